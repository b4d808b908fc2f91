"""Reading and changing whole parameters, gradients and optimizer state of a sharded model.

Words: *full* functions give or take a tensor in the parameter's true shape (of a part of a logical tensor: that of the part) and are
collective over the ranks that the parameter lives on: every one calls them, in the same order. *local* functions give or take this rank's elements, 1-D, and
communicate nothing. A write goes to the shard in master format, so the next step starts from it. What another tier keeps is fetched
for it; what was only read stays until the next update.

A gradient is what the next `step` would use before clipping: averaged over ranks, loss scale and divisor taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

import ds_comm as comm
from ds_config.errors import PlanError, ShardedAccessError
from ds_zero.runtime.forward_backward import alias_saved
from ds_zero.runtime.init_shards import Scatter, is_scattered, number_of, scatter_of
from ds_zero.runtime.param_storage import copy_edits, parts_of
from ds_zero.runtime.sharded_model import ShardedModel, sharding_of
from ds_zero.runtime.unit import Unit

__all__ = [
    "GatheredParameters",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter is: its unit, its number in it."""

    sharding: ShardedModel
    unit: Unit
    member: int

    @property
    def name(self) -> str:
        return self.unit.spec.params[self.member].name

    @property
    def shared_name(self) -> str:
        return self.unit.spec.params[self.member].shared_name

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return (start in the parameter, start in the shard, elements) of the ranges that this rank owns."""
        owned = self.unit.owned
        return [(p.interval.start, p.start, p.interval.numel) for p in owned if p.name == self.name]


def _place(param: Tensor) -> _Place | None:
    sharding = sharding_of(param)
    match = None if sharding is None else sharding.find(param)
    if sharding is not None:
        sharding.arrivals.finish()
    return None if sharding is None or match is None else _Place(sharding, *match)


# ---- whole parameters


@contextmanager
def GatheredParameters(  # noqa: N802  the reference's name; used as a context manager only
    params: Iterable[Parameter] | Parameter | nn.Module,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
    *,
    write: bool = False,
) -> Iterator[None]:
    """Gather `params` so that they are whole and usable on every rank. Collective on entry and, if changed, on exit.

    Args:
        params: Parameters, or a module for all its parameters.
        modifier_rank: Broadcast this rank's changes (a rank within the group that the parameter's gradient is reduced
        over).
        fwd_module: Accepted for compatibility; a parameter used outside its own module needs no registration here.
        enabled: False makes this do nothing.
        write: Keep changes that every rank made alike.
    Raises:
        ShardedAccessError: a parameter was changed without `modifier_rank` or `write` ("sharded-write"); on exit, after
            the change was dropped. Where parameters are unsharded (stages 0 to 2) a change that every rank makes is
            kept.
    Cost: (N-1)/N of the bytes of the units the parameters are in; with modifier_rank their bytes once more. What is computed inside may
        go backward outside: memory that its graph needs stays until the graph is gone.
    """
    del fwd_module
    if not enabled:
        yield
        return
    if isinstance(params, Parameter):
        params = [params]
    candidates = params.parameters() if isinstance(params, nn.Module) else params
    # Clients give a parameter twice, and the bias of a layer that has none.
    wanted = list({id(p): p for p in candidates if isinstance(p, Parameter)}.values())
    scattered = [p for p in wanted if is_scattered(p)]
    with _scattered(scattered, modifier_rank, write), _sharded(wanted, modifier_rank, write):
        yield


@contextmanager
def _scattered(params: list[Parameter], modifier_rank: int | None, write: bool) -> Iterator[None]:
    """Gather the parameters of models that `Init` has sharded and `shard` has not seen yet."""
    params.sort(key=number_of)  # callers give sets, whose order differs between ranks
    for param in params:
        _scatter(param).pin(param)
    before = [param._version for param in params]
    try:
        yield
    finally:
        alike = {id(p): write or _scatter(p).group.size == 1 for p in params}
        lost = [
            p
            for p, v in zip(params, before, strict=True)
            if p._version != v and modifier_rank is None and not alike[id(p)]
        ]
        names = [_scatter(p).name_of(p) for p in lost]
        for param in params:
            _scatter(param).unpin(param, modifier_rank, alike=alike[id(param)])
    if lost:
        raise _not_written(names)


def _scatter(param: Parameter) -> Scatter:
    scatter = scatter_of(param)
    if scatter is None:
        raise ShardedAccessError(
            f"a parameter of shape {tuple(param.shape)} was sharded inside GatheredParameters",
            code="sharded-access",
            fix="Call shard or initialize outside of it.",
        )
    return scatter


@contextmanager
def _sharded(wanted: list[Parameter], modifier_rank: int | None, write: bool) -> Iterator[None]:
    places = [p for p in map(_place, wanted) if p is not None]
    order = {s: i for i, s in enumerate(dict.fromkeys(p.sharding for p in places))}
    places.sort(key=lambda p: (order[p.sharding], p.unit.number, p.member))
    units = list(dict.fromkeys(p.unit for p in places))
    for sharding in order:
        sharding.runtime.end_raised()
    channels = {p.unit: p.unit.groups.late_group() for p in places if p.unit.releases}
    for unit in units:
        unit.unshard(channels.get(unit))
        unit.pins += 1
    before = [p.unit.params[p.member]._version for p in places]
    try:
        with ExitStack() as graphs:
            if any(unit.releases for unit in units) and torch.is_grad_enabled():
                graphs.enter_context(alias_saved(places[0].sharding.runtime.gathering))
            yield
    finally:
        for unit in units:
            unit.pins -= 1
        replaced = {unit: unit.storage.take_back(moved=True) for unit in units}
        versions = [p.unit.params[p.member]._version for p in places]
        changed = [
            p for p, a, b in zip(places, versions, before, strict=True) if a != b or p.member in replaced[p.unit]
        ]
        lost = [p for p in changed if p.unit.releases and modifier_rank is None and not write]
        if modifier_rank is not None or write:
            changed = places  # a write through `param.data` changes no version
        if modifier_rank is not None:
            for place in places:
                group = place.unit.groups.reduction_group.group
                comm.broadcast(
                    place.unit.storage.views[place.member], group=group, group_src=modifier_rank, unit=place.shared_name
                )
        changed = _quiet(changed, modifier_rank is not None or write, places)
        _keep([p for p in changed if p not in lost])
        for unit in units:
            unit.reshard(spare_aliases=True)
    if lost:
        raise _not_written([p.name for p in lost])


def _not_written(names: Sequence[str]) -> ShardedAccessError:
    return ShardedAccessError(
        f"in-place modification of {', '.join(names[:5])} inside GatheredParameters without write access; undone",
        code="sharded-write",
        fix="Pass modifier_rank=0 if one rank changes it, or write=True if every rank makes the same change.",
    )


def _quiet(changed: list[_Place], agreed: bool, places: Sequence[_Place]) -> list[_Place]:
    """Return the places that may be written to shards now.

    In shared memory, only when all ranks are here to do the same (`agreed`).
    """
    if agreed:
        for sharding in dict.fromkeys(p.sharding for p in places):
            sharding.quiet("GatheredParameters", [p.unit for p in places if p.sharding is sharding])
        return changed
    return [p for p in changed if not p.unit.storage.common]  # those are adopted by the next step


def _keep(places: Sequence[_Place]) -> None:
    """Copy what was edited of full parameters into this rank's shard, which may have more digits than a parameter."""
    with torch.no_grad():
        for place in places:
            place.unit.state_store.fetch()
            flat = place.unit.storage.views[place.member].reshape(-1)
            for start, at, numel in place.ranges():
                copy_edits(flat[start : start + numel], place.unit.shard[at : at + numel])
    for unit in dict.fromkeys(place.unit for place in places):
        unit.storage.forget()
        unit.storage.publish()
        unit.state_store.store()


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Unshard `model` and pause its hooks, to generate as with a plain model. Collective on entry and exit.

    Cost: an all-gather of the whole model; this rank holds all of it meanwhile.
    """
    sharding = sharding_of(next(iter(model.parameters()), torch.empty(0, device="cpu")))
    if sharding is None:
        yield model
        return
    with GatheredParameters(model.parameters()), sharding.runtime.paused():
        yield model


def register_external_parameter(module: nn.Module, parameter: Parameter) -> None:
    """Does nothing: a parameter that another module uses in forward is gathered when it is touched, and stays for backward."""
    del module, parameter


def unregister_external_parameter(module: nn.Module, parameter: Parameter) -> None:
    """Does nothing; see `register_external_parameter`."""
    del module, parameter


# ---- elements of shards: the same functions for parameters, gradients and optimizer state

_Source = Callable[[_Place], "list[tuple[int, Tensor]] | None"]
"""What this rank owns of a place: (first element, 1-D view) for each range; None if there is nothing of the kind."""


def _param(place: _Place) -> list[tuple[int, Tensor]]:
    place.unit.state_store.fetch()
    return [(start, place.unit.shard[at : at + numel]) for start, at, numel in place.ranges()]


def _grad(place: _Place) -> list[tuple[int, Tensor]] | None:
    place.sharding.runtime.reducing.drain()
    pieces = [(start, place.unit.gradients.view(at, at + numel)) for start, at, numel in place.ranges()]
    return None if not place.unit.gradients.has_sums else [(start, grad) for start, grad in pieces if grad is not None]


def _state(key: str) -> _Source:
    """State lives with the optimizer's parts, which may be whole units or single parameters."""

    def source(place: _Place) -> list[tuple[int, Tensor]] | None:
        pieces = []
        place.unit.state_store.fetch_state()
        for start, at, numel in place.ranges():
            for part in place.unit.parts:
                if part.start <= at and at + numel <= part.stop:
                    value = place.sharding.state_of(part).get(key)
                    if not isinstance(value, Tensor) or value.numel() != part.stop - part.start:
                        return None
                    pieces.append((start, value.view(-1)[at - part.start : at - part.start + numel]))
        return pieces

    return source


