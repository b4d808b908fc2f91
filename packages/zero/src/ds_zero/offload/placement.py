"""Where state is kept between uses, as a value; and the host memory there is for it.

Words: a *placement* is given for a role: masters and optimizer state (`ShardOptions.tier`), or parameters (`ShardOptions.param_tier`). *Host*
is memory of the CPU, page-locked where that makes copies faster. *File* is a scratch file of each rank, of which a bounded number of
*buffers* is in host memory at a time.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ds_accel import host_memory
from ds_config.errors import PlanError
from ds_config.sizes import bytes_text
from ds_ops.io import IOSettings
from ds_zero.layout.units import UnitBytes, UnitSpec

__all__ = ["PAGE_BYTES", "Placement", "host_bytes", "placed_numel", "room_refusal"]


@dataclass(frozen=True, slots=True)
class Placement:
    """A place for state, usable as `tier=` and `param_tier=` of `shard`.

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

    def planned_params(self, found: UnitBytes) -> UnitBytes:
        """What gathers send is here instead of on the device. Pure."""
        return replace(found, full=0, **{self.where: getattr(found, self.where) + found.full})

    def staging(self, units: Sequence[UnitBytes]) -> int:
        """Bytes of host memory for what is on its way to or from files."""
        if self.where != "file":
            return 0
        return min(self.buffers, len(units)) * max(
            (-(-unit.file // PAGE_BYTES) * PAGE_BYTES for unit in units), default=0
        )

    def spread(self, units: Sequence[UnitSpec]) -> list[str | Placement]:
        """Of each unit, in canonical order, whether it is placed here. Whole units: at least the share asked for."""
        numels = [unit.numel if unit.trained else 0 for unit in units]
        return [self if here else "device" for here in placed_numel(numels, self.share)]

    def spread_params(self, numels: Sequence[int]) -> list[Placement]:
        """Of each unit, in canonical order, where its parameters are between uses, given the elements that a rank keeps of it."""
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


_log = logging.getLogger("ds_zero")
PAGE_BYTES = 4096
_told: set[str] = set()


def host_bytes(nbytes: int, device: torch.device, *, pin: bool) -> Tensor:
    """[nbytes], uint8, on the host, starts on a page. Zero.

    Args:
        device: What it is copied to and from; page-locked memory helps where that is not the host itself.
    Page-locking may be refused (RLIMIT_MEMLOCK, the driver): then the memory is plain, with one warning a process.
    """
    if pin and device.type not in ("cpu", "meta", "mps"):
        try:
            return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            if "pin" not in _told:
                _told.add("pin")
                _log.warning(
                    "zero: page-locking %s was refused (%s): plain memory is used, copies are slower",
                    bytes_text(nbytes),
                    str(error).partition("\n")[0],
                )
    region = mmap.mmap(-1, max(PAGE_BYTES, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8)[:nbytes]


def room_refusal(needed: int, ranks: int, *, what: str) -> str:
    """Why the host cannot hold what its `ranks` would keep there, `needed` bytes each; empty if it can."""
    available = host_memory().available
    if needed * ranks <= available:
        return ""
    return (
        f"{ranks} ranks of this host would keep {bytes_text(needed)} each in its memory, together {bytes_text(needed * ranks)}, "
        f"of which {bytes_text(available)} are free:\n{what}"
    )
