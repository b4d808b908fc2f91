"""What passes know of a graph, and what they have decided to do in it. Pure: no torch.

Words: a *position* is a number of a node; an action at a position is done right before that node, and one at the number of nodes
at the end of the graph. A node *reads* a unit if it uses one of the unit's parameters, or a view of one; torch checks memory even where it
only makes a view. Bytes are those of a node's own result, 0 for views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import accumulate

__all__ = ["Grad", "Graph", "GraphAction", "GraphVerb", "Node", "PassInputs", "SavedResult"]


class GraphVerb(Enum):
    """What an action does, in the order in which actions at one position are done."""

    ARRIVED = "reduce"  # gradients of a unit, or of several, are there
    SPARE = "release"  # a unit's parameters are not needed any more
    FREE = "free"  # a saved result is not needed any more
    STORE = "offload"  # a saved result goes to host memory
    PARK = "offload state of"  # the optimizer's state of a unit goes to host memory
    UNPARK = "reload state of"  # it starts to come back
    LOAD = "load"  # what a unit's gather sends starts to come from host memory
    EXPECT = "prefetch"  # a unit's gather begins
    FETCH = "reload"  # a saved result comes back
    NEED = "gather"  # a unit's parameters are needed


_ORDER = {verb: at for at, verb in enumerate(GraphVerb)}


@dataclass(frozen=True, slots=True)
class Node:
    """One operation.

    Attributes:
        name: In the graph.
        nbytes: Of its result.
        uses: Positions of the nodes whose results it takes, views looked through.
        reads: Numbers of the units that it reads.
        seconds: It took; 0.0 while nobody has measured.
    """

    name: str
    nbytes: int = 0
    uses: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Grad:
    """The gradient of member `member` of unit `unit` is the result of the node at `at`."""

    unit: int
    member: int
    at: int


@dataclass(frozen=True, slots=True)
class SavedResult:
    """A result that a forward graph keeps for its backward graph; in that graph an input.

    Attributes:
        name: Of the node in both graphs.
        nbytes: Of it.
        position: Position of the node that makes it in the forward graph; -1 in a backward graph.
        last: Last position that uses it in this graph.
        first: First position that uses it in this graph.
        owned: Whether nothing else shares its memory.
    """

    name: str
    nbytes: int
    position: int
    first: int
    last: int
    owned: bool = True


@dataclass(frozen=True, slots=True)
class GraphAction:
    """One thing that is done at a position: to a unit, with some others of its bucket, or to the saved result `name`."""

    verb: GraphVerb
    at: int
    unit: int = -1
    name: str = ""
    others: tuple[int, ...] = ()

    @property
    def units(self) -> tuple[int, ...]:
        """All that it is done to."""
        return (self.unit, *self.others)

    def __str__(self) -> str:
        return self.describe()

    def describe(self, names: Callable[[int], str] = str) -> str:
        """Describe the action in words, with units by their names."""
        return f"{self.verb.value} {self.name or ' + '.join(map(names, self.units))}"


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph and the actions in it.

    Attributes:
        nodes: Operations in the order in which they run.
        backward: Whether it makes gradients.
        grads: Those that it makes of parameters.
        saved: What goes from the forward to the backward graph.
        actions: Decided so far.
        inputs_bytes: Of its inputs, parameters left out.
    """

    nodes: tuple[Node, ...]
    backward: bool = False
    grads: tuple[Grad, ...] = ()
    saved: tuple[SavedResult, ...] = ()
    actions: tuple[GraphAction, ...] = ()
    inputs_bytes: int = 0

    @property
    def end(self) -> int:
        """The last position."""
        return len(self.nodes)

    def uses_of(self, unit: int) -> list[int]:
        """Positions of the nodes that read a unit."""
        return [at for at, node in enumerate(self.nodes) if unit in node.reads]

    @property
    def units(self) -> tuple[int, ...]:
        """Units that are read, in the order of their first use."""
        return tuple(dict.fromkeys(unit for node in self.nodes for unit in node.reads))

    def plus(self, actions: Iterable[GraphAction]) -> Graph:
        """Return the graph with more actions, in order."""
        combined = [*self.actions, *actions]
        return replace(self, actions=tuple(sorted(combined, key=lambda a: (a.at, _ORDER[a.verb]))))

    def without(self, gone: Callable[[GraphAction], bool]) -> Graph:
        """Return the graph without the actions that `gone` selects."""
        return replace(self, actions=tuple(action for action in self.actions if not gone(action)))

    def live(self) -> list[int]:
        """Return the live bytes of results while each node runs, without parameters. Inputs live to the end."""
        last = list(range(len(self.nodes)))
        for at, node in enumerate(self.nodes):
            for used in node.uses:
                last[used] = at
        for saved in self.saved:
            if saved.position >= 0:
                last[saved.position] = len(self.nodes) - 1
        deltas = [0] * (len(self.nodes) + 1)
        for at, node in enumerate(self.nodes):
            deltas[at] += node.nbytes
            deltas[last[at] + 1] -= node.nbytes
        return [self.inputs_bytes + total for total in accumulate(deltas)][: len(self.nodes)]

    def resident(self, nbytes: Callable[[int], int]) -> list[int]:
        """Return the bytes of gathered units while each node runs, according to the actions; `nbytes` of each unit."""
        deltas, here = [0] * (self.end + 2), set()
        for action in self.actions:
            if action.verb in (GraphVerb.NEED, GraphVerb.EXPECT) and action.unit not in here:
                here.add(action.unit)
                deltas[action.at] += nbytes(action.unit)
            elif action.verb is GraphVerb.SPARE and action.unit in here:
                here.discard(action.unit)
                deltas[action.at] -= nbytes(action.unit)
        return list(accumulate(deltas))[: self.end]

    def lines(self, names: Callable[[int], str] = str) -> list[str]:
        """Describe the actions in words, each with the node that follows."""
        texts = []
        for action in self.actions:
            where = f"before {self.nodes[action.at].name}" if action.at < self.end else "at the end"
            texts.append(f"{action.describe(names)} {where}")
        return texts


@dataclass(frozen=True, slots=True)
class PassInputs:
    """What passes know besides the graph.

    Attributes:
        gathered: Bytes of each released unit when it is gathered, by number; others are always there.
        seconds: One gather of each takes; as measured, or bytes as if all took equally long a byte.
        budget: Bytes that a rank may use; None: no limit is known.
        floor: Bytes that are always used: shards, optimizer state, inputs.
        least: Smallest saved result that is worth an action.
        both: Units that the forward and the backward graphs gather.
        saved: Units that stay gathered between them.
        peak: Most bytes that any graph was seen to use at once, floor and gathered units left out.
        states: Bytes of the optimizer's state of each unit that has it on the device; part of the floor.
        resting: Bytes that a rank sends for a gather of each unit that rests on the host.
        buckets: Units whose gradients are summed by one message, in the order of reductions.
    """

    gathered: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    budget: int | None = None
    floor: int = 0
    least: int = 0
    both: frozenset[int] = frozenset()
    saved: frozenset[int] = frozenset()
    peak: int = 0
    states: dict[int, int] = field(default_factory=dict)
    resting: dict[int, int] = field(default_factory=dict)
    buckets: tuple[tuple[int, ...], ...] = ()
