"""The deciding part of every pass: a graph and what is known in, the same graph with more actions out. Pure.

Insertion places each gather right before the first use of a unit and its release right behind the last one. The other passes move or
drop these actions; they never invent a use. Prefetching follows DeepCompile (Tanaka et al., arXiv:2504.09983, section 3) in walking
from a gather to earlier positions while memory lasts; it stops as soon as the operations in between take longer than the gather.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from ds_engine.compiling.graph import Graph, GraphAction, GraphVerb, PassInputs

__all__ = [
    "bucket",
    "choose_kept",
    "free",
    "insert",
    "keep",
    "load",
    "park",
    "park_all",
    "prefetch",
    "reduce",
    "store",
    "store_all",
]

_MARGIN = 0.9  # of the budget
_AHEAD = 4 * 10**9  # bytes that are gathered early at most


def insert(graph: Graph, known: PassInputs) -> Graph:
    """Gather units before their first use, release them behind the last one."""
    actions = []
    for unit in graph.units:
        if unit in known.gathered:
            uses = graph.uses_of(unit)
            actions += [GraphAction(GraphVerb.NEED, uses[0], unit), GraphAction(GraphVerb.SPARE, uses[-1] + 1, unit)]
    return graph.plus(actions)


def reduce(graph: Graph, known: PassInputs) -> Graph:
    """Insert the reduction of each unit's gradients after the last gradient that this graph computes."""
    del known
    last: dict[int, int] = defaultdict(int)
    for grad in graph.grads:
        last[grad.unit] = max(last[grad.unit], grad.at + 1)
    return graph.plus(GraphAction(GraphVerb.ARRIVED, at, unit) for unit, at in last.items())


def bucket(graph: Graph, known: PassInputs) -> Graph:
    """Join the reductions of a bucket's units, after the last gradient that this graph computes."""
    arrived = {a.unit: a for a in graph.actions if a.verb is GraphVerb.ARRIVED}
    joined, gone = [], set[int]()
    for units in known.buckets:
        here = [arrived[unit] for unit in units if unit in arrived]
        if len(here) > 1:
            first, *others = (action.unit for action in here)
            joined.append(replace(here[0], at=max(a.at for a in here), unit=first, others=tuple(others)))
            gone.update(action.unit for action in here)
    return graph.without(lambda a: a.verb is GraphVerb.ARRIVED and a.unit in gone).plus(joined)


def prefetch(graph: Graph, known: PassInputs) -> Graph:
    """Begin gathers before their units are needed, in the same order, as far as memory and the time of other work go."""
    live = graph.live()
    resident = graph.resident(lambda unit: known.gathered.get(unit, 0))
    room = [
        None if known.budget is None else int(known.budget * _MARGIN) - known.floor - a - b
        for a, b in zip(live, resident, strict=True)
    ]
    actions, earliest, ahead = [], 0, 0
    released = [a for a in graph.actions if a.verb is GraphVerb.SPARE]
    for need in [a for a in graph.actions if a.verb is GraphVerb.NEED]:
        nbytes, hidden, at = known.gathered.get(need.unit, 0), 0.0, need.at
        before = max((a.at for a in released if a.unit == need.unit and a.at <= need.at), default=0)
        while at > max(earliest, before) and hidden < known.seconds.get(need.unit, 0.0):
            left = room[at - 1]
            if left is not None and left < nbytes:
                break
            at -= 1
            hidden += graph.nodes[at].seconds
        if at < need.at and ahead + nbytes <= _AHEAD:
            for between in range(at, need.at):
                left = room[between]
                room[between] = None if left is None else left - nbytes
            actions.append(GraphAction(GraphVerb.EXPECT, at, need.unit))
        earliest = at
    return graph.plus(actions)


def choose_kept(known: PassInputs) -> frozenset[int]:
    """Choose units that stay gathered between forward and backward, by all-gather time per byte, as memory allows."""
    if known.budget is None:
        return known.both
    room = int(known.budget * _MARGIN) - known.floor - known.peak
    chosen = []
    for unit in sorted(known.both, key=lambda u: (-known.seconds.get(u, 0.0) / max(1, known.gathered[u]), u)):
        if known.gathered[unit] <= room:
            chosen.append(unit)
            room -= known.gathered[unit]
    return frozenset(chosen)


def keep(graph: Graph, known: PassInputs) -> Graph:
    """Leave kept units where they are: no release, and no gather in backward."""

    def gone(action: GraphAction) -> bool:
        again = action.verb in (GraphVerb.NEED, GraphVerb.EXPECT) and graph.backward
        return action.unit in known.saved and (action.verb is GraphVerb.SPARE or again)

    return graph.without(gone)


def free(graph: Graph, known: PassInputs) -> Graph:
    """Give back the memory of saved results of at least `known.least` bytes behind their last use in backward."""
    if not graph.backward:
        return graph
    candidates = [saved for saved in graph.saved if saved.owned and saved.nbytes >= known.least and saved.last >= 0]
    return graph.plus(GraphAction(GraphVerb.FREE, saved.last + 1, name=saved.name) for saved in candidates)


