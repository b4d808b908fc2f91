"""Moves between the ranks of layers and sequences that are cut, as operations of a graph: `ds_comm.differentiable` for a compiler.

Each is one collective with its shapes and its gradient, which is a move again. They name their group, as torch does: what is captured holds
words and numbers, no objects. While a forward is captured, functions of `ds_comm.differentiable` stand for these (`substitute`); outside of
graphs they are what they always are, and both give the same bits.

    summed     own -> common       the gradient as it is
    gathered   own -> common       own part of the gradient; `common` false: own -> own use, gradients summed and cut
    scattered  own -> own          the gradients, gathered
    part       common -> own       the gradients, gathered
    exchanged  own -> own          the reverse exchange

`copy` (common -> own use) moves nothing forward, so it is no operation: its gradient is `summed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_comm import Group, differentiable
from ds_engine.compiling._torch import group_named, substitute

__all__ = ["MOVES", "exchanged", "substitute_moves"]

_NAME = "ds_moves_1"
"""As in `ops.py`: counts how the operations are lowered."""


# ---- what they do


def _summed(x: Tensor, group: str) -> Tensor:
    result: Tensor = differentiable.reduce(x.detach(), group_named(group))
    return result


def _gathered(x: Tensor, group: str, dim: int, sizes: Sequence[int], common: bool) -> Tensor:
    del common
    result: Tensor = differentiable.gather(x.detach(), group_named(group), dim, list(sizes))
    return result


def _scattered(x: Tensor, group: str, dim: int, sizes: Sequence[int]) -> Tensor:
    result: Tensor = differentiable.reduce_scatter(x.detach(), group_named(group), dim, list(sizes))
    return result


def _part(x: Tensor, group: str, dim: int, sizes: Sequence[int]) -> Tensor:
    return differentiable.split(x.detach(), group_named(group), dim, list(sizes))


def _exchanged(x: Tensor, group: str, cut: int, put: int, scattered: Sequence[int], gathered: Sequence[int]) -> Tensor:
    result: Tensor = differentiable.seq_all_to_all(
        x.detach(),
        group_named(group),
        scatter_dim=cut,
        gather_dim=put,
        scatter_sizes=list(scattered),
        gather_sizes=list(gathered),
    )
    return result


# ---- what a compiler knows of them


def _like(x: Tensor, places: dict[int, Any]) -> Tensor:
    return x.new_empty([places.get(dim, size) for dim, size in enumerate(x.shape)])


def _fake_summed(x: Tensor, group: str) -> Tensor:
    del group
    return _like(x, {})


def _fake_gathered(x: Tensor, group: str, dim: int, sizes: Sequence[int], common: bool) -> Tensor:
    del group, common
    return _like(x, {dim: sum(sizes)})


def _fake_part(x: Tensor, group: str, dim: int, sizes: Sequence[int]) -> Tensor:
    return _like(x, {dim: sizes[group_named(group).rank]})


def _fake_exchanged(
    x: Tensor, group: str, cut: int, put: int, scattered: Sequence[int], gathered: Sequence[int]
) -> Tensor:
    return _like(x, {cut: scattered[group_named(group).rank], put: sum(gathered)})


# ---- their gradients


def _of_summed(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    del ctx
    return grad, None


def _of_gathered(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    group, dim, sizes, common = ctx.move
    back = MOVES.part if common else MOVES.scattered
    return back(grad, group, dim, sizes), None, None, None, None


def _of_scattered(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    group, dim, sizes = ctx.move
    return MOVES.gathered(grad, group, dim, sizes, False), None, None, None


def _of_part(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    group, dim, sizes = ctx.move
    return MOVES.gathered(grad, group, dim, sizes, True), None, None, None


def _of_exchanged(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    group, cut, put, scattered, gathered = ctx.move
    return MOVES.exchanged(grad, group, put, cut, gathered, scattered), None, None, None, None, None


def _note(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.move = inputs[1:]


_CUT = "(Tensor x, str group, int dim, SymInt[] sizes"
_DEFINED: dict[str, tuple[str, Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "summed": ("(Tensor x, str group) -> Tensor", _summed, _fake_summed, _of_summed),
    "gathered": (f"{_CUT}, bool common) -> Tensor", _gathered, _fake_gathered, _of_gathered),
    "scattered": (f"{_CUT}) -> Tensor", _scattered, _fake_part, _of_scattered),
    "part": (f"{_CUT}) -> Tensor", _part, _fake_part, _of_part),
    "exchanged": (
        "(Tensor x, str group, int cut, int put, SymInt[] scattered, SymInt[] gathered) -> Tensor",
        _exchanged,
        _fake_exchanged,
        _of_exchanged,
    ),
}


def _define() -> torch.library.Library:
    library = torch.library.Library(_NAME, "DEF")
    for name, (schema, run, fake, gradient) in _DEFINED.items():
        library.define(name + schema)
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_NAME}::{name}", fake, lib=library)
        torch.library.register_autograd(f"{_NAME}::{name}", gradient, setup_context=_note, lib=library)
    return library


_LIBRARY = _define()
MOVES = getattr(torch.ops, _NAME)
"""Where the operations are found by name."""


# ---- what stands for functions of ds_comm.differentiable while a forward is captured: only what a capture can follow


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return MOVES.summed(grads[0], ctx.group), None


class _Here:
    """A result that is there: what is started in a graph is waited for where the compiler needs it."""

    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        return self.result

    def is_completed(self) -> bool:
        return True


def _result(value: Tensor, async_op: bool) -> Any:
    return _Here(value) if async_op else value


def _sizes(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None) -> list[int]:
    return [x.shape[dim]] * len(group.ranks) if sizes is None else list(sizes)


def _parts(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None) -> list[int]:
    return [x.shape[dim] // len(group.ranks)] * len(group.ranks) if sizes is None else list(sizes)


def exchanged(x: Tensor, group: Group, cut: int, put: int, scattered: Sequence[int], gathered: Sequence[int]) -> Tensor:
    """Cut dim `cut` over the ranks and put dim `put` together; sizes by rank."""
    result: Tensor = MOVES.exchanged(x, group.order.key, cut, put, list(scattered), list(gathered))  # type: ignore[union-attr]
    return result


def _copy(x: Tensor, group: Any, *, unit: str = "") -> Tensor:
    if len(group.ranks) == 1:
        return x
    result: Tensor = _Copied.apply(x, group.order.key)
    return result


def _reduce(x: Tensor, group: Any, *, async_op: bool = False, unit: str = "") -> Any:
    result = x if len(group.ranks) == 1 else MOVES.summed(x, group.order.key)
    return _result(result, async_op)


def _gather(
    x: Tensor, group: Any, dim: int, sizes: Sequence[int] | None = None, *, async_op: bool = False, unit: str = ""
) -> Any:
    dim = dim % x.dim()
    result = x if len(group.ranks) == 1 else MOVES.gathered(x, group.order.key, dim, _sizes(x, group, dim, sizes), True)
    return _result(result, async_op)


def _all_gather(
    x: Tensor, group: Any, dim: int = 0, sizes: Sequence[int] | None = None, *, async_op: bool = False, unit: str = ""
) -> Any:
    dim = dim % x.dim()
    result = (
        x if len(group.ranks) == 1 else MOVES.gathered(x, group.order.key, dim, _sizes(x, group, dim, sizes), False)
    )
    return _result(result, async_op)


def _reduce_scatter(
    x: Tensor, group: Any, dim: int = 0, sizes: Sequence[int] | None = None, *, async_op: bool = False, unit: str = ""
) -> Any:
    dim = dim % x.dim()
    result = x if len(group.ranks) == 1 else MOVES.scattered(x, group.order.key, dim, _parts(x, group, dim, sizes))
    return _result(result, async_op)


def _split(x: Tensor, group: Any, dim: int, sizes: Sequence[int] | None = None, *, unit: str = "") -> Tensor:
    dim = dim % x.dim()
    if len(group.ranks) == 1:
        return x
    result: Tensor = MOVES.part(x, group.order.key, dim, _parts(x, group, dim, sizes))
    return result


def _exchange(
    x: Tensor,
    group: Any,
    *,
    scatter_dim: int,
    gather_dim: int,
    scatter_sizes: Sequence[int] | None = None,
    gather_sizes: Sequence[int] | None = None,
    async_op: bool = False,
    unit: str = "",
) -> Any:
    if len(group.ranks) == 1:
        return _result(x, async_op)
    cut, put = scatter_dim % x.dim(), gather_dim % x.dim()
    sent, received = _parts(x, group, cut, scatter_sizes), _sizes(x, group, put, gather_sizes)
    return _result(MOVES.exchanged(x, group.order.key, cut, put, sent, received), async_op)


def substitute_moves() -> None:
    """Let captures of this process include collectives, instead of breaking there."""
    for function, traced in (
        (differentiable.copy, _copy),
        (differentiable.reduce, _reduce),
        (differentiable.gather, _gather),
        (differentiable.all_gather, _all_gather),
        (differentiable.reduce_scatter, _reduce_scatter),
        (differentiable.split, _split),
        (differentiable.seq_all_to_all, _exchange),
    ):
        substitute(function, traced)
