"""What `param.grad` is where a rank has only a part of it: a tensor of the parameter's shape with this rank's elements.

It has DTensor's words: `to_local()` are this rank's elements, `full_tensor()` all of them, gathered over the ranks. Functions that treat
elements apart (`mul_`, `clamp_`, `isfinite`) run on this rank's elements and send nothing. Reductions over all elements would need the
other ranks, and a rank may skip them; so they are answered from numbers that the ranks measured together at the end of the backward (the
sum of squares and the largest magnitude of every parameter), and what these do not say is refused by the function's name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_config.errors import ShardedAccessError
from ds_zero._torch import graph_task_id, without_torch_function
from ds_zero.runtime.forward_backward import tensors_in

__all__ = ["GradientNorms", "GradientShard", "ShardedGradient", "copy_into", "dropped", "set_by_hand"]

_FACES = {
    "shape", "dtype", "device", "layout", "ndim", "names", "itemsize", "nbytes", "size", "dim", "numel", "nelement", "stride", "element_size",
    "ndimension", "requires_grad", "requires_grad_", "grad", "grad_fn", "is_leaf", "retains_grad", "output_nr", "_version", "__len__",
    "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "is_meta", "is_cpu", "is_cuda", "is_mps", "is_xpu",
    "is_floating_point", "is_complex", "get_device", "_is_view", "__dir__", "untyped_storage", "storage_offset",
    "is_conj", "is_neg", "is_inference", "_base", "_is_zerotensor", "__hash__",
}  # fmt: skip
"""What depends on no value."""

_ITSELF = {"data", "detach", "detach_", "contiguous"}
_NORMS = {"norm", "vector_norm", "linalg_vector_norm", "linalg_norm", "frobenius_norm"}
_APART = {
    "abs", "absolute", "neg", "negative", "sign", "square", "sqrt", "rsqrt", "reciprocal", "pow", "exp", "log", "tanh", "sigmoid",
    "mul", "multiply", "div", "divide", "true_divide", "add", "sub", "subtract", "rsub", "clamp", "clamp_min", "clamp_max", "clip",
    "nan_to_num", "addcmul", "addcdiv", "lerp", "masked_fill", "maximum", "minimum", "clone", "isfinite", "isnan", "isinf",
    "logical_not", "logical_and", "logical_or", "eq", "ne", "lt", "le", "gt", "ge", "bitwise_not", "zero", "fill", "copy",
    "__deepcopy__", "zeros_like", "ones_like", "to", "float", "double", "half", "bfloat16", "invert",
}  # fmt: skip
"""What treats elements apart; in place, too."""

_FOREACH = {"mul", "div", "add", "sub", "clamp_min", "clamp_max", "zero", "neg", "abs", "copy"}
_OPERATORS = {"truediv": "div", "rmul": "mul", "radd": "add", "rsub": "rsub", "rtruediv": "reciprocal"}


@dataclass(frozen=True, slots=True)
class GradientNorms:
    """Numbers of one gradient that its ranks have measured together. fp64 tensors of one element, the same on every rank.

    Attributes:
        square: The sum of squares.
        peak: The largest magnitude; not looked at where `square` is not a number.
    """

    square: Tensor
    peak: Tensor

    def scaled(self, factor: Any) -> GradientNorms:
        """Return the norms of the gradient multiplied by `factor`, a number or a tensor of one element."""
        if isinstance(factor, Tensor):
            factor = factor.detach().to(self.square.device, torch.float64)
        return GradientNorms(self.square * factor * factor, self.peak * abs(factor))

    def norm(self, order: float) -> Tensor | None:
        """Return the norm of an order; None for an order that was not measured."""
        if order == math.inf:
            return torch.where(self.square.isnan(), self.square, self.peak)
        return self.square.sqrt() if order == 2.0 else None


class GradientShard(ABC):
    """Where the elements of one gradient are on this rank: the interface that `ShardedGradient` reads and writes.

    Attributes:
        spans: (first element, elements) of each piece, in the flattened gradient.
    """

    spans: tuple[tuple[int, int], ...]

    @abstractmethod
    def pieces(self) -> list[Tensor]:
        """Return this rank's elements, averaged: a writable 1-D view of each span. Raises where they are not summed yet."""

    @abstractmethod
    def norms(self) -> GradientNorms | None:
        """Return what was measured; None where a write has made it untrue."""

    @abstractmethod
    def write(self, update: Callable[[list[Tensor]], None], factor: Any = None) -> None:
        """Change the elements by `update(pieces)`.

        Args:
            factor: What `update` multiplies by, a number or a tensor of one element; None for any other update.
        """

    @abstractmethod
    def full(self) -> Tensor:
        """Gather all elements, flattened. Collective over the ranks that share the parameter."""

    def gather_pieces(self, pieces: Sequence[Tensor]) -> Tensor:
        """Gather other values in the place of this gradient's elements, flattened. Collective over the same ranks."""
        raise NotImplementedError(f"{type(self).__name__} gathers nothing else than its gradient")


