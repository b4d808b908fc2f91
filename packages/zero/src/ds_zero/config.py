"""The configuration sections of ds-zero: `zero_optimization`, `fp16`, `bf16`, `torch_autocast`, `data_types`.

Imported only by who reads a configuration; `import ds_zero` does not need pydantic. Keys and defaults are those of
DeepSpeed's schema; each is used, deprecated, dead (with what replaces it), or not built (an error when it is switched on).
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ds_config import Alias, Deprecated, NoEffect, StrictModel, Unsupported
from ds_ops.io import IOSettings
from ds_zero.layout.shard_options import OffloadPolicy
from ds_zero.policies.zenflow import ZenFlowOptions, bad

__all__ = [
    "BF16Config",
    "DataTypesConfig",
    "FP16Config",
    "LeafModuleConfig",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "TorchAutocastConfig",
    "ZeroConfig",
]

_log = logging.getLogger("ds_zero")

Count = Annotated[int, Field(ge=0)]
DType = Literal["fp32", "fp16", "bf16"]
AutocastDType = Literal[
    "torch.float16", "fp16", "float16", "half", "torch.bfloat16", "bf16", "bfloat16", "torch.float32", "fp32", "float32"
]


_BUFFERS = "Units of which the bytes of files may be in memory at a time; at least 2 are used."


class _OffloadConfig(StrictModel):
    device: Literal["none", "cpu", "nvme"] = Field(default="none", description="none: the device, nvme: files.")
    nvme_path: str | None = Field(default=None, description="Folder of the scratch files.")
    pin_memory: bool = Field(default=True, description="Page-lock host memory where the device gains from it.")
    buffer_count: Annotated[int, Field(ge=1)] = Field(default=4, description=_BUFFERS)

    def _placement(
        self, io: IOSettings, share: float = 1.0, early: float = 0.0, **files: Any
    ) -> Literal["device"] | OffloadPolicy:
        if self.device == "none":
            return "device"
        if self.device == "cpu":
            return OffloadPolicy("host", pin=self.pin_memory, ratio=share, overlap_ratio=early)
        # Several runs may be told the same path: none sees the other's files, which have no names.
        folder = None if self.nvme_path is None else os.path.join(os.path.expanduser(self.nvme_path), "ds-zero")
        buffers = max(2, self.buffer_count)
        return OffloadPolicy("file", folder, self.pin_memory, ratio=share, buffer_count=buffers, io=io, **files)


class OffloadParamConfig(_OffloadConfig):
    """`zero_optimization.offload_param`: where parameters are between uses, at stage 3."""

    buffer_count: Annotated[int, Field(ge=1)] = Field(default=5, description=_BUFFERS)
    buffer_size: Annotated[Count, NoEffect("a buffer holds a unit")] = 100_000_000
    max_in_cpu: Count = Field(
        default=1_000_000_000,
        description="With nvme: elements of a rank that stay in host memory before files are used.",
    )

    def placement(self, io: IOSettings) -> Literal["device"] | OffloadPolicy:
        """Return this section as the OffloadPolicy that `ds_zero.shard` accepts."""
        return self._placement(io, max_in_cpu=self.max_in_cpu)


class OffloadOptimizerConfig(_OffloadConfig):
    """`zero_optimization.offload_optimizer`: where masters and optimizer state are between updates."""

    pipeline_read: bool | None = Field(
        default=None, description="Read the next unit while one is updated; null is true."
    )
    pipeline_write: bool | None = Field(
        default=None, description="Write a unit while the next one is updated; null is true."
    )
    fast_init: Annotated[bool, NoEffect("state is made where it is kept")] = False
    ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Part of the elements that is offloaded, in whole units from the model's end.",
    )
    super_offload: bool = Field(
        default=False,
        description="With cpu: update a unit while backward goes on, on a thread of its own; the same numbers, and its state once more "
        "in host memory.",
    )
    cpuadam_cores_perc: float = Field(
        default=0.8, ge=0, le=1, description="With super_offload: share of a rank's threads that do it, at least one."
    )

    def placement(self, io: IOSettings) -> Literal["device"] | OffloadPolicy:
        """Return this section as the OffloadPolicy that `ds_zero.shard` accepts."""
        reads, writes = self.pipeline_read is not False, self.pipeline_write is not False
        early = self.cpuadam_cores_perc if self.super_offload else 0.0
        return self._placement(io, self.ratio, early, read_ahead=reads, write_behind=writes)


class ZenFlowConfig(StrictModel):
    """`zero_optimization.zenflow`: a few columns of each matrix are updated in every step, all others now and then.

    Lan et al. 2025, arXiv:2505.12242.
    """

    topk_ratio: float = Field(
        default=0.1, gt=0, le=1, description="Share of a matrix's columns that are updated in every step."
    )
    select_strategy: Literal["auto", "step", "epoch"] = Field(
        default="auto",
        description="Unit of `select_interval`; auto is once an epoch of the engine's data, or once where it has none.",
    )
    select_interval: Literal["auto"] | int = Field(
        default="auto", description="Columns are chosen anew so often; auto is 1, in epochs."
    )
    update_interval: Literal["auto"] | int = Field(
        default="auto",
        description="All other columns are updated every so many steps; auto when their gradients have grown large.",
    )
    full_warm_up_rounds: Count = Field(default=0, description="Steps at the beginning that update everything.")
    auto_ratio: float = Field(
        default=0.99,
        ge=0,
        le=1,
        description="Share of the matrices whose other columns must have grown large, for an update_interval of auto.",
    )
    overlap_step: bool = Field(
        default=False,
        description="With offload_optimizer.device cpu: update a unit while backward goes on, as super_offload does. With an update_interval "
        "of auto, and where columns are chosen, all gradients are asked first, so updates begin after it.",
    )
    offload: Annotated[bool, NoEffect("state of chosen columns is where all optimizer state is")] = False
    pt_reserved_cores_perc: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="With overlap_step: share of a rank's threads that do not do it; at least one does.",
    )
    steps_per_epoch: Annotated[int | None, NoEffect("the engine knows its data")] = None

    @property
    def overlaps(self) -> bool:
        """Whether updates may begin during backward: an interval of auto ends by what all gradients are."""
        return self.overlap_step and self.update_interval != "auto"

    def importance(self, steps_per_epoch: int | None = None) -> ZenFlowOptions:
        """Return this section as the ZenFlowOptions that `ds_zero.shard` accepts.

        Args:
            steps_per_epoch: Of the engine's data; None where the caller feeds the batches.
        Raises:
            PlanError: strategy and interval contradict each other ("zero-zenflow").
        """
        strategy, every = self.select_strategy, self.select_interval
        if (strategy == "auto") != (every == "auto"):
            raise bad(
                f"zenflow.select_strategy {strategy!r} with select_interval {every!r}",
                "Set both, or leave both at auto.",
            )
        if strategy == "epoch" and steps_per_epoch is None:
            raise bad(
                "zenflow.select_strategy epoch without training_data, whose length would tell",
                "Use select_strategy step.",
            )
        count = 1 if every == "auto" else int(every)
        interval = 0 if self.update_interval == "auto" else int(self.update_interval)
        epochs = count * (steps_per_epoch or 0)
        # An epoch may be shorter than an interval: then columns are chosen when it ends.
        steps = count if strategy == "step" else epochs and max(epochs, interval)
        return ZenFlowOptions(self.topk_ratio, steps, interval, self.auto_ratio, self.full_warm_up_rounds)


class LeafModuleConfig(StrictModel):
    """`zero_optimization.leaf_module`: modules whose parameters are gathered together. A hint; results do not depend on it."""

    classes: Annotated[tuple[str, ...], NoEffect("name the modules; any order of experts is right without it")] = ()
    names: tuple[str, ...] = Field(default=(), description="Qualified names of modules that are never split.")
    name_suffixes: tuple[str, ...] = Field(default=(), description="Ends of such names.")


class LocoConfig(StrictModel):
    """`zero_optimization.zeropp_loco_param`: the errors of quantized gradients, e = err_beta e + (1 - err_beta) lost."""

    err_beta: float = Field(default=0.8, ge=0, lt=1, description="Share of the old error that stays.")
    reset_T: int = Field(  # noqa: N815  the reference's name
        default=1024, ge=0, description="Reductions after which a unit's error is forgotten; 0: never."
    )


def _offload(on: bool) -> dict[str, str]:
    return {"device": "cpu" if on else "none"}


class ZeroConfig(StrictModel):
    """`zero_optimization`: what is cut into one shard per rank, and how it travels."""

    stage: Literal[0, 1, 2, 3] = Field(
        default=0, description="0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters."
    )
    overlap_comm: bool | None = Field(
        default=None,
        description="Communicate while computing; null is true. False: each operation is waited for where it starts, new weights in step.",
    )
    reduce_bucket_size: Count = Field(
        default=500_000_000,
        description="Elements that travel together. Unless given, an eighth of the model, so that there is something to overlap.",
    )
    param_persistence_threshold: Annotated[Count, Alias("stage3_param_persistence_threshold")] = Field(
        default=100_000, description="Stage 3 keeps parameters up to so many elements whole."
    )
    model_persistence_threshold: Annotated[Count, Alias("stage3_model_persistence_threshold")] = Field(
        default=sys.maxsize, description="At most so many elements are kept whole in all."
    )
    leaf_module: LeafModuleConfig = Field(default=LeafModuleConfig(), description="Modules that are never split.")
    mics_shard_size: Annotated[int, Field(ge=-1)] = Field(
        default=-1, description="So many neighbouring ranks share one copy of what is sharded; -1: all ranks."
    )
    mics_hierarchical_params_gather: bool = Field(
        default=False, description="Gather across nodes first, then inside: every byte enters a node once. At stage 3."
    )
    zero_hpz_partition_size: Count = Field(
        default=1,
        description="So many neighbouring ranks keep what stage 3 gathered until the next update; gathers until then stay among them.",
    )
    zero_quantized_weights: bool = Field(
        default=False, description="Stage 3 gathers int8 codes of parameters; masters stay exact. fp32 and bf16."
    )
    zero_quantized_nontrainable_weights: bool = Field(
        default=False, description="The same of parameters that are not trained only."
    )
    zero_quantized_gradients: bool = Field(
        default=False, description="Gradients travel as int4 codes, inside nodes first. At stages 1 to 3."
    )
    zeropp_loco_param: LocoConfig | None = Field(
        default=None, description="What codes of gradients lose is added to the next ones; null: it is lost."
    )
    enable_sanity_checks: bool = Field(
        default=False, description="Raise on all ranks if the ranks of a step used different parameters."
    )

    # What the units replace
    contiguous_gradients: Annotated[bool, NoEffect("gradients of a unit are always contiguous")] = True
    reduce_scatter: Annotated[bool, NoEffect("what is sharded is reduce-scattered, what is whole is all-reduced")] = (
        True
    )
    use_multi_rank_bucket_allreduce: Annotated[bool, NoEffect("what is sharded is reduce-scattered")] = True
    allgather_partitions: Annotated[bool, NoEffect("parameters are gathered by units")] = True
    allgather_bucket_size: Annotated[Count, NoEffect("units of reduce_bucket_size are gathered, too")] = 500_000_000
    sub_group_size: Count = Field(
        default=1_000_000_000,
        description="Of files in DeepSpeed's layout at stage 3: elements of a flat tensor. In memory, the optimizer updates unit by unit.",
    )
    prefetch_bucket_size: Annotated[
        Count, Alias("stage3_prefetch_bucket_size"), NoEffect("the next unit is gathered ahead with overlap_comm")
    ] = 50_000_000
    max_live_parameters: Annotated[
        Count, Alias("stage3_max_live_parameters"), NoEffect("at most two units are whole at a time")
    ] = 1_000_000_000
    max_reuse_distance: Annotated[
        Count, Alias("stage3_max_reuse_distance"), NoEffect("a unit is released when its graph is done with it")
    ] = 1_000_000_000
    module_granularity_threshold: Annotated[
        int, Alias("stage3_module_granularity_threshold"), NoEffect("units have the size of reduce_bucket_size")
    ] = 0
    use_all_reduce_for_fetch_params: Annotated[
        bool, Alias("stage3_use_all_reduce_for_fetch_params"), NoEffect("parameters are gathered in place")
    ] = False
    allgather_sequential: Annotated[
        bool, Alias("stage3_allgather_sequential"), NoEffect("a unit is one gather without a copy")
    ] = False
    parameter_alignment: bool = Field(
        default=False,
        description="Of files in DeepSpeed's layout: parameters begin at multiples of 16 bytes. In memory, of 64 in any case.",
    )
    compute_grad_norm: Annotated[bool, NoEffect("the norm is summed beside what else a step must agree on")] = True
    round_robin_gradients: bool = Field(
        default=False,
        description="Of files in DeepSpeed's layout: parameters lie dealt out over ranks. In memory, every rank owns the same share of every unit.",
    )
    memory_efficient_linear: Annotated[bool, NoEffect("released parameters are gathered again in backward")] = True
    override_module_apply: Annotated[bool, NoEffect("nothing in torch is patched")] = True
    log_trace_cache_warnings: Annotated[bool, NoEffect("the recorded order is only a hint")] = False
    load_from_fp32_weights: Annotated[bool, NoEffect("checkpoints hold the master weights")] = True
    elastic_checkpoint: Annotated[bool, NoEffect("every checkpoint resumes on any number of ranks")] = False
    pipeline_loading_checkpoint: Annotated[bool, NoEffect("every rank reads only the bytes that it holds")] = False
    gather_16bit_weights_on_model_save: Annotated[
        bool,
        Alias("stage3_gather_16bit_weights_on_model_save"),
        NoEffect("weights are gathered where they are asked for"),
    ] = False
    stage3_gather_fp16_weights_on_model_save: Annotated[
        bool, NoEffect("weights are gathered where they are asked for")
    ] = False
    save_muon_momentum_buffer_in_memory: Annotated[bool, NoEffect("the momentum stays with its shard")] = False

    # Older names
    cpu_offload: Annotated[bool, Deprecated("offload_optimizer", convert=_offload)] = False
    cpu_offload_param: Annotated[bool, Deprecated("offload_param", convert=_offload)] = False
    cpu_offload_use_pin_memory: Annotated[bool, NoEffect("offload_optimizer.pin_memory")] = False

    offload_param: OffloadParamConfig | None = Field(default=None, description="Where parameters are between uses.")
    offload_optimizer: OffloadOptimizerConfig | None = Field(
        default=None, description="Where optimizer state is between updates."
    )

    zenflow: ZenFlowConfig | None = Field(default=None, description="Split updates by importance.")
    ignore_unused_parameters: bool = Field(
        default=True,
        description="A parameter without a gradient on any rank is not updated; false: that is an error on all ranks.",
    )

    # Not built
    legacy_stage1: Annotated[bool, Unsupported("stage 1")] = False

    @model_validator(mode="before")
    @classmethod
    def _from_bool(cls, data: Any) -> Any:
        # The oldest form of the section. True was stage 1.
        if isinstance(data, bool):
            _log.warning("zero_optimization: %s is deprecated, use {'stage': %d}", data, data)
            return {"stage": int(data)}
        return data


class FP16Config(StrictModel):
    """`fp16`: parameters in fp16, masters in fp32, a scaled loss."""

    enabled: bool = Field(default=False, description="Train in fp16.")
    auto_cast: bool = Field(default=False, description="Cast floating-point inputs of the model to fp16.")
    loss_scale: float = Field(default=0.0, ge=0, description="Constant loss scale; 0 is dynamic.")
    initial_scale_power: Count = Field(default=16, le=1023, description="The first dynamic scale is 2 to this power.")
    loss_scale_window: int = Field(default=1000, gt=0, description="Clean steps before the scale doubles.")
    hysteresis: int = Field(default=2, gt=0, description="Overflows to tolerate before the scale halves.")
    consecutive_hysteresis: bool = Field(default=False, description="Refill the hysteresis on every clean step.")
    min_loss_scale: float = Field(default=1.0, gt=0, description="The scale never falls below it.")
    fp16_master_weights_and_grads: bool = Field(
        default=False,
        description="Keep masters and accumulated gradients in fp16, too. Updates below their precision are lost.",
    )


class BF16Config(StrictModel):
    """`bf16`: parameters in bf16, masters in fp32, no loss scale."""

    enabled: bool = Field(default=False, description="Train in bf16.")
    check_grad_overflow: bool = Field(default=True, description="Skip a step whose gradients are not finite.")
    immediate_grad_update: Annotated[bool, NoEffect("gradients add up in fp32 as they arrive")] = False
    bf16_master_weights_and_grads: bool = Field(
        default=False,
        description="Keep masters and accumulated gradients in bf16, too. Updates below their precision are lost.",
    )
    bf16_optimizer_states: bool = Field(
        default=False, description="Keep optimizer state in bf16. Needs bf16_master_weights_and_grads."
    )


class TorchAutocastConfig(StrictModel):
    """`torch_autocast`: run the forward under torch.autocast; parameters keep their format."""

    enabled: bool = Field(default=False, description="Run forward under torch.autocast.")
    dtype: AutocastDType | None = Field(default=None, description="Its format; null is torch's choice for the device.")
    lower_precision_safe_modules: tuple[str, ...] | None = Field(
        default=None,
        description='Classes of modules ("torch.nn.Linear") the gradients of whose own parameters travel in `dtype`; null: those of none.',
        examples=[["torch.nn.Linear"]],
    )


class DataTypesConfig(StrictModel):
    """`data_types`: formats that differ from the mode's."""

    grad_accum_dtype: DType | None = Field(default=None, description="Format microbatches add up in; null is fp32.")
    param_dtype: DType | None = Field(default=None, description="Must be the format of the active mode, if given.")
    buffer_dtype: DType | None = Field(
        default=None, description="Cast floating-point buffers to it; null leaves them as they are."
    )
    keep_in_fp32_modules: Literal["auto"] | tuple[str, ...] = Field(
        default="auto",
        description="Buffers that are fp32 in bf16 and fp16 training: parts of names, `*` stands for anything; auto is what a transformers model says.",
    )
