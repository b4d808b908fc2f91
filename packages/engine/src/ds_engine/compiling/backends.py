"""What will be compiled, decided: a configuration in, a printable record out. No tensor."""

from __future__ import annotations

from dataclasses import dataclass

from ds_comm import Group, MeshSpec
from ds_config.errors import PlanError
from ds_config.sizes import bytes_text
from ds_engine.compiling.config import CompileConfig
from ds_engine.compiling.schedule_passes import PassEntry, check_schedule, default_schedule, schedule_text
from ds_zero.config import ZeroConfig

__all__ = ["BACKENDS", "CUTS", "Compiling", "Shares", "compiling_of"]

BACKENDS = ("inductor", "eager")
CUTS = {"autosp": "sequence_parallel_size", "autotp": "tensor_parallel.autotp_size"}
"""Passes that cut the model, and the key that says over how many ranks."""
_BUCKET = 25 * 2**20 // 4  # elements: what torch's DistributedDataParallel sums at once, of fp32


@dataclass(frozen=True, slots=True)
class Shares:
    """How the ranks of a sequence share what they are given whole.

    Attributes:
        group: These ranks.
        attention: transformers' name of the attention function that exchanges heads; None: the model does, or the graphs.
        in_graphs: The graphs do.
    """

    group: Group
    attention: str | None
    in_graphs: bool


@dataclass(frozen=True, slots=True)
class Compiling:
    """How graphs are treated once `engine.compile()` was called.

    Attributes:
        schedule: Passes from which step on.
        section: Where the device is waited for, which saved results count, and where they go.
        bucket: Elements of the gradients that the pass `bucket` sums by one message.
        cuts: Passes that cut layers or sequences and have ranks to cut them over.
    """

    schedule: tuple[PassEntry, ...]
    section: CompileConfig
    bucket: int = _BUCKET
    cuts: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.passes}; {self.handling}"

    @property
    def passes(self) -> str:
        """Which passes run when, in words."""
        return f"{schedule_text(self.schedule)}; from engine.compile() on"

    @property
    def handling(self) -> str:
        """How graphs and what they pass on are treated, in words."""
        section = self.section
        waited = {
            "before gather": section.sync_before_allgather,
            "after gather": section.sync_after_allgather,
            "before reduce": section.sync_before_reduce,
            "after reduce": section.sync_after_reduce,
        }
        waits = [where for where, on in waited.items() if on]
        memory = "page-locked" if section.offload_activation_pin_memory else "pageable"
        sentences = [
            f"saved results count from {bytes_text(section.free_activation_threshold)} on, in {memory} memory when offloaded",
            "a gradient buffer is filled while another is summed"
            if section.double_buffer
            else "each reduction is waited for",
            *([f"the device is waited for {', '.join(waits)}"] if waits else []),
            *(["every action is logged"] if section.debug_log else []),
        ]
        return "; ".join(sentences)


def compiling_of(section: CompileConfig | None, zero: ZeroConfig, mesh: MeshSpec) -> Compiling | None:
    """Resolve the compile section at a ZeRO stage; None for graphs without actions.

    Raises:
        PlanError: passes that the stage does not have ("compile-pass"), passes that shard over a single rank
        ("compile-cuts"), or state
            that is offloaded already ("compile-offload").
    """
    if section is None or not section.deepcompile:
        return None
    passes, stage = set(section.passes or ()), zero.stage
    ranks = {"autosp": mesh.sequence, "autotp": mesh.tensor}
    if alone := sorted(name for name in passes & set(CUTS) if ranks[name] == 1):
        raise PlanError(
            f"compile.passes = {list(section.passes or ())}, and "
            + ", ".join(f"{CUTS[name]} = 1: {name} has nothing to cut over" for name in alone),
            code="compile-cuts",
            fix=f"Set {' and '.join(CUTS[name] for name in alone)} to a number of ranks, or leave the pass out.",
        )
    wrong = passes - set(CUTS) - ({"z3"} if stage == 3 else {"z1"} if stage else set())
    if wrong:
        raise PlanError(
            f"compile.passes = {list(section.passes or ())} at ZeRO stage {stage}",
            code="compile-pass",
            fix="Leave it out, or name z3 at stage 3, z1 at stages 1 and 2.",
        )
    # Layers that are cut have their sums in the graphs anyway; batches are cut where that was asked for.
    cuts = frozenset({*(passes & set(CUTS)), *(["autotp"] if mesh.tensor > 1 else [])})
    _check_offload(section, zero)
    schedule = default_schedule(
        stage,
        frees=section.free_activation,
        offloads=section.offload_activation,
        states=section.offload_opt_states,
        params=section.offload_parameters,
        cuts=sorted(cuts),
    )
    check_schedule(schedule)
    bucket = zero.reduce_bucket_size if "reduce_bucket_size" in zero.model_fields_set else _BUCKET
    return Compiling(schedule, section, bucket, cuts)


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