def _owned(param: Tensor, source: _Source) -> tuple[_Place, list[tuple[int, Tensor]]] | None:
    place = _place(param)
    ranges = None if place is None else source(place)
    return None if place is None or ranges is None else (place, ranges)


def _get_local(param: Tensor, source: _Source) -> Tensor | None:
    owned = _owned(param, source)
    if owned is None:
        return None
    place, ranges = owned
    if len(ranges) == 1:
        return ranges[0][1].detach()
    return torch.cat([data.detach() for _, data in ranges]) if ranges else place.unit.shard[:0].detach()


def _get_full(param: Tensor, source: _Source, dtype: torch.dtype | None = None) -> Tensor | None:
    place = _place(param)
    if place is None:
        return None
    ranges, group = source(place), place.unit.groups.shard_group
    slot = place.unit.layout.slots[place.member]
    # One more element counts the ranks that have something, so that all of them know when nobody has.
    full = torch.zeros(slot.numel + 1, dtype=dtype or place.unit.dtypes.master, device=place.unit.full.device)
    full[-1] = 1.0 if ranges is not None and (ranges or not slot.numel) else 0.0
    with torch.no_grad():
        for start, data in ranges or ():
            full[start : start + data.numel()].copy_(data)
        comm.all_reduce(full, group=group, unit=place.shared_name)
    return full[:-1].view(slot.shape) if full[-1] else None


