"""`DeepSpeedEngine`: the engine of ds-engine under upstream's names.

It decides nothing. The one thing that upstream's callers may decide, where a step ends
(`set_gradient_accumulation_boundary`), answers the two questions that the engine asks about it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deepspeed._errors import UnsupportedNameError
from deepspeed._ours.base._torch import accumulates, transformed, tree_leaves
from deepspeed._ours.base.forwarding import answers
from deepspeed._ours.base.raising import raising, refused
from deepspeed._ours.communication import expert_getters, group_getters
from deepspeed._ours.config.config import DeepSpeedConfig
from deepspeed._ours.monitor.flops import FlopsProfiler
from deepspeed._ours.monitor.monitors import MonitorMaster
from deepspeed._ours.monitor.upstream_logging import logger
from deepspeed._ours.monitor.wall_clock_timers import ThroughputTimer
from deepspeed._ours.parallel.autoep_layer import AutoEPMoELayer, undress_blocks
from deepspeed._ours.parallel.tp_layers import undress
from deepspeed._ours.training_engine.accessors import add_accessors
from deepspeed._ours.training_engine.compile_passes import (
    BUILTIN,
    as_ours,
    check_passes,
    functions_of,
    register_pass_contract,
    translated_schedule,
)
from deepspeed._ours.training_engine.engine_data import ReadsData
from deepspeed._ours.training_engine.engine_files import SavesAndLoads
from deepspeed._ours.zero.params import mark, unmark
from deepspeed._ours.zero.zero_optimizer import OffloadsStates
from deepspeed._surface import MISSING_ATTRIBUTES
from ds_config.errors import PlanError
from ds_engine import Engine, Plan, StepResult
from ds_engine.compiling import Contract
from ds_engine.components import Components
from ds_moe.utils import has_moe_layers
from ds_pipe import Action
from ds_zero import ShardedModel, ShardedOptimizer
from ds_zero.layout.dtypes_plan import ScaleState

_log = logging.getLogger("DeepSpeed")


class _BatchesDifferError(PlanError, AssertionError):
    """Tensor-parallel ranks were given different batches. Programs compare the text."""

    def __init__(self, error: PlanError) -> None:
        super().__init__(error.message, code=error.code, fix=error.fix)

    def __str__(self) -> str:
        return (
            "Data inconsistency within the TP group. Please check the Dataloader implementation to ensure consistency."
        )


def _counter(field: str, meaning: str) -> Any:
    """Build a property of a counter, which loops of upstream's programs also set."""
    return property(attrgetter(f"counters.{field}"), lambda self, value: self._count(field, value), doc=meaning)


