"""What a step of a plan sends over which links, and the least time that those allow. Pure.

Counted are the messages of weights and gradients. Those of activations (tensor and sequence parallelism, pipelines, experts) depend on what
the script feeds in: `ds rehearse` measures them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ds_comm.rehearsal import Fabric
from ds_engine.plan import Plan
from ds_zero.layout.units import DENSE
from ds_zero.planning.unit_plan import UnitPlan

__all__ = ["LeastStep", "Message", "Phase", "least_step", "messages_of", "traffic_rows"]

Phase = Literal["forward", "backward", "update"]
_PHASES: Final[tuple[Phase, ...]] = ("forward", "backward", "update")
_FLOPS: Final[Mapping[Phase, int]] = {"forward": 2, "backward": 4, "update": 0}
"""Operations for each trained parameter and token: a product forward, and two of the same size backward."""


@dataclass(frozen=True, slots=True)
class Message:
    """A collective of one unit, as rank 0 takes part in it.

    Attributes:
        phase: When it can run: weights before the forward or the backward that uses them, gradients from their backward on, what
            `step` publishes before the next forward.
        op: `all_gather`, `reduce_scatter` or `all_reduce`.
        unit: The unit's name.
        nbytes: Of the whole message.
        count: How often in a step.
        ranks: Who takes part.
    """

    phase: Phase
    op: str
    unit: str
    nbytes: int
    count: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LeastStep:
    """The least time of a step: in each phase the longer of computing and sending, as if all of one hid behind the other.

    Attributes:
        messages_s: Seconds of messages, by phase.
        compute_s: Seconds of computing, by phase; 0 where no rate was given.
    """

    messages_s: Mapping[Phase, float]
    compute_s: Mapping[Phase, float]

    @property
    def seconds(self) -> float:
        """The sum over phases."""
        return sum(max(self.messages_s[p], self.compute_s[p]) for p in _PHASES)


def messages_of(plan: Plan) -> tuple[Message, ...]:
    """Return the messages of weights and gradients in one step of rank 0, in the order of units."""
    return tuple(message for unit in plan.units for message in _messages_of(unit, plan))


def _messages_of(unit: UnitPlan, plan: Plan) -> Iterator[Message]:
    residency, accumulation = plan.residency, plan.batch.accumulation
    whole = plan.mesh.group_of("gradient" if unit.spec.family == DENSE else "expert_data", 0)
    ranks = plan.mesh.group_of("shard", 0) if unit.spec.family == DENSE else whole
    if len(whole) == 1:
        return
    shards = unit.layout.world
    gathered = shards * unit.wire.message("gather", unit.layout, unit.dtypes.param)
    reduced = shards * unit.wire.message("reduce", unit.layout, unit.dtypes.reduce)
    if not unit.spec.strategy.shard_optim or shards == 1:
        if unit.spec.trained:
            yield Message("backward", "all_reduce", unit.name, reduced, 1, whole)
        return
    if unit.spec.strategy.shard_params:
        yield Message("forward", "all_gather", unit.name, gathered, accumulation, ranks)
        yield Message("backward", "all_gather", unit.name, gathered, accumulation, ranks)
    elif unit.spec.trained:
        yield Message("update", "all_gather", unit.name, gathered, 1, ranks)
    if unit.spec.trained:
        times = accumulation if residency.shard_grads else 1
        yield Message("backward", "reduce_scatter", unit.name, reduced, times, ranks)
        if len(ranks) < len(whole):  # each shard is summed over the replicas
            replicas = plan.mesh.group_of("data_replicate", 0)
            yield Message("backward", "all_reduce", unit.name, reduced // shards, times, replicas)


def least_step(plan: Plan, fabric: Fabric, tokens: int = 0, flops_per_s: float = 0.0) -> LeastStep:
    """Return the least time of a step over `fabric`.

    Args:
        plan: The plan of any world.
        fabric: The links.
        tokens: Of one microbatch of one rank.
        flops_per_s: What the device reaches; 0: messages alone are counted.
    """
    sending = dict.fromkeys(_PHASES, 0.0)
    for message in messages_of(plan):
        sending[message.phase] += message.count * fabric.seconds(message.op, message.nbytes, message.ranks)
    numel = sum(unit.numel for unit in plan.units)
    work = tokens * plan.batch.accumulation * numel
    computing = {p: _FLOPS[p] * work / flops_per_s if flops_per_s else 0.0 for p in _PHASES}
    return LeastStep(sending, computing)


def traffic_rows(plan: Plan, fabric: Fabric, tokens: int = 0, flops_per_s: float = 0.0) -> dict[str, str]:
    """Describe the messages by operation and link, and the least step, as rows of a printed plan."""
    totals: dict[tuple[str, str], list[float]] = {}
    for message in messages_of(plan):
        link = "between nodes" if fabric.span(message.ranks).nodes > 1 else "within a node"
        row = totals.setdefault((message.op, link), [0, 0.0, 0.0])
        row[0] += message.count
        row[1] += message.count * fabric.wire_bytes(message.op, message.nbytes, message.ranks)
        row[2] += message.count * fabric.seconds(message.op, message.nbytes, message.ranks)
    parts = [
        f"{int(count)} {op} {link}, {nbytes / 1e6:,.1f} MB a rank, {1e3 * seconds:,.2f} ms"
        for (op, link), (count, nbytes, seconds) in totals.items()
    ]
    least = least_step(plan, fabric, tokens, flops_per_s)
    by_phase = ", ".join(
        f"{phase} {1e3 * max(least.messages_s[phase], least.compute_s[phase]):,.2f} ms"
        f" ({'computing' if least.compute_s[phase] > least.messages_s[phase] else 'messages'})"
        for phase in _PHASES
        if max(least.messages_s[phase], least.compute_s[phase])
    )
    work = f"{tokens:,} tokens at {flops_per_s / 1e12:,.0f} TFLOP/s" if flops_per_s else "computing is not counted"
    return {
        "links": f"{fabric.name}: {fabric.node_size} ranks a node",
        "messages": "; ".join(parts) or "none of weights or gradients",
        "least step": f"{1e3 * least.seconds:,.2f} ms: {by_phase or 'nothing is sent'}; {work}",
    }
