"""What the ranks measure together of their gradients when a backward ends, so that a later read sends nothing.

One pass over this rank's shards, then an all-reduce of sums and one of maxima: of every parameter the sum of squares and the largest
magnitude, how many ranks have used the parameter, and on how many its gradient was dropped or replaced since the last time. A norm is
that of the logical tensor: parts of one tensor on several ranks (tensor parallelism, experts) have the norm of the whole.

Note "experts". Experts of other ranks are other tensors, and a sum over this rank's parameters must be that over the model. So the norm of an
expert's gradient is that of the same parameter of all ranks' experts, as of one tensor [experts, ...] that is cut over the ranks. Where a rank
has no parameter of some name (stages of a pipeline, experts in unequal numbers), no sum of its own is the model's, and norms are refused.

Note "algebra". A factor that is written scales the norms, so they stay true and nobody reads the elements again. Any other write makes the
norms of that parameter unknown until the next backward, or until `measure_gradients()`.

Note "writes of parts". The optimizer's groups have parts of shards, and a rank need not have a part of every unit. So a factor written to
parts changes norms once every part of the model has got the same one; until then no norm is known.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ds_comm as comm
from ds_comm import Group
from ds_comm.metadata import metadata_device
from ds_comm.reduction_group import Logical
from ds_config.errors import PlanError, ShardedAccessError
from ds_ops.stream import norms_of_ranges
from ds_zero.layout.units import DENSE
from ds_zero.runtime.sharded_gradient import GradientNorms
from ds_zero.runtime.unit import OptimizerSlice, Unit

__all__ = ["REPLACED", "GradientAccess", "GradientAgreement", "GradientMeasurements", "replaced_on_some"]

REPLACED = float(2**24)
"""What a parameter whose gradient was dropped or replaced adds to the count of its users: more than there are ranks."""
_GATHERED = 8
"""Up to so many ranks send what they have measured to one another; more ranks sum it by all-reduces."""


@dataclass(frozen=True, slots=True)
class GradientAgreement:
    """Over which ranks gradients are measured, and where each parameter's numbers are in the message.

    Attributes:
        group: Of the ranks that have a part of the model.
        tensors: Of each trained parameter, by unit and member, the place of its logical tensor's norms.
        parts: The same of its users: those of the part of the logical tensor that the parameter is.
        sizes: How many norms and how many counts there are.
        owners: On how many ranks each counted part is.
        missing: A tensor that some rank has nothing of; None where a sum over any rank's parameters is that over the model.
    """

    group: Group
    tensors: Mapping[tuple[int, int], int]
    parts: Mapping[tuple[int, int], int]
    sizes: tuple[int, int]
    owners: tuple[int, ...]
    missing: str | None = None

    @staticmethod
    def between(units: Iterable[Unit], logical: Mapping[str, Logical], group: Group) -> GradientAgreement:
        """Agree on the places of all parameters. Collective over `group`, once."""
        keys: dict[tuple[int, int], tuple[str, str, str]] = {}
        for unit in units:
            for member, info in enumerate(unit.spec.params if unit.spec.trained else ()):
                of = logical[info.name]
                slot = "" if unit.spec.family == DENSE else f"{unit.spec.family} {info.name}"
                keys[unit.number, member] = (of.name, f"{of.name} {of.box}", slot)
        every = (
            comm.all_gather_json(list(keys.values()), group, unit="gradients")
            if group.size > 1
            else [list(keys.values())]
        )
        slots = _slots_of_experts(every)
        tensors_of = [[slots.get(slot, name) for name, _, slot in rank] for rank in every]
        names = {name: i for i, name in enumerate(dict.fromkeys(name for rank in tensors_of for name in rank))}
        on_all = set(names).intersection(*tensors_of)
        missing = next((name for name in names if name not in on_all), None)
        boxes = {box: i for i, box in enumerate(dict.fromkeys(box for rank in every for _, box, _ in rank))}
        owners = [0] * len(boxes)
        for rank in every:
            for _, box, _ in rank:
                owners[boxes[box]] += 1
        tensors = {place: names[slots.get(slot, name)] for place, (name, _, slot) in keys.items()}
        parts = {place: boxes[box] for place, (_, box, _) in keys.items()}
        return GradientAgreement(group, tensors, parts, (len(names), len(boxes)), tuple(owners), missing)


@dataclass(frozen=True, slots=True)
class GradientAccess:
    """How gradients are shown.

    Attributes:
        remaining: What the sums of a unit are to be multiplied by to be averages.
        agreement: Between which ranks they are measured; None: gradients that this rank has a part of are not shown.
        whole: Whether a gradient that this rank has all of is a plain tensor.
        together: Whether all those ranks end their backwards together, so that they can measure then. Stages of a pipeline do not:
            there norms are known after `measure_gradients()` only.
    """

    remaining: Callable[[Unit], float]
    agreement: GradientAgreement | None
    whole: bool
    together: bool


def _slots_of_experts(every: Sequence[Sequence[Sequence[str]]]) -> dict[str, str]:
    """Name what parameters of one name in a family are together, if they are other tensors on other ranks."""
    found: dict[str, set[str]] = {}
    for rank in every:
        for name, _, slot in rank:
            if slot:
                found.setdefault(slot, set()).add(name)
    return {slot: f"all of {slot}" for slot, names in found.items() if len(names) > 1}


@dataclass(slots=True)
class _UnitNorms:
    """Of each member of a unit; the tensors, [members], are replaced and never written, for others have views of them."""

    squares: Tensor
    peaks: Tensor
    stale: set[int] = field(default_factory=set)


_Chunk = tuple[int, str, float, float]
"""Norms of one unit: its number, of which pieces they are, and what sums of squares, and magnitudes, are to be multiplied by."""
_Ranges = list[tuple[int, list[tuple[int, int]]]]
"""Numbers of sums, and elements [start, stop) of each."""


class _NormPlaces:
    """Where the norms of one unit's pieces and members belong. Computed once: neither pieces nor ranges of a unit change.

    Args:
        tensors: Of each trained parameter, by unit and member, the place of its logical tensor's norms.
        device: Where norms are added up.
    Attributes:
        pieces: (start, stop) in the shard of every piece of a parameter that this rank has.
        members: Of each member the place of its tensor, int64 [members].
        whole: Numbers of the ranges of the sums that are one piece, [n].
        ranges: Where pieces lie in the sums: "all" of them, and the "others", which are no range.
        places: Of each piece the place of its tensor: of "all" [pieces], those in ranges ("whole", [n]), the "others".
    """

    def __init__(self, unit: Unit, tensors: Mapping[tuple[int, int], int], device: torch.device) -> None:
        def index(numbers: Sequence[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=device)

        members = {info.name: member for member, info in enumerate(unit.spec.params)}
        owned = [piece for piece in unit.owned if piece.interval.numel]
        places = [tensors[unit.number, members[piece.name]] for piece in owned]
        ranges = {at: number for number, at in enumerate(unit.gradients.ranges)}
        self.pieces = [(piece.start, piece.stop) for piece in owned]
        self.members = index([tensors[unit.number, member] for member in range(len(unit.params))])
        within = [(ranges[at], place) for at, place in zip(self.pieces, places, strict=True) if at in ranges]
        apart = [(at, place) for at, place in zip(self.pieces, places, strict=True) if at not in ranges]
        self.whole = index([number for number, _ in within])
        others = [at for at, _ in apart]
        self.ranges = {"all": self._in_sums(unit, self.pieces), "others": self._in_sums(unit, others)}
        self.places = {
            "all": index(places),
            "whole": index([place for _, place in within]),
            "others": index([place for _, place in apart]),
        }

    @staticmethod
    def _in_sums(unit: Unit, pieces: Sequence[tuple[int, int]]) -> _Ranges:
        """Locate pieces, which are sorted and lie in one range each."""
        found: dict[int, list[tuple[int, int]]] = {}
        for start, stop in pieces:
            number = bisect_right(unit.gradients.ranges, start, key=itemgetter(0)) - 1
            first = unit.gradients.ranges[number][0]
            found.setdefault(number, []).append((start - first, stop - first))
        return list(found.items())


class _NormMessage:
    """What ranks tell one another of their gradients: counts and norms.

    Attributes:
        table: This rank's sums of squares and largest magnitudes, [tensors, 2], to be written before `sum`.
    """

    def __init__(self, agreement: GradientAgreement, device: torch.device) -> None:
        self._group, (tensors, counted) = agreement.group, agreement.sizes
        self._counted, self._totals = counted + 4, (torch.zeros(0, device="cpu"), torch.zeros(0, device="cpu"))
        host = metadata_device(self._group)
        # One message to each other rank, and one wait: all-reduces of sums and of maxima have two.
        self._gathers = 1 < self._group.size <= _GATHERED and host == device
        self._row = torch.zeros(self._counted + 2 * tensors, dtype=torch.float64, device=device)
        self._rows = self._row.new_empty(self._group.size if self._gathers else 0, len(self._row))
        self._counts: list[float] = []  # those in the row
        self._read: bool = True  # whether `_totals` are those of the last sum
        self.table = self._row[self._counted :].view(-1, 2)

    def sum(self, counts: list[float], *, norms: bool) -> list[float]:
        """Sum counts over the ranks, and if `norms` the squares, and take the largest of the magnitudes. Collective."""
        if self._group.size == 1:
            self._totals = self.table[:, 0], self.table[:, 1]
            return counts
        if not self._gathers:
            return self._reduce(torch.tensor(counts, dtype=torch.float64, device="cpu"), norms=norms)
        if counts != self._counts:
            self._row[: self._counted] = torch.tensor(counts, dtype=torch.float64, device="cpu")
            self._counts = counts
        row, rows = self._row, self._rows
        if not norms:
            row = row[: self._counted]
            rows = row.new_empty(self._group.size, self._counted)
        comm.all_gather_into_tensor(rows, row, group=self._group, unit="gradients")
        self._read = False
        total: list[float] = rows[:, : self._counted].sum(0).tolist()
        return total

    def _reduce(self, counts: Tensor, *, norms: bool) -> list[float]:
        counts = counts.to(metadata_device(self._group))
        squares, peaks = (column.clone() for column in (self.table if norms else self.table[:0]).unbind(1))
        if counts.device != squares.device:
            sums = [counts, squares]
        else:
            sums = [torch.cat([counts, squares])]
            counts, squares = sums[0][: self._counted], sums[0][self._counted :]
        works = [comm.all_reduce(t, group=self._group, async_op=True, unit="gradients") for t in sums if len(t)]
        if len(peaks):
            works.append(comm.all_reduce(peaks, dist.ReduceOp.MAX, group=self._group, async_op=True, unit="gradients"))
        for work in works:
            work.wait()
        self._totals = squares, peaks
        total: list[float] = counts.tolist()
        return total

    def totals(self) -> tuple[Tensor, Tensor]:
        """Return the squares and magnitudes over all ranks, [tensors] each, of the last `sum` with norms."""
        if not self._read:
            norms, self._read = self._rows[:, self._counted :], True
            self._totals = norms[:, ::2].sum(0), norms[:, 1::2].amax(0)
        return self._totals


class GradientMeasurements:
    """The norms of a model's gradients, as they were measured and as factors have changed them since.

    Args:
        units: Those that are trained.
        agreement: Between which ranks.
        remaining: What the sums of a unit are to be multiplied by to be averages.
    Attributes:
        writes: How many writes to gradients this rank has made since the last measurement.
    """

    def __init__(self, units: Sequence[Unit], agreement: GradientAgreement, remaining: Callable[[Unit], float]) -> None:
        self.agreement, self.writes = agreement, 0
        self._units, self._remaining = list(units), remaining
        self._norms: dict[int, _UnitNorms] = {}  # of a unit as soon as somebody asks
        self._versions: dict[int, int] = {}  # of units' gradients, when they were measured
        self._chunks: tuple[list[_Chunk], Tensor, Tensor, bool] | None = None  # see `_places_of`
        self._scaled_parts: dict[tuple[int, int], Any] = {}
        self._device = self._units[0].device if self._units else metadata_device(agreement.group)
        self._places = {unit.number: _NormPlaces(unit, agreement.tensors, self._device) for unit in self._units}
        self._message = _NormMessage(agreement, self._device)
        self._users = [0.0] * agreement.sizes[1]  # of a backward that every parameter took part in
        for place in agreement.parts.values():
            self._users[place] += 1.0

    def measure(
        self,
        absent: Mapping[int, set[int]],
        replaced: Mapping[int, set[int]],
        local_counts: tuple[int, int],
        *,
        norms: bool,
    ) -> tuple[dict[int, set[int]], float, float]:
        """Measure all gradients. Collective over the ranks of the agreement; every sum over ranks is there.

        Args:
            absent: Of each unit the members without a gradient on this rank.
            replaced: Those whose gradient was dropped or replaced by an assignment since the last time.
            local_counts: How many units' gradients this rank holds that are not summed, and how many of its backwards an error has ended.
            norms: Whether to measure norms, and not only who has a gradient.
        Returns:
            Of each unit the members that have a gradient on some rank; and `local_counts`, summed over the ranks.
        Raises:
            PlanError: a gradient was dropped or replaced on some of its ranks only, or ranks wrote different numbers of times
                ("sharded-gradient-ranks").
        Cost: 24 bytes a parameter, in one all-gather (in two all-reduces beside one another from nine ranks on); a read of this rank's
            sums on a CPU, two on a device, none where the pass that made them has measured them (`Gradients.norms`).
        """
        counted, parts, used = self.agreement.sizes[1], self.agreement.parts, self._users.copy()
        for unit in self._units:
            for member in absent[unit.number]:
                used[parts[unit.number, member]] -= 1.0
            for member in replaced.get(unit.number, ()):
                used[parts[unit.number, member]] += REPLACED
        if norms:
            self._local(self._message.table)
        counts = [*used, float(self.writes), float(self.writes**2), *map(float, local_counts)]
        *numbers, holding, ended = self._message.sum(counts, norms=norms)
        self._check(numbers)
        self.writes = 0
        self._scaled_parts.clear()
        self._norms.clear()
        self._versions = {unit.number: unit.gradients.version for unit in self._units} if norms else {}
        users = numbers[:counted]
        every = min(users, default=1.0) > 0.0 and max(users, default=1.0) < REPLACED
        present: dict[int, set[int]] = {}
        for unit in self._units:
            number, members = unit.number, range(len(unit.params))
            present[number] = (
                set(members) if every else {m for m in members if users[parts[number, m]] % REPLACED > 0.0}
            )
        return present, holding, ended

    def measurement_of(self, unit: Unit) -> Callable[[], Tensor]:
        """Return what measures the pieces of one unit before its sums leave the device."""
        owner, ranges = weakref.ref(unit), self._places[unit.number].ranges["all"]

        def measure() -> Tensor:
            alive = owner()
            sums = None if alive is None else alive.gradients.sums
            sources = [(sums[at], within) for at, within in ranges] if sums else []
            return norms_of_ranges(sources) if sources else torch.zeros(0, 2, dtype=torch.float64, device="cpu")

        return measure

    def _local(self, table: Tensor) -> None:
        """Write this rank's share of the squares, and the magnitudes of its elements, to rows that it has written before: [tensors, 2]."""
        rows, chunks = list[Tensor](), list[_Chunk]()
        unmeasured: dict[tuple[torch.device, torch.dtype], list[tuple[_Chunk, list[Tensor], _Ranges]]] = {}
        for unit in self._units:
            if not unit.gradients.has_sums:
                continue
            number, known, remaining = unit.number, self._places[unit.number], self._remaining(unit)
            factors, kind = (remaining * remaining / unit.groups.counts, abs(remaining)), "all"
            if (measured := unit.gradients.measured) is not None:
                rows.append(measured.to(table.device))
                chunks.append((number, kind, *factors))
                continue
            if (summed := unit.gradients.norms) is not None:
                kind = "others"
                if len(known.whole):
                    rows.append(summed.to(table.device).index_select(0, known.whole))
                    chunks.append((number, "whole", *factors))
            if (ranges := known.ranges[kind]) and (sums := unit.gradients.sums):
                same = unmeasured.setdefault((sums[0].device, sums[0].dtype), [])
                same.append(((number, kind, *factors), sums, ranges))
        for several in unmeasured.values():
            sources = [(sums[at], within) for _, sums, ranges in several for at, within in ranges]
            rows.append(norms_of_ranges(sources).to(table.device))
            chunks += [chunk for chunk, _, _ in several]
        if self._chunks is None or self._chunks[0] != chunks:
            self._chunks = chunks, *self._places_of(chunks)
            table.zero_()
        if not rows:
            return
        _, index, weights, once = self._chunks
        norms = (rows[0] if len(rows) == 1 else torch.cat(rows)) * weights
        if once:
            table.index_copy_(0, index, norms)
        else:
            table.zero_()
            table[:, 0].index_add_(0, index, norms[:, 0])
            table[:, 1].scatter_reduce_(0, index, norms[:, 1], "amax")

    def _places_of(self, chunks: list[_Chunk]) -> tuple[Tensor, Tensor, bool]:
        """Return the places of norms, [n], their factors, [n or 1, 2], and whether each is all that this rank has of its tensor."""
        places = [self._places[number].places[kind] for number, kind, _, _ in chunks]
        index = torch.cat(places) if places else torch.zeros(0, dtype=torch.int64, device=self._device)
        every = [list(factors) for _, _, *factors in chunks] or [[1.0, 1.0]]
        weights = torch.tensor(
            every[:1] if every.count(every[0]) == len(every) else every, dtype=torch.float64, device="cpu"
        )
        if len(weights) > 1:
            weights = weights.repeat_interleave(torch.tensor([len(place) for place in places], device="cpu"), 0)
        return index, weights.to(self._device), len(index.unique()) == len(index)

    def _check(self, numbers: list[float]) -> None:
        *users, writes, squares = numbers
        unequal = self.agreement.group.size * squares != writes * writes
        if not unequal and max(users, default=0.0) < REPLACED:
            return
        names = {place: key for key, place in self.agreement.parts.items()}
        partly = [names.get(i) for i, n in enumerate(users) if 0 < n // REPLACED < self.agreement.owners[i]]
        if partly or unequal:
            known = {unit.number: unit for unit in self._units}
            shown = [known[at[0]].spec.params[at[1]].name for at in partly if at is not None]
            raise replaced_on_some(shown)

    # ---- reads and writes

    def _norms_of(self, unit: Unit) -> _UnitNorms | None:
        """Return what is known of a unit's members; None where nothing was measured."""
        if unit.number not in self._versions:
            return None
        if (norms := self._norms.get(unit.number)) is None:
            at, (squares, peaks) = self._places[unit.number].members, self._message.totals()
            norms = self._norms[unit.number] = _UnitNorms(squares[at], peaks[at])
        return norms

    def of(self, unit: Unit, member: int) -> GradientNorms | None:
        """Return the norms of a parameter's gradient; None where a write has made them untrue.

        Raises:
            ShardedAccessError: some rank has no parameter of this model's others ("sharded-gradient-apart").
        """
        if (missing := self.agreement.missing) is not None:
            raise ShardedAccessError(
                f"the norm of the gradient of {unit.spec.params[member].name}: some rank has no {missing}, so a norm over one rank's "
                "parameters is not that of the model",
                code="sharded-gradient-apart",
                fix="Clip with `clip=` of ds_zero.shard, or with ds_pipe.clip_grad_norm_, which go over all ranks.",
            )
        norms = self._norms_of(unit)
        unknown = norms is None or member in norms.stale or self._versions[unit.number] != unit.gradients.version
        return (
            None
            if norms is None or unknown or self._scaled_parts
            else GradientNorms(norms.squares[member], norms.peaks[member])
        )

    def of_group(self, group: int | None, present: Mapping[int, set[int]]) -> GradientNorms | None:
        """Return the norms of all gradients of an optimizer group; None where one of them is not known."""
        every: list[GradientNorms] = []
        for unit in self._units:
            for member in present.get(unit.number, ()) if unit.spec.params[0].group == group else ():
                one = self.of(unit, member)
                if one is None:
                    return None
                every.append(one)
        if not every:
            return None
        return GradientNorms(
            torch.stack([one.square for one in every]).sum(), torch.stack([one.peak for one in every]).max()
        )

    def write(self, unit: Unit, members: Iterable[int], update: Callable[[], None], factor: Any) -> None:
        """Run a write to the gradients of some members, and follow it by algebra where it is a factor."""
        norms, number = self._norms_of(unit), unit.number
        if norms is not None and self._versions[number] != unit.gradients.version:
            norms.stale.update(range(len(unit.params)))
        update()
        self.writes += 1
        if norms is None:
            return
        self._versions[number] = unit.gradients.version
        self._follow(norms, members, factor)

    def write_part(self, unit: Unit, part: OptimizerSlice, update: Callable[[], None], factor: Any) -> None:
        """Run a write to a part of a unit; see the note "writes of parts"."""
        update()
        if unit.number in self._versions:
            self._versions[unit.number] = unit.gradients.version
        done, key = self._scaled_parts, (unit.number, part.start)
        done[key] = None if factor is None or key in done else factor
        first = next(iter(done.values()))
        every = sum(len(u.parts) for u in self._units)
        if len(done) < every or any(one is not first and not _equal(one, first) for one in done.values()):
            return
        if first is not None:
            done.clear()
            for other in self._units:
                if (norms := self._norms_of(other)) is not None:
                    self._follow(norms, range(len(other.params)), first)

    @staticmethod
    def _follow(norms: _UnitNorms, members: Iterable[int], factor: Any) -> None:
        if factor is None:
            norms.stale.update(members)
            return
        scaled, chosen = GradientNorms(norms.squares, norms.peaks).scaled(factor), list(members)
        if len(chosen) < len(norms.squares):
            squares, peaks, at = scaled.square, scaled.peak, torch.tensor(chosen, device=norms.squares.device)
            scaled = GradientNorms(
                norms.squares.index_copy(0, at, squares[at]), norms.peaks.index_copy(0, at, peaks[at])
            )
        norms.squares, norms.peaks = scaled.square, scaled.peak

    def moved(self, unit: Unit, before: int) -> None:
        """Go on with the norms of a unit whose sums were multiplied, and are the same gradient; `before` was their version."""
        if self._versions.get(unit.number) == before:
            self._versions[unit.number] = unit.gradients.version

    def zero(self) -> None:
        """Go on after every gradient was set to zero."""
        self._scaled_parts.clear()
        for unit in self._units:
            if (norms := self._norms_of(unit)) is not None:
                self._versions[unit.number], norms.stale = unit.gradients.version, set()
                norms.squares, norms.peaks = torch.zeros_like(norms.squares), torch.zeros_like(norms.peaks)

    def drop(self) -> None:
        """Forget all norms."""
        self._norms.clear()
        self._versions.clear()
        self._scaled_parts.clear()
        self.writes = 0


def _equal(one: Any, other: Any) -> bool:
    return isinstance(one, int | float) and isinstance(other, int | float) and one == other


def replaced_on_some(names: Sequence[str]) -> PlanError:
    """Build the error of gradients that ranks have written differently."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    what = f"param.grad of {shown} was set" if names else "gradients were written"
    return PlanError(
        f"{what} after a backward on some ranks and not on others, or another number of times: each rank has a part of every gradient",
        code="sharded-gradient-ranks",
        fix="Write gradients alike on every rank: take `if rank == 0` away, and let what decides be the same number on all of them.",
    )
