"""`DeepSpeedEngine`: the engine of ds-engine under upstream's names.

It decides nothing. The one thing that upstream's callers may decide, where a step ends
(`set_gradient_accumulation_boundary`), answers the two questions that the engine asks about it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed._errors import UnsupportedNameError
from deepspeed._ours import groups
from deepspeed._ours._torch import transformed, tree_leaves
from deepspeed._ours.config import DeepSpeedConfig
from deepspeed._ours.data import CurriculumScheduler, RandomLTDScheduler
from deepspeed._ours.flops import FlopsProfiler
from deepspeed._ours.layers import undress
from deepspeed._ours.monitors import MonitorMaster
from deepspeed._ours.optimizer import OffloadsStates
from deepspeed._ours.params import mark, unmark
from deepspeed._ours.raising import also
from deepspeed._ours.saving import (
    decode,
    encode,
    get_model_ckpt_name_for_rank,
    get_zero_ckpt_name_for_rank,
    leave_files,
    leave_signs,
    name_of_tag,
    same_everywhere,
)
from deepspeed._ours.tools import logger
from deepspeed._ours.version import version
from deepspeed._surface import MISSING_ATTRIBUTES
from ds_comm import all_gather_object, barrier
from ds_compress import CompressionScheduler
from ds_config.errors import ConfigError, DsError, PlanError, UnsupportedError
from ds_engine import Engine, Plan, StepResult
from ds_engine.components import Components
from ds_engine.foreign import translated
from ds_engine.loader import CurriculumLoader
from ds_engine.transforms.routing import RandomLTD
from ds_moe.utils import has_moe_layers
from ds_pipe import Action
from ds_zero import ShardedOptimizer, Sharding
from ds_zero.layout.precision import ScaleState

__all__ = ["ACCESSORS", "DeepSpeedEngine"]

_log = logging.getLogger("DeepSpeed")


def _of_zero(name: str) -> Callable[[DeepSpeedEngine], Any]:
    return lambda engine: getattr(engine.plan.config.zero_optimization, name)


def _of_config(*path: str) -> Callable[[DeepSpeedEngine], Any]:
    def read(engine: DeepSpeedEngine) -> Any:
        found: Any = engine._config
        for name in path:
            found = getattr(found, name)
        return found

    return read


def _gathers(section: Any) -> bool:
    # The key does nothing in ds-zero, which drops it; clients ask what the user wrote.
    names = ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save")
    older = "stage3_gather_fp16_weights_on_model_save"
    return isinstance(section, Mapping) and any(section.get(name) is True for name in (*names, older))


ACCESSORS: Mapping[str, Callable[[DeepSpeedEngine], Any]] = {
    "train_batch_size": lambda e: e.plan.batch.train,
    "train_micro_batch_size_per_gpu": lambda e: e.plan.batch.micro,
    "gradient_accumulation_steps": lambda e: e.plan.batch.accumulation,
    "zero_optimization": lambda e: e.plan.config.zero_optimization.stage > 0,
    "zero_optimization_stage": _of_zero("stage"),
    "zero_optimization_partition_gradients": lambda e: e.plan.residency.shard_grads,
    "zero_optimization_partition_weights": lambda e: e.plan.residency.shard_params,
    "zero_gather_16bit_weights_on_model_save": lambda e: _gathers(e.config.get("zero_optimization", {})),
    "zero_reduce_bucket_size": _of_zero("reduce_bucket_size"),
    "zero_overlap_comm": lambda e: e.plan.config.zero_optimization.overlap_comm is not False,
    "zero_contiguous_gradients": _of_zero("contiguous_gradients"),
    "zero_reduce_scatter": _of_zero("reduce_scatter"),
    "zero_allgather_bucket_size": _of_zero("allgather_bucket_size"),
    "zero_sub_group_size": _of_zero("sub_group_size"),
    "zero_param_persistence_threshold": _of_zero("param_persistence_threshold"),
    "zero_model_persistence_threshold": _of_zero("model_persistence_threshold"),
    "zero_prefetch_bucket_size": _of_zero("prefetch_bucket_size"),
    "zero_max_live_parameters": _of_zero("max_live_parameters"),
    "zero_max_reuse_distance": _of_zero("max_reuse_distance"),
    "zero_ignore_unused_parameters": _of_zero("ignore_unused_parameters"),
    "zero_offload_optimizer": _of_zero("offload_optimizer"),
    "zero_offload_param": _of_zero("offload_param"),
    "zero_elastic_checkpoint": _of_zero("elastic_checkpoint"),
    "zero_round_robin_gradients": _of_zero("round_robin_gradients"),
    "fp16_enabled": _of_config("fp16", "enabled"),
    "fp16_auto_cast": _of_config("fp16", "auto_cast"),
    "bfloat16_enabled": _of_config("bf16", "enabled"),
    "torch_autocast_enabled": _of_config("torch_autocast", "enabled"),
    "amp_enabled": lambda e: False,
    "loss_scale": _of_config("fp16", "loss_scale"),
    "dynamic_loss_scale": lambda e: e.plan.config.fp16.enabled and e.plan.config.fp16.loss_scale == 0,
    "initial_dynamic_scale": lambda e: 2**e.plan.config.fp16.initial_scale_power,
    "gradient_clipping": _of_config("gradient_clipping"),
    "gradient_predivide_factor": _of_config("gradient_predivide_factor"),
    "prescale_gradients": _of_config("prescale_gradients"),
    "postscale_gradients": lambda e: not e.plan.config.prescale_gradients,
    "sparse_gradients_enabled": _of_config("sparse_gradients"),
    "steps_per_print": _of_config("steps_per_print"),
    "wall_clock_breakdown": _of_config("wall_clock_breakdown"),
    "log_level": _of_config("log_level"),
    "memory_breakdown": _of_config("memory_breakdown"),
    "dataloader_drop_last": _of_config("dataloader_drop_last"),
    "dump_state_enabled": _of_config("dump_state"),
    "optimizer_name": lambda e: None if e.plan.config.optimizer is None else e.plan.config.optimizer.type.lower(),
    "optimizer_params": lambda e: e.config.get("optimizer", {}).get("params"),
    "scheduler_name": lambda e: None if e.plan.config.scheduler is None else e.plan.config.scheduler.type,
    "scheduler_params": lambda e: e.config.get("scheduler", {}).get("params"),
    "load_universal_checkpoint": lambda e: False,
    "managed_gradient_accumulation": lambda e: e.plan.managed,
    "use_node_local_storage": lambda e: False,
    "elasticity_enabled": lambda e: bool(e.config.get("elasticity", {}).get("enabled", False)),
    "pld_enabled": lambda e: bool((e.config.get("progressive_layer_drop") or {}).get("enabled", False)),
    "curriculum_enabled_legacy": lambda e: e.plan.curriculum is not None,
    "data_efficiency_enabled": lambda e: bool((e.config.get("data_efficiency") or {}).get("enabled", False)),
    "data_efficiency_config": lambda e: e.plan.config.data_efficiency.model_dump(mode="json"),
    "data_sampling_enabled": lambda e: e.plan.config.data_efficiency.sampling is not None,
    "data_sampling_config": lambda e: e.plan.config.data_efficiency.data_sampling.model_dump(mode="json"),
    "curriculum_learning_enabled": lambda e: e.plan.config.data_efficiency.curriculum is not None,
    "curriculum_learning_config": lambda e: e.data_sampling_config()["curriculum_learning"],
    "curriculum_params_legacy": lambda e: e.config.get("curriculum_learning") or {},
    "random_ltd_enabled": lambda e: e.plan.config.data_efficiency.random_ltd is not None,
    "random_ltd_config": lambda e: e.plan.config.data_efficiency.data_routing.random_ltd.model_dump(mode="json"),
    "flops_profiler_enabled": lambda e: bool((e.config.get("flops_profiler") or {}).get("enabled", False)),
    "autotuning_enabled": lambda e: False,
    "autotp_size": lambda e: 0 if e.plan.config.tensor_parallel is None else e.plan.config.tensor_parallel.autotp_size,
    "tensorboard_enabled": _of_config("tensorboard", "enabled"),
    "wandb_enabled": _of_config("wandb", "enabled"),
    "csv_monitor_enabled": _of_config("csv_monitor", "enabled"),
    "get_data_parallel_rank": lambda e: e.mesh["data"].rank,
    "get_data_parallel_world_size": lambda e: e.mesh["data"].size,
    "get_tensor_parallel_rank": lambda e: e.mesh["tensor"].rank,
    "get_model_parallel_rank": lambda e: e.mesh["tensor"].rank,
    "get_sequence_parallel_group": lambda e: e.seq_parallel_group,
    "get_type": lambda e: [type(e.basic_optimizer).__name__ for _ in e.get_lr()],
    "is_deepcompile_enabled": lambda e: False,
    "is_deepcompile_active": lambda e: False,
}
"""Methods without arguments that only tell something: name -> what it tells."""


class _BatchesDifferError(PlanError, AssertionError):
    """Tensor-parallel ranks were given different batches. Programs compare the text."""

    def __init__(self, error: PlanError) -> None:
        super().__init__(error.message, code=error.code, fix=error.fix)

    def __str__(self) -> str:
        return (
            "Data inconsistency within the TP group. Please check the Dataloader implementation to ensure consistency."
        )


class DeepSpeedEngine(OffloadsStates, Engine):  # type: ignore[misc]  # upstream asks for states in other words
    """`ds_engine.Engine` under upstream's names; made by `deepspeed.initialize`. Unknown attributes are the model's.

    Attributes:
        config: The configuration as it was given, the same object.
        mpu: Groups of another library; kept, not read.
    """

    def __init__(self, plan: Plan, components: Components, config: dict[str, Any] | None = None) -> None:
        super().__init__(plan, components)
        self._config = DeepSpeedConfig({} if config is None else config, plan=plan)
        self._boundary: bool | None = None
        self._open: str | None = None
        self._scaled = False
        self._compiled = False
        self._monitor: MonitorMaster | None = None
        self.mpu: Any = None
        mark(self.sharding)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            row = MISSING_ATTRIBUTES.get(name)
            if row is None:
                raise
            raise UnsupportedNameError(
                f"DeepSpeedEngine.{name} is not here: {row.why}", code="compat-missing", fix=f"Use {row.instead}."
            ) from error

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as it was given."""
        return self._config.raw

    @property
    def flops_profiler(self) -> FlopsProfiler | None:
        """What `flops_profiler` of the configuration counted; None where it is not enabled. Counts are rank 0's."""
        section = self.plan.telling.flops
        if section is None:
            return None
        return FlopsProfiler(self.module, self, section.recompute_fwd_factor, counter=self._telemetry.counter)

    @property
    def curriculum_scheduler(self) -> CurriculumScheduler | None:
        """Of `curriculum_learning`, at the step that comes next; None where it is not enabled."""
        if self.plan.curriculum is None:
            return None
        found = CurriculumScheduler(self.config["curriculum_learning"])
        found.update_difficulty(self.global_steps + 1)
        return found

    @property
    def compression_scheduler(self) -> CompressionScheduler | None:
        """What moves the schedule of a compressed model on; None of another model."""
        return self.follower(CompressionScheduler)

    @property
    def random_ltd_scheduler(self) -> RandomLTDScheduler | None:
        """Of the routed layers; None where nothing is routed."""
        found = self.follower(RandomLTD)
        if found is None:
            return None
        return RandomLTDScheduler(
            {**self.random_ltd_config(), "global_batch_size": self.train_batch_size()}, found.router
        )

    def random_ltd_initialize(self) -> None:
        """Nothing is left to do: `initialize` has routed the converted layers.

        Raises:
            PlanError: the configuration does not ask for it ("compat-argument").
        """
        if self.random_ltd_scheduler is None:
            raise _order("random_ltd_initialize() without data_routing.random_ltd", "Enable it in the configuration.")

    def set_data_post_process_func(self, post_process_func: Callable[[Any, Mapping[str, Any]], Any]) -> None:
        """Call this with every microbatch of the engine's loader, and where its order stands; what it returns is trained on."""
        if self.training_dataloader is not None:
            self.training_dataloader.post_process = post_process_func

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], int]]) -> None:
        """Functions of the step for the metrics of the curriculum, by name."""
        if isinstance(self.training_dataloader, CurriculumLoader):
            self.training_dataloader.curriculum.set_schedules(schedule_func_dict)

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that is sharded."""
        return None if self.optimizer is None else self.optimizer.inner

    @property
    def global_rank(self) -> int:
        """Of this process, in the world."""
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.mesh["world"].size

    @property
    def local_rank(self) -> int:
        """Of this process, on its host."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def dp_world_size(self) -> int:
        """Ranks that the batch is split over."""
        return self.mesh["data"].size

    @property
    def data_parallel_group(self) -> Any:
        """Their process group; None in a world of one that made none."""
        return self.mesh["data"].pg

    @property
    def seq_parallel_group(self) -> Any:
        """Process group of the ranks that share a sequence; None where each has its own."""
        return self.mesh["sequence"].pg if self.mesh["sequence"].size > 1 else None

    @property
    def mp_world_size(self) -> int:
        """Ranks that layers are cut over."""
        return self.mesh["tensor"].size

    @property
    def checkpoint_mp_rank(self) -> int:
        """This rank's place among them."""
        return self.mesh["tensor"].rank

    @property
    def monitor(self) -> MonitorMaster:
        """Writers of the sections' monitors, for events of the program's own. Made when they are first asked for."""
        if self._monitor is None:
            self._monitor = MonitorMaster(self._config.monitor_config)
        return self._monitor

    def get_summary_writer(self) -> Any:
        """TensorBoard's writer; None where it is off, and on other ranks."""
        tensorboard = self.monitor.tb_monitor
        return None if tensorboard is None else tensorboard.summary_writer

    @property
    def has_moe_layers(self) -> bool:
        """Whether the model has `deepspeed.moe.layer.MoE` layers."""
        return has_moe_layers(self.module)[0]

    @property
    def communication_data_type(self) -> torch.dtype | None:
        """Format that gradients travel in; None is that of the parameters."""
        return self.plan.precision.reduce

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._compiled

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last update's averaged gradient before clipping; also between updates."""
        return None if self.optimizer is None or self.optimizer.last is None else self.optimizer.last.norm

    # ---- where a step ends

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside accumulate without reducing. At ZeRO stages 0 and 1, as upstream has it; see `coalesce_grad_reduction`.

        Raises:
            PlanError: at stage 2 or 3, or inside another; an AssertionError, too ("compat-order").
        """
        stage = self.plan.config.zero_optimization.stage
        if stage > 1:
            raise _order(
                f"no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage {stage}",
                "Use coalesce_grad_reduction, which has no such limit.",
            )
        return self._without_reducing("no_sync")

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Several backwards inside, one reduction at the next step. At every ZeRO stage; a rank holds whole gradients meanwhile.

        Raises:
            PlanError: where the loop decides by itself when a step ends; an AssertionError, too ("compat-order").
        """
        if not self.plan.managed:
            raise _order(
                "coalesce_grad_reduction() without managed_gradient_accumulation", "Nothing reduces before step()."
            )
        return self._without_reducing("coalesce_grad_reduction")

    @contextmanager
    def _without_reducing(self, name: str) -> Iterator[None]:
        if self._open is not None:
            raise _order(f"{name} context manager reentry is unsupported: nested in {self._open}", "Leave that first.")
        self._open = name
        try:
            with super().no_sync():
                yield
        finally:
            self._open = None

    # ---- what may be differentiated at stage 0, where no hook sees a plain backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. At stage 0 a loss must go through `backward` or `scale`, as upstream has it."""
        try:
            found = super().forward(*args, **kwargs)
        except PlanError as error:
            if error.code != "tensor-inputs":
                raise
            raise _BatchesDifferError(error) from error
        if self.optimizer is not None and self.plan.config.zero_optimization.stage == 0 and not transformed():
            self._scaled = False
            for leaf in tree_leaves(found):
                if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                    leaf.register_hook(self._must_be_scaled)
        return found

    def _must_be_scaled(self, grad: Tensor) -> None:
        del grad
        if not self._scaled:
            raise also(PlanError, RuntimeError)(
                "Direct calls to tensor.backward() are not supported at ZeRO stage 0: nothing would divide it by the microbatches",
                code="compat-order",
                fix="Call engine.backward(loss), or engine.scale(loss).backward().",
            )

    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Accumulate the gradients of one microbatch's loss. See `ds_engine.Engine.backward`."""
        self._scaled = True
        return super().backward(loss, retain_graph, scale_wrt_gas)

    def _backward_epilogue(self) -> None:
        """Nothing: gradients of a plain `loss.backward()` are seen as they arrive. For losses that several engines share."""

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """The next backward, and the step after it, are (not) the last of a step; until this is called again."""
        if not self.plan.managed:
            raise _order(
                "set_gradient_accumulation_boundary() without managed_gradient_accumulation", "Call step() instead."
            )
        self._boundary = bool(is_boundary)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current microbatch ends a step."""
        return super().is_gradient_accumulation_boundary() if self._boundary is None else self._boundary

    def next_backward(self) -> Action:
        """As the program has it, or as the caller decided: shards reduce every time, whole gradients at the end."""
        if self._boundary is None:
            return super().next_backward()
        return replace(self._backwards[-1], reduce=self._boundary or self.plan.residency.shard_grads)

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """Nothing to do: the last backward of a step reduces, and `step` closes what is open."""
        del bucket_size

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` as `.backward()` may be called on it: divided by the microbatches, times the loss scale."""
        if loss.numel() != 1:
            raise _order(
                f"scale() wants a scalar tensor, got one of shape {tuple(loss.shape)}", "Reduce the loss first."
            )
        self._scaled = True
        return self._trains("scale").scale(loss / self.plan.batch.accumulation)

    # ---- checkpoints

    def save_checkpoint(  # type: ignore[override]
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a run into `save_dir/tag`, with `latest` and `zero_to_fp32.py` beside it. Collective.

        Args:
            client_state: Data and tensors of the caller's own; rank 0's is stored.
        """
        if not save_dir:
            raise ConfigError(
                f"save_checkpoint(save_dir={save_dir!r})", code="compat-argument", fix="Give a directory."
            )
        world = self.mesh["world"]
        name = self._one_tag(str(tag or f"global_step{self.global_steps}"))
        state = same_everywhere(encode(client_state or {}), world)
        super().save_checkpoint(save_dir, name, state, exclude_frozen_parameters)
        if save_latest:
            self.checkpointer.wait()
        whole = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters) if self._one_file() else {}
        if world.rank == 0:
            sharded = self.plan.config.zero_optimization.stage > 0
            leave_signs(os.fspath(save_dir), name, latest=save_latest, sharded=sharded)
            if self.plan.config.checkpoint.layout == "ds":
                leave_files(f"{os.fspath(save_dir)}/{name}", whole, self._facts(client_state or {}))
        barrier(world)
        return True

    def _one_tag(self, tag: str) -> str:
        """The tag, the same on every rank: rank 0's, after what `checkpoint.tag_validation` says of others. Collective."""
        tags = self.mesh["world"].size * [None]
        all_gather_object(tags, tag, group=self.mesh["world"])
        if len(set(tags)) > 1:
            told = f"ranks save under different tags: {sorted(set(map(str, tags)))[:5]}"
            mode = str((self.config.get("checkpoint") or {}).get("tag_validation", "Warn")).upper()
            if mode == "FAIL":
                raise _order(told, "Give every rank the same tag.")
            if mode == "WARN":
                _log.warning("%s; the one of rank 0 is used", told)
        return str(tags[0])

    def _one_file(self) -> bool:
        # Where every rank has the whole model, which upstream then stores in one file.
        return not self.plan.residency.shard_params and self.plan.config.checkpoint.layout == "ds"

    def _facts(self, client_state: Mapping[str, Any]) -> dict[str, Any]:
        """What upstream stores beside the weights. Client state that only pickle could hold was refused before."""
        counters = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
        return {
            **client_state,
            **{name: getattr(self, name) for name in counters},
            "ds_version": version,
            "dp_world_size": self.dp_world_size,
            "mp_world_size": 1,
            "partition_count": self.dp_world_size,
            "zero_stage": self.plan.config.zero_optimization.stage,
        }

    def _get_ckpt_name(self, checkpoints_path: str, tag: str, mp_placeholder: str | None = None) -> str:
        """Path of the file with the weights, in upstream's layout."""
        return get_model_ckpt_name_for_rank(f"{checkpoints_path}/{tag}", mp_placeholder or "00")

    def _get_optimizer_ckpt_name(self, checkpoints_path: str, tag: str, expp_rank: int) -> str:
        """Path of the file with a rank's optimizer state, in upstream's layout."""
        return get_zero_ckpt_name_for_rank(f"{checkpoints_path}/{tag}", expp_rank, 0)

    def _change_recovery_script_permissions(self, dst: str) -> None:
        """Make `zero_to_fp32.py` a program. Some file systems have no such permission, which is no reason to stop."""
        try:
            Path(dst).chmod(0o755)
        except OSError as error:
            logger.info("%s cannot be made a program: %s", dst, error)

    def load_checkpoint(  # type: ignore[override]
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint of ours or of upstream's, saved on any number of ranks. Collective.

        Returns:
            Path and client state; (None, None) where there is none.
        Raises:
            UnsupportedError: `custom_load_fn` ("compat-argument").
        """
        if custom_load_fn is not None:
            raise UnsupportedError(
                "load_checkpoint(custom_load_fn=...)",
                code="compat-argument",
                fix="Read tensors with ds_ckpt.load and set them with deepspeed.utils.safe_set_full_fp32_param.",
            )
        root, world = os.fspath(load_dir), self.mesh["world"]
        name = same_everywhere(name_of_tag(root, tag), world)
        if name is None and not Path(root).is_dir():
            _log.warning("there is no checkpoint directory %s", root)
            return None, None
        with translated(root, name, world) as copy:
            path, client = super().load_checkpoint(
                root,
                copy or name,
                load_optimizer_states=load_optimizer_states,
                load_lr_scheduler_states=load_lr_scheduler_states,
                load_module_only=load_module_only,
                load_data_state=not load_module_only,
                load_module_strict=load_module_strict,
            )
        if path is None:
            return None, None
        return (f"{root}/{name}" if name else path), decode(client or {})

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Tensor]:
        """The whole model's state dict: on rank 0, or on every rank where parameters are whole. Collective where they are cut."""
        del destination, keep_vars
        if self.plan.residency.shard_params or self.mp_world_size > 1:
            found = self.whole_state_dict(exclude_frozen=exclude_frozen_parameters)
            return {prefix + name: value for name, value in found.items()}
        frozen = {name for name, param in self.module.named_parameters() if not param.requires_grad}
        state = self.module.state_dict()
        return {prefix + k: v for k, v in state.items() if not (exclude_frozen_parameters and k in frozen)}

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Callable[..., Any] | None = None
    ) -> None:
        """Load a whole state dict, or the `module` of a checkpoint dict; the same on every rank. Collective."""
        state = checkpoint.get("module", checkpoint)
        if custom_load_fn is not None:
            custom_load_fn(src=state, dst=self.module)
            self.sharding.refresh()
        else:
            self.load_whole_state_dict(state, strict)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """The whole model in the format it computes in, on rank 0; None elsewhere. Collective."""
        return self.whole_state_dict(exclude_frozen=exclude_frozen_parameters) or None

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_16bit_model(  # type: ignore[override]
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole model into one file. At stage 3 only if the configuration asks for gathering, as upstream."""
        if self.plan.residency.shard_params and not self.zero_gather_16bit_weights_on_model_save():
            _log.warning(
                "the model was not saved: zero_optimization.stage3_gather_16bit_weights_on_model_save is false"
            )
            return False
        return super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)

    def save_fp16_model(self, save_dir: str, save_filename: str = "pytorch_model.bin") -> bool:
        """`save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    # ---- state that moves, the end

    def _holder(self) -> ShardedOptimizer | Sharding:
        return self.optimizer or self.sharding

    def empty_partition_cache(self) -> None:
        """Nothing is kept: a unit is released when its graph is done with it."""

    def compile(  # type: ignore[override]
        self,
        backend: str = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """torch.compile the model's forward.

        Raises:
            UnsupportedError: compile passes or compiled autograd ("compat-argument").
        """
        if schedule is not None or compiled_autograd_enabled:
            raise UnsupportedError(
                "compile(schedule=..., compiled_autograd_enabled=True)", code="compat-argument", fix="Leave them out."
            )
        super().compile(backend, **(compile_kwargs or {}))
        self._compiled = True

    def close(self) -> None:
        """Give the model back whole and free the rest. Collective."""
        module: nn.Module = self.module
        super().close()
        groups.forget_layers(self.mesh)
        undress(module)

    def destroy(self) -> None:
        """Give the model back whole and free the rest. Collective."""
        module: nn.Module = self.module
        self.close()
        unmark(module)

    def get_batch_info(self) -> tuple[int, int, int]:
        """Train batch size, microbatch size, microbatches a step."""
        batch = self.plan.batch
        return batch.train, batch.micro, batch.accumulation

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> StepResult:
        """End a microbatch; at the boundary, update. Collective there."""
        if self._open is not None:
            raise _order(
                "It is illegal to call Engine.step() inside no_sync context manager"
                + (f": {self._open} is one" if self._open != "no_sync" else ""),
                "Leave the context first.",
            )
        held = None if self.optimizer is None else self.optimizer._scale
        result = super().step(lr_kwargs)
        if result.skipped and held is not None:
            self._tell_overflow(held)
        return result

    def _no_backward(self) -> None:
        logger.warning(
            "step() was called and no backward has begun since the last step(); upstream goes on, so this does"
        )

    def _tell_overflow(self, held: ScaleState) -> None:
        """Upstream's line about a skipped step, which programs look for."""
        now = self._trains("step")._scale
        if self.global_rank or now is None or (now.scale, now.tolerance) == (held.scale, held.tolerance):
            return
        told = f"[deepspeed] OVERFLOW! Rank {self.global_rank} Skipping step. Attempted loss scale: {int(held.scale)}, "
        if now.scale < held.scale:
            logger.info("%sreducing to %d", told, now.scale)
        else:
            logger.info("%sbut hysteresis is %d. Reducing hysteresis to %d", told, held.tolerance, now.tolerance)


def _order(what: str, fix: str) -> DsError:
    return also(PlanError, AssertionError)(what, code="compat-order", fix=fix)


def _accessor(name: str, tells: Callable[[DeepSpeedEngine], Any]) -> Callable[[DeepSpeedEngine], Any]:
    def accessor(self: DeepSpeedEngine) -> Any:
        return tells(self)

    accessor.__name__ = name
    accessor.__qualname__ = f"DeepSpeedEngine.{name}"
    return accessor


for _name, _tells in ACCESSORS.items():
    setattr(DeepSpeedEngine, _name, _accessor(_name, _tells))