def _set(param: Tensor, value: Tensor, source: _Source, *, local: bool) -> None:
    owned = _owned(param, source)
    if owned is None:
        place = _place(param)
        name = place.name if place is not None else f"a parameter of shape {tuple(param.shape)}"
        raise PlanError(
            f"{name} has nothing here to set: it is not part of a sharded model, or has no such gradient or state yet",
            code="access-not-available",
            fix="Set gradients after a backward, and optimizer state after the first step (or after `materialize`).",
        )
    place, ranges = owned
    shape = place.unit.layout.slots[place.member].shape
    if not local and tuple(value.shape) != shape:
        raise PlanError(
            f"{place.name} has shape {shape}, the value to set {tuple(value.shape)}",
            code="access-shape",
            fix="Pass a tensor of the parameter's shape.",
        )
    wanted = sum(data.numel() for _, data in ranges)
    if local and value.numel() < wanted:
        raise PlanError(
            f"{place.name} has {wanted} elements on this rank, the value to set {value.numel()}",
            code="access-shape",
            fix="Pass as many elements as safe_get_local_fp32_param and its like return.",
        )
    flat, done = value.reshape(-1), 0
    with torch.no_grad():
        for start, data in ranges:
            first = done if local else start
            data.copy_(flat[first : first + data.numel()])
            done += data.numel()


# ---- the reference's names


def safe_get_full_fp32_param(param: Parameter) -> Tensor | None:
    """Return the unsharded parameter on every rank, in its original shape and master dtype. Collective.

    The dtype is fp32 where a frozen parameter's is narrower. None if the parameter is not part of a sharded model.
    """
    place = _place(param)
    frozen = place is not None and not place.unit.spec.trained and param.is_floating_point()
    return _get_full(param, _param, torch.promote_types(param.dtype, torch.float32) if frozen else None)


