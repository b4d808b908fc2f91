"""Sums of several tensors, with the norms of the results from the same pass: the local half of a reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import ds_ops._call as _call
from ds_ops.registry import Op, choose, cpu_backend, reference_backend, register
from ds_ops.stream import norms_and_partials, norms_of
from ds_ops.threads import kernel_threads

__all__ = ["sum_ranges", "sum_sources"]


@dataclass(frozen=True, slots=True)
class _Sums:
    """What `sum_ranges` was given."""

    outs: Sequence[Tensor]
    rows: Sequence[Tensor]
    starts: Sequence[Sequence[int]]
    local: int
    instead: Sequence[Tensor | None]


def sum_ranges(
    outs: Sequence[Tensor],
    rows: Sequence[Tensor],
    starts: Sequence[Sequence[int]],
    *,
    own_row: int = 0,
    instead: Sequence[Tensor | None] = (),
) -> Tensor:
    """Sum ranges: outs[i] = the sum over k of the elements of rows[k] from starts[i][k] on, in that order.

    Returns the norms of each out, as `norms_of`: [n, 2] fp64. Sums are computed in fp32 or wider and rounded once.

    Args:
        outs: at least one, contiguous, of one dtype (fp32, bf16, fp16; others through torch) on one device.
        rows: at least one, contiguous; disjoint from outs, or an out itself.
        instead: instead[i], if present and not None, replaces what out i would read of rows[own_row]: as many elements
        as the
            out has, the out itself or disjoint from all outs.
    Cost: one read of each source, one write of each out; no read for the norms. Thakur et al. 2005, section 4.3. The
    call
    takes about 8 us for each of several ranges, where one call a range takes 24.
    """
    if not outs or not rows:
        raise _call.refuse("sum_ranges: no outs, or no rows.", "Pass at least one tensor of each.")
    sums = _Sums(outs, rows, starts, own_row, instead or [None] * len(outs))
    norms: Tensor = choose(_SUM_RANGES, outs[0].device.type, outs[0].dtype).backend.run(sums)
    return norms


def sum_sources(out: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """`sum_ranges` of one range; returns the norms of `out`, [2] fp64.

    Args:
        out: [n], contiguous; fp32, bf16, fp16 (others through torch).
        sources: at least one, each [n] like `out`: `out` itself, or memory apart from it.
    """
    for number, source in enumerate(sources):
        _call.require(f"sources[{number}]", source, dtypes=(out.dtype,), numel=out.numel())
    return sum_ranges([out], sources, [[0] * len(sources)])[0]


def _check(sums: _Sums) -> tuple[list[int], list[int], list[int]]:
    """Check the sums and return the addresses of the outs and of all their sources in order, and the outs' lengths."""
    like, to, of, numels = sums.outs[0], [], [], []
    size = like.element_size()
    lengths = [row.numel() for row in sums.rows]
    firsts = [
        _call.reach(f"rows[{k}]", row, 0, length, like)
        for k, (row, length) in enumerate(zip(sums.rows, lengths, strict=True))
    ]
    for out, places, other in zip(sums.outs, sums.starts, sums.instead, strict=True):
        n = out.numel()
        at = _call.reach("outs", out, 0, n, like)
        if any(not 0 <= place <= length - n for place, length in zip(places, lengths, strict=True)):
            raise _call.refuse(
                "sum_ranges: an out reaches beyond its rows.", "Pass starts that leave room for the out."
            )
        sources = [first + place * size for first, place in zip(firsts, places, strict=True)]
        if other is not None:
            sources[sums.local] = at if other is out else _call.reach("instead", other, 0, n, like)
        low, high = at - n * size, at + n * size
        if any(low < source < high and source != at for source in sources):
            raise _call.refuse(
                "sum_ranges: an out and one of its sources share memory.",
                "Pass the out itself, or memory apart from it.",
            )
        to.append(at)
        of += sources
        numels.append(n)
    return to, of, numels


def _cpu_sum_ranges(sums: _Sums) -> Tensor:
    native = _call.native()
    to, of, numels = _check(sums)
    norms, partials = norms_and_partials(numels)
    dtype = _call.DTYPES[sums.outs[0].dtype]
    status = native.sum_ranges(
        to, of, len(sums.rows), dtype, numels, _call.address(norms), _call.address(partials), kernel_threads()
    )
    _call.finish("sum_ranges", status)
    _call.mark_written(sums.outs)
    return norms


def _reference_sum_ranges(sums: _Sums) -> Tensor:
    _check(sums)
    with torch.no_grad():
        for out, places, other in zip(sums.outs, sums.starts, sums.instead, strict=True):
            terms = [row.view(-1)[place : place + out.numel()] for row, place in zip(sums.rows, places, strict=True)]
            if other is not None:
                terms[sums.local] = other.view(-1)
            total = terms[0].to(torch.promote_types(out.dtype, torch.float32), copy=True)
            for term in terms[1:]:
                total += term
            out.copy_(total.view_as(out))
    return norms_of(sums.outs)


_SUM_RANGES = register(
    Op(
        "sum_ranges",
        "sums of several tensors and their norms",
        (cpu_backend(_cpu_sum_ranges), reference_backend(_reference_sum_ranges)),
    )
)
