"""What the kernel says of this process's memory. Standard library only: workers run under the interpreters of peers, too."""

from __future__ import annotations


def status_bytes(name: str) -> int:
    """Return a line of /proc/self/status, for example VmRSS or VmHWM."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))


def pss_bytes() -> int:
    """Return the memory of this process, what it shares with others by equal parts."""
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
