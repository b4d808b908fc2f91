"""Upstream's helpers around the launcher: hosts, filters, the classes that make a command for many hosts.

`ds_launcher` starts programs; these are for programs that look at hosts themselves, or bring a runner of their own.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed._ours.raising import raising
from ds_launcher.inventory import Host, Inventory, parse_filter, parse_hostfile, select
from ds_launcher.options import options_of, register

__all__ = [
    "MultiNodeRunner",
    "decode_world_info",
    "encode_world_info",
    "fetch_hostfile",
    "parse_args",
    "parse_inclusion_exclusion",
    "parse_resource_filter",
]

_PLAIN = re.compile(r"[\w@%+=:,./-]*", re.ASCII)


@raising(ValueError)
def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Host -> slots of a hostfile; None when there is no such file.

    Raises:
        ConfigError: a bad line, a host given twice, no host at all ("launch-hostfile").
    """
    path = Path(hostfile_path)
    if not path.is_file():
        return None
    return {host.name: len(host.slots) for host in parse_hostfile(path.read_text(encoding="utf-8"), str(path))}


def _inventory(pool: Mapping[str, int | Sequence[int]]) -> Inventory:
    return tuple(
        Host(name, tuple(range(slots)) if isinstance(slots, int) else tuple(slots)) for name, slots in pool.items()
    )


@raising(ValueError)
def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """The slots that a filter `host[:slot,slot]@host...` keeps, or leaves.

    Raises:
        ConfigError: both are given, or they name what is not there ("launch-filter").
    """
    if not include_str and not exclude_str:
        return {name: list(slots) for name, slots in host_info.items()}
    kept = select(_inventory(host_info), include_str, exclude_str)
    order = list(parse_filter(include_str)) if include_str else [host.name for host in kept]
    slots = {host.name: list(host.slots) for host in kept}
    return {name: slots[name] for name in order if name in slots}


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """`parse_resource_filter` of what `fetch_hostfile` gives."""
    slots = {name: list(range(count)) for name, count in resource_pool.items()}
    return parse_resource_filter(slots, include_str=inclusion, exclude_str=exclusion)


def encode_world_info(world_info: Mapping[str, Any]) -> str:
    """Hosts and their slots as text for a command line."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def decode_world_info(text: str) -> Any:
    """What `encode_world_info` was given."""
    return json.loads(base64.urlsafe_b64decode(text))


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of `deepspeed`: those of `ds run`, and the script as `user_script` with its `user_args`."""
    parser = argparse.ArgumentParser(prog="deepspeed")
    register(parser)
    given = parser.parse_args(args)
    options_of(given)
    given.user_script, given.user_args = given.script, list(given.script_args)
    return given


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
        """The command that starts the script on all hosts."""

    def add_export(self, key: str, var: str) -> None:
        """Give a variable to the other hosts."""
        text = str(var).strip()
        self.exports[key.strip()] = text if _PLAIN.fullmatch(text) else f'"{text}"'

    def parse_user_args(self) -> list[str]:
        """The script's own arguments, quoted for a shell."""
        return [shlex.quote(str(arg)) for arg in self.args.user_args]

    @property
    def name(self) -> str:
        """Of the class."""
        return type(self).__name__

    def validate_args(self) -> None:  # noqa: B027  a runner may forbid something
        """Raise for arguments that this way cannot serve."""
