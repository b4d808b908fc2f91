"""What a parameter answers whose values are with other ranks.

Words: a parameter is *released* while its buffer has no storage. Reading it then would crash the process in a CPU kernel, so on release
its class becomes `ShardedParameter`, whose `__torch_function__` answers questions about shape, dtype, device, gradient and hooks, and hands
everything else to its *keeper*. The keeper of a unit's parameter gathers the unit inside a forward of the model, and between that and its backward
for what records a graph: the loss. Anywhere else what only looks at it gets a placeholder, and what computes is refused with
`ShardedAccessError`. On gather the parameter's own class returns.
Identity never changes, and nothing in torch is replaced. A copy is cut as the parameter is, and stands alone.

`detach`, `data`, `clone`, `to` and so `state_dict`, `torch.save` and every library around them ask a parameter for a tensor before they
know whether they will use its values. They get a *placeholder*: no elements, the parameter's dtype and device, its public attributes.
It may be copied, moved, kept and written to files, where it is an empty tensor like any other. What would compute with it is refused,
with the name of the parameter that it stands for.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from ds_config.errors import ShardedAccessError
from ds_zero._torch import skip_frame, without_torch_function
from ds_zero.runtime.forward_backward import tensors_in

__all__ = [
    "AccessHandler",
    "Placeholder",
    "ShardedParameter",
    "guard",
    "keep",
    "keeper_of",
    "placeholder_of",
    "release",
    "restore",
    "unguard",
    "unkeep",
]

_KEEPER = "_ds_zero_keeper"
_CLASS = "_ds_zero_class"


class AccessHandler(ABC):
    """Who gathers a released parameter on demand, or says why not."""

    @abstractmethod
    def name_of(self, param: Parameter) -> str:
        """Return the parameter's qualified name."""

    @abstractmethod
    def on_access(self, param: Parameter, what: str) -> bool:
        """Gather `param` before its use by `what` and return True, or return False to have the use refused."""

    def arrive(self, param: Parameter) -> bool:
        """Wait for values of `param` that are on their way; return whether it is an ordinary parameter then."""
        del param
        return False

    def used(self, param: Parameter) -> None:  # noqa: B027
        """End the use of `param` that `touched` allowed."""

    def materialize(self, param: Parameter, what: str) -> Tensor | None:
        """Return a stand-in for `param`'s values in `what`, which only inspects them; None if the values are needed."""
        del param, what
        return None

    def placeholder_for(self, param: Parameter) -> Parameter | None:
        """Return another sharded parameter with the same shard; None if the values are needed."""
        del param
        return None


class _KeeperLink:
    """Leads from a parameter to its handler. A pickled or copied one leads nowhere."""

    __slots__ = ("_handler",)

    def __init__(self, handler: Any = None) -> None:
        self._handler = handler

    @property
    def handler(self) -> Any:
        return self._handler() if isinstance(self._handler, weakref.ref) else self._handler

    def __reduce__(self) -> tuple[type[_KeeperLink], tuple[()]]:
        return _KeeperLink, ()


def keep(param: Tensor, keeper: AccessHandler, weakly: bool = False) -> None:
    """Register the access handler of `param`, once; needed before `release`.

    Args:
        param: A parameter, or a tensor that stands for one.
        keeper: Its handler.
        weakly: Whether somebody else holds the handler as long as the model lives. A graph holds parameters, and Python's collector does not
            look into graphs: with a strong reference a model that keeps an output of its own would never be freed.
    """
    setattr(param, _KEEPER, _KeeperLink(weakref.ref(keeper) if weakly else keeper))


def keeper_of(param: Tensor) -> Any:
    """Return the access handler of `param`; None for a parameter without a handler, or whose model is gone."""
    link = param.__dict__.get(_KEEPER)
    return None if link is None else link.handler


def unkeep(param: Parameter) -> None:
    """Forget the keeper; the parameter must not be released."""
    param.__dict__.pop(_KEEPER, None)
    param.__dict__.pop(_CLASS, None)


def release(param: Tensor) -> None:
    """Make every use of `param`'s values ask its access handler. O(1), no allocation."""
    if type(param) is not ShardedParameter:
        setattr(param, _CLASS, param.__class__)
        param.__class__ = ShardedParameter


def restore(param: Tensor) -> None:
    """Restore the class of `param`, whose values may be used freely again."""
    param.__class__ = param.__dict__[_CLASS]


def guard(params: Sequence[Tensor], keeper: AccessHandler) -> None:
    """Do what `keep`, weakly, and `release` do, for all parameters of a unit in every step."""
    link = _KeeperLink(weakref.ref(keeper))
    for param in params:
        known = param.__dict__
        known[_KEEPER] = link
        if type(param) is not ShardedParameter:
            known[_CLASS] = param.__class__
            param.__class__ = ShardedParameter


def unguard(params: Sequence[Tensor]) -> None:
    """Do what `restore` and `unkeep` do, after `guard`."""
    for param in params:
        known = param.__dict__
        param.__class__ = known.pop(_CLASS)
        del known[_KEEPER]


