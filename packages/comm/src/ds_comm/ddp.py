"""torch's DistributedDataParallel around a model of which ranks hold different parts.

DDP gives all ranks of its process group the parameters and buffers of the first one, and averages gradients. That is wrong for
experts, parts of tensor-parallel layers and pipeline stages, and nobody would notice. Who cuts a model says so of its tensors
(`mark_unlike`, or a family by `set_param_sharding`), and a DDP that would touch them raises before it sends anything. `leave_out` is the other
way: DDP leaves these out, and their gradients are reduced as their family says while DDP reduces the others.

How it is noticed: a module is registered in DDP when DDP knows its group and what it ignores, and has not sent anything; torch calls
the hooks of module registration then. The hook is there from the first mark on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ds_config.errors import PlanError

__all__ = ["leave_out", "mark_unlike", "others_of", "reduces_left_out", "watch_ddp"]

Others = Callable[[Tensor, Collection[int]], Collection[int]]
"""Of a tensor and some ranks of the world, those of them that do not hold the same values."""

_UNLIKE = "_ds_unlike"
_LEFT_OUT = "_ds_left_out"
_SHOWN = 3  # names in a message


def mark_unlike(tensors: Iterable[Tensor], ranks: Iterable[int]) -> None:
    """Say that these ranks of the world hold other values than this one under the names of `tensors`. The last word counts."""
    unlike = frozenset(ranks)
    for tensor in tensors:
        setattr(tensor, _UNLIKE, unlike)
    watch_ddp(_marked)


def _marked(tensor: Tensor, ranks: Collection[int]) -> Collection[int]:
    unlike: frozenset[int] = getattr(tensor, _UNLIKE, frozenset())
    return unlike.intersection(ranks)


def leave_out(model: nn.Module, reduce: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
    """Let a DDP around `model` leave parameters and buffers out. One around a module that contains `model` raises instead.

    Args:
        reduce: By qualified name. Of a gradient as one backward makes it, what all ranks shall have; not called for buffers, nor
            while there is no DDP.
    """
    known = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    setattr(model, _LEFT_OUT, _LeftOut(dict(reduce)))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted({*known, *reduce}))


def reduces_left_out(model: nn.Module) -> bool:
    """Return whether a DDP around `model` is there, beside which the gradients that it leaves out are reduced."""
    left_out: _LeftOut | None = getattr(model, _LEFT_OUT, None)
    return left_out is not None and left_out.ddp is not None and left_out.ddp() is not None


@dataclass(slots=True, eq=False, weakref_slot=True)
class _LeftOut:
    """What DDP leaves out of a module, and the DDP that does. Hooks of gradients follow it, so they end with that DDP."""

    reduce: dict[str, Callable[[Tensor], Tensor]]
    ddp: weakref.ref[DistributedDataParallel] | None = None
    hooks: list[Any] = field(default_factory=list)

    def attach(self, module: nn.Module, ddp: DistributedDataParallel) -> None:
        self.ddp = weakref.ref(ddp)
        if self.hooks:
            return
        for name, param in module.named_parameters():
            if name in self.reduce and param.requires_grad:
                self.hooks.append(param.register_hook(partial(self._reduced, self.reduce[name])))

    def _reduced(self, reduce: Callable[[Tensor], Tensor], grad: Tensor) -> Tensor:
        return grad if self.ddp is None or self.ddp() is None else reduce(grad)

    def __deepcopy__(self, memo: object) -> _LeftOut:
        return _LeftOut(dict(self.reduce))  # a copy has other parameters, and no DDP yet


_sources: list[Others] = []


def watch_ddp(others: Others) -> None:
    """Ask `others` of all tensors of modules that DDP is put around from now on."""
    if not _sources:
        register_module_module_registration_hook(_at_registration)
    if others not in _sources:
        _sources.append(others)


def others_of(tensor: Tensor, ranks: Collection[int]) -> Collection[int]:
    """Return those of `ranks` that hold other values than this one, by all that was said of `tensor`."""
    return {rank for source in _sources for rank in source(tensor, ranks)}


def _at_registration(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    if not isinstance(parent, DistributedDataParallel) or name != "module" or module is None:
        return
    ranks = dist.get_process_group_ranks(parent.process_group)
    ignored = parent.parameters_to_ignore
    touched: dict[str, set[int]] = {}
    for tensor_name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        others = set(others_of(tensor, ranks))
        if others and tensor_name not in ignored:
            touched[tensor_name] = others
    if touched:
        raise _refusal(ranks, touched)
    left_out: _LeftOut | None = getattr(module, _LEFT_OUT, None)
    if left_out is not None:
        left_out.attach(module, parent)


def _refusal(ranks: Collection[int], touched: Mapping[str, set[int]]) -> PlanError:
    listing = [f"{name} (other values on ranks {sorted(others)})" for name, others in list(touched.items())[:_SHOWN]]
    more = f", and {len(touched) - _SHOWN} more" if len(touched) > _SHOWN else ""
    return PlanError(
        f"DistributedDataParallel over ranks {sorted(ranks)} would overwrite {len(touched)} tensors, of which these ranks hold different "
        f"parts, with those of one rank: {', '.join(listing)}{more}",
        code="comm-ddp",
        fix='Give it the ranks that hold the same parts (process_group=mesh["data"].pg); call ds_moe.place_experts on the very module that it '
        "is put around; or let ds_zero.shard or the engine reduce gradients instead.",
    )
