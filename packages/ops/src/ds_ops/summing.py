"""The sum of several tensors, with the squares of the result from the same pass: the local half of a reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import ds_ops._call as _call
from ds_config.errors import KernelError
from ds_ops.registry import Op, choose, cpu_backend, reference_backend, register

__all__ = ["sum_sources"]


def sum_sources(out: Tensor, sources: Sequence[Tensor]) -> float:
    """out = sources[0] + sources[1] + ..., in that order, in fp32 or wider, rounded once; returns the sum of out^2 (fp64).

    Args:
        out: [n], contiguous; fp32, bf16, fp16 (others through torch).
        sources: at least one, each [n] like `out`: `out` itself, or memory apart from it.
    Cost: one read of each source, one write of `out`; no read for the squares. Thakur et al. 2005, section 4.3.
    """
    if not sources:
        raise KernelError("sum_sources: no sources.", code="kernel-argument", fix="Pass at least one tensor.")
    return choose(_SUM_SOURCES, out.device.type, out.dtype).backend.run(out, sources)


def _check(out: Tensor, sources: Sequence[Tensor]) -> None:
    _call.require("out", out, dtypes=(out.dtype,))
    for number, source in enumerate(sources):
        _call.require(f"sources[{number}]", source, dtypes=(out.dtype,), numel=out.numel(), device=out.device)
        if _call.address(source) != _call.address(out):
            _call.require_disjoint(out=out, **{f"sources[{number}]": source})


def _cpu_sum_sources(out: Tensor, sources: Sequence[Tensor]) -> float:
    native = _call.native()
    _check(out, sources)
    partials = torch.empty(-(-out.numel() // native.norm_block), dtype=torch.float64)
    addresses = [_call.address(source) for source in sources]
    status, squares = native.sum_sources(
        _call.address(out),
        addresses,
        _call.DTYPES[out.dtype],
        out.numel(),
        _call.address(partials),
        torch.get_num_threads(),
    )
    _call.finish("sum_sources", status)
    _call.mark_written([out])
    return float(squares)


def _reference_sum_sources(out: Tensor, sources: Sequence[Tensor]) -> float:
    _check(out, sources)
    with torch.no_grad():
        total = sources[0].to(torch.promote_types(out.dtype, torch.float32), copy=True)
        for source in sources[1:]:
            total += source
        flat = out.copy_(total).view(-1).double()
        return float(torch.dot(flat, flat))


_SUM_SOURCES = register(
    Op(
        "sum_sources",
        "sum of several tensors and its squares",
        (cpu_backend(_cpu_sum_sources), reference_backend(_reference_sum_sources)),
    )
)
