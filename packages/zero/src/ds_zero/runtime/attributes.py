"""What `param.grad` is between a backward and `zero_grad`: put there when the outermost backward ends, taken off before the next one adds.

Gradients are summed over the ranks in flat buffers. Where a rank has all of a parameter's gradient (stage 0), `param.grad` is a view of
those, averaged. Where a rank has a part, it is a `ShardedGradient`. What is written there is what the step uses; a `param.grad` that was
set to None is a gradient that was dropped, and another tensor in its place is copied into the sums.

The parameters of the optimizer's groups (parts of shards) get gradients, too: `GradScaler` and clients that clip by groups read those.

Note "before the first gradient". autograd adds to what it finds in `param.grad`, so it must find None: a hook on the gradient of each
parameter takes all of them off. Where autograd calls no such hook, it adds to a `ShardedGradient`, which keeps a copy of what is added, and
the hooks on the accumulated gradient find the copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

import ds_comm as comm
from ds_config.errors import ShardedAccessError
from ds_zero._torch import graph_task_id, queue_callback, without_torch_function
from ds_zero.runtime.forward_backward import Backward
from ds_zero.runtime.gradient_norms import GradientAccess, GradientMeasurements
from ds_zero.runtime.sharded_gradient import (
    GradientNorms,
    GradientShard,
    ShardedGradient,
    copy_into,
    dropped,
    set_by_hand,
)
from ds_zero.runtime.unit import OptimizerSlice, Unit

__all__ = ["GradAttributes", "ShardedGradient"]


class _Shard(GradientShard):
    """Elements of a unit's sums; what parameters and parts have in common. Of the model it has weak references only.

    `param.grad` is a reference that Python's collector does not see: a model that is dropped with gradients would stay for ever.
    """

    def __init__(self, owner: GradAttributes, unit: Unit, of: str) -> None:
        self._owner, self._unit, self.of, self.alive = weakref.ref(owner), weakref.ref(unit), of, True

    @property
    def unit(self) -> Unit:
        unit = self._unit()
        if unit is None:
            raise dropped(self.of)
        return unit

    def owner(self) -> GradAttributes:
        """Return the attributes that show this gradient; raise if they do no longer, or if it is not summed yet."""
        owner = self._owner()
        if owner is None or not self.alive:
            raise dropped(self.of)
        if self.unit.gradients.open or not self.unit.gradients.has_sums:
            raise ShardedAccessError(
                f"the gradient of {self.of} was used while it waits for its sum over the ranks (no_sync, reduction(False))",
                code="sharded-gradient-waits",
                fix="Make the last backward before the step outside of no_sync, or call optimizer.reduce() on all ranks first.",
            )
        return owner


class _ParamShard(_Shard):
    def __init__(self, owner: GradAttributes, unit: Unit, member: int) -> None:
        super().__init__(owner, unit, unit.spec.params[member].name)
        self.member = member
        self._pieces, self.spans = owner.pieces_of(unit, member)

    def pieces(self) -> list[Tensor]:
        self.owner().average(self.unit)
        return self._views()

    def _views(self) -> list[Tensor]:
        gradients = self.unit.gradients
        return gradients.cut(self._pieces) if self._pieces and gradients.has_sums else []

    def norms(self) -> GradientNorms | None:
        measured = self.owner().measured
        return None if measured is None else measured.of(self.unit, self.member)

    def write(self, update: Callable[[list[Tensor]], None], factor: Any = None) -> None:
        owner = self.owner()
        self.unit.gradients.change()
        run = partial(update, self._views() if factor is not None else self.pieces())
        if owner.measured is None:
            run()
        else:
            owner.measured.write(self.unit, (self.member,), run, factor)

    def full(self) -> Tensor:
        return self.gather_pieces(self.pieces())

    def gather_pieces(self, pieces: Sequence[Tensor]) -> Tensor:
        slot = self.unit.layout.slots[self.member]
        like = pieces[0] if pieces else (self.unit.gradients.sums or [self.unit.shard])[0]
        full = torch.zeros(slot.numel, dtype=like.dtype, device=self.unit.gradients.device)
        for (start, numel), piece in zip(self.spans, pieces, strict=True):
            full[start : start + numel].copy_(piece)
        if full.dtype is torch.bool:
            return self._sum(full.to(torch.uint8)).bool()
        return self._sum(full)

    def _sum(self, full: Tensor) -> Tensor:
        comm.all_reduce(full, group=self.unit.groups.shard_group, unit=self.unit.spec.name)
        return full


class _PartShard(_Shard):
    def __init__(self, owner: GradAttributes, unit: Unit, part: OptimizerSlice, of: str) -> None:
        super().__init__(owner, unit, of)
        self._part = weakref.ref(part)
        self.spans = ((0, part.stop - part.start),)

    @property
    def part(self) -> OptimizerSlice:
        part = self._part()
        if part is None:
            raise dropped(self.of)
        return part

    @property
    def is_part(self) -> bool:
        """Whether the optimizer still has this part; a suspended unit's are made anew."""
        part, unit = self._part(), self._unit()
        return unit is not None and part in unit.parts

    def pieces(self) -> list[Tensor]:
        self.owner().average(self.unit)
        return self._views()

    def _views(self) -> list[Tensor]:
        view = self.unit.gradients.view(self.part.start, self.part.stop)
        return [] if view is None else [view.view(-1)]

    def norms(self) -> GradientNorms | None:
        owner = self.owner()
        first = owner.first_of_group(self.unit)
        if owner.measured is None or first is None:
            return None
        norms = owner.measured.of_group(self.unit.spec.params[0].group, owner.present)
        # A rank has parts of some units only, so the first one of a group stands for all gradients of the group.
        return norms if norms is None or first is self.part else norms.scaled(0.0)

    def write(self, update: Callable[[list[Tensor]], None], factor: Any = None) -> None:
        owner = self.owner()
        self.unit.gradients.change()
        run = partial(update, self._views() if factor is not None else self.pieces())
        if owner.measured is None:
            run()
        else:
            owner.measured.write_part(self.unit, self.part, run, factor)

    def full(self) -> Tensor:
        raise ShardedAccessError(
            f"full_tensor() of a parameter in the optimizer's groups, which is a part of the shard of {self.of}",
            code="sharded-gradient",
            fix="Use the gradient of the model's parameter.",
        )


