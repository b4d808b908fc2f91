"""What `param.grad` is between a backward and its step: a tensor of the parameter's shape without values, which refuses its uses by name.

Gradients are summed over the ranks in flat buffers of which a rank may hold a part, so `param.grad` cannot be a view of them. A None there
would make `torch.nn.utils.clip_grad_norm_`, a `GradScaler` and whatever else reads gradients do nothing, and say nothing.

The parameters of the optimizer's groups (parts of shards) get stand-ins, too: `GradScaler` and clients that clip by groups read those.

Note "before the first gradient". autograd adds to what it finds in `param.grad`, so stand-ins are taken off before. A hook on the
parameter whose gradient came first in an earlier backward does it for all. Where another one comes first, autograd adds to its stand-in,
which keeps a copy of what is added, and the hooks of that parameter find the copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_config.errors import ShardedAccessError
from ds_zero._torch import graph_task_id, queue_callback, without_torch_function
from ds_zero.runtime.autograd import Backward, tensors_in
from ds_zero.runtime.unit import Unit

__all__ = ["GradAttributes", "ShardedGradient"]

_FACES = {
    "shape", "dtype", "device", "layout", "ndim", "names", "itemsize", "nbytes", "size", "dim", "numel", "nelement", "stride", "element_size",
    "ndimension", "requires_grad", "requires_grad_", "grad", "grad_fn", "is_leaf", "retains_grad", "output_nr", "_version", "__len__",
    "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "is_meta", "is_cpu", "is_cuda", "is_mps", "is_xpu",
    "is_floating_point", "is_complex", "get_device", "_is_view", "__dir__", "untyped_storage", "storage_offset",
    "is_conj", "is_neg", "is_inference", "_base", "_is_zerotensor",
}  # fmt: skip
"""What may be asked of a stand-in: nothing that depends on values."""


def _called(func: Callable[..., Any]) -> str:
    """The name of what was called; of a property that is read, the property's."""
    name: str = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


