"""Upstream's helpers around the launcher: hosts, filters, the classes that make a command for many hosts, the cores of a rank.

`ds_launcher` starts programs; these are for programs that look at hosts themselves, or bring a runner of their own.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import shlex
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed._ours.base.raising import refused
from ds_launcher import cpu_binding
from ds_launcher.backends import BACKENDS, LaunchJob
from ds_launcher.inventory import Host, Inventory, parse_filter, parse_hostfile, read_hostfile, select
from ds_launcher.launch_options import joined, options_of, register
from ds_launcher.launch_plan import Process

_PLAIN = re.compile(r"[\w@%+=:,./-]*", re.ASCII)


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Read a hostfile into host -> slots; None when the file does not exist.

    Raises:
        ConfigError: a bad line, a host given twice, no host at all, no text ("launch-hostfile").
    """
    if not Path(hostfile_path).is_file():
        return None
    return {host.name: len(host.slots) for host in read_hostfile(hostfile_path)}


def hosts_of(hostfile_lines: Iterable[str]) -> dict[str, int]:
    """Parse a hostfile's lines into host -> slots. See `fetch_hostfile`."""
    text = "\n".join(line.strip() for line in hostfile_lines)
    return {host.name: len(host.slots) for host in parse_hostfile(text, "the hostfile")}


def _inventory(pool: Mapping[str, int | Sequence[int]]) -> Inventory:
    return tuple(
        Host(name, tuple(range(slots)) if isinstance(slots, int) else tuple(slots)) for name, slots in pool.items()
    )


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Return the slots that a filter `host[:slot,slot]@host...` includes, or does not exclude; may be empty.

    Raises:
        ConfigError: both filters are given, or a filter names an unknown host or slot ("launch-filter").
    """
    if not include_str and not exclude_str:
        return {name: list(slots) for name, slots in host_info.items()}
    selected = select(_inventory(host_info), include_str, exclude_str, some=False)
    order = list(parse_filter(include_str)) if include_str else [host.name for host in selected]
    slots = {host.name: list(host.slots) for host in selected}
    return {name: slots[name] for name in order if name in slots}


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """`parse_resource_filter` of what `fetch_hostfile` gives."""
    slots = {name: list(range(count)) for name, count in resource_pool.items()}
    return parse_resource_filter(slots, include_str=inclusion, exclude_str=exclusion)


def encode_world_info(world_info: Mapping[str, Any]) -> str:
    """Encode hosts and their slots as text for a command line."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def decode_world_info(text: str) -> Any:
    """Decode the text of `encode_world_info` into hosts and their slots."""
    return json.loads(base64.urlsafe_b64decode(text))


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of `deepspeed`: those of `ds run`, with the script as `user_script` and its `user_args`."""
    parser = argparse.ArgumentParser(prog="deepspeed")
    register(parser)
    parser.allow_abbrev = True  # as upstream's
    words = [
        ("--launcher_args" if word == "--launcher_arg" else word) for word in (sys.argv[1:] if args is None else args)
    ]
    namespace = parser.parse_args(joined(words))
    options_of(namespace)
    namespace.user_script, namespace.user_args = namespace.script, list(namespace.script_args)
    return namespace


class MultiNodeRunner(ABC):
    """The base of a way to start a script on many hosts, for programs that bring their own.

    Attributes:
        exports: Variables for the other hosts, quoted for a shell where that is needed.
    """

    def __init__(self, args: Any, world_info_base64: str) -> None:
        self.args = args
        self.world_info_base64 = world_info_base64
        self.user_arguments = self.parse_user_args()
        self.user_script = args.user_script
        self.exports: dict[str, str] = {}
        self.validate_args()

    @abstractmethod
    def backend_exists(self) -> bool:
        """Whether the program that reaches hosts is there."""

    @abstractmethod
    def get_cmd(self, environment: Mapping[str, str], active_resources: Mapping[str, Any]) -> Any:
        """Build the command that starts the script on all hosts."""

    def add_export(self, key: str, var: str) -> None:
        """Give a variable to the other hosts."""
        text = str(var).strip()
        self.exports[key.strip()] = text if _PLAIN.fullmatch(text) else f'"{text}"'

    def parse_user_args(self) -> list[str]:
        """Quote the script's arguments for a shell."""
        return [shlex.quote(str(arg)) for arg in self.args.user_args]

    @property
    def name(self) -> str:
        """Of the class."""
        return type(self).__name__

    def validate_args(self) -> None:  # noqa: B027  a runner may forbid something
        """Raise for arguments that this way cannot serve."""


class _BackendRunner(MultiNodeRunner):
    """A way of ds-launcher, as a runner. `get_cmd` gives one command line that starts every host."""

    BACKEND = ""

    def __init__(self, args: Any, world_info_base64: str, resource_pool: Mapping[str, Any] | None = None) -> None:
        super().__init__(args, world_info_base64)
        self.resource_pool = resource_pool

    def backend_exists(self) -> bool:
        return shutil.which(BACKENDS[self.BACKEND].tool) is not None

    @property
    def name(self) -> str:
        return self.BACKEND

    def _launcher_args(self, args: list[str]) -> tuple[str, ...]:
        return tuple(args)

    def _process(self, environment: Mapping[str, str], active_resources: Mapping[str, Any]) -> Process:
        del environment
        settings = options_of(self.args)
        flags = (
            ("--module", settings.module),
            ("--no-python", settings.no_python),
            ("--local-rank-arg", settings.local_rank_arg),
        )
        job = LaunchJob(
            inventory=_inventory(active_resources), python=sys.executable, cwd=os.getcwd(),
            options=tuple(flag for flag, on in flags if on),
            command=(self.user_script, *map(str, self.args.user_args)), exports=self.exports,
            launcher_args=self._launcher_args(shlex.split(settings.launcher_args)),
            ssh_port=settings.ssh_port if settings.ssh_port > 0 else None,
        )  # fmt: skip
        return BACKENDS[self.BACKEND].build(job)[0]

    def get_cmd(self, environment: Mapping[str, str], active_resources: Mapping[str, Any]) -> Any:
        return list(self._process(environment, active_resources).argv)


class PDSHRunner(_BackendRunner):
    """Hosts reached by pdsh."""

    BACKEND = "pdsh"

    def get_cmd(self, environment: Mapping[str, str], active_resources: Mapping[str, Any]) -> Any:
        """Return the start command, the stop command and the environment.

        The stop command does nothing: a node stops its ranks when its connection ends.
        """
        process = self._process(environment, active_resources)
        return list(process.argv), ["true"], {**environment, **process.env}


class OpenMPIRunner(_BackendRunner):
    """Hosts reached by Open MPI's mpirun, by the interface eth0 unless `launcher_args` say another, as upstream's are."""

    BACKEND = "openmpi"

    def _launcher_args(self, args: list[str]) -> tuple[str, ...]:
        return (*(() if "btl_tcp_if_include" in args else ("--mca", "btl_tcp_if_include", "eth0")), *args)


def _reached_by(program: str, backend: str, name: str) -> type[_BackendRunner]:
    there = {"__module__": __name__, "__doc__": f"Hosts reached by {program}.", "BACKEND": backend}
    return type(name, (_BackendRunner,), there)


MPICHRunner = _reached_by("MPICH's mpirun", "mpich", "MPICHRunner")
IMPIRunner = _reached_by("Intel MPI's mpirun", "impi", "IMPIRunner")
MVAPICHRunner = _reached_by("MVAPICH's mpirun", "mvapich", "MVAPICHRunner")
SlurmRunner = _reached_by("srun", "slurm", "SlurmRunner")


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