class GradAttributes:
    """The `grad` of a model's trained parameters, and of the parts that its optimizer has. Nothing happens before `attach`.

    Args:
        units: Of the model.
        unused: Of each unit the members that have no gradient; another one changes it.
        backward: Where the model's backward is.
        forget: A bound method that drops all gradients of this step; only a weak reference to its object is kept.
    Attributes:
        added: What autograd has added to a sharded gradient; None nearly always.
        measured: The norms that the ranks know; None where nothing is measured.
        present: Of each unit the members that have a gradient on some rank.
        replaced: Of each unit the members whose gradient was dropped or set since the ranks last agreed.
        shows: Whether some gradients are shown when a backward ends.
        keeps: Whether gradients stay after a step, until `zero_grad`.
        before: A weak reference to what is called before the first gradient of a backward is added.
    """

    def __init__(
        self, units: Sequence[Unit], unused: Sequence[set[int]], backward: Backward, forget: Callable[[], None]
    ) -> None:
        self.added: tuple[ShardedGradient, Tensor] | None = None
        self.measured: GradientMeasurements | None = None
        self.present: dict[int, set[int]] = {}
        self.replaced: dict[int, set[int]] = {}
        self._units = [(unit, absent) for unit, absent in zip(units, unused, strict=True) if unit.spec.trained]
        # The thread of early updates reads the gradients of all parts of a group while others would see stand-ins there.
        self._of_parts = not any(unit.plan.early for unit in units)
        self._backward, self._forget = backward, weakref.WeakMethod(forget)
        self._versions: dict[Tensor, tuple[Unit, int]] = {}  # of plain gradients, when they were shown
        # By id of the parameter or part, which stays meanwhile. Nothing else refers to a gradient but by these very tuples.
        self._shards: dict[int, tuple[Tensor, ShardedGradient]] = {}
        self._shards_of_parts: dict[int, tuple[Tensor, ShardedGradient]] = {}
        self._rows: dict[int, list[tuple[Tensor, ShardedGradient]]] = {}  # of units all of whose members have one
        self._pieces: dict[tuple[int, int], tuple[list[tuple[int, int]], tuple[tuple[int, int], ...]]] = {}
        self._on: tuple[list[_Row], list[_Row]] = ([], [])  # of parameters, of parts
        self._task = [-1]  # the graph task that has begun to add gradients since they were shown
        self._added = _accumulates(weakref.ref(self))
        self._places: dict[Tensor, tuple[Unit, int]] = {}
        self._first: dict[Tensor, torch.utils.hooks.RemovableHandle] = {}
        self._access: GradientAccess | None = None
        self.shows = self.keeps = False
        self.before: Callable[[], Callable[[], None] | None] = lambda: None

    @property
    def writes(self) -> int:
        """How many writes to gradients this rank has made since the ranks last agreed."""
        return 0 if self.measured is None else self.measured.writes

    def pieces_of(self, unit: Unit, member: int) -> tuple[list[tuple[int, int]], tuple[tuple[int, int], ...]]:
        """Return (start, stop) in the shard, and (first element, elements) in the parameter, of what this rank has of it."""
        key = (unit.number, member)
        if key not in self._pieces:
            name = unit.spec.params[member].name
            owned = [piece for piece in unit.owned if piece.name == name]
            spans = tuple((piece.interval.start, piece.interval.numel) for piece in owned)
            self._pieces[key] = [(piece.start, piece.stop) for piece in owned], spans
        return self._pieces[key]

    @property
    def attached(self) -> bool:
        """Whether somebody has said how gradients are shown."""
        return self._access is not None

    def attach(self, access: GradientAccess) -> None:
        """Show gradients from the end of the next backward on."""
        self._access, self.keeps = access, access.agreement is not None
        self.shows = self.keeps or access.whole
        if access.agreement is not None:
            units = [unit for unit, _ in self._units]
            self.measured = GradientMeasurements(units, access.agreement, access.remaining)
        else:
            self.measured = None
        self._places = {param: (unit, i) for unit, _ in self._units for i, param in enumerate(unit.params)}
        for unit, _ in self._units:
            unit.gradients.measure = None if self.measured is None else self.measured.measurement_of(unit)
        for param in self._places:
            if param not in self._first:
                self._hook(param)

    def detach(self) -> None:
        """Take gradients and hooks back."""
        self._access, self.shows, self.keeps = None, False, False
        for handle in self._first.values():
            handle.remove()
        self._first.clear()
        self.remove()

    # ---- what is shown

    def average(self, unit: Unit) -> None:
        """Make the sums of a unit averages, in place; their norms stay known."""
        remaining = 1.0 if self._access is None else self._access.remaining(unit)
        if remaining != 1.0:
            before = unit.gradients.version
            unit.gradients.change()
            unit.gradients.scale(remaining)
            if self.measured is not None:
                self.measured.moved(unit, before)

    def averaged(self, unit: Unit) -> None:
        """Note that somebody has made the sums of a unit averages, of whose writes tensors do not know."""
        before, sums = unit.gradients.version, list(unit.gradients.sums or ())
        increment_version(sums)
        if self._access is not None:
            unit.gradients.applied *= self._access.remaining(unit)
        if self.measured is not None:
            self.measured.moved(unit, before)

    def multiply(self, unit: Unit, factor: float) -> None:
        """Multiply the gradients of a unit by `factor`: the elements when they are averaged, or now where the factor has no inverse."""
        unit.gradients.change()
        if _LEAST < factor < 1.0 / _LEAST:
            unit.gradients.applied /= factor
            if self.measured is not None:
                self.measured.write(unit, range(len(unit.params)), _nothing, factor)
            return
        views = list(unit.gradients.sums or ())
        if self.measured is not None:
            self.measured.write(unit, range(len(unit.params)), partial(_multiply, views, factor), factor)

    def measure(self, leftovers: int = 0, raised: int = 0) -> tuple[bool, bool]:
        """Measure all gradients, which are summed. Collective over the ranks of the agreement.

        Args:
            leftovers: How many units' gradients this rank holds that are not.
            raised: How many backwards an error has ended on this rank.
        Returns:
            Whether some rank holds any, then norms are not those of all gradients; and whether an error has ended one on some rank.
        """
        if self.measured is None or self._access is None:
            return False, False
        absent = {unit.number: members for unit, members in self._units}
        norms = not all(self._is_plain(unit) for unit, _ in self._units)
        self.present, holding, ended = self.measured.measure(absent, self.replaced, (leftovers, raised), norms=norms)
        self.replaced.clear()
        return holding > 0.0, ended > 0.0

    @property
    def together(self) -> bool:
        """Whether the ranks of the agreement end their backwards together."""
        return self._access is not None and self._access.together

    def first_of_group(self, unit: Unit) -> OptimizerSlice | None:
        """Return the first part of an optimizer group on this rank; None if some group has no part here."""
        firsts: dict[int | None, OptimizerSlice] = {}
        for other, _ in self._units:
            for part in other.parts:
                firsts.setdefault(other.spec.params[0].group, part)
        groups = {other.spec.params[0].group for other, _ in self._units}
        return firsts[unit.spec.params[0].group] if groups == firsts.keys() else None

    def _is_plain(self, unit: Unit) -> bool:
        """Whether the gradients of a unit are shown as views of its sums."""
        whole = self._access is not None and self._access.whole and unit.layout.world == 1
        return whole and unit.dtypes.accumulate == unit.dtypes.param and not unit.plan.early

    def put(self) -> None:
        """Set `grad` wherever there is a gradient. O(parameters)."""
        access = self._access
        if access is None:
            return
        self.added, self._on, self._task[0] = None, ([], []), -1
        self._versions.clear()
        with without_torch_function():
            for unit, absent in self._units:
                summed = unit.gradients.has_sums and not unit.gradients.open
                local = access.agreement is None and unit.gradients.local
                plain = (summed or local) and self._is_plain(unit)
                if not plain and access.agreement is None:
                    continue
                if plain and summed:
                    self.average(unit)
                present = self.present.get(unit.number) if summed and self.measured is not None else None
                members: Sequence[int] = range(len(unit.params))
                if absent if present is None else len(present) < len(members):
                    members = sorted(set(members) - absent if present is None else present)
                self._show(unit, 0, self._plain_rows(unit, members) if plain else self._sharded_rows(unit, members))
                if self._of_parts and access.agreement is not None:
                    self._show(unit, 1, self._rows_of_parts(unit, absent, present, plain))

    def _show(self, unit: Unit, kind: int, rows: Iterable[_Row]) -> None:
        on = self._on[kind]
        for row in rows:
            tensor, grad = row
            now = tensor.grad
            if now is None:
                try:
                    tensor.grad = grad
                except RuntimeError:  # another shape or dtype than when it was sharded, which this names
                    unit.storage.take_back()
                    raise
                on.append(row)
            elif now is grad:
                on.append(row)

    def _sharded_rows(self, unit: Unit, members: Sequence[int]) -> list[tuple[Tensor, ShardedGradient]]:
        rows = self._rows.get(unit.number)
        if rows is None or len(members) != len(rows):
            rows = [self._sharded(unit, member) for member in members]
            if len(members) == len(unit.params):
                self._rows[unit.number] = rows
        return rows

    def _sharded(self, unit: Unit, member: int) -> tuple[Tensor, ShardedGradient]:
        param = unit.params[member]
        if (row := self._shards.get(id(param))) is None:
            shard = _ParamShard(self, unit, member)
            row = self._shards[id(param)] = param, ShardedGradient(param, shard.of, shard, self._added)
        return row

    def _alias(self, unit: Unit, view: Tensor, shape: torch.Size) -> Tensor:
        """Return the same memory as a tensor that is no view: older loops call `p.grad.detach_()`, which views refuse."""
        with torch.no_grad():
            alias = view.new_empty(0).set_(view.detach().view(shape))  # type: ignore[call-overload]
        self._versions[alias] = unit, alias._version
        return alias

    def _plain_rows(self, unit: Unit, members: Sequence[int]) -> Iterator[_Row]:
        for member in members:
            param = unit.params[member]
            grad = self._whole(unit, member, param.shape)
            if grad is not None:
                yield param, grad

    def _whole(self, unit: Unit, member: int, shape: torch.Size) -> Tensor | None:
        if unit.gradients.local:
            own = unit.gradients.local_grad(member)
            return None if own is None else self._alias(unit, own, own.shape)
        name = unit.spec.params[member].name
        starts = [p.start for p in unit.owned if p.name == name and p.interval.numel == shape.numel()]
        view = unit.gradients.view(starts[0], starts[0] + shape.numel()) if starts else None
        return None if view is None else self._alias(unit, view[: shape.numel()], shape)

    def _rows_of_parts(self, unit: Unit, absent: set[int], present: set[int] | None, plain: bool) -> Iterator[_Row]:
        for part in unit.parts:
            members = part.members or tuple(range(len(unit.params)))
            if absent.issuperset(members) and (present is None or not present.intersection(members)):
                continue
            if plain and unit.dtypes.accumulate == part.tensor.dtype:
                view = unit.gradients.view(part.start, part.stop)
                if view is not None and view.device == part.tensor.device:  # the optimizer's state may be on the host
                    yield part.tensor, self._alias(unit, view, part.tensor.shape)
                    continue
            if (row := self._shards_of_parts.get(id(part.tensor))) is None:
                names = ", ".join([unit.spec.params[i].name for i in members[:3]] + ["..."] * (len(members) > 3))
                grad = ShardedGradient(part.tensor, names, _PartShard(self, unit, part, names), self._added)
                row = self._shards_of_parts[id(part.tensor)] = part.tensor, grad
            yield row

    def _hook(self, param: Tensor) -> None:
        resting = not param.requires_grad  # frozen, with state: a hook that it gets now serves when it is thawed
        if resting:
            param.requires_grad_(True)
        self._first[param] = param.register_hook(_begins(weakref.ref(self), self._task))
        if resting:
            param.requires_grad_(False)

    # ---- what was written

    def rest(self) -> bool:
        """Take off the gradients of parts alone, if every parameter has one that may stay during a step; return whether it does."""
        on, parts = self._on
        if self._versions or self.added is not None or len(on) != len(self._places):
            return False
        with without_torch_function():
            for tensor, grad in on:
                if tensor.grad is not grad:
                    return False
            if any(tensor.grad is not grad for tensor, grad in parts):
                return False
            for tensor, _ in parts:
                tensor.grad = None
        self._on = on, []
        return True

    def take(self, but: Tensor | None = None) -> None:
        """Take gradients off: others are added now, or all are stepped. What was set to None is dropped, other tensors are copied.

        Args:
            but: This one stays.
        Raises:
            ShardedAccessError: one of them can be neither ("sharded-gradient-set"). Nothing was changed then.
        """
        if not any(self._on):
            return
        with without_torch_function():
            changed = [
                [tensor for tensor, grad in on if (now := tensor.grad) is not grad and not _is_same(now, grad)]
                for on in self._on
            ]
        if not any(changed):
            self.remove(but)
            return
        if any(on and all(tensor.grad is None for tensor, _ in on) for on in self._on):
            every = {unit.number: set(range(len(unit.params))) - absent for unit, absent in self._units}
            self.remove(but)
            if (forget := self._forget()) is not None:
                forget()
            self.replaced = every  # ranks that have dropped nothing find out when they agree next
            return
        if changed[1]:
            raise set_by_hand([self._name(tensor) for tensor in changed[1]], len(self._on[1]))
        sets = [(tensor, *self._places[tensor], tensor.grad) for tensor in changed[0]]
        alone = self.measured is None
        for param, unit, member, grad in sets if alone else ():
            if unit.gradients.local:
                self._replace_local(param, unit, member, grad)
        sets = [one for one in sets if not (alone and one[1].gradients.local)]
        waiting = [param for param, unit, _, _ in sets if unit.gradients.open or not unit.gradients.has_sums]
        if waiting:
            raise set_by_hand([self._name(tensor) for tensor in waiting], len(self._on[0]))
        for param, unit, member, grad in sets:
            self._replace(param, unit, member, grad)
        self.remove(but)

    def _replace_local(self, param: Tensor, unit: Unit, member: int, grad: Tensor | None) -> None:
        """Write what was assigned to the `param.grad` of a gradient that is this rank's own until it is summed."""
        own = unit.gradients.local_grad(member)
        if own is None or (grad is not None and (grad.shape != own.shape or grad.layout is not torch.strided)):
            raise set_by_hand([self._name(param)], len(self._on[0]))
        with torch.no_grad():
            own.zero_() if grad is None else own.copy_(grad)
        if grad is None:
            next(absent for other, absent in self._units if other is unit).add(member)
        with without_torch_function():
            param.grad = None

    def _replace(self, param: Tensor, unit: Unit, member: int, grad: Tensor | None) -> None:
        """Write a gradient that was assigned to `param.grad`; None drops the gradient."""
        shard = _ParamShard(self, unit, member)
        if grad is None:
            shard.write(_zero, 0.0)
            absent = next(absent for other, absent in self._units if other is unit)
            absent.add(member)
            self.present.get(unit.number, set()).discard(member)
        elif not copy_into(shard, grad, param.shape):
            raise set_by_hand([self._name(param)], len(self._on[0]))
        self.replaced.setdefault(unit.number, set()).add(member)
        with without_torch_function():
            param.grad = None

    def _name(self, tensor: Tensor) -> str:
        unit, member = self._places.get(tensor, (None, 0))
        return "a parameter of the optimizer's groups" if unit is None else unit.spec.params[member].name

    def remove(self, but: Tensor | None = None) -> None:
        """Take gradients off where they still are."""
        on, self._on = self._on, ([], [])
        written = {unit for alias, (unit, version) in self._versions.items() if alias._version != version}
        if written:  # what is known of the sums is known by their version, and aliases have one of their own
            increment_version([total for unit in written for total in unit.gradients.sums or ()])
        views = [
            (self._places[tensor][0], weakref.ref(grad))
            for tensor, grad in (on[0] if self._versions else ())
            if type(grad) is Tensor
        ]
        self._versions.clear()
        with without_torch_function():
            for shown in on:
                _take_off(shown, but)
        for unit in {unit for unit, view in views if view() is not None}:
            unit.gradients.leave_memory()

    def dropped(self) -> None:
        """Let go of gradients that were dropped: who has one of them gets an error from now on."""
        if _let_go(self._shards):
            self._rows.clear()
        parts = self._shards_of_parts.items()
        _let_go(self._shards_of_parts, [key for key, (_, grad) in parts if not _is_part(grad.shard)])
        self.present.clear()
        self.replaced.clear()
        if self.measured is not None:
            self.measured.drop()

    def begin(self) -> None:
        """A gradient comes that is added, or only asked for (`torch.autograd.grad`): after that, gradients come back."""
        self._task[0] = graph_task_id()
        if (before := self.before()) is not None:
            before()
        if any(self._on):
            self.take()
            queue_callback(self._return)

    def _return(self) -> None:
        if self._backward.task is None:  # else it puts them on when it ends
            self.put()

    def accumulate(self, grad: ShardedGradient, copy: Tensor) -> None:
        """autograd has added `copy` to a sharded gradient; see the note "before the first gradient"."""
        params = [param for param, shown in self._on[0] if shown is grad]
        self.take(but=grad)
        with without_torch_function():
            for param in params:
                if param.grad is None:  # all were dropped, and autograd still writes to this one
                    param.grad = grad
        self.added = grad, copy

    def land(self, param: Tensor) -> None:
        """If something was added to the sharded gradient of `param`, make that its gradient."""
        if self.added is not None:
            grad, copy = self.added
            with without_torch_function():
                if param.grad is grad:
                    param.grad, self.added = copy, None


