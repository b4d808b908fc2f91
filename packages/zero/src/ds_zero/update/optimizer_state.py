"""What the optimizer keeps of each parameter: read by name, cut with its parts, saved, loaded, and carried to another plan.

Words: a *fragment* is what this rank has of one state tensor of one parameter: a range of it, or all of it where the state does
not have the parameter's elements (the row and column sums of Adafactor). Whole tensors exist one parameter at a time. Names in what is
saved are those of logical tensors, see `reduction_groups.py`.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

import ds_comm as comm
from ds_comm import Group, LocalShard
from ds_comm.placement import TensorShard
from ds_comm.reduction_group import Logical
from ds_config.errors import CheckpointError, ShardedAccessError
from ds_zero.layout.elements import ParamPiece, gaps_between
from ds_zero.layout.shard_options import dtype_name
from ds_zero.offload.state_stores import OptimizerSlice
from ds_zero.runtime.param_storage import clear_gaps
from ds_zero.runtime.sharded_model import ShardedModel
from ds_zero.runtime.unit import Unit
from ds_zero.update.wrapped_optimizer import WAITING, owns_reduction, state_format

__all__ = ["Fragment", "Fragments", "OptimizerState", "PartStates", "offset_text"]


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [start, start + n) of the flattened state `key`, whose whole has `shape`."""

    key: str
    shape: tuple[int, ...]
    start: int
    data: Tensor


Fragments = dict[str, list[Fragment]]


