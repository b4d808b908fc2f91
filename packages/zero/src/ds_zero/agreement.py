"""What the ranks agree on before an update: the gradient's norm, and which parameters nobody used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import ds_comm as comm
from ds_config.errors import PlanError
from ds_zero.norms import square_of
from ds_zero.sharding import Sharding
from ds_zero.unit import Unit

__all__ = ["Facts", "agree"]


@dataclass(frozen=True, slots=True)
class Facts:
    """The same on every rank.

    Attributes:
        square: Sum of squares of the summed gradient; None where nobody asked.
        unused: For each trained unit the numbers of parameters that no rank used.
        riders: Sums over the ranks of the numbers that the caller sent along.
    """

    square: float | None
    unused: list[set[int]]
    riders: tuple[float, ...] = ()


def agree(sharding: Sharding, *, wants_norm: bool, copies: int, riders: Sequence[float] = ()) -> Facts:
    """One all-reduce of 8 bytes a parameter; one of 8 bytes more where the norm goes over more axes.

    Args:
        wants_norm: Whether to measure the gradient.
        copies: How many ranks count each element of the gradient.
        riders: Numbers of the caller's own to sum over the ranks, as many on every rank.
    Raises:
        PlanError: in strict mode, on every rank, if only some of them used a parameter ("ranks-diverged").
    """
    units, reducing = [u for u in sharding.units if u.spec.trained], sharding.runtime.reducing
    scope = sharding.options.norm
    square = square_of(units, scope) / copies if wants_norm else 0.0
    unused = [sorted(reducing.unused[n]) for n in reducing.trained]
    if sharding.group.size > 1:
        counts = torch.ones(1 + sum(len(u.params) for u in units) + len(riders), dtype=torch.float64)
        counts[0] = square
        if riders:
            counts[-len(riders) :] = torch.tensor(riders, dtype=torch.float64)
        base = 1
        for unit, absent in zip(units, unused, strict=True):
            for i in absent:
                counts[base + i] = 0.0
            base += len(unit.params)
        comm.all_reduce(counts, group=sharding.group, unit="step")
        told = counts.tolist()
        square, nobody = _read(sharding, units, told)
        riders = told[len(told) - len(riders) :]
    else:
        nobody = [set(absent) for absent in unused]
    if wants_norm and scope is not None:
        square = scope.total(square)
    return Facts(square if wants_norm else None, nobody, tuple(riders))


def _read(sharding: Sharding, units: Sequence[Unit], counts: list[float]) -> tuple[float, list[set[int]]]:
    size, base, unused, partly = sharding.group.size, 1, [], []
    for unit in units:
        users = counts[base : base + len(unit.params)]
        unused.append({i for i, n in enumerate(users) if n == 0})
        partly += [unit.spec.params[i].name for i, n in enumerate(users) if 0 < n < size]
        base += len(unit.params)
    if partly and sharding.options.strict:
        raise _diverged(partly, size)
    return counts[0], unused


def _diverged(names: Sequence[str], size: int) -> PlanError:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return PlanError(
        f"some of {size} ranks used these parameters in the last step and some did not: {shown}",
        code="ranks-diverged",
        fix="Make every rank take the same path, or shard without strict=True: absent gradients then count as zeros.",
    )
