"""What ranks tell each other before gathers that no recorded order of the whole model covers, so that none takes another unit's bytes.

The order of a phase is that of the module whose forward begins it, so the ranks must have begun the same one. Where a program calls
submodules by themselves, they say which: if they called several, all of them follow the orders of these modules one after the other.

A gather on the spot has no order. Where ranks may need other units, or some rank none, they meet in *rounds* after the order of a forward: in
each, a rank says which unit it needs once more, or that its forward is over; all gather the units that were named. A rank whose forward
is over goes on with rounds until everybody's is. Messages go over the group of the gathers, behind those of the order, so each
rank sends them at the same place whenever it comes to them.
"""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

import ds_comm as comm
from ds_comm import Group
from ds_comm.metadata import metadata_device
from ds_config.errors import PlanError
from ds_zero.runtime.unit import Unit

__all__ = ["GatherAgreement"]


class GatherAgreement:
    """The words of one model's released units. Every method is collective over the ranks that share their shards.

    Args:
        units: In canonical order.
        released: Numbers of those that have no memory between uses.
        modules: Names of the modules that begin phases, alike on all ranks.
    """

    def __init__(self, units: Sequence[Unit], released: Sequence[int], modules: Sequence[str]) -> None:
        self._units, self._modules = units, list(modules)
        self._members = list(dict.fromkeys(units[number].groups.shard_group.ranks for number in released))
        self._first = units[released[0]]
        counters: dict[str, Iterator[int]] = defaultdict(itertools.count)
        # Numbers may differ between ranks that have parameters of other families; the place within the family does not.
        self._places = [next(counters[unit.spec.family]) for unit in units]
        keys = [(zlib.crc32(unit.spec.family.encode()), place) for unit, place in zip(units, self._places, strict=True)]
        self._keys = {number: keys[number] for number in released}
        self._numbers = {key: number for number, key in self._keys.items()}
        wide = max((units[number].groups for number in released), key=lambda one: one.shard_group.size)
        everyone = set(wide.shard_group.ranks)
        alone = everyone == {wide.shard_group.global_rank} or not all(everyone >= set(ranks) for ranks in self._members)
        self._round_group = None if alone else wide.gather_group

    @property
    def has_rounds(self) -> bool:
        """Whether some group has all ranks that a unit is gathered from; the same on all of them."""
        return self._round_group is not None

    @property
    def waits_for_device(self) -> bool:
        """Whether a round reads its answer from a device, which waits for what the device has to do before."""
        return self._round_group is not None and metadata_device(self._round_group).type != "cpu"

    def meet(self, number: int | None, path: Sequence[int] = ()) -> tuple[list[int], bool, bool]:
        """Have a round: say which unit this rank needs once more in its forward, None where the forward is over.

        Args:
            path: The units that the forward needed, where it is over.
        Returns:
            The units that ranks need and this rank has a shard of, in an order that is the same on all ranks; whether every rank's forward is
            over, and whether all said the same path.
        Cost: an all-gather of 24 bytes a rank; waits for it.
        """
        group = self._round_group
        if group is None:
            raise RuntimeError("a round without a group")
        key = (0, 0) if number is None else (self._keys[number][0], self._keys[number][1] + 1)
        digest = zlib.crc32(repr([self._keys[one] for one in path]).encode())
        rows = torch.empty((group.size, 3), dtype=torch.int64, device=metadata_device(group))
        comm.all_gather_single(rows, torch.tensor([[*key, digest]], device=rows.device), group, unit="order of gathers")
        wanted: dict[int, None] = {}
        over, paths = True, set()
        for rank, (family, place, one) in zip(group.ranks, rows.tolist(), strict=True):
            paths.add(one)
            over = over and not place
            match = self._numbers.get((family, place - 1)) if place else None
            if match is not None and rank in self._units[match].groups.shard_group.ranks:
                wanted[match] = None
        return list(wanted), over, len(paths) == 1

    def modules_of_phase(self, name: str) -> list[str]:
        """Return the modules whose forwards begin now on some rank, each once, by rank; `name` is this rank's.

        Raises:
            PlanError: they differ, and units are cut over several sets of ranks, which do not know each other's ("zero-calls-differ").
        Cost: an all-gather of 8 bytes a rank.
        """
        called = self._all_of(self._modules.index(name), self._first)
        names = [self._modules[number] for number in dict.fromkeys(called)]
        if len(names) > 1 and len(self._members) > 1:
            raise PlanError(
                f"the ranks call other modules by themselves: {', '.join(names)}, of a model whose units are cut over {len(self._members)} sets "
                "of ranks",
                code="zero-calls-differ",
                fix="Call the same module on every rank, or the forward of the whole model.",
            )
        return names

    def check_on_the_spot(self, number: int) -> None:
        """Raise on every rank if the ranks are about to gather other units on the spot.

        Raises:
            PlanError: with the units of two ranks ("zero-calls-differ").
        Cost: an all-gather of 8 bytes a rank; waits for it.
        """
        unit = self._units[number]
        places = self._all_of(self._places[number], unit)
        if len(set(places)) == 1:
            return
        family = [one for one in self._units if one.spec.family == unit.spec.family]
        other = next(i for i, place in enumerate(places) if place != places[0])
        ranks = unit.groups.shard_group.ranks
        raise PlanError(
            f"rank {ranks[0]} needs {family[places[0]].spec.name} once more and rank {ranks[other]} {family[places[other]].spec.name}: the ranks "
            "took other paths through modules that share weights",
            code="zero-calls-differ",
            fix="Make every rank use the shared weights in the same order, or keep them gathered (UnitSizePolicy.persist_numel).",
        )

    @staticmethod
    def _all_of(value: int, unit: Unit) -> list[int]:
        group: Group = unit.groups.gather_group
        if group.size == 1:
            return [value]
        mine = torch.tensor([value], dtype=torch.int64, device=metadata_device(group))
        values = mine.new_empty(group.size)
        comm.all_gather_single(values, mine, group, unit="order of gathers")
        numbers: list[int] = values.tolist()
        return numbers