def safe_set_full_fp32_param(param: Parameter, value: Tensor) -> None:
    """Set the parameter, the same value on every rank; the full copy follows. Collective."""
    with _written(param):
        _set(param, value, _param, local=False)


def safe_get_local_fp32_param(param: Parameter) -> Tensor | None:
    """Return this rank's elements of the parameter in master dtype: a view where they are contiguous."""
    return _get_local(param, _param)


def safe_set_local_fp32_param(param: Parameter, value: Tensor) -> None:
    """Set this rank's elements. Collective where full copies, or secondary ones, are kept: they follow."""
    with _written(param):
        _set(param, value, _param, local=True)


@contextmanager
def _written(param: Parameter) -> Iterator[None]:
    """Guard a write to shards: wait until no rank is in a forward or backward, then refresh every copy."""
    place = _place(param)
    if place is not None:
        place.sharding.quiet(place.name, [place.unit])
    yield
    if place is not None:
        place.unit.mark_updated()
        place.unit.state_store.store()
        if not place.unit.releases:
            place.unit.unshard()


def safe_get_full_grad(param: Parameter) -> Tensor | None:
    """Return the averaged gradient in accumulation dtype and original shape; None if no rank has any. Collective.

    Before any gradient of a step was reduced (inside `no_sync`): this rank's gradient, as if all ranks had the same; None if this rank has none.
    """
    place = _place(param)
    if place is not None and place.sharding.runtime.reducing.waits(place.unit.number):
        local_grad = place.unit.gradients.local_grad(place.member)
        return None if local_grad is None else _scaled(param, local_grad.detach() * place.unit.groups.size)
    return _scaled(param, _get_full(param, _grad))


def safe_get_local_grad(param: Parameter) -> Tensor | None:
    """Return a copy of this rank's elements of the averaged gradient."""
    return _scaled(param, _get_local(param, _grad))


def safe_set_full_grad(param: Parameter, value: Tensor) -> None:
    """Set the averaged gradient; norm, clipping and update use it. The same value on every rank."""
    _set(param, value / _factor(param), _grad, local=False)


def safe_set_local_grad(param: Parameter, value: Tensor) -> None:
    """Set this rank's elements of the averaged gradient."""
    _set(param, value / _factor(param), _grad, local=True)


def safe_update_full_grad_vectorized(
    param_list: Sequence[Parameter], update_func: Callable[[Tensor, Parameter], Tensor]
) -> None:
    """`update_func(averaged gradient, parameter)` gives the new gradient. Collective: one collective a unit, not a parameter.

    Every rank calls `update_func` for every parameter, with the same values.
    """
    places = [p for p in map(_place, param_list) if p is not None]
    for unit in dict.fromkeys(p.unit for p in places):
        members = [p for p in places if p.unit is unit]
        _grad(members[0])
        sums = unit.gradients.sums
        if sums is None:
            continue
        shard = torch.cat(sums).to(unit.device)
        whole = torch.empty(unit.layout.numel, dtype=shard.dtype, device=shard.device)
        for (start, stop), part in zip(unit.layout.spans, parts_of(shard, unit.layout), strict=True):
            comm.all_gather_single(whole[start:stop], part, unit.groups.shard_group, unit=unit.spec.name)
        for place in members:
            slot, param = unit.layout.slots[place.member], unit.params[place.member]
            factor = place.sharding.grad_factor(unit)
            new = update_func(whole[slot.offset : slot.offset + slot.numel].view(slot.shape) * factor, param)
            safe_set_full_grad(param, new)


def _factor(param: Tensor) -> float:
    place = _place(param)
    return 1.0 if place is None else place.sharding.grad_factor(place.unit)


def _scaled(param: Tensor, grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad * _factor(param)


def safe_get_full_optimizer_state(param: Parameter, optim_state_key: str) -> Tensor | None:
    """Return an entry of the optimizer state (`exp_avg`) in original shape; None before its creation. Collective."""
    return _get_full(param, _state(optim_state_key))


def safe_get_local_optimizer_state(param: Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's elements of an entry of the optimizer state."""
    return _get_local(param, _state(optim_state_key))


def safe_set_full_optimizer_state(param: Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set an entry of the optimizer's state; the same value on every rank."""
    _set(param, value, _state(optim_state_key), local=False)


def safe_set_local_optimizer_state(param: Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's elements of an entry of the optimizer's state."""
    _set(param, value, _state(optim_state_key), local=True)