class ShardedGradient(Tensor):
    """Stands for the gradient of one parameter, whose elements are with several ranks or not averaged yet. Made by `GradAttributes`.

    Attributes:
        of: Whose gradient it is.
        accumulate: Called when autograd adds a tensor to it, with a copy of that.
    """

    of: str
    accumulate: Callable[[ShardedGradient, Tensor], None]

    @staticmethod
    def __new__(cls, param: Tensor, of: str, accumulate: Callable[[ShardedGradient, Tensor], None]) -> ShardedGradient:
        """Of the parameter's shape, dtype and device. Allocates nothing on it."""
        made: ShardedGradient = Tensor._make_wrapper_subclass(cls, param.shape, dtype=param.dtype, device=param.device)
        made.of, made.accumulate = of, accumulate
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if _called(func) in _FACES:
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        raise _refusal(func, (args, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        in_place = func is torch.ops.aten.add_.Tensor
        if (in_place or func is torch.ops.aten.add.Tensor) and graph_task_id() != -1:
            mine, more = args[:2]
            if type(mine) is ShardedGradient and type(more) is not ShardedGradient:
                copy = more.clone()  # autograd may have given the same tensor to other parameters
                mine.accumulate(mine, copy)
                return mine if in_place else copy
        raise _refusal(func, (args, kwargs))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGradient(of={self.of!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def _refusal(func: Any, given: Any) -> ShardedAccessError:
    found = next((t for t in tensors_in(given) if isinstance(t, ShardedGradient)), None)
    whose = "a parameter" if found is None else f"{found.of} {tuple(found.shape)}"
    return ShardedAccessError(
        f"the gradient of {whose} was used by {_called(func)!r}: its sum over the ranks is in shards, and "
        "param.grad only says that there is one",
        code="sharded-gradient",
        fix="Clip with ds_zero.shard(..., clip=1.0) in the place of clip_grad_norm_, and read the norm in optimizer.last.norm after step(). "
        "For values: safe_get_full_grad(param) and safe_set_full_grad(param, value) of ds_zero. "
        'In the place of a GradScaler: shard(..., precision="fp16") and optimizer.scale(loss).backward().',
    )


class GradAttributes:
    """The `grad` of a model's trained parameters, and of the parts that its optimizer has. Nothing happens before `attach`.

    Args:
        units: Of the model.
        unused: Of each unit the members that have no gradient; another one changes it.
        backward: Where the model's backward is.
        forget: A bound method that drops all gradients of this step; only a weak reference to its object is kept.
    Attributes:
        added: What autograd has added to a stand-in; None nearly always.
    """

    def __init__(
        self, units: Sequence[Unit], unused: Sequence[set[int]], backward: Backward, forget: Callable[[], None]
    ) -> None:
        self.added: tuple[ShardedGradient, Tensor] | None = None
        self._units = [(unit, absent) for unit, absent in zip(units, unused, strict=True) if unit.spec.trained]
        # The thread of early updates reads the gradients of all parts of a group while others would see stand-ins there.
        self._of_parts = not any(unit.plan.early for unit in units)
        self._backward, self._forget = backward, weakref.WeakMethod(forget)
        self._gradients: dict[Tensor, ShardedGradient] = {}
        self._on: tuple[list[Tensor], list[Tensor]] = ([], [])  # parameters, parts
        self._first: dict[Tensor, torch.utils.hooks.RemovableHandle] = {}
        self._active = False

    def attach(self) -> None:
        """Gradients have stand-ins from the end of the next backward on."""
        self._active = True

    def detach(self) -> None:
        """Take stand-ins and hooks back."""
        self._active = False
        for handle in self._first.values():
            handle.remove()
        self._first.clear()
        self.remove()

    def put(self, first: Tensor | None = None) -> None:
        """Gradients were added: what has one gets a stand-in, the same one every time. O(parameters).

        Args:
            first: The parameter whose gradient came first in the backward that is over.
        """
        if not self._active:
            return
        if first is not None and first not in self._first:
            self._first[first] = first.register_hook(_begins(weakref.ref(self)))
        known, self._gradients, self.added = self._gradients, {}, None
        self._on = ([], [])
        accumulate = _accumulates(weakref.ref(self))
        with without_torch_function():
            for owners, on in zip((self._params(), self._parts()), self._on, strict=True):
                for tensor, unit, members in owners:
                    mine, now = known.get(tensor), tensor.grad
                    if now is not None and now is not mine:
                        continue
                    if mine is None:
                        names = [unit.spec.params[i].name for i in members[:3]] + ["..."] * (len(members) > 3)
                        mine = ShardedGradient(tensor, ", ".join(names), accumulate)
                    tensor.grad = self._gradients[tensor] = mine
                    on.append(tensor)

    def _params(self) -> Iterator[tuple[Tensor, Unit, tuple[int, ...]]]:
        for unit, absent in self._units:
            for member, param in enumerate(unit.params):
                if member not in absent:
                    yield param, unit, (member,)

    def _parts(self) -> Iterator[tuple[Tensor, Unit, tuple[int, ...]]]:
        for unit, absent in self._units if self._of_parts else ():
            for part in unit.parts:
                members = part.members or tuple(
                    range(len(unit.params))
                )  # a part without elements: as on the rank that has them
                if not absent.issuperset(members):
                    yield part.tensor, unit, members

    def take(self, but: ShardedGradient | None = None) -> None:
        """Take stand-ins off: gradients are added now, or stepped. Who has set all of them to None has dropped the gradients.

        Args:
            but: This one stays.
        Raises:
            ShardedAccessError: some were set to None, or to other tensors ("sharded-gradient-set"). Nothing was changed then.
        """
        if not any(self._on):
            return
        dropped = False
        with without_torch_function():
            for tensors in self._on:
                grads = [(tensor.grad, self._gradients[tensor]) for tensor in tensors]
                other = [mine for grad, mine in grads if grad is not None and grad is not mine]
                none = [mine for grad, mine in grads if grad is None]
                if other or 0 < len(none) < len(grads):
                    raise _set(other or none, len(grads), "another tensor" if other else "None")
                dropped |= bool(none)
        self.remove(but)
        if dropped and (forget := self._forget()) is not None:
            forget()

    def remove(self, but: ShardedGradient | None = None) -> None:
        """Take stand-ins off where they still are."""
        on, self._on = self._on, ([], [])
        with without_torch_function():
            for tensor in (*on[0], *on[1]):
                mine = self._gradients[tensor]
                if mine is not but and tensor.grad is mine:
                    tensor.grad = None

    def begin(self) -> None:
        """A gradient comes that is added, or only asked for (`torch.autograd.grad`): after that, stand-ins come back."""
        if any(self._on):
            self.take()
            queue_callback(self._return)

    def _return(self) -> None:
        if self._backward.task is None:  # else it puts them on when it ends
            self.put()

    def accumulate(self, mine: ShardedGradient, copy: Tensor) -> None:
        """autograd has added `copy` to a stand-in; see the note "before the first gradient"."""
        self.take(but=mine)
        self.added = mine, copy

    def land(self, param: Tensor) -> None:
        """If something was added to the stand-in of `param`, this is its gradient."""
        if self.added is not None:
            mine, copy = self.added
            with without_torch_function():
                if param.grad is mine:
                    param.grad, self.added = copy, None


# Weak: autograd keeps hooks where the garbage collector does not look, and stand-ins may be kept by anyone.


def _begins(owner: weakref.ref[GradAttributes]) -> Callable[[Tensor], None]:
    def begins(grad: Tensor) -> None:
        del grad
        attributes = owner()
        if attributes is not None:
            attributes.begin()

    return begins


def _accumulates(owner: weakref.ref[GradAttributes]) -> Callable[[ShardedGradient, Tensor], None]:
    def accumulates(mine: ShardedGradient, copy: Tensor) -> None:
        attributes = owner()
        if attributes is not None:
            attributes.accumulate(mine, copy)

    return accumulates


def _set(which: Sequence[ShardedGradient], many: int, to: str) -> ShardedAccessError:
    names = ", ".join(mine.of for mine in which[:5])
    return ShardedAccessError(
        f"param.grad of {names} was set to {to} after a backward ({len(which)} of {many} gradients): the step would use the sum that is in "
        "shards all the same",
        code="sharded-gradient-set",
        fix="Set values with ds_zero.safe_set_full_grad(param, value). Drop all gradients with optimizer.zero_grad(); leave a parameter out "
        "with requires_grad_(False) and optimizer.replan().",
    )