_Row = tuple[Tensor, Tensor]
"""A parameter, or a part, and its gradient."""
_OURS = 3
"""References to a gradient that nobody else has: of its tuple, of the loop over them, and of the call that counts."""


def _is_part(shard: GradientShard) -> bool:
    return not isinstance(shard, _PartShard) or shard.is_part


def _let_go(shards: dict[int, tuple[Tensor, ShardedGradient]], more: Collection[int] = ()) -> bool:
    """Forget gradients that somebody else has, who gets an error from now on, and `more`; return whether there were any."""
    gone = set(more)
    for key, row in shards.items():
        grad = row[1]
        if getrefcount(grad) > _OURS:
            gone.add(key)
        elif grad.answers:
            grad.answers.clear()
    for key in gone:
        shard = shards.pop(key)[1].shard
        if isinstance(shard, _Shard):
            shard.alive = False
    return bool(gone)


def _is_same(now: Tensor | None, shown: Tensor) -> bool:
    """Whether `param.grad` is what was shown there, or another view of all of its memory (a `PartGradient`)."""
    if now is None or now is shown:
        return now is shown
    if isinstance(now, ShardedGradient) or isinstance(shown, ShardedGradient) or now.layout is not torch.strided:
        return False
    faces = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (now, shown)]
    return faces[0] == faces[1] and now.numel() > 0


