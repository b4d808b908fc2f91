"""Where state rests between uses, as a value. No tensor, no file.

Words: a *placement* is said for a role: that of masters and optimizer state (`ShardOptions.tier`), or that of parameters
(`ShardOptions.rest`). *Host* is memory of the CPU, page-locked where that makes copies faster. *File* is a scratch file of each rank,
of which a bounded number of *buffers* is in host memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ds_config.errors import PlanError
from ds_ops.io import IOSettings
from ds_zero.layout.residency import UnitBytes
from ds_zero.layout.units import UnitSpec

__all__ = ["Placement", "placed_numel"]


@dataclass(frozen=True, slots=True)
class Placement:
    """A place for state, usable as `tier=` and `rest=` of `shard`.

    Attributes:
        where: `"host"` or `"file"`.
        folder: Of the scratch files; made if it is not there. Nothing is left in it, however the process ends.
        pin: Page-lock host memory where the device gains from it; a refusal falls back to plain memory with one warning.
        share: Which part of the elements is placed there, counted from the model's end; the rest stays on the device.
        buffers: Units of which the bytes of a file may be in memory at a time, at least 2.
        near: Of parameters: so many elements of a rank stay in host memory before files are used.
        read_ahead: Read the next unit while one is used.
        write_behind: Write a unit while the next one is used.
        io: How transfers are cut and queued.
    Raises:
        PlanError: a file without a folder, or a number out of range ("offload-placement").
    """

    where: Literal["host", "file"] = "host"
    folder: str | None = None
    pin: bool = True
    share: float = 1.0
    buffers: int = 4
    near: int = 0
    read_ahead: bool = True
    write_behind: bool = True
    io: IOSettings = field(default_factory=IOSettings)

    def __post_init__(self) -> None:
        wrong = []
        if self.where not in ("host", "file"):
            wrong.append(f"where is 'host' or 'file', not {self.where!r}")
        if (self.where == "file") != (self.folder is not None):
            wrong.append(f"where = {self.where!r} with folder = {self.folder!r}")
        if self.buffers < 2:
            wrong.append(f"buffers = {self.buffers}, at least 2 are needed to overlap anything")
        if not 0.0 <= self.share <= 1.0:
            wrong.append(f"share = {self.share}, not between 0 and 1")
        if wrong:
            raise PlanError(
                "; ".join(wrong), code="offload-placement", fix="Give a folder for files, and none for host memory."
            )

    def __str__(self) -> str:
        return self.where

    resident = False
    """Never a range of the buffer that forward uses."""

    @property
    def alone(self) -> bool:
        """Whether a unit is updated by itself: so many buffers hold all that is in memory."""
        return self.where == "file"

    def planned(self, found: UnitBytes) -> UnitBytes:
        """Masters and optimizer state are here instead of on the device. Pure."""
        moved = found.shard + found.optim
        return replace(found, shard=0, optim=0, **{self.where: getattr(found, self.where) + moved})

    def planned_rest(self, found: UnitBytes) -> UnitBytes:
        """What gathers send is here instead of on the device. Pure."""
        return replace(found, full=0, **{self.where: getattr(found, self.where) + found.full})

    def staging(self, units: Sequence[UnitBytes]) -> int:
        """Bytes of host memory for what is on its way to or from files."""
        if self.where != "file":
            return 0
        return min(self.buffers, len(units)) * max((_pages(unit.file) for unit in units), default=0)

    def spread(self, units: Sequence[UnitSpec]) -> list[str | Placement]:
        """Of each unit, in canonical order, whether it is placed here. Whole units: at least the share asked for."""
        numels = [unit.numel if unit.trained else 0 for unit in units]
        return [self if here else "device" for here in placed_numel(numels, self.share)]

    def spread_rest(self, numels: Sequence[int]) -> list[Placement]:
        """Of each unit, in canonical order, where its parameters rest, given the elements that a rank keeps of it."""
        host, done, found = replace(self, where="host", folder=None, near=0), 0, []
        for numel in numels:
            done += numel
            found.append(host if self.where == "file" and done <= self.near else self)
        return found


def placed_numel(numels: Sequence[int], share: float) -> list[bool]:
    """Which of several units are in the last `share` of all elements, counting a unit that lies across the border in."""
    kept, done = (1.0 - share) * sum(numels), 0
    found = []
    for numel in numels:
        done += numel
        found.append(share > 0.0 and done > kept)
    return found


def _pages(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096
