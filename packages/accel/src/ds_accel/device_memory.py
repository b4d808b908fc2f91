"""Bytes in use: on a device what its allocator says, on the host what the kernel says.

Host figures come from /proc on Linux (resident set, proportional set, high-water mark) and from psutil elsewhere.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_accel.probes import find_package
from ds_config.errors import UnsupportedError

__all__ = ["MemoryStats", "ProcessMemory", "device_memory", "host_memory", "reset_host_peak"]

_PROC = Path("/proc/self")
_CGROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """One device as one process sees it, in bytes.

    Attributes:
        allocated: Held by tensors of this process (on the host: its resident set).
        peak: Most that `allocated` was since the last reset.
        reserved: Held by this process's allocator, free parts included (on the host: the resident set).
        peak_reserved: Most that `reserved` was since the last reset.
        free: What could still be had now, other processes considered.
        total: All there is.
    """

    allocated: int
    peak: int
    reserved: int
    peak_reserved: int
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """This process and its host, in bytes.

    Attributes:
        rss: Resident set: pages in memory, shared ones counted in full.
        pss: Proportional set: shared pages divided by those who share them; -1 where the system does not tell.
        peak_rss: Most that rss was since the start or the last `reset_host_peak`.
        available: What could be had without swapping, inside the limit of the container.
        total: Of the machine, or the limit of the container if that is less.
    """

    rss: int
    pss: int
    peak_rss: int
    available: int
    total: int


def host_memory(*, pss: bool = False, proc: Path = _PROC, cgroups: tuple[Path, ...] = _CGROUPS) -> ProcessMemory:
    """Read the memory of this process and of its host.

    Args:
        pss: Whether to read the proportional set, which costs a walk over all mappings (milliseconds per GB).
        proc: The process's directory in procfs; another one in tests.
        cgroups: Where the container's limit may stand; others in tests.
    Raises:
        UnsupportedError: there is no procfs, and psutil is not installed ("accel-host-memory").
    """
    if not (proc / "status").exists():
        return _from_psutil()
    status, machine = _kilobytes(proc / "status"), _kilobytes(proc.parent / "meminfo")
    total, available = machine["MemTotal"], machine["MemAvailable"]
    limit, used = _container(cgroups)
    if limit < total:
        total, available = limit, min(available, max(limit - used, 0))
    shared = _kilobytes(proc / "smaps_rollup").get("Pss", -1) if pss and (proc / "smaps_rollup").exists() else -1
    return ProcessMemory(status["VmRSS"], shared, status["VmHWM"], available, total)


def reset_host_peak(proc: Path = _PROC) -> bool:
    """Set the high-water mark of this process to what it holds now; False where the system cannot."""
    try:
        (proc / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def device_memory(module: Any, index: int) -> MemoryStats:
    """Ask a device's module. What the module cannot tell is 0, except that reserved falls back to allocated.

    Cost: no synchronisation; one driver call for `free` and `total`.
    """

    # A module without current_device (mps) has one device, and functions that take no index.
    where = (index,) if hasattr(module, "current_device") else ()

    def read(*names: str) -> int:
        function = next((getattr(module, name) for name in names if hasattr(module, name)), None)
        return 0 if function is None else int(function(*where))

    allocated = read("memory_allocated", "current_allocated_memory")
    peak = read("max_memory_allocated") or allocated
    reserved = read("memory_reserved", "driver_allocated_memory") or allocated
    free, total = _free_and_total(module, index, reserved)
    return MemoryStats(allocated, peak, reserved, read("max_memory_reserved") or reserved, free, total)


def _free_and_total(module: Any, index: int, reserved: int) -> tuple[int, int]:
    if hasattr(module, "mem_get_info"):
        free, total = module.mem_get_info(index)
        return int(free), int(total)
    if hasattr(module, "get_device_properties"):
        total = int(module.get_device_properties(index).total_memory)
    else:
        total = int(getattr(module, "recommended_max_memory", lambda: 0)())
    return max(total - reserved, 0), total


def _kilobytes(file: Path) -> dict[str, int]:
    """Parse the `Name:  123 kB` lines of a procfs file into bytes by name."""
    sizes = {}
    for line in file.read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            sizes[name] = int(words[0]) * 1024
    return sizes


def _container(cgroups: tuple[Path, ...]) -> tuple[int, int]:
    """Return (limit, used) in bytes of the control group, version 2 or 1.

    Without a limit, returns (1 << 62, 0).
    """
    for root in cgroups:
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = root / limit_name, root / used_name
            if limit.exists() and used.exists():
                text = limit.read_text().strip()
                if text.isdigit():
                    return int(text), int(used.read_text())
    return 1 << 62, 0


def _from_psutil() -> ProcessMemory:
    if not find_package("psutil"):
        raise UnsupportedError(
            "the memory of this process: this system has no /proc, and psutil is not installed.",
            code="accel-host-memory",
            fix="pip install 'ds-accel[psutil]'.",
        )
    psutil = importlib.import_module("psutil")
    process, machine = psutil.Process().memory_info(), psutil.virtual_memory()
    return ProcessMemory(process.rss, -1, getattr(process, "peak_wset", process.rss), machine.available, machine.total)
