"""Which leaves of a manifest may hold what a rank needs: bounds that never miss, in a few numbers a leaf. Pure arithmetic.

A *zone* is a range of tensor names, a shape (as a number, see `shape_key`; 0 for any), and a box of relative positions: in each dim, from
which to which `SCALE`th of the tensor. The zones of a leaf cover all its pieces. Layouts are regular (the same rows of every matrix, the same columns of every other), so a
few zones cover thousands of pieces tightly; where a layout is not, zones are wide, and a reader reads leaves for nothing, but
never misses one. Databases know this as zone maps (Moerkotte 1998), and boxes that bound boxes as R-trees (Guttman 1984).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ds_ckpt.crc import crc32
from ds_comm.placement import Box

__all__ = ["MAX_ZONES", "SCALE", "Bounds", "Zone", "bounds_of", "meet", "shape_key", "zones_of"]

SCALE: Final = 2**20
MAX_ZONES: Final = 16  # of a leaf, or one for each number of dims if that is more
_LOOSE: Final = (
    1.5,
    4.0,
    16.0,
    256.0,
    4.0 * SCALE,
)  # how much wider than its widest member a zone may be; the last: anything

Bounds = tuple[tuple[int, int], ...]  # per dim: first and last SCALEth, the last one not included


@dataclass(frozen=True, slots=True)
class Zone:
    """Tensors `first` to `last` (both included, in the order of names) of a shape, at `bounds` of them."""

    first: str
    last: str
    shape: int
    bounds: Bounds


def shape_key(shape: Sequence[int]) -> int:
    """Hash a shape to a number from 1 to 65,536: tensors with different numbers have different shapes."""
    return 1 + crc32(",".join(map(str, shape)).encode()) % 2**16


def bounds_of(shape: Sequence[int], box: Box, start: int, stop: int) -> Bounds:
    """Return the smallest box around elements start..stop (at least one) of `box` flattened, in SCALEths of `shape`.

    Index i of n is in the i * SCALE // n-th; so different indices stay different where n is at most SCALE, and ranges
    that
    share an index share a SCALEth.
    """
    low, high = start, stop - 1
    stride = box.numel
    inner = False  # the run spans several indices of an outer dim: all of each inner one
    out = []
    for origin, side, total in zip(box.offset, box.shape, shape, strict=True):
        stride //= side
        first, last = (0, side - 1) if inner else (low // stride, high // stride)
        if not inner:
            low, high = low - first * stride, high - last * stride
            inner = first != last
        out.append(((origin + first) * SCALE // total, (origin + last) * SCALE // total + 1))
    return tuple(out)


def zones_of(pieces: Iterable[tuple[str, Sequence[int], Bounds]]) -> tuple[Zone, ...]:
    """Build zones that cover `pieces`, each given by its tensor's name and shape, and its bounds.

    Cost: n log n.
    """
    names: dict[tuple[int, Bounds], tuple[str, str]] = {}
    for name, shape, bounds in pieces:
        key = (shape_key(shape), bounds)
        low, high = names.get(key, (name, name))
        names[key] = (min(low, name), max(high, name))
    zones = [Zone(*names[key], *key) for key in sorted(names, key=lambda k: (len(k[1]), k))]
    for loose in _LOOSE:
        if len(zones) <= MAX_ZONES:
            return tuple(zones)
        zones = _joined(zones, loose)
    # More shapes than zones: any shape.
    zones = sorted((Zone(z.first, z.last, 0, z.bounds) for z in zones), key=lambda z: (len(z.bounds), z.bounds))
    limit = max(MAX_ZONES, len({len(z.bounds) for z in zones}))
    for loose in _LOOSE:
        if len(zones) > limit:
            zones = _joined(zones, loose)
    return tuple(zones)


def meet(one: Zone, other: Zone) -> bool:
    """Whether something may be in both."""
    return (
        one.first <= other.last
        and other.first <= one.last
        and (one.shape == other.shape or not one.shape or not other.shape)
        and len(one.bounds) == len(other.bounds)
        and all(a < d and c < b for (a, b), (c, d) in zip(one.bounds, other.bounds, strict=True))
    )


def _joined(zones: Sequence[Zone], loose: float) -> list[Zone]:
    out: list[Zone] = []
    for zone in zones:
        if out and len(out[-1].bounds) == len(zone.bounds) and out[-1].shape == zone.shape:
            last = out[-1]
            both = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(last.bounds, zone.bounds, strict=True))
            widest = [max(b - a, d - c) for (a, b), (c, d) in zip(last.bounds, zone.bounds, strict=True)]
            if all(high - low <= loose * wide for (low, high), wide in zip(both, widest, strict=True)):
                out[-1] = Zone(min(last.first, zone.first), max(last.last, zone.last), zone.shape, both)
                continue
        out.append(zone)
    return out