def _take_off(shown: list[_Row], but: Tensor | None) -> None:
    """Take gradients off where they still are; of a view that somebody else has there are references left."""
    for tensor, grad in shown:
        now = tensor.grad
        if (now is grad or _is_same(now, grad)) and grad is not but:
            tensor.grad = None
    shown.clear()


_LEAST = 1e-18
"""Factors below it, or above its inverse, may leave what fp32 can hold between the gradient and what was applied to it."""


def _nothing() -> None:
    """Do nothing: the elements are multiplied with the next factor."""


def _multiply(pieces: Sequence[Tensor], factor: float) -> None:
    for piece in pieces:
        piece.mul_(factor)


def _zero(pieces: Sequence[Tensor]) -> None:
    for piece in pieces:
        piece.zero_()


# Weak: autograd keeps hooks where the garbage collector does not look, and gradients may be kept by anyone.


def _begins(owner: weakref.ref[GradAttributes], task: Sequence[int]) -> Callable[[Tensor], None]:
    def begins(_: Tensor) -> None:
        if task[0] != graph_task_id() and (attributes := owner()) is not None:  # else it is not the first
            attributes.begin()

    return begins


def _accumulates(owner: weakref.ref[GradAttributes]) -> Callable[[ShardedGradient, Tensor], None]:
    def accumulates(grad: ShardedGradient, copy: Tensor) -> None:
        attributes = owner()
        if attributes is not None:
            attributes.accumulate(grad, copy)

    return accumulates
