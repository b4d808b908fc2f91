"""The layers of a model that is cut: what each computes with its part of the weights.

A module keeps its identity, its hooks and the names of its parameters; its class becomes one of these in front of its own.
A parameter in several parts (a fused QKV) becomes one parameter a part, `weight_0`, `weight_1`, ...: each is one box of
the logical tensor, which is what sharding and checkpoints understand. `weight` is then put together when it is asked for.

    column   y_r = f(x) W_r^T + b_r        f: as it is forward, gradients summed backward
    row      y = g(x_r W_r^T) + b          g: summed forward, as it is backward
    (Shoeybi et al., arXiv:1909.08053, section 3)
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_comm import Group
from ds_comm.differentiable import copy, copy_with_late_sum, gather, reduce, split
from ds_config.errors import UnsupportedError
from ds_parallel._torch import order_of, set_order, version_of
from ds_parallel.tensor.dim_shards import DimShards
from ds_parallel.tensor.half_batches import Turns
from ds_parallel.tensor.half_plan import LATE_GRADIENT, wait_number
from ds_parallel.tensor.late_gradients import late_linear
from ds_parallel.tensor.layer_rules import ShardKind
from ds_parallel.tensor.partial_gradients import PartialGradients

__all__ = ["CopyToTensorRegion", "LayerShard", "cut_class", "kind_of", "part_names"]


class CopyToTensorRegion:
    """`f` of an input that several column layers read: one sum of gradients for all of them.

    The layers of one attention or one MLP share it. Whichever reads an input first makes the copy; the others find it, until the row layer behind
    them is called (`end`).

    Args:
        is_late: The sum travels while backward computes what needs it not.
        turns: Of the layer's halves; None where it does not run in halves.
    Attributes:
        late_number: For `late_linear`: the gradient of a weight is computed when the sum is under way.
        has_end: A row layer is among the layers that share it; without one nothing is remembered.
    """

    def __init__(self, group: Group, is_late: bool = False, turns: Turns | None = None) -> None:
        self.group, self.is_late, self._turns = group, is_late, turns
        self.late_number, self.has_end = LATE_GRADIENT, False
        self._last: tuple[weakref.ref[Tensor], Tensor, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_region, (
            self.group,
            self.is_late,
            self._turns,
            self.has_end,
        )  # nobody has read an input of the copied model

    def __call__(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if torch.compiler.is_compiling():  # the compiler's passes see what reads one input
            return copy(x, self.group)
        if self._last is not None:
            source, copied, version = self._last
            if source() is x and version == version_of(x):
                return copied
        result = self._late(x) if self.is_late else copy(x, self.group)
        # The tensor itself: torch may drop its Python object at once, though the graph goes on with it.
        self._last = (weakref.ref(x), result, version_of(x)) if self.has_end else None
        return result

    def end(self) -> None:
        """Forget the last copy, which keeps its input and its graph."""
        self._last = None

    def _late(self, x: Tensor) -> Tensor:
        """Copy with a sum of its own node, and one that waits for it, which backward takes after all that is ready."""
        result = copy_with_late_sum(x, self.group)
        start = result.grad_fn
        wait = None if start is None else start.next_functions[0][0]
        lane = None if self._turns is None else self._turns.lane
        if lane is None:  # in the order start, gradients of weights, wait, before whatever is older
            self.late_number = order_of(wait)
            set_order(wait, self.late_number - 1)
        else:
            self.late_number = LATE_GRADIENT
            set_order(wait, wait_number(lane.copies, lane.half))
            lane.copies += 1
        return result


def _make_region(group: Group, is_late: bool, turns: Turns | None, has_end: bool) -> CopyToTensorRegion:
    region = CopyToTensorRegion(group, is_late, turns)
    region.has_end = has_end
    return region


@dataclass(frozen=True, slots=True, eq=False)
class LayerShard:
    """What a module that is cut knows of itself.

    Attributes:
        group: The tensor-parallel ranks.
        cut: Of its weight (of `gate_up_proj` for packed experts).
        fan: Shared by the layers that read one input.
        partials: Sums gradients of whole tensors between a column layer and this one; shared by all layers of a model.
        turns: Of the layer that this one is in, where that runs in halves; shared by all layers of a model.
        transposed: The weight is [in, out].
        gather_output, split_input: See `LayerRule`.
    """

    group: Group
    cut: DimShards
    fan: CopyToTensorRegion
    partials: PartialGradients
    transposed: bool = False
    gather_output: bool = False
    split_input: bool = False
    turns: Turns | None = None

    def widths(self, part: int) -> list[int]:
        """Return how many elements of a part each rank has."""
        return [stop - start for start, stop in self.cut.parts[part]]


def part_names(name: str, cut: DimShards) -> list[str]:
    """Names of the parameters that take the place of `name`: itself, or one a part."""
    return [name] if len(cut.parts) == 1 else [f"{name}_{index}" for index in range(len(cut.parts))]


def cut_class(
    plain: type[nn.Module], kind: ShardKind, names: dict[str, list[str]], dims: dict[str, int]
) -> type[nn.Module]:
    """Build the tensor-parallel class of modules of class `plain`.

    Args:
        names: For every sharded parameter, the names that replace its name.
        dims: The dim along which each of these parameters is concatenated.
    Raises:
        UnsupportedError: `plain` has a different forward, which cannot run on a shard ("tensor-layer").
    """
    space: dict[str, Any] = {"__module__": plain.__module__, "_ds_plain": plain}
    for name, parts in names.items():
        if len(parts) > 1:
            space[name] = property(_Joined(name, tuple(parts), dims[name]))
    front = _FRONTS[kind]
    if kind is ShardKind.EXPERTS or plain in (nn.Linear, nn.Embedding) or plain.__name__ in _SAME_AS_LINEAR:
        bases: tuple[type, ...] = (front, plain)
    elif issubclass(plain, nn.Embedding) and _calls_super(plain):
        bases = (plain, _EMBEDDINGS[kind])  # its own forward calls the next one, which is ours
    else:
        raise UnsupportedError(
            f"{plain.__module__}.{plain.__name__} has a forward of its own, which cannot be computed with a part of its weight",
            code="tensor-layer",
            fix="Apply tensor parallelism before what replaces layers (adapters, quantization), or skip this layer.",
        )
    return type(f"{kind.value.capitalize()}{plain.__name__}", bases, space)


def kind_of(module: nn.Module) -> ShardKind | None:
    """Return how a layer is sharded; None where the layer is not sharded."""
    return next((kind for kind, front in _FRONTS.items() if isinstance(module, front)), None)


class _Joined:
    """Reads a parameter that is in several parts: a new tensor every time, except inside a forward that holds it."""

    def __init__(self, name: str, parts: tuple[str, ...], dim: int) -> None:
        self.name, self.parts, self.dim = name, parts, dim

    def __call__(self, module: nn.Module) -> Tensor | None:
        joined: Tensor | None = vars(module).get(f"_held_{self.name}")
        if joined is not None:
            return joined
        parts = [getattr(module, part) for part in self.parts]
        return None if parts[0] is None else torch.cat(parts, self.dim)


class _Front:
    _ds_part: LayerShard


class _Column(_Front):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  nn.Linear's name
        part, outs = self._ds_part, []
        x = part.fan(input)
        several = len(part.cut.parts) > 1
        for index in range(len(part.cut.parts)):
            end = f"_{index}" if several else ""
            weight, bias = getattr(self, f"weight{end}"), getattr(self, f"bias{end}", None)
            weight = weight.t() if part.transposed else weight
            if part.fan.is_late and not torch.compiler.is_compiling():
                out = late_linear(x, weight, bias, part.fan.late_number)
            else:
                out = functional.linear(x, weight, bias)
            outs.append(gather(out, part.group, -1, part.widths(index)) if part.gather_output else out)
        return torch.cat(outs, -1) if several else outs[0]


class _Row(_Front):
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  nn.Linear's name
        part, x = self._ds_part, input
        part.fan.end()
        if part.split_input:
            x = split(x, part.group, -1, part.widths(0))
        elif not torch.compiler.is_compiling():
            part.partials.close_region(x)
        product = functional.linear(x, self.weight.t() if part.transposed else self.weight)
        turns = part.turns
        if turns is None or turns.lane is None:
            out: Tensor = reduce(product, part.group)
        else:
            out = turns.give(reduce(product, part.group, async_op=True))
        return out if self.bias is None else out + self.bias


class _Vocabulary(_Front):
    weight: Tensor
    padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  nn.Embedding's name
        part, ids = self._ds_part, input
        start, stop = part.cut.parts[0][part.group.rank]
        local = ids - start
        outside = (local < 0) | (local >= stop - start)
        rows = functional.embedding(local.masked_fill(outside, 0), self.weight, self.padding_idx)
        return reduce(rows.masked_fill(outside.unsqueeze(-1), 0), part.group)


class _Features(_Front):
    weight: Tensor
    padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  nn.Embedding's name
        part = self._ds_part
        features = functional.embedding(input, self.weight, self.padding_idx)
        return gather(features, part.group, -1, part.widths(0)) if part.gather_output else features


class _Experts(_Front):
    """Every float input is read in part by each rank: hidden states, and the weights of the chosen experts."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        part = self._ds_part

        def fanned(value: Any) -> Any:
            is_read = isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad
            return copy(value, part.group) if is_read else value

        self.__dict__["_held_gate_up_proj"] = self.gate_up_proj  # type: ignore[attr-defined]
        try:
            out = super().forward(*map(fanned, args), **{key: fanned(value) for key, value in kwargs.items()})  # type: ignore[misc]
        finally:
            del self.__dict__["_held_gate_up_proj"]
        if not torch.compiler.is_compiling():
            part.partials.close_region(out)
        return reduce(out, part.group)


class _VocabularyEmbedding(_Vocabulary, nn.Embedding):
    pass


class _FeaturesEmbedding(_Features, nn.Embedding):
    pass


_FRONTS: dict[ShardKind, type] = {
    ShardKind.COLUMN: _Column,
    ShardKind.ROW: _Row,
    ShardKind.VOCABULARY: _Vocabulary,
    ShardKind.FEATURES: _Features,
    ShardKind.EXPERTS: _Experts,
}
_EMBEDDINGS: dict[ShardKind, type] = {
    ShardKind.VOCABULARY: _VocabularyEmbedding,
    ShardKind.FEATURES: _FeaturesEmbedding,
}
_SAME_AS_LINEAR = ("Conv1D", "FalconLinear", "NonDynamicallyQuantizableLinear")


def _calls_super(kind: type[nn.Module]) -> bool:
    code: CodeType | None = getattr(kind.forward, "__code__", None)
    return kind.forward is nn.Embedding.forward or (code is not None and "__class__" in code.co_freevars)
