"""The deciding part of every pass: a graph and what is known in, the same graph with more actions out. Pure.

Insertion places each gather right before the first use of a unit and its release right behind the last one. The other passes move or
drop these actions; they never invent a use. Prefetching follows DeepCompile (Tanaka et al., arXiv:2504.09983, section 3) in walking
from a gather to earlier positions while memory lasts; it stops as soon as the operations in between take longer than the gather.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ds_engine.compiling.graph import Action, Graph, Known, Verb

__all__ = ["choose_kept", "free", "insert", "keep", "prefetch", "reduce", "store", "store_all"]

_MARGIN = 0.9  # of the budget
_AHEAD = 4 * 10**9  # bytes that are gathered early at most


def insert(graph: Graph, known: Known) -> Graph:
    """Gather units before their first use, release them behind the last one."""
    actions = []
    for unit in graph.units:
        if unit in known.gathered:
            uses = graph.uses_of(unit)
            actions += [Action(Verb.NEED, uses[0], unit), Action(Verb.SPARE, uses[-1] + 1, unit)]
    return graph.plus(actions)


def reduce(graph: Graph, known: Known) -> Graph:
    """Hand over the gradients of a unit behind the last of them that this graph makes."""
    del known
    last: dict[int, int] = defaultdict(int)
    for grad in graph.grads:
        last[grad.unit] = max(last[grad.unit], grad.at + 1)
    return graph.plus(Action(Verb.ARRIVED, at, unit) for unit, at in last.items())


def prefetch(graph: Graph, known: Known) -> Graph:
    """Begin gathers before their units are needed, in the same order, as far as memory and the time of other work go."""
    live = graph.live()
    held = graph.resident(lambda unit: known.gathered.get(unit, 0))
    room = [
        None if known.budget is None else int(known.budget * _MARGIN) - known.floor - a - b
        for a, b in zip(live, held, strict=True)
    ]
    actions, earliest, ahead = [], 0, 0
    released = [a for a in graph.actions if a.verb is Verb.SPARE]
    for need in [a for a in graph.actions if a.verb is Verb.NEED]:
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
            actions.append(Action(Verb.EXPECT, at, need.unit))
        earliest = at
    return graph.plus(actions)


def choose_kept(known: Known) -> frozenset[int]:
    """Units that stay gathered between forward and backward: those whose gather is costliest a byte, as long as memory lasts."""
    if known.budget is None:
        return known.both
    room = int(known.budget * _MARGIN) - known.floor - known.peak
    kept = []
    for unit in sorted(known.both, key=lambda u: (-known.seconds.get(u, 0.0) / max(1, known.gathered[u]), u)):
        if known.gathered[unit] <= room:
            kept.append(unit)
            room -= known.gathered[unit]
    return frozenset(kept)


def keep(graph: Graph, known: Known) -> Graph:
    """Leave kept units where they are: no release, and no gather in backward."""

    def gone(action: Action) -> bool:
        again = action.verb in (Verb.NEED, Verb.EXPECT) and graph.backward
        return action.unit in known.kept and (action.verb is Verb.SPARE or again)

    return graph.without(gone)


def free(graph: Graph, known: Known) -> Graph:
    """Give back the memory of saved results of at least `known.least` bytes behind their last use in backward."""
    if not graph.backward:
        return graph
    found = [saved for saved in graph.saved if saved.own and saved.nbytes >= known.least and saved.last >= 0]
    return graph.plus(Action(Verb.FREE, saved.last + 1, name=saved.name) for saved in found)


def store_all(graph: Graph, known: Known) -> Graph:
    """Keep every saved result of at least `known.least` bytes in host memory between its last use in forward and its first in
    backward: the least memory that there can be."""
    return _stored(graph, [s.name for s in graph.saved if s.own and s.nbytes >= known.least])


def store(graph: Graph, known: Known) -> Graph:
    """The same for as few saved results as the budget asks for: those that are needed last in backward, which are made first."""
    if known.budget is None:
        return graph
    over = known.floor + known.peak - int(known.budget * _MARGIN)
    chosen = []
    # In both graphs alike: what is saved stands in the order in which it was made.
    for saved in graph.saved:
        if over > 0 and saved.own and saved.nbytes >= known.least:
            chosen.append(saved.name)
            over -= saved.nbytes
    return _stored(graph, chosen)


def _stored(graph: Graph, names: Iterable[str]) -> Graph:
    chosen = set(names)
    found = [saved for saved in graph.saved if saved.name in chosen]
    if graph.backward:
        return graph.plus(Action(Verb.FETCH, saved.first, name=saved.name) for saved in found)
    return graph.plus(Action(Verb.STORE, max(saved.last, saved.made) + 1, name=saved.name) for saved in found)
