"""Two half batches in turn: which layers, which half computes when, and in which order backward takes what is ready. Pure; no tensor.

In a layer that tensor parallelism has cut, every row layer ends with a sum over the ranks that the next operation needs. Two halves of a batch
need nothing of each other, so one computes while the sums of the other travel (Wang et al. 2024, "Domino", arXiv:2409.15241):

    forward    A0  B0  A1  B1          a half computes up to its next row layer, starts the sum there and gives the turn away
    backward   A1  B1  A0  B0          up to the input of its column layers, whose gradient's sum starts there

A *part* is what a half computes between two sums. Backward's order is autograd's: of what is ready it takes the node with the largest number. So
the nodes that wait for sums get the smallest ones, with the late gradients of weights (`late_gradients.py`) before them, and both only
while nothing else is ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_config.errors import PlanError, UnsupportedError
from ds_parallel.tensor.layer_rules import ShardKind

__all__ = [
    "FIRST_FREE",
    "LATE_GRADIENT",
    "HalfPart",
    "LayerCut",
    "backward_order",
    "forward_order",
    "half_sizes",
    "layers_in_halves",
    "wait_number",
]

_PARTS = 16  # of one layer; more share a number
LATE_GRADIENT = 2 * _PARTS
"""Number of the nodes that compute a weight's gradient late: behind everything, before all waits."""
FIRST_FREE = 2 * LATE_GRADIENT
"""Numbers of all other nodes are at least this."""


class HalfPart(NamedTuple):
    """What one half (0 or 1) computes before its sum number `part`."""

    half: int
    part: int


@dataclass(frozen=True, slots=True)
class LayerCut:
    """Of a decision what concerns halves: a layer's qualified name and what becomes of it."""

    name: str
    kind: ShardKind


def forward_order(parts: int) -> Iterator[HalfPart]:
    """Yield in which order the parts of a layer with `parts` - 1 sums are computed: the last part of each half ends the layer."""
    for part in range(parts):
        yield HalfPart(0, part)
        yield HalfPart(1, part)


def backward_order(parts: int) -> Iterator[HalfPart]:
    """Yield in which order backward computes parts, where a part ends with the sum of an input's gradient."""
    for part in reversed(range(parts)):
        yield HalfPart(0, part)
        yield HalfPart(1, part)


def wait_number(part: int, half: int) -> int:
    """Return the number of the node that waits for the gradient's sum of a part: later parts first, of one part the first half."""
    return 2 * min(part, _PARTS - 1) + 1 - half


def half_sizes(batch: int) -> tuple[int, int] | None:
    """Return the samples of both halves, the larger one first; None for a batch of one, which has no halves."""
    return None if batch < 2 else (batch - batch // 2, batch // 2)


def layers_in_halves(cuts: Iterable[LayerCut]) -> tuple[str, ...]:
    """Return the layers that run in halves: the outermost numbered modules (`model.layers.3`) with a row layer inside, in order.

    Raises:
        UnsupportedError: a layer mixes samples ("tensor-halves").
        PlanError: no numbered module has a row layer ("tensor-halves").
    """
    cuts = tuple(cuts)
    experts = [cut.name for cut in cuts if cut.kind is ShardKind.EXPERTS]
    if experts:
        raise UnsupportedError(
            f"half_batches: {experts[0]} routes the tokens of a whole batch, and counts them together",
            code="tensor-halves",
            fix="Leave half_batches out for models with experts; tp_overlap_comm works with them.",
        )
    found = dict.fromkeys(_numbered(cut.name.split(".")) for cut in cuts if cut.kind is ShardKind.ROW)
    layers = tuple(name for name in found if name)
    if not layers:
        rows = [cut.name for cut in cuts if cut.kind is ShardKind.ROW]
        where = (
            f"the row layers ({', '.join(rows[:3])}) are in no numbered module" if rows else "there are no row layers"
        )
        raise PlanError(
            f"half_batches: {where}, so nobody can say what is one layer of the model",
            code="tensor-halves",
            fix="Keep the model's layers in an nn.ModuleList, or leave half_batches out.",
        )
    return layers


def _numbered(path: Sequence[str]) -> str:
    at = next((at for at, part in enumerate(path[:-1]) if part.isdecimal()), None)
    return "" if at is None else ".".join(path[: at + 1])