def _keeper(param: Tensor) -> AccessHandler:
    keeper: AccessHandler | None = keeper_of(param)
    if keeper is None:
        raise ShardedAccessError(
            f"the sharded model of a parameter of shape {tuple(param.shape)} is gone, and nobody can gather its weights any more",
            code="sharded-access",
            fix="Keep the model, or what shard returned, as long as its parameters are used.",
        )
    return keeper


# ---- what is asked

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


def _called(func: Callable[..., Any]) -> str:
    """Return the name of the called function; of a property accessor, the property's name."""
    name: str = getattr(func, "__name__", "")
    is_property = name in ("__get__", "__set__", "__delete__")
    return getattr(getattr(func, "__self__", None), "__name__", name) if is_property else name


def _faces(func: Callable[..., Any]) -> bool:
    """Whether `func` asks a tensor for something other than its values."""
    return func in _FACES or _called(func) in _PROPERTIES


def _reads(func: Callable[..., Any]) -> bool:
    """Whether `func` gives another tensor with the same values, or says where they are."""
    return func in _READS or (getattr(func, "__name__", "") == "__get__" and _called(func) == "data")


def _refusal(what: str, name: str, shape: Sequence[int]) -> ShardedAccessError:
    """Build the error for a use of values that this rank does not have."""
    return ShardedAccessError(
        f"parameter {name} {tuple(shape)} was used by {what!r} while this rank holds only its shard of it",
        code="sharded-access",
        fix="Use it inside the model's forward or in the loss after it, or open `with ds_zero.GatheredParameters([param]):` around the use.",
    )


# ---- who answers


class ShardedParameter(Parameter):
    """A parameter of which this rank holds only a shard. Made by `release`, never constructed."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, _called(func)
        looks = _reads(func) and bool(args)
        if _faces(func) or (looks and type(args[0]) is not ShardedParameter):  # x.to(param) wants its dtype and device
            with without_torch_function():
                return func(*args, **kwargs)
        if looks and (stand_in := _keeper(args[0]).materialize(args[0], name)) is not None:
            return func(stand_in, *args[1:], **kwargs) if isinstance(stand_in, Placeholder) else stand_in
        if func is torch._has_compatible_shallow_copy_type:
            return True
        shown = args[-1] if name == "data" else None
        if isinstance(shown, Placeholder) and (shown.dtype, shown.device) == (args[0].dtype, args[0].device):
            return True  # model.to(device) of a model that is there already
        touched = [(p, _keeper(p)) for p in tensors_in((args, kwargs)) if type(p) is ShardedParameter]
        for param, handler in touched:
            if type(param) is ShardedParameter and not handler.on_access(param, name):
                raise _refusal(name, handler.name_of(param), param.shape)
        try:
            return func(*args, **kwargs)
        finally:
            for param, handler in touched:
                handler.used(param)

    def __repr__(self) -> str:  # type: ignore[override]
        keeper = keeper_of(self)
        if keeper is not None and keeper.arrive(self):
            return repr(self)
        name = "of a model that is gone" if keeper is None else keeper.name_of(self)
        return f"Parameter(name={name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, released)"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        if id(self) in memo:
            known: Parameter = memo[id(self)]
            return known
        if _keeper(self).arrive(self):
            arrived: Parameter = deepcopy(self, memo)
            return arrived
        duplicate = _keeper(self).placeholder_for(self)
        if duplicate is None:
            duplicate = cast(Parameter, self.clone())
        else:
            for key, value in _attributes_of(self).items():
                setattr(duplicate, key, deepcopy(value, memo))
        memo[id(self)] = duplicate
        return duplicate

    def __reduce_ex__(self, protocol: Any) -> Any:
        if _keeper(self).arrive(self):
            return self.__reduce_ex__(protocol)
        return Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


skip_frame(ShardedParameter.__torch_function__.__func__)  # type: ignore[attr-defined]  # gathers, which are no part of a graph


class Placeholder(Tensor):
    """Stands for the values of a released parameter. Made by `placeholder_of`.

    Attributes:
        of: Name and shape of the parameter.
    """

    of: tuple[str, tuple[int, ...]]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _faces(func) and not _reads(func):
            placeholders = [t for t in tensors_in((args, kwargs)) if isinstance(t, Placeholder)]
            raise _refusal(_called(func), *(placeholders[0].of if placeholders else ("", ())))
        with without_torch_function():
            result = func(*args, **kwargs)
            of_it = _reads(func) and isinstance(result, Tensor) and isinstance(args[0], Placeholder)
            return _dressed(result, args[0]) if of_it and result is not args[0] else result

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


def placeholder_of(param: Tensor, name: str) -> Placeholder:
    """Build a placeholder for the values of `param`. O(1)."""
    with without_torch_function():
        placeholder = torch.empty(0, dtype=param.dtype, device=param.device).as_subclass(Placeholder)
        placeholder.of = (name, tuple(param.shape))
    placeholder.__dict__.update(_attributes_of(param))
    return placeholder


def _dressed(tensor: Tensor, like: Placeholder) -> Placeholder:
    placeholder = tensor.as_subclass(Placeholder)
    placeholder.__dict__.update(_attributes_of(like))
    return placeholder


def _attributes_of(param: Tensor) -> dict[str, Any]:
    """Return the attributes that programs set on a parameter, without private names."""
    return {key: value for key, value in param.__dict__.items() if not key.startswith("_")}
