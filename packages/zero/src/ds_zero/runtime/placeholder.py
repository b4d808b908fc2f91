"""What a parameter whose storage is with other ranks gives those who only want to look: an empty tensor that says so.

`detach`, `data`, `clone`, `to` and so `state_dict`, `torch.save` and every library around them ask a parameter for a tensor before they
know whether they will use its values. They get a *placeholder*: no elements, the parameter's dtype and device, its public attributes.
It may be copied, moved, kept and written to files, where it is an empty tensor like any other. What would compute with it is refused,
with the name of the parameter that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from ds_config.errors import ShardedAccessError
from ds_zero._torch import without_torch_function

__all__ = ["Placeholder", "attributes_of", "called", "faces", "placeholder_of", "reads", "refusal"]

_READS = {
    Tensor.detach, torch.detach, Tensor.clone, torch.clone, Tensor.cpu, Tensor.cuda, Tensor.to, Tensor.contiguous, Tensor.pin_memory,
    Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.type, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage_offset,
}  # fmt: skip
_FACES = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size, Tensor.ndimension, Tensor.is_contiguous,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.requires_grad_, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook,
    Tensor.__len__, Tensor._is_view, torch.numel, torch.is_floating_point, torch.is_complex, Tensor.is_shared, Tensor.is_pinned, Tensor.get_device,
    torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
    Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor,
}  # fmt: skip
_PROPERTIES = {
    "shape", "dtype", "device", "grad", "requires_grad", "is_leaf", "layout", "grad_fn", "ndim", "names", "itemsize",
    "nbytes", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mps", "is_xpu", "name",
    "output_nr", "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "is_sparse_csr", "is_mkldnn", "retains_grad",
}  # fmt: skip


def called(func: Callable[..., Any]) -> str:
    """The name of what was called; of a property, the property's."""
    name: str = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", name) if _is_property(name) else name


def _is_property(name: str) -> bool:
    return name in ("__get__", "__set__", "__delete__")


def faces(func: Callable[..., Any]) -> bool:
    """Whether `func` asks a tensor for something other than its values."""
    return func in _FACES or called(func) in _PROPERTIES


def reads(func: Callable[..., Any]) -> bool:
    """Whether `func` gives another tensor with the same values, or says where they are."""
    return func in _READS or (getattr(func, "__name__", "") == "__get__" and called(func) == "data")


def refusal(what: str, name: str, shape: Sequence[int]) -> ShardedAccessError:
    """Somebody wants values that this rank does not have."""
    return ShardedAccessError(
        f"parameter {name} {tuple(shape)} was used by {what!r} while this rank holds only its shard of it",
        code="sharded-access",
        fix="Use it inside the model's forward, or open `with ds_zero.GatheredParameters([param]):` around the use.",
    )


class Placeholder(Tensor):
    """See the module's docstring. Made by `placeholder_of`.

    Attributes:
        of: Name and shape of the parameter.
    """

    of: tuple[str, tuple[int, ...]]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not faces(func) and not reads(func):
            found = [arg for arg in (*args, *kwargs.values(), *_inside(args)) if isinstance(arg, Placeholder)]
            raise refusal(called(func), *(found[0].of if found else ("", ())))
        with without_torch_function():
            made = func(*args, **kwargs)
            of_it = reads(func) and isinstance(made, Tensor) and isinstance(args[0], Placeholder)
            return _dressed(made, args[0]) if of_it and made is not args[0] else made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placeholder(name={self.of[0]!r}, shape={self.of[1]}, dtype={self.dtype})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        plain = Parameter(empty, self.requires_grad) if getattr(self, "_is_param", False) else empty
        return plain.__reduce_ex__(protocol)


def _inside(values: tuple[Any, ...]) -> list[Any]:
    return [item for value in values if isinstance(value, list | tuple) for item in value]


def placeholder_of(param: Tensor, name: str) -> Placeholder:
    """What stands for the values of `param`. O(1)."""
    with without_torch_function():
        made = torch.empty(0, dtype=param.dtype, device=param.device).as_subclass(Placeholder)
        made.of = (name, tuple(param.shape))
    made.__dict__.update(attributes_of(param))
    return made


def _dressed(made: Tensor, like: Placeholder) -> Placeholder:
    found = made.as_subclass(Placeholder)
    found.__dict__.update(attributes_of(like))
    return found


def attributes_of(param: Tensor) -> dict[str, Any]:
    """What programs have noted on it; names with an underscore are somebody's own."""
    return {key: value for key, value in param.__dict__.items() if not key.startswith("_")}