def store_all(graph: Graph, known: PassInputs) -> Graph:
    """Keep every saved result of at least `known.least` bytes in host memory between its last use in forward and its first in
    backward: the least memory that there can be."""
    return _stored(graph, [s.name for s in graph.saved if s.owned and s.nbytes >= known.least])


def store(graph: Graph, known: PassInputs) -> Graph:
    """Offload as few saved results as the budget needs: those needed last in backward, which are computed first."""
    if known.budget is None:
        return graph
    over = known.floor + known.peak - int(known.budget * _MARGIN)
    chosen = []
    # In both graphs alike: what is saved stands in the order in which it was made.
    for saved in graph.saved:
        if over > 0 and saved.owned and saved.nbytes >= known.least:
            chosen.append(saved.name)
            over -= saved.nbytes
    return _stored(graph, chosen)


def _stored(graph: Graph, names: Iterable[str]) -> Graph:
    chosen = set(names)
    selected = [saved for saved in graph.saved if saved.name in chosen]
    if graph.backward:
        return graph.plus(GraphAction(GraphVerb.FETCH, saved.first, name=saved.name) for saved in selected)
    return graph.plus(
        GraphAction(GraphVerb.STORE, max(saved.last, saved.position) + 1, name=saved.name) for saved in selected
    )


def park_all(graph: Graph, known: PassInputs) -> Graph:
    """Keep the optimizer's state in host memory while graphs run: it leaves as a forward graph begins, and comes back at the end of the
    backward graph that makes the unit's gradients. The least memory that there can be."""
    return _parked(graph, known.states, None)


def park(graph: Graph, known: PassInputs) -> Graph:
    """Offload the optimizer state of as few units as the budget needs, as late and as short as memory allows.

    Offloads the state of all units where no budget is known.
    """
    if known.budget is None:
        return park_all(graph, known)
    over = known.floor + known.peak - int(known.budget * _MARGIN)
    chosen = {}
    # The gradients of the first units come last, so their state has the most time on the host.
    for unit, nbytes in sorted(known.states.items()):
        if over > 0:
            chosen[unit] = nbytes
            over -= nbytes
    resident = graph.resident(lambda unit: known.gathered.get(unit, 0))
    left = int(known.budget * _MARGIN) - known.floor
    return _parked(graph, chosen, [left - a - b for a, b in zip(graph.live(), resident, strict=True)])


def _parked(graph: Graph, states: dict[int, int], room: list[int] | None) -> Graph:
    """Insert actions that offload optimizer state in forward, or bring the state back in backward.

    Args:
        states: Bytes of each unit that is offloaded.
        room: Bytes that are free at each position with all state on the device; None where nothing is known.
    """
    if not graph.backward:
        at, actions, gone = 0, [], 0
        for unit, nbytes in states.items():
            while room is not None and at < graph.end and room[at] + gone >= 0:
                at += 1
            actions.append(GraphAction(GraphVerb.PARK, at, unit))
            gone += nbytes
        return graph.plus(actions)
    actions, back = [], 0
    away = sum(states.values())
    with_grads = {grad.unit for grad in graph.grads}
    for unit, nbytes in reversed(states.items()):
        if unit not in with_grads:
            continue
        back += nbytes
        at = graph.end
        while room is not None and at > 0 and room[at - 1] + away - back >= 0:
            at -= 1
        actions.append(GraphAction(GraphVerb.UNPARK, at, unit))
    return graph.plus(actions)


def load(graph: Graph, known: PassInputs) -> Graph:
    """Bring what gathers send from the host to the device before they begin: each while the one before it is used, if memory lasts."""
    room = None
    if known.budget is not None:
        resident = graph.resident(lambda unit: known.gathered.get(unit, 0))
        left = int(known.budget * _MARGIN) - known.floor
        room = [left - a - b for a, b in zip(graph.live(), resident, strict=True)]
    actions, before, coming = [], 0, set[int]()
    for action in graph.actions:
        if action.verb is GraphVerb.SPARE:
            coming.discard(action.unit)
        if (
            action.verb not in (GraphVerb.EXPECT, GraphVerb.NEED)
            or action.unit not in known.resting
            or action.unit in coming
        ):
            continue
        coming.add(action.unit)
        nbytes, at = known.resting[action.unit], action.at
        while at > before and (room is None or room[at - 1] >= nbytes):
            at -= 1
        if room is not None:
            room[at : action.at] = [free - nbytes for free in room[at : action.at]]
        released = max(
            (a.at for a in graph.actions if a.verb is GraphVerb.SPARE and a.unit == action.unit and a.at <= action.at),
            default=0,
        )
        actions.append(GraphAction(GraphVerb.LOAD, max(at, released), action.unit))
        before = action.at
    return graph.plus(actions)
