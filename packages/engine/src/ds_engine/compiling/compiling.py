"""What will be compiled, decided: a configuration in, a printable record out. No tensor."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ds_config.errors import PlanError, UnsupportedError
from ds_config.sizes import bytes_text
from ds_engine.compiling.config import CompileConfig
from ds_engine.compiling.passes import Entry, check_schedule, default_schedule, schedule_text
from ds_zero.config import ZeroConfig

__all__ = ["BACKENDS", "Compiling", "Syncs", "compiling_of"]

BACKENDS = ("inductor", "eager")
_BUCKET = 25 * 2**20 // 4  # elements: what torch's DistributedDataParallel sums at once, of fp32


@dataclass(frozen=True, slots=True)
class Syncs:
    """Where the device is waited for, to see what a run's time is made of."""

    before_gather: bool = False
    after_gather: bool = False
    before_reduce: bool = False
    after_reduce: bool = False


@dataclass(frozen=True, slots=True)
class Compiling:
    """How graphs are treated once `engine.compile()` was called.

    Attributes:
        schedule: Passes from which step on.
        syncs: Where the device is waited for.
        least: Smallest saved result that is freed or offloaded, bytes.
        pin: Offloaded results are page-locked.
        double: Gradients are collected while others are summed.
        told: Log every action.
        bucket: Elements of the gradients that the pass `bucket` sums by one message.
    """

    schedule: tuple[Entry, ...]
    syncs: Syncs
    least: int
    pin: bool
    double: bool
    told: bool
    bucket: int = _BUCKET

    def __str__(self) -> str:
        return f"{self.passes}; {self.handling}"

    @property
    def passes(self) -> str:
        """Which passes run when, in words."""
        return f"{schedule_text(self.schedule)}; from engine.compile() on"

    @property
    def handling(self) -> str:
        """How graphs and what they pass on are treated, in words."""
        waits = [name.replace("_", " ") for name, on in asdict(self.syncs).items() if on]
        said = [
            f"saved results count from {bytes_text(self.least)} on, in {'page-locked' if self.pin else 'pageable'} memory when offloaded",
            "a gradient buffer is filled while another is summed" if self.double else "each reduction is waited for",
            *([f"the device is waited for {', '.join(waits)}"] if waits else []),
            *(["every action is logged"] if self.told else []),
        ]
        return "; ".join(said)


def compiling_of(section: CompileConfig | None, zero: ZeroConfig) -> Compiling | None:
    """What the section asks for at a ZeRO stage; None for graphs without actions.

    Raises:
        PlanError: passes that the stage does not have ("compile-pass"), or state that is elsewhere already ("compile-offload").
        UnsupportedError: passes that cut layers or sequences ("compile-cuts").
    """
    if section is None or not section.deepcompile:
        return None
    asked, stage = set(section.passes or ()), zero.stage
    if cuts := sorted(asked & {"autosp", "autotp"}):
        instead = {"autosp": "sequence_parallel_size", "autotp": "tensor_parallel.autotp_size"}
        raise UnsupportedError(
            f"compile.passes = {list(section.passes or ())}: {', '.join(cuts)} would cut the model in its graphs",
            code="compile-cuts",
            fix=f"Set {' and '.join(instead[name] for name in cuts)}, which cut it before it is compiled.",
        )
    wrong = asked - ({"z3"} if stage == 3 else {"z1"} if stage else set())
    if wrong:
        raise PlanError(
            f"compile.passes = {list(section.passes or ())} at ZeRO stage {stage}",
            code="compile-pass",
            fix="Leave it out, or name z3 at stage 3, z1 at stages 1 and 2.",
        )
    _check_offload(section, zero)
    schedule = default_schedule(
        stage,
        frees=section.free_activation,
        offloads=section.offload_activation,
        states=section.offload_opt_states,
        params=section.offload_parameters,
    )
    check_schedule(schedule)
    return Compiling(
        schedule=schedule,
        syncs=Syncs(
            section.sync_before_allgather,
            section.sync_after_allgather,
            section.sync_before_reduce,
            section.sync_after_reduce,
        ),
        least=section.free_activation_threshold,
        pin=section.offload_activation_pin_memory,
        double=section.double_buffer,
        told=section.debug_log,
        bucket=zero.reduce_bucket_size if "reduce_bucket_size" in zero.model_fields_set else _BUCKET,
    )


def _check_offload(section: CompileConfig, zero: ZeroConfig) -> None:
    state, params = zero.offload_optimizer, zero.offload_param
    if section.offload_opt_states and state is not None and state.device != "none":
        raise PlanError(
            f"compile.offload_opt_states with zero_optimization.offload_optimizer.device = {state.device}",
            code="compile-offload",
            fix="Keep one: offload_optimizer updates on the host, offload_opt_states on the device.",
        )
    if section.offload_parameters and zero.stage != 3:
        raise PlanError(
            f"compile.offload_parameters at ZeRO stage {zero.stage}, where every rank needs all parameters all the time",
            code="compile-offload",
            fix="Use stage 3, or leave it out.",
        )
    if section.offload_parameters and params is not None and params.device == "nvme":
        raise PlanError(
            "compile.offload_parameters with zero_optimization.offload_param.device = nvme",
            code="compile-offload",
            fix="Keep one: parameters in files are read when they are gathered.",
        )
