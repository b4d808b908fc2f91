"""A parameter whose storage is with other ranks: it keeps its face and refuses to be used.

Words: a parameter is *released* while its unit's full buffer has no storage. Reading it then would crash the process in a
CPU kernel, so on release its class becomes `Released`, whose `__torch_function__` answers questions about shape, dtype,
device, gradient and hooks, and hands everything else to the unit's keeper: inside a forward of the model the keeper
gathers the unit and the call goes on; anywhere else it raises `ShardedAccessError` with the parameter's name. On gather
the parameter's own class returns. Identity never changes, and nothing in torch is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from ds_config.errors import ShardedAccessError
from ds_zero._torch import without_torch_function

__all__ = ["Keeper", "Released", "keep", "keeper_of", "release", "restore", "unkeep"]

_KEEPER = "_ds_zero_keeper"
_CLASS = "_ds_zero_class"


class Keeper(Protocol):
    """Who gathers a released parameter on demand, or says why not."""

    def touched(self, param: Parameter, what: str) -> bool:
        """`param` is about to be used by `what`: gather it and return True, or return False to have the use refused."""

    def used(self, param: Parameter) -> None:
        """The use that `touched` was asked about is over."""

    def name_of(self, param: Parameter) -> str:
        """The parameter's qualified name."""


@runtime_checkable
class Shows(Protocol):
    """A keeper that answers `detach`, and so `state_dict`, without gathering."""

    def shown(self, param: Parameter) -> Tensor:
        """`param` without its graph."""


@runtime_checkable
class Copies(Protocol):
    """A keeper that makes another parameter of which this rank holds the same part."""

    def copied(self, param: Parameter) -> Parameter:
        """A copy of `param`, released as it is."""


_METHODS = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size, Tensor.ndimension,
    Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.requires_grad_, Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook, Tensor.__len__, torch.numel, torch.is_floating_point, torch.is_complex,
}  # fmt: skip
_PROPERTIES = {
    "shape", "dtype", "device", "grad", "requires_grad", "is_leaf", "layout", "grad_fn", "ndim", "names", "itemsize",
    "nbytes", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mps", "is_xpu", "name",
    "output_nr", "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "is_sparse_csr", "is_mkldnn", "retains_grad",
}  # fmt: skip


class Released(Parameter):
    """A parameter of which this rank holds only a shard. Made by `release`, never constructed."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        if func in _METHODS or name in _PROPERTIES:
            with without_torch_function():
                return func(*args, **kwargs)
        if func is Tensor.detach and isinstance(shows := getattr(args[0], _KEEPER), Shows):
            return shows.shown(args[0])
        touched = [p for p in _find(args) + _find(kwargs.values()) if type(p) is Released]
        for param in touched:
            keeper: Keeper = getattr(param, _KEEPER)
            if type(param) is Released and not keeper.touched(param, name):
                raise ShardedAccessError(
                    f"parameter {keeper.name_of(param)} {tuple(param.shape)} was used by {name!r} while this rank holds only "
                    "its shard of it",
                    code="sharded-access",
                    fix="Use it inside the model's forward, or open `with ds_zero.GatheredParameters([param]):` around the use.",
                )
        try:
            return func(*args, **kwargs)
        finally:
            for param in touched:
                keeper_of(param).used(param)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parameter(name={getattr(self, _KEEPER).name_of(self)!r}, shape={tuple(self.shape)}, dtype={self.dtype}, released)"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        if id(self) in memo:
            known: Parameter = memo[id(self)]
            return known
        if isinstance(keeper := keeper_of(self), Copies):
            memo[id(self)] = made = keeper.copied(self)
            return made
        raise ShardedAccessError(
            f"parameter {getattr(self, _KEEPER).name_of(self)} cannot be copied while this rank holds only its shard of it",
            code="sharded-access",
            fix="Copy the model before `shard`, or inside `with ds_zero.GatheredParameters(model.parameters()):`.",
        )


def _find(values: Any) -> list[Any]:
    # Arguments nest: torch.cat([p, q]), linear(x, weight=p).
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found.extend(_find(value))
        elif isinstance(value, dict):
            found.extend(_find(value.values()))
    return found


def keep(param: Tensor, keeper: Keeper) -> None:
    """Say once who answers for `param`; needed before `release`."""
    setattr(param, _KEEPER, keeper)


def keeper_of(param: Tensor) -> Any:
    """Who answers for `param`; None for a parameter that nobody keeps."""
    return param.__dict__.get(_KEEPER)


def unkeep(param: Parameter) -> None:
    """Forget the keeper; the parameter must not be released."""
    param.__dict__.pop(_KEEPER, None)
    param.__dict__.pop(_CLASS, None)


def release(param: Tensor) -> None:
    """From now on every use of `param`'s values asks its keeper. O(1), no allocation."""
    if type(param) is not Released:
        setattr(param, _CLASS, param.__class__)
        param.__class__ = Released


def restore(param: Tensor) -> None:
    """`param` may be used freely again."""
    param.__class__ = param.__dict__[_CLASS]