class PartStates(defaultdict[Any, Any]):
    """The `state` of an optimizer whose model is sharded: by part. A use with a parameter of the model is an error that names the call.

    Args:
        states: What it holds now.
        is_sharded: A bound method: whether a key is a parameter of the model. Only a weak reference to its object is kept.
    """

    def __init__(self, states: Mapping[Any, Any], is_sharded: Callable[[object], bool]) -> None:
        super().__init__(dict, states)
        self._is_sharded = weakref.WeakMethod(is_sharded)

    def __missing__(self, key: Any) -> Any:
        self._refuse(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        there = super().__contains__(key)
        return there or self._refuse(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a part."""
        return super().get(key, default) if key in self else default

    def _refuse(self, key: object) -> Literal[False]:
        is_sharded = self._is_sharded()
        if is_sharded is not None and is_sharded(key):
            raise ShardedAccessError(
                "optimizer.state was asked for the state of a parameter of the model: it is that of the parameter's shards, by the parts in "
                "optimizer.param_groups",
                code="zero-state-of-parameters",
                fix='Use ds_zero.safe_get_full_optimizer_state(param, "exp_avg") on all ranks, or safe_get_local_optimizer_state for this '
                "rank's elements.",
            )
        return False

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))


class OptimizerState:
    """The state that `inner` keeps of the parts of a sharding's units."""

    def __init__(self, inner: Optimizer, sharding: ShardedModel) -> None:
        self.inner, self.sharding = inner, sharding
        self.fills_gaps = owns_reduction(inner)  # signs know no zero

    def of(self, part: OptimizerSlice) -> dict[str, Any]:
        """Return the optimizer state of one part; empty before its first step."""
        entries: dict[str, Any] = self.inner.state.get(part.tensor, {})
        return entries

    def keys(self) -> list[str]:
        """Return the names of the state's tensors with elements for a parameter's, of all ranks. Collective."""
        local_keys = {key for unit in self.sharding.units for part in unit.parts for key in self._tensors_of(part)}
        every = comm.all_gather_json(sorted(local_keys), self.sharding.everyone, unit="state_dict")
        return sorted({key for keys in every for key in keys})

    def has_any(self, keys: Collection[str]) -> bool:
        """Whether this rank has one of these tensors of some part."""
        return any(not self._tensors_of(part).isdisjoint(keys) for unit in self.sharding.units for part in unit.parts)

    def _tensors_of(self, part: OptimizerSlice) -> set[str]:
        return {key for key, value in self.of(part).items() if isinstance(value, Tensor) and value.dim() > 0}

    def pieces(self, unit: Unit) -> Iterator[tuple[str, ParamPiece, Tensor]]:
        """Yield the state tensors of a unit: (key, piece of the parameter, as many values).

        A tensor without the elements of its parameter (the row sums of Adafactor) comes whole, with the parameter's
        first piece.
        """
        unit.state_store.fetch_state()
        pieces = self.sharding.pieces(unit) if unit.parts else []
        for part in unit.parts:
            inside = [piece for piece in pieces if part.start <= piece.start and piece.stop <= part.stop]
            for key, value in self.of(part).items():
                if not isinstance(value, Tensor) or value.dim() == 0:
                    continue
                if value.numel() != part.stop - part.start:
                    name = unit.spec.params[part.members[0]].name
                    yield key, next(piece for piece in inside if piece.name == name), value
                    continue
                flat = value.view(-1)
                for piece in inside:
                    yield key, piece, flat[piece.start - part.start : piece.stop - part.start]

    def shards(self) -> list[LocalShard]:
        """Return this rank's part of the state, as writable 1-D views."""
        shards = []
        for unit in self.sharding.units:
            for key, piece, data in self.pieces(unit):
                logical, dtype = self.sharding.logical[piece.name], dtype_name(data.dtype)
                if data.numel() == piece.interval.numel:
                    shard = logical.shard("optim", dtype, piece.interval, f"/{key}")
                else:
                    # Of a part of a logical tensor there is no place in a whole state: each part has one of its own.
                    of = "" if logical.whole else f"@{offset_text(logical)}"
                    shard = TensorShard.whole(f"optim/{logical.name}/{key}{of}", tuple(data.shape), dtype)
                shards.append(LocalShard(shard, data.view(-1)))
        # By name, whether or not a unit was split: a snapshot on the nodes is filled in the order it was taken.
        return sorted(shards, key=lambda one: one.shard.name)

    def materialize(self, stored: Mapping[str, Sequence[int]]) -> Callable[[], None]:
        """Create the state that a checkpoint has, for a load to fill, and drop all other state.

        A parameter without stored state has none afterwards, as before its first step. A unit whose parameters differ in
        what is stored is split.

        Args:
            stored: Shapes of the stored tensors by name, `optim/<parameter>/<state>`; other names are passed over.
        Returns: Gives the state of before back, as far as nothing was written into it.
        """
        before: dict[Tensor, dict[str, Any]] = {}
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in stored.items():
            if name.startswith("optim/"):
                owner, _, key = name.removeprefix("optim/").rpartition("/")
                shapes.setdefault(owner, {})[key] = tuple(shape)
        for unit in self.sharding.units:
            unit.state_store.fetch_state()
            logical = [self.sharding.logical[info.name] for info in unit.spec.params]
            wanted = [shapes.get(param.name, {}) for param in logical]
            if any(len({frozenset(wanted[m]) for m in part.members}) > 1 for part in unit.parts):
                self.split(unit)
            for part in unit.parts:
                # A part of padding alone goes with the first parameter, as its step count does.
                member = part.members[0] if part.members else 0
                before[part.tensor] = dict(self.inner.state[part.tensor])
                self._create(part, logical[member], wanted[member])

        def undo() -> None:
            for tensor, entries in before.items():
                self.inner.state[tensor].clear()
                self.inner.state[tensor].update(entries)

        return undo

    def _create(self, part: OptimizerSlice, param: Logical, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Replace the state of one part by tensors for `wanted`; those of the right size are used again."""
        entries = self.inner.state[part.tensor]
        before = dict(entries)
        entries.clear()
        for stored, shape in wanted.items():
            key, _, offset = stored.partition("@")
            if offset and offset != offset_text(param):
                continue  # of another part of the logical tensor
            like = part.tensor.shape if not offset and shape == param.shape else torch.Size(shape)
            dtype = part.tensor.dtype if key == WAITING else state_format(self.inner, part.tensor, key)
            old = before.get(key)
            fits = isinstance(old, Tensor) and (old.shape, old.dtype) == (like, dtype)
            entries[key] = old if fits else torch.zeros(like, dtype=dtype, device=part.tensor.device)

    def split(self, unit: Unit) -> None:
        """Give every parameter of a unit its own part, with its share of the state so far."""
        if unit.layout.kind != "flat":
            return
        unit.state_store.fetch_state()
        for old in [part for part in unit.parts if len(part.members) > 1]:
            new = [part for part in unit.split() if old.start <= part.start < old.stop]
            state = self.inner.state.pop(old.tensor, None)
            for part in new if state is not None else ():
                self.inner.state[part.tensor] = {k: _share(v, old, part) for k, v in state.items()}
            for group in self.inner.param_groups:
                for i in [i for i, p in enumerate(group["params"]) if p is old.tensor]:
                    group["params"][i : i + 1] = [p.tensor for p in new]
            at = next(i for i, part in enumerate(unit.parts) if part is old)
            unit.parts[at : at + 1] = new

    # ---- another plan of the same model

    def fragments(self) -> Fragments:
        """Copies of this rank's part of all state. Collect before any unit is closed."""
        fragments: Fragments = {}
        for key, piece, data in [state for unit in self.sharding.units for state in self.pieces(unit)]:
            each = data.numel() == piece.interval.numel
            shape, start = (piece.shape, piece.interval.start) if each else (tuple(data.shape), 0)
            fragments.setdefault(piece.name, []).append(Fragment(key, shape, start, data.clone()))
        return fragments

    def clear_gaps(self, units: Iterable[Unit]) -> None:
        """Zero what an update wrote between parameters. An optimizer that sends signs, which know no zero, moves those elements, too, and no checkpoint has them."""
        for unit in units:
            clear_gaps(unit.shard, unit.owned)
            for part in unit.parts:
                inside = [
                    (p.start - part.start, p.stop - part.start) for p in unit.owned if part.start <= p.start < part.stop
                ]
                gaps = gaps_between(inside, part.tensor.numel())
                for value in self.inner.state.get(part.tensor, {}).values():
                    if gaps and isinstance(value, Tensor) and value.shape == part.tensor.shape:
                        for gap in gaps:
                            value[gap.start : gap.stop].zero_()

    def carry(self, fragments: Fragments, trained: Collection[str]) -> None:
        """Give parameters out of `trained` the state they had under another plan. Collective."""
        known: set[str] = set()  # of which some rank has state
        for family in self.sharding.families.values():
            infos = [p for u in self.sharding.units if u.spec.family == family.name for p in u.spec.params]
            with_state = sorted({p.shared_name for p in infos if p.name in fragments})
            gathered = comm.all_gather_json(with_state, family.group, unit="replan")
            known |= {name for names in gathered for name in names}
        for unit in self.sharding.units:
            members = {i: p for i, p in enumerate(unit.spec.params) if p.name in trained and p.shared_name in known}
            if 0 < len(members) < len(unit.params):
                self.split(unit)
            for member, info in members.items():
                found, group = fragments.get(info.name, []), unit.groups.reduction_group.group
                self._fill(unit, member, _assemble(found, info.shared_name, group))

    def _fill(self, unit: Unit, member: int, state: Mapping[str, Tensor]) -> None:
        info = unit.spec.params[member]
        unit.state_store.fetch_state()
        pieces = [p for p in self.sharding.pieces(unit) if p.name == info.name]
        for part in (p for p in unit.parts if member in (p.members or (0,))):  # padding alone: as in `materialize`
            entries = self.inner.state[part.tensor]
            for key, whole in state.items():
                if whole.numel() != info.numel:
                    entries[key] = whole
                    continue
                if not isinstance(entries.get(key), Tensor):
                    entries[key] = torch.zeros_like(part.tensor, requires_grad=False, dtype=whole.dtype)
                for piece in pieces:
                    if part.start <= piece.start < part.stop:
                        flat = entries[key].view(-1)[piece.start - part.start : piece.stop - part.start]
                        flat.copy_(whole.view(-1)[piece.interval.start : piece.interval.stop])

    # ---- what is not a tensor of a parameter's elements

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups without their parameters. JSON-able."""
        return [{k: _plain(v) for k, v in g.items() if k != "params"} for g in self.inner.param_groups]

    def load_groups(self, saved: Iterable[Mapping[str, Any]]) -> None:
        """Take back what `groups` gave.

        Raises:
            CheckpointError: it has another number of groups ("optimizer-groups").
        """
        groups, saved = self.inner.param_groups, list(saved)
        if len(saved) != len(groups):
            raise CheckpointError(
                f"the checkpoint has {len(saved)} optimizer groups, this optimizer has {len(groups)}",
                code="optimizer-groups",
                fix="Build the optimizer with the groups it was saved with.",
            )
        for group, values in zip(groups, saved, strict=True):
            for key, value in values.items():
                group[key] = _like(value, group.get(key))

    def scalars(self) -> dict[str, dict[str, float]]:
        """Step counts and the like: key -> parameter -> number, of all ranks. Collective."""
        local_scalars: dict[str, dict[str, float]] = {}
        for unit in self.sharding.units:
            for key, of in self.numbers(unit).items():
                for name, number in of.items():
                    plain = number.item() if isinstance(number, Tensor) else number
                    local_scalars.setdefault(key, {})[self.sharding.logical[name].name] = plain
        # A rank knows the scalars of the parameters it has elements of; together the ranks know all.
        merged: dict[str, dict[str, float]] = {}
        for rank_scalars in comm.all_gather_json(local_scalars, self.sharding.everyone, unit="state_dict"):
            for key, values in rank_scalars.items():
                merged.setdefault(key, {}).update(values)
        return {k: dict(sorted(v.items())) for k, v in sorted(merged.items())}

    def numbers(self, unit: Unit) -> dict[str, dict[str, Any]]:
        """Return numbers of a unit's state, as the optimizer keeps them: key -> parameter -> number."""
        numbers: dict[str, dict[str, Any]] = {}
        for part in unit.parts:
            for key, value in self.of(part).items():
                if isinstance(value, Tensor) and value.dim():
                    continue
                for member in part.members or range(len(unit.params)):
                    numbers.setdefault(key, {})[unit.spec.params[member].name] = value
        return numbers

    def load_scalars(self, scalars: Mapping[str, Mapping[str, float]]) -> None:
        """Take back what `scalars` gave."""
        for key, values in scalars.items():
            for unit in self.sharding.units:
                self._load_scalars(unit, key, values)

    def _load_scalars(self, unit: Unit, key: str, values: Mapping[str, float]) -> None:
        if not unit.parts:
            return
        names = [self.sharding.logical[p.name].name for p in unit.spec.params]
        if len({values.get(name) for name in names}) > 1:
            self.split(unit)
        for part in unit.parts:
            members = part.members or tuple(range(len(unit.params)))
            value = values.get(names[members[0]])
            if value is not None:
                # torch's own optimizers count in tensors; those that name their state keep plain numbers.
                as_tensor = isinstance(value, float) and not hasattr(self.inner, "state_names")
                self.inner.state[part.tensor][key] = torch.tensor(float(value), device="cpu") if as_tensor else value


def _assemble(fragments: list[Fragment], name: str, group: Group) -> dict[str, Tensor]:
    """State of one parameter, whole, on every rank. Collective."""
    everyone: list[Any] = [None] * group.size
    comm.all_gather_object(everyone, fragments, group, unit=name)
    whole: dict[str, Tensor] = {}
    for fragment in (f for part in everyone for f in part):
        if fragment.key not in whole:
            whole[fragment.key] = torch.zeros(fragment.shape, dtype=fragment.data.dtype, device=fragment.data.device)
        end = fragment.start + fragment.data.numel()
        whole[fragment.key].view(-1)[fragment.start : end] = fragment.data.view(-1)
    return whole


def offset_text(param: Logical) -> str:
    """Return where a parameter begins in its logical tensor, as names of its state say it."""
    return ",".join(map(str, param.box.offset))


def _share(value: Any, old: OptimizerSlice, new: OptimizerSlice) -> Any:
    if isinstance(value, Tensor) and value.numel() == old.stop - old.start:
        return value.view(-1)[new.start - old.start : new.stop - old.start].view(new.tensor.shape)
    return value.clone() if isinstance(value, Tensor) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.dim() == 0 else value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _like(value: Any, old: Any) -> Any:
    if isinstance(old, tuple) and isinstance(value, list):
        return tuple(value)
    return torch.tensor(value, dtype=old.dtype, device="cpu") if isinstance(old, Tensor) else value
