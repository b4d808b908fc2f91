"""Host memory for state: page-locked where the device gains from it, plain otherwise, and how much of it there is."""

from __future__ import annotations

import logging
import mmap

import torch
from torch import Tensor

from ds_accel import host_memory
from ds_config.errors import PlanError
from ds_config.sizes import bytes_text

__all__ = ["PAGE_BYTES", "check_room", "host_bytes", "room_refusal"]

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


def check_room(needed: int, ranks: int, *, what: str) -> None:
    """Refuse, before anything is allocated, what the host cannot hold.

    Args:
        needed: Bytes of one rank.
        ranks: Of this host, all of which need as much.
    Raises:
        PlanError: "offload-host-memory", with what was planned and what there is.
    """
    available = host_memory().available
    if needed * ranks > available:
        raise room_refusal(
            f"{ranks} ranks of this host would keep {bytes_text(needed)} each in its memory, together {bytes_text(needed * ranks)}, "
            f"of which {bytes_text(available)} are free:\n{what}"
        )


def room_refusal(text: str) -> PlanError:
    """What `check_room` raises, on a rank that is told of it by another."""
    return PlanError(
        text,
        code="offload-host-memory",
        fix="Offload to files (device: nvme), offload a smaller ratio, or use more hosts.",
    )
