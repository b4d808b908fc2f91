"""Sums of several tensors, with the squares of the results from the same pass: the local half of a reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import ds_ops._call as _call
from ds_config.errors import KernelError
from ds_ops.registry import Op, choose, cpu_backend, reference_backend, register

__all__ = ["sum_ranges", "sum_sources"]


def sum_ranges(
    outs: Sequence[Tensor],
    rows: Sequence[Tensor],
    starts: Sequence[Sequence[int]],
    *,
    own: int = 0,
    instead: Sequence[Tensor | None] = (),
) -> float:
    """outs[i] = the sum over k of the elements of rows[k] from starts[i][k] on, in that order; returns the sum of all outs^2 (fp64).

    Sums are made in fp32 or wider and rounded once.

    Args:
        outs: at least one, contiguous, of one dtype (fp32, bf16, fp16; others through torch) on one device.
        rows: at least one, contiguous; apart from outs, or an out itself.
        instead: instead[i], where it is there and not None, stands for what out i would read of rows[own]: as many elements as the
            out has, the out itself or apart from all outs.
    Cost: one read of each source, one write of each out; no read for the squares. Thakur et al. 2005, section 4.3. One call for
    many short ranges takes 1 us for each, where `sum_sources` takes 20.
    """
    if not outs or not rows:
        raise KernelError(
            "sum_ranges: no outs, or no rows.", code="kernel-argument", fix="Pass at least one tensor of each."
        )
    return choose(_SUM_RANGES, outs[0].device.type, outs[0].dtype).backend.run(outs, rows, starts, own, instead)


def sum_sources(out: Tensor, sources: Sequence[Tensor]) -> float:
    """`sum_ranges` of one range.

    Args:
        out: [n], contiguous; fp32, bf16, fp16 (others through torch).
        sources: at least one, each [n] like `out`: `out` itself, or memory apart from it.
    """
    for number, source in enumerate(sources):
        _call.require(f"sources[{number}]", source, dtypes=(out.dtype,), numel=out.numel())
    return sum_ranges([out], sources, [[0] * len(sources)])


def _check(
    outs: Sequence[Tensor],
    rows: Sequence[Tensor],
    starts: Sequence[Sequence[int]],
    own: int,
    instead: Sequence[Tensor | None],
) -> tuple[list[int], list[int], list[int]]:
    """Addresses of the outs, those of all of their sources one after the other, and the outs' lengths."""
    like, to, of, numels = outs[0], [], [], []
    size = like.element_size()
    firsts = [_call.reach(f"rows[{k}]", row, 0, row.numel(), like) for k, row in enumerate(rows)]
    lengths = [row.numel() for row in rows]
    for number, (out, places) in enumerate(zip(outs, starts, strict=True)):
        n = out.numel()
        at = _call.reach("outs", out, 0, n, like)
        sources = [first + place * size for first, place in zip(firsts, places, strict=True)]
        if any(not 0 <= place <= length - n for place, length in zip(places, lengths, strict=True)):
            raise _call.refuse(
                f"sum_ranges: outs[{number}] reaches beyond its rows.", "Pass starts that leave room for the out."
            )
        other = instead[number] if instead else None
        if other is not None:
            sources[own] = at if other is out else _call.reach("instead", other, 0, n, like)
        low, high = at - n * size, at + n * size
        if any(low < source < high and source != at for source in sources):
            raise _call.refuse(
                f"sum_ranges: outs[{number}] and one of its sources share memory.",
                "Pass the out itself, or memory apart from it.",
            )
        to.append(at)
        of += sources
        numels.append(n)
    return to, of, numels


def _cpu_sum_ranges(
    outs: Sequence[Tensor],
    rows: Sequence[Tensor],
    starts: Sequence[Sequence[int]],
    own: int,
    instead: Sequence[Tensor | None],
) -> float:
    native = _call.native()
    to, of, numels = _check(outs, rows, starts, own, instead)
    partials = torch.empty(-(-max(numels) // native.norm_block), dtype=torch.float64)
    status, squares = native.sum_ranges(
        to, of, len(rows), _call.DTYPES[outs[0].dtype], numels, _call.address(partials), torch.get_num_threads()
    )
    _call.finish("sum_ranges", status)
    _call.mark_written(outs)
    return float(squares)


def _reference_sum_ranges(
    outs: Sequence[Tensor],
    rows: Sequence[Tensor],
    starts: Sequence[Sequence[int]],
    own: int,
    instead: Sequence[Tensor | None],
) -> float:
    _check(outs, rows, starts, own, instead)
    squares = 0.0
    with torch.no_grad():
        for number, (out, places) in enumerate(zip(outs, starts, strict=True)):
            terms = [row.view(-1)[place : place + out.numel()] for row, place in zip(rows, places, strict=True)]
            other = instead[number] if instead else None
            if other is not None:
                terms[own] = other.view(-1)
            total = terms[0].to(torch.promote_types(out.dtype, torch.float32), copy=True)
            for term in terms[1:]:
                total += term
            flat = out.copy_(total.view_as(out)).view(-1).double()
            squares += float(torch.dot(flat, flat))
    return squares


_SUM_RANGES = register(
    Op(
        "sum_ranges",
        "sums of several tensors and their squares",
        (cpu_backend(_cpu_sum_ranges), reference_backend(_reference_sum_ranges)),
    )
)