class _TellsOfPatches(type):
    """Warns where a program replaces a method of upstream's engine that this one does not have: nothing would call it."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if not hasattr(cls, name) and not name.startswith("__"):
            logger.warning(
                "%s.%s is set from outside, and nothing here calls it: if upstream's engine does, that change has no effect",
                cls.__name__, name,
            )  # fmt: skip
        super().__setattr__(name, value)


class DeepSpeedEngine(OffloadsStates, SavesAndLoads, ReadsData, Engine, metaclass=_TellsOfPatches):  # type: ignore[misc]  # upstream asks for states in other words
    """`ds_engine.Engine` under upstream's names; made by `deepspeed.initialize`. Unknown attributes are the model's.

    Attributes:
        config: The configuration as it was given, the same object.
        mpu: Groups of another library, as they were given, or of the stages; kept, not read.
        client_optimizer, client_lr_scheduler, training_data, collate_fn: What `initialize` was given.
        tput_timer: Samples per second of the loop, from a forward in training to the `step` after it.
    """

    client_optimizer: Any
    client_lr_scheduler: Any
    training_data: Any
    collate_fn: Any
    _running_backwards: ClassVar = 0  # engines whose `backward` runs now

    def __init__(self, plan: Plan, components: Components, config: dict[str, Any] | None = None) -> None:
        super().__init__(plan, components)
        self._config = DeepSpeedConfig({} if config is None else config, plan=plan)
        self._is_gradient_accumulation_boundary: bool | None = None
        self._communication: torch.dtype | None = None
        self._open: str | None = None
        self._scaled = False
        self._monitor: MonitorMaster | None = None
        self.mpu: Any = None
        timers = SimpleNamespace(enabled=True, synchronized=False)  # a loop's rate needs no wait for the device
        self.tput_timer = ThroughputTimer(timers, plan.batch.train, steps_per_output=None)
        mark(self.sharding)
        expert_getters.share_experts(self)

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

    global_steps = _counter("steps", "Optimizer steps done, skipped ones included.")
    global_samples = _counter("samples", "Samples trained on, over all ranks.")
    skipped_steps = _counter("skipped", "Steps whose update was left out.")
    micro_steps = _counter(
        "micro_steps", "Microbatches done on this rank. Setting it says which one of its step comes next."
    )

    def _count(self, field: str, value: int) -> None:
        position, counters = self._position, asdict(self.counters) | {field: int(value)}
        self.set_progress(counters | {"taken": self._feed.consumed})
        self._position = counters["micro_steps"] % len(self._backwards) if field == "micro_steps" else position

    @property
    def communication_data_type(self) -> torch.dtype:
        """The format that the configuration says gradients travel in; that of its precision where it says none."""
        return self._communication or self.plan.precision.reduce or self.get_data_types()[0]

    @communication_data_type.setter
    def communication_data_type(self, dtype: torch.dtype | None) -> None:
        travel = {unit.dtypes.reduce for unit in self.sharding.units if unit.spec.trained}
        if dtype is not None and self.mesh["gradient"].size > 1 and not travel <= {dtype}:
            raise refused("communication-set", dtype, " and ".join(sorted(map(str, travel))))
        self._communication = dtype

    def optimizer_name(self) -> str | None:
        """Name the optimizer: the class of the caller's, else the configuration's type in lower case."""
        if self.client_optimizer is not None:
            return type(self.client_optimizer).__name__
        name: str | None = self._config.optimizer_name
        return name

    @property
    def flops_profiler(self) -> FlopsProfiler | None:
        """What `flops_profiler` of the configuration counted; None where it is not enabled. Counts are rank 0's."""
        section = self.plan.config.flops_profiler
        if not section.enabled:
            return None
        return FlopsProfiler(self.module, self, section.recompute_fwd_factor, counter=self._telemetry.counter)

    @property
    def monitor(self) -> MonitorMaster:
        """Writers of the sections' monitors, for events of the program's own. Made when they are first asked for."""
        if self._monitor is None:
            self._monitor = MonitorMaster(self._config.monitor_config)
        return self._monitor

    def get_summary_writer(self) -> Any:
        """Return TensorBoard's writer; None where TensorBoard is off, and on other ranks."""
        tensorboard = self.monitor.tb_monitor
        return None if tensorboard is None else tensorboard.summary_writer

    @property
    def has_moe_layers(self) -> bool:
        """Whether the model has `deepspeed.moe.layer.MoE` layers, or blocks whose experts the engine has cut."""
        return has_moe_layers(self.module)[0] or any(isinstance(m, AutoEPMoELayer) for m in self.module.modules())

    def get_global_grad_norm(self) -> Any:
        """Return the norm of the last update's averaged gradient before clipping; also between updates. See `DeepSpeedZeroOptimizer`."""
        optimizer: Any = self.optimizer
        return None if optimizer is None else optimizer._global_grad_norm

    # ---- where a step ends

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients of the backwards inside the context without reducing, at ZeRO stages 0 and 1.

        The limit to these stages is upstream's; see `coalesce_grad_reduction`.

        Raises:
            PlanError: at stage 2 or 3, or inside another such context; an AssertionError, too ("compat-call-order").
        """
        stage = self.plan.config.zero_optimization.stage
        if stage > 1:
            raise refused("no-sync-stage", stage)
        return self._without_reducing("no_sync")

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Defer gradient reduction of several backwards inside the context to the next step, at every ZeRO stage.

        A rank holds unsharded gradients meanwhile.

        Raises:
            PlanError: where the training loop decides when a step ends; an AssertionError, too ("compat-call-order").
        """
        if not self.plan.managed:
            raise refused("coalesce-unmanaged")
        return self._without_reducing("coalesce_grad_reduction")

    @contextmanager
    def _without_reducing(self, name: str) -> Iterator[None]:
        if self._open is not None:
            raise refused("no-sync-nested", name, self._open)
        self._open = name
        try:
            with super().no_sync():
                yield
        finally:
            self._open = None

    # ---- backwards that the engine does not start

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. A plain `backward()` of what comes out is one microbatch; at stage 0 it must go through `scale`, as upstream has it."""
        if self.module.training:
            self.tput_timer.start()
        try:
            output = super().forward(*args, **kwargs)
        except PlanError as error:
            if error.code != "tensor-inputs":
                raise
            raise _BatchesDifferError(error) from error
        several = len(self._backwards) > 1 or self.plan.config.zero_optimization.stage == 0
        if self.optimizer is not None and several and not transformed():
            self._scaled = False
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                    leaf.register_hook(self._backward_from_outside)
        return output

    def _backward_from_outside(self, grad: Tensor) -> Tensor | None:
        """Divide the gradients of a plain backward by the microbatches: on the way in, or with all others of the step.

        Outputs may depend on one another, so a division where each of them is entered is right for a mixed step only if they do not.
        """
        if DeepSpeedEngine._running_backwards or not accumulates(self.module.parameters()):
            return None  # another engine's loss, through this one's output, is scaled by that; torch.autograd.grad keeps its values
        if self.plan.config.zero_optimization.stage == 0 and not self._scaled:
            raise refused("plain-backward")
        if self._ledger.losses:
            return grad / len(self._backwards)
        self._trains("backward").divisor = float(len(self._backwards))
        return None

    @raising(AssertionError, "loss-missing")
    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Accumulate the gradients of one microbatch's loss. See `ds_engine.Engine.backward`."""
        DeepSpeedEngine._running_backwards += 1
        try:
            return super().backward(loss, retain_graph, scale_wrt_gas)
        finally:
            DeepSpeedEngine._running_backwards -= 1

    def _start(self, loss: Any, divide: bool = True) -> Any:
        self._scaled = True
        part, scaled = super()._start(loss, divide)
        divisor = self._trains("backward").divisor  # of plain backwards of this step
        return part, scaled if divisor == 1.0 else scaled * divisor

    _backward_epilogue = answers(
        None,
        "Do nothing: gradients of a plain `loss.backward()`, also of losses that engines share, are processed on arrival.",
    )

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the next backward and the following step end a gradient accumulation, until the next call; None: the engine counts again."""
        if not self.plan.managed:
            raise refused("boundary-unmanaged")
        self._is_gradient_accumulation_boundary = None if is_boundary is None else bool(is_boundary)
        if is_boundary is None:
            # Setting it places the engine by the count: upstream counts from the first microbatch on, whatever was a boundary since.
            self.micro_steps = self.micro_steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current microbatch ends a step."""
        told = self._is_gradient_accumulation_boundary
        return super().is_gradient_accumulation_boundary() if told is None else told

    def next_backward(self) -> Action:
        """Return the action of the next backward: the program's, or the caller's decision on the boundary.

        Sharded gradients are reduced in every backward, unsharded gradients in the last.
        """
        told = self._is_gradient_accumulation_boundary
        if told is None:
            return super().next_backward()
        return replace(self._backwards[-1], reduce=told or self.plan.residency.shard_grads)

    allreduce_gradients = answers(
        None, "Do nothing: the last backward of a step reduces, and `step` finishes pending reductions."
    )

    def scale(self, loss: Tensor) -> Tensor:
        """Scale `loss` for a plain `.backward()`: multiply by the loss scale. Its gradients are divided by the microbatches, as those of `backward`."""
        if loss.numel() != 1:
            raise refused("scale-scalar", tuple(loss.shape))
        self._scaled = True
        return self._trains("scale").scale(loss)

    # ---- checkpoints

    def _holder(self) -> ShardedOptimizer | ShardedModel:
        return self.optimizer or self.sharding

    empty_partition_cache = answers(
        None, "Do nothing: no partitions are cached, a unit is released when its graph no longer needs its parameters."
    )

    def compile(  # type: ignore[override]
        self,
        backend: str = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the model's forward; a second call does nothing, as upstream.

        Args:
            schedule: (step, passes): upstream's names or functions, ours, or the caller's.
        Raises:
            UnsupportedError: compiled autograd ("compat-argument").
            PassContractError: passes that do not go together ("compile-contract").
        """
        if compiled_autograd_enabled:
            raise refused("compiled-autograd")
        if self.is_compiled:
            return
        if schedule is not None:
            functions = functions_of(self.compiled.passes)
            if self.compiled.plan is not None:
                check_passes(schedule, functions)
            schedule = translated_schedule(schedule, functions)
        super().compile(backend, compile_kwargs, schedule)

    def register_compile_pass(self, pass_name: str, pass_fn: Callable[..., Any], contract: Any = None) -> None:
        """Name a pass for `compile(schedule=...)`, which checks its contract against the schedule as it was given.

        Args:
            pass_fn: In upstream's form, of eight arguments, or in ds_engine's, of seven. What it is told of graphs is what ds_engine knows.
            contract: Upstream's, in upstream's words.
        Raises:
            PlanError: the name is one of upstream's passes, or of ours ("compile-register").
        """
        if pass_name in BUILTIN:
            raise refused("pass-built-in", pass_name)
        # Of its contract ds_engine, which is given the schedule in its own words, gets what can speak of those.
        conflicts = frozenset() if contract is None else contract.conflicts_with
        super().register_compile_pass(pass_name, as_ours(pass_fn), Contract(conflicts=conflicts))
        register_pass_contract(pass_name, contract)

    def close(self) -> None:
        """Give the model back whole and free the rest. Collective."""
        module: nn.Module = self.module
        super().close()
        group_getters.forget_layers(self.mesh)
        expert_getters.forget_experts(self)
        undress(module)
        undress_blocks(module)

    def destroy(self) -> None:
        """Give the model back whole and free the rest. Collective."""
        module: nn.Module = self.module
        self.close()
        unmark(module)

    def get_batch_info(self) -> tuple[int, int, int]:
        """Train batch size, microbatch size, microbatches a step."""
        batch = self.plan.batch
        return batch.train, batch.micro, batch.accumulation

    @raising(AssertionError, "zero-unused")
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> StepResult:
        """End a microbatch; at the boundary, update. Collective there."""
        if self._open is not None:
            raise refused("step-in-context", f": {self._open} is one" if self._open != "no_sync" else "")
        scale_before = None if self.optimizer is None else self.optimizer._scale
        result = super().step(lr_kwargs)
        self.tput_timer.stop(global_step=result.applied or result.skipped)
        if result.skipped and scale_before is not None:
            self._tell_overflow(scale_before)
        return result

    @raising(AssertionError, "zero-unused")
    def train_batch(self, data_iter: Iterator[Any] | Iterable[Any] | None = None) -> StepResult:
        """Run the microbatches of one step, then the update. See `ds_engine.Engine.train_batch`."""
        self.tput_timer.start()
        began = self.tput_timer.start_time
        result = super().train_batch(data_iter)
        self.tput_timer.start_time = began  # forwards inside have started the clock anew
        self.tput_timer.stop(global_step=True)
        return result

    def _no_backward(self) -> None:
        logger.warning(
            "step() was called and no backward has begun since the last step(); upstream goes on, so this does"
        )

    def _tell_overflow(self, before: ScaleState) -> None:
        """Log upstream's line about a skipped step, which programs parse."""
        now = self._trains("step")._scale
        if self.global_rank or now is None or (now.scale, now.tolerance) == (before.scale, before.tolerance):
            return
        message = (
            f"[deepspeed] OVERFLOW! Rank {self.global_rank} Skipping step. Attempted loss scale: {int(before.scale)}, "
        )
        if now.scale < before.scale:
            logger.info("%sreducing to %d", message, now.scale)
        else:
            logger.info("%sbut hysteresis is %d. Reducing hysteresis to %d", message, before.tolerance, now.tolerance)


add_accessors(DeepSpeedEngine)
