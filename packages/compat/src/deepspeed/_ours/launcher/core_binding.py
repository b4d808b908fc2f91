"""`deepspeed.utils.numa`: which processor cores a rank of a host takes, for programs that bind ranks themselves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from deepspeed._ours.base.raising import refused
from ds_launcher import cpu_binding

_NODES = Path("/sys/devices/system/node")


def parse_range_list(range_str: str) -> list[int]:
    """Parse "0,2-4" into its numbers: ranges in ascending order that do not overlap.

    Raises:
        ValueError: any other text.
    """
    return list(cpu_binding.parse_ranges(range_str))


def get_numa_cores() -> list[list[int]]:
    """List the cores of each NUMA node, by the kernel's own numbers; empty where the kernel lists no nodes."""
    nodes = sorted(_NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    lists = [(node / "cpulist").read_text().strip() for node in nodes if (node / "cpulist").is_file()]
    return [parse_range_list(text) if text else [] for text in lists]


def get_numactl_cmd(bind_core_list: str | None, num_local_procs: int, local_rank: int) -> tuple[int, list[str]]:
    """Return the cores per rank, and the numactl command prefix that binds a rank to its cores and their memory.

    Args:
        bind_core_list: Cores to share, as `parse_range_list` reads them; None: those this process may use.
    Raises:
        ValueError: KMP_AFFINITY is set, which would bind threads another way, or there are fewer cores than ranks.
    """
    if "KMP_AFFINITY" in os.environ:
        raise refused("kmp-affinity")
    usable = sorted(os.sched_getaffinity(0)) if bind_core_list is None else parse_range_list(bind_core_list)
    each = len(usable) // num_local_procs
    if each < 1:
        raise refused("cores-of-ranks", num_local_procs, len(usable))
    rank_cores = usable[each * local_rank : each * (local_rank + 1)]
    return each, ["numactl", "-C", _text(rank_cores), *_memory(rank_cores)]


def _text(numbers: Sequence[int]) -> str:
    """Numbers as ranges: "0-3,8"."""
    parts: list[list[int]] = []
    for core in numbers:
        if parts and parts[-1][-1] == core - 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _memory(cores: Sequence[int]) -> list[str]:
    """Return the numactl option for the NUMA nodes of these cores; empty on a host with fewer than two nodes."""
    nodes = get_numa_cores()
    near = [number for number, node in enumerate(nodes) if set(node) & set(cores)]
    return ["-m", _text(near)] if near and len(nodes) > 1 else []