class _Copy(GradientShard):
    """What a function made of a gradient: values in memory of their own."""

    def __init__(self, base: GradientShard, pieces: list[Tensor], norms: GradientNorms | None) -> None:
        self.base, self.spans, self._pieces, self._norms = base, base.spans, pieces, norms

    def pieces(self) -> list[Tensor]:
        return self._pieces

    def norms(self) -> GradientNorms | None:
        return self._norms

    def write(self, update: Callable[[list[Tensor]], None], factor: Any = None) -> None:
        update(self._pieces)
        self._norms = None if factor is None or self._norms is None else self._norms.scaled(factor)

    def full(self) -> Tensor:
        return self.gather_pieces(self._pieces)

    def gather_pieces(self, pieces: Sequence[Tensor]) -> Tensor:
        return self.base.gather_pieces(pieces)


def _name_of(func: Callable[..., Any]) -> str:
    """Return the name of a called function; of a property that is read, the property's."""
    name: str = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


class ShardedGradient(Tensor):
    """The gradient of one parameter, of which this rank has a part. Made by `GradAttributes` and by functions of others.

    Attributes:
        of: Names of the parameters.
        shard: Where this rank's elements are.
        accumulate: Called when autograd adds a tensor to the gradient, with a copy of that.
        answers: Results of reductions that are known, by name.
    """

    of: str
    shard: GradientShard
    accumulate: Callable[[ShardedGradient, Tensor], None] | None
    answers: dict[str, Tensor]

    @staticmethod
    def __new__(
        cls,
        like: Tensor,
        of: str,
        shard: GradientShard,
        accumulate: Callable[[ShardedGradient, Tensor], None] | None = None,
        dtype: torch.dtype | None = None,
    ) -> ShardedGradient:
        """Build a gradient of the shape and device of `like`. Allocates no memory on that."""
        built: ShardedGradient = Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=dtype or like.dtype, device=like.device
        )
        built.of, built.shard, built.accumulate, built.answers = of, shard, accumulate, {}
        return built

    def to_local(self) -> Tensor:
        """Return this rank's elements, averaged, 1-D, in the dtype that gradients are summed in; a view of them where they are contiguous.

        What is written into the view is what the step uses.
        """
        pieces = self.shard.pieces()
        if len(pieces) == 1:
            return pieces[0]
        with without_torch_function():
            empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return torch.cat(pieces) if pieces else empty

    def full_tensor(self) -> Tensor:
        """Gather the whole averaged gradient. Collective: an all-reduce of its size over the ranks that share the parameter."""
        return self.shard.full().view(self.shape).to(self.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = _name_of(func), kwargs or {}
        if name in _FACES:
            with without_torch_function():
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            answer = _answer(func, name, args, kwargs)
        if answer is NotImplemented:
            raise _refusal(name, (args, kwargs))
        return answer

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        in_place = func is torch.ops.aten.add_.Tensor
        if (in_place or func is torch.ops.aten.add.Tensor) and graph_task_id() != -1:
            grad, more = args[:2]
            if type(grad) is ShardedGradient and grad.accumulate is not None and type(more) is not ShardedGradient:
                copy = more.clone()  # autograd may have given the same tensor to other parameters
                grad.accumulate(grad, copy)
                return grad if in_place else copy
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise _refusal(_name_of(func), (args, kwargs))

    def __repr__(self) -> str:  # type: ignore[override]
        with without_torch_function():
            return f"ShardedGradient(of={self.of!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


# ---- answers


def _answer(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Answer a call of a torch function; NotImplemented if it cannot be answered on one rank."""
    if name.startswith("_foreach_") or name.startswith("_amp_foreach"):
        return _foreach(name, args, kwargs)
    first = args[0] if args else None
    if not isinstance(first, ShardedGradient):
        return _apart(func, name, args, kwargs)
    if name in _ITSELF:
        return first
    if name in ("copysign", "result_type"):
        return NotImplemented
    if name in first.answers and len(args) == 1 and not kwargs:
        return first.answers[name]
    if name in _NORMS:
        return _norm(first, name, args[1:], kwargs)
    return _apart(func, name, args, kwargs)


def _norm(grad: ShardedGradient, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    key = "ord" if "ord" in kwargs or name.startswith(("linalg", "vector")) else "p"
    order = args[0] if args else kwargs.get(key, 2.0)
    rest = [*args[1:], *(v for k, v in kwargs.items() if k not in (key, "keepdim", "dtype"))]
    matrix = name == "linalg_norm" and order not in (None, "fro")  # of a matrix: the spectral norm, or that of rows
    if any(value not in (None, False) for value in rest) or kwargs.get("keepdim") or (matrix and grad.dim() > 1):
        return NotImplemented
    order = 2.0 if order in (None, "fro") else order
    norms = grad.shard.norms()
    found = None if norms is None or isinstance(order, str) else norms.norm(float(order))
    return NotImplemented if found is None else found.to(kwargs.get("dtype") or grad.dtype)


def _stem(name: str) -> tuple[str, bool]:
    """Return the elementwise function that a name stands for, and whether it writes its first argument."""
    if name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__"):
        stem = name[3:-2]
        return _OPERATORS.get(stem, stem), True
    if name.startswith("__") and name.endswith("__") and name not in ("__deepcopy__", "__float__"):
        stem = name[2:-2]
        return _OPERATORS.get(stem, stem), False
    return (name[:-1], True) if name.endswith("_") and not name.endswith("__") else (name, False)


def _apart(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a function that treats elements apart on this rank's elements."""
    stem, in_place = _stem(name)
    gradients = [t for t in tensors_in((args, kwargs)) if isinstance(t, ShardedGradient)]
    base, first = gradients[0], args[0] if args else None
    if stem not in _APART or kwargs.get("out") is not None or (in_place and not isinstance(first, ShardedGradient)):
        return NotImplemented
    if name == "to" and not all(
        isinstance(v, torch.dtype | torch.device | str | bool) for v in (*args[1:], *kwargs.values())
    ):
        return NotImplemented
    if any(t.shard.spans != base.shard.spans or t.shape != base.shape for t in gradients):
        return NotImplemented
    if not all(map(_whole, tensors_in((args, kwargs)))):
        return NotImplemented
    call = func if name != "__deepcopy__" else Tensor.clone
    if name == "__deepcopy__":
        args = args[:1]
    if in_place and isinstance(first, ShardedGradient):
        factor = _factor(stem, args)
        first.shard.write(partial(_run_in_place, call, first, args, kwargs), factor)
        first.answers.clear()
        return first
    pieces = [call(*_local(args, i), **_local(kwargs, i)) for i in range(len(base.shard.spans))]
    return _derived(base, stem, args, pieces)


def _run_in_place(
    call: Callable[..., Any],
    first: ShardedGradient,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    pieces: list[Tensor],
) -> None:
    for i, piece in enumerate(pieces):
        if call in (Tensor.copy_,) and not isinstance(args[1], ShardedGradient):
            piece.copy_(_slice(args[1].expand(first.shape), *first.shard.spans[i]))
        else:
            call(piece, *_local(args[1:], i, first), **_local(kwargs, i, first))


def _whole(tensor: Tensor) -> bool:
    """Whether an operand has all its values here: a number as a tensor, a whole tensor, or a gradient."""
    return isinstance(tensor, ShardedGradient) or type(tensor) in (Tensor, torch.nn.Parameter)


def _local(value: Any, i: int, like: ShardedGradient | None = None) -> Any:
    """Return an argument with every tensor replaced by its elements of span i."""
    if isinstance(value, ShardedGradient):
        return value.shard.pieces()[i]
    if isinstance(value, tuple):
        grad = next((v for v in value if isinstance(v, ShardedGradient)), None) if like is None else like
        return tuple(_local(v, i, grad) for v in value)
    if isinstance(value, Mapping):
        return {k: _local(v, i, like) for k, v in value.items()}
    if isinstance(value, Tensor) and value.dim() > 0 and like is not None:
        return _slice(value.expand(like.shape), *like.shard.spans[i])
    return value


def _slice(tensor: Tensor, start: int, numel: int) -> Tensor:
    return tensor.reshape(-1)[start : start + numel]


def _factor(stem: str, args: tuple[Any, ...]) -> Any:
    """Return the number, or tensor of one element, by which an elementwise function multiplies; None for others."""
    if stem == "neg":
        return -1.0
    if stem == "zero":
        return 0.0
    value = args[1] if len(args) == 2 else None
    plain = isinstance(value, int | float) or (isinstance(value, Tensor) and type(value) is Tensor and value.dim() == 0)
    if not plain or stem not in ("mul", "multiply", "div", "divide", "true_divide"):
        return None
    if stem in ("mul", "multiply"):
        return value
    return 1.0 / value if isinstance(value, Tensor) or value else math.inf


def _derived(base: ShardedGradient, stem: str, args: tuple[Any, ...], pieces: list[Tensor]) -> ShardedGradient:
    norms = base.shard.norms()
    factor = (
        1.0 if stem in ("clone", "__deepcopy__", "abs", "absolute", "to", "float", "double") else _factor(stem, args)
    )
    if norms is not None and not isinstance(args[0], ShardedGradient) and stem in ("mul", "multiply"):
        factor = _factor(stem, (args[1], args[0]))
    kept = None if norms is None or factor is None else norms.scaled(factor)
    dtype = pieces[0].dtype if pieces else base.dtype
    if stem not in (
        "isfinite",
        "isnan",
        "isinf",
        "logical_not",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "to",
        "float",
        "double",
        "half",
    ):
        dtype = base.dtype
    built = ShardedGradient(base, base.of, _Copy(base.shard, pieces, kept), dtype=dtype)
    if norms is not None:
        built.answers = _answers(stem, base, args, norms)
    return built


def _answers(stem: str, base: ShardedGradient, args: tuple[Any, ...], norms: GradientNorms) -> dict[str, Tensor]:
    """Return the reductions of a function's result that are known from the gradient's norms."""
    if stem == "isfinite":
        return {"all": norms.square.isfinite()}
    if stem == "isnan":
        return {"any": norms.square.isnan()}
    if stem == "isinf":
        return {} if norms.square.isnan() else {"any": norms.square.isinf()}
    if stem in ("bitwise_not", "logical_not", "invert") and "all" in base.answers:
        return {"any": base.answers["all"].logical_not()}
    if stem in ("abs", "absolute") and (peak := norms.norm(math.inf)) is not None:
        peak = peak.to(base.dtype)
        return {"max": peak, "amax": peak}
    if stem == "square" or (stem == "pow" and args[1:] in ((2,), (2.0,))):
        square = norms.square.to(base.dtype)
        return {"sum": square, "mean": (norms.square / max(1, base.numel())).to(base.dtype)}
    return {}


# ---- lists of gradients


def _foreach(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return _unscale(*args)
    gradients = args[0]
    if name == "_foreach_norm":
        order = args[1] if len(args) > 1 else kwargs.get("ord", 2.0)
        answers = [_one_norm(grad, order, kwargs.get("dtype")) for grad in gradients]
        return NotImplemented if any(one is NotImplemented for one in answers) else answers
    stem, in_place = _stem(name.removeprefix("_foreach_"))
    if stem not in _FOREACH or not in_place or kwargs.keys() - {"alpha"}:
        return NotImplemented
    func = getattr(Tensor, f"{stem}_")
    for i, grad in enumerate(gradients):
        more = [value[i] if isinstance(value, list | tuple) else value for value in args[1:]]
        if isinstance(grad, ShardedGradient):
            answer = _apart(func, f"{stem}_", (grad, *more), kwargs)
            if answer is NotImplemented:
                return answer
        else:
            func(grad, *more, **kwargs)
    return None


def _one_norm(grad: Tensor, order: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(grad, ShardedGradient):
        return _norm(grad, "norm", (order,), {"dtype": dtype})
    return torch.linalg.vector_norm(grad, order, dtype=dtype)


def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, factor: Tensor) -> Any:
    """Multiply gradients by `factor`, and write 1 into `found_inf` if some element of them is not finite on any rank."""
    norms = [grad.shard.norms() for grad in gradients if isinstance(grad, ShardedGradient)]
    known = [one for one in norms if one is not None]
    if len(known) < len(norms):
        return NotImplemented
    plain = [grad for grad in gradients if not isinstance(grad, ShardedGradient)]
    if plain:
        torch._amp_foreach_non_finite_check_and_unscale_(plain, found_inf, factor)
    if known:
        broken = torch.stack([one.square for one in known]).isfinite().all().logical_not()
        found_inf.copy_(torch.maximum(found_inf, broken.to(found_inf.device, found_inf.dtype)))
    number = factor.reshape(())
    for grad in gradients:
        if isinstance(grad, ShardedGradient):
            _apart(Tensor.mul_, "mul_", (grad, number), {})
    return None


def copy_into(shard: GradientShard, value: Tensor, shape: torch.Size) -> bool:
    """Copy a tensor of shape `shape`, or another gradient of the same parameter, into a gradient; whether that is possible."""
    with without_torch_function(), torch.no_grad():
        if isinstance(value, ShardedGradient):
            if value.shard.spans != shard.spans:
                return False
            sources = value.shard.pieces()
        elif value.shape == shape and _whole(value) and value.layout is torch.strided:
            sources = [_slice(value, start, numel) for start, numel in shard.spans]
        else:
            return False
        shard.write(partial(_copy_all, sources))
    return True


def _copy_all(sources: Sequence[Tensor], pieces: list[Tensor]) -> None:
    for piece, source in zip(pieces, sources, strict=True):
        piece.copy_(source)


def _refusal(name: str, given: Any) -> ShardedAccessError:
    grad = next((t for t in tensors_in(given) if isinstance(t, ShardedGradient)), None)
    with without_torch_function():
        whose = "a parameter" if grad is None else f"{grad.of} {tuple(grad.shape)}"
    return ShardedAccessError(
        f"{name!r} was called with the gradient of {whose}, of which each rank has a part: norms are known until something but a factor is "
        "written, functions of single elements work on this rank's part, and this one is neither",
        code="sharded-gradient",
        fix="Use param.grad.full_tensor() on all ranks (a collective) for whole values, and param.grad.to_local() for this rank's elements; "
        "optimizer.measure_gradients() on all ranks measures norms again. param.grad.copy_(tensor) writes.",
    )


def dropped(of: str) -> ShardedAccessError:
    """Return the error of a gradient that is used after it was dropped."""
    return ShardedAccessError(
        f"the gradient of {of} was used after it was dropped (zero_grad, param.grad = None)",
        code="sharded-gradient-dropped",
        fix="Keep a copy of it: param.grad.clone() has this rank's elements, param.grad.full_tensor() all of them.",
    )


def set_by_hand(names: Sequence[str], many: int) -> ShardedAccessError:
    """Return the error of gradients, `many` in all, of which some were set to what cannot be copied into the sums."""
    return ShardedAccessError(
        f"param.grad of {', '.join(names[:5])} was set after a backward ({len(names)} of {many} gradients) to what cannot be copied into the "
        "sum over the ranks: it waits for that sum, or the tensor has another shape or layout, or it is one of the optimizer's own groups",
        code="sharded-gradient-set",
        fix="Set param.grad of the model's parameters to None or to a whole tensor of their shape, after a backward outside of no_sync.",
    )
