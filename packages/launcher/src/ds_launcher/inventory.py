"""Hosts and their slots: from a hostfile or Slurm, narrowed by filters. Pure, but for reading the file.

Words: a *slot* is a place for one rank, numbered on its host; on a host with devices it is a position among the devices that
are visible there. Global ranks go host by host, slot by slot, in the order of the inventory.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_config.did_you_mean import nearest
from ds_config.errors import ConfigError
from ds_config.regular_file import read_regular_text

__all__ = [
    "Host",
    "Inventory",
    "decode",
    "encode",
    "expand_nodelist",
    "from_slurm",
    "is_host",
    "limit",
    "number_in",
    "parse_filter",
    "parse_hostfile",
    "read_hostfile",
    "select",
    "slurm_gpus",
]


@dataclass(frozen=True, slots=True)
class Host:
    """A host and the slots that are used on it, ascending."""

    name: str
    slots: tuple[int, ...]


Inventory = tuple[Host, ...]
_MOST_SLOTS = 1 << 16  # on one host
_MOST_SLOTS_OF_ALL = 1 << 20
_MOST_HOSTS = 1 << 17
_MOST_DIGITS = 9
_LONGEST_NAME = 253  # characters of a host's name in the DNS
_NAME = re.compile(r"[^\s,@#\x00-\x20-][^\s,@#\x00-\x20]{0,252}")  # one that ssh would take for an option is none
_LINE = re.compile(r"(?P<host>\S+)\s+slots\s*=\s*(?P<slots>\d+)")


def parse_hostfile(text: str, source: str = "hostfile") -> Inventory:
    """Read lines `host slots=n`; `#` starts a comment.

    Raises:
        ConfigError: every bad line, host given twice, host without slots, or an empty file, in one error ("launch-hostfile").
    """
    hosts: dict[str, Host] = {}
    problems = []
    total = 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("#", 1)[0].strip()
        match = _LINE.fullmatch(line)
        if not line:
            continue
        if match is None:
            problems.append(f"{source}:{number}: found {line[:200]!r}, expected `host slots=n`")
        elif not is_host(match["host"]):
            problems.append(f"{source}:{number}: {match['host'][:80]!r} is no name of a host")
        elif match["host"] in hosts:
            problems.append(f"{source}:{number}: host {match['host']!r} is given a second time")
        elif not (slots := number_in(match["slots"])):
            problems.append(f"{source}:{number}: host {match['host']!r} has no slots")
        elif slots > _MOST_SLOTS:
            problems.append(f"{source}:{number}: {match['slots'][:20]} slots on one host, at most {_MOST_SLOTS}")
        elif (total := total + slots) > _MOST_SLOTS_OF_ALL:
            problems.append(f"{source}:{number}: {total} slots up to here, at most {_MOST_SLOTS_OF_ALL}")
        else:
            hosts[match["host"]] = Host(match["host"], tuple(range(slots)))
    if not hosts and not problems:
        problems.append(f"{source}: names no host")
    if problems:
        more = [f"and {len(problems) - 50} more"] if len(problems) > 50 else []
        raise ConfigError(
            "\n  ".join([*problems[:50], *more]), code="launch-hostfile", fix="One line per host: `node1 slots=8`."
        )
    return tuple(hosts.values())


def read_hostfile(path: str | Path) -> Inventory:
    """`parse_hostfile` of a file.

    Raises:
        ConfigError: also when there is no such file ("launch-hostfile").
    """
    try:
        text = read_regular_text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the hostfile {path} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}",
            code="launch-hostfile",
            fix="Give its path with --hostfile, or leave that out to run on this host.",
        ) from error
    return parse_hostfile(text, str(path))


def parse_filter(text: str) -> dict[str, tuple[int, ...]]:
    """Read `host[:slot[,slot]...][@host...]`; an empty tuple means all slots of the host. A host named again adds its slots.

    Raises:
        ConfigError: not of this form ("launch-filter").
    """
    chosen: dict[str, set[int]] = {}  # an empty set: all slots
    for part in text.split("@"):
        name, colon, slots = part.strip().partition(":")
        numbers = slots.split(",") if colon else []
        if not name or any(number_in(number) is None for number in numbers):
            raise ConfigError(
                f"the filter {text[:200]!r} has the part {part[:200]!r}, which is not `host` or `host:slot,slot`",
                code="launch-filter",
                fix="Write it as host1@host2:0,2 - hosts separated by @, slots after a colon.",
            )
        every = not numbers or chosen.get(name) == set()
        if every:
            chosen[name] = set()
        else:
            chosen.setdefault(name, set()).update(int(number) for number in numbers)
    return {name: tuple(sorted(slots)) for name, slots in chosen.items()}


def select(inventory: Inventory, include: str = "", exclude: str = "", *, some: bool = True) -> Inventory:
    """Keep what `include` names, or drop what `exclude` names; the inventory's order stays.

    Args:
        some: Whether something must be left.
    Raises:
        ConfigError: both are given, they name a host or a slot that is not there, or nothing is left ("launch-filter").
    """
    if include and exclude:
        raise ConfigError(
            f"include ({include!r}) and exclude ({exclude!r}) are both given",
            code="launch-filter",
            fix="Give one of them.",
        )
    chosen = parse_filter(include or exclude) if include or exclude else {}
    _check_known(inventory, chosen)
    selected = []
    for host in inventory:
        named = set(chosen.get(host.name, ())) or set(host.slots)
        if include:
            slots = tuple(slot for slot in host.slots if host.name in chosen and slot in named)
        else:
            slots = tuple(slot for slot in host.slots if host.name not in chosen or slot not in named)
        if slots:
            selected.append(Host(host.name, slots))
    if some and not selected:
        raise ConfigError(
            f"the filter {include or exclude!r} leaves no slot of {_listed(inventory)}",
            code="launch-filter",
            fix="Keep at least one slot.",
        )
    return tuple(selected)


def _check_known(inventory: Inventory, chosen: Mapping[str, Sequence[int]]) -> None:
    known = {host.name: host for host in inventory}
    problems = []
    for name, slots in chosen.items():
        if name not in known:
            hint = "".join(f"; did you mean {near!r}?" for near in nearest(name, known))
            problems.append(f"host {name!r} is not in the inventory{hint}")
        elif missing := sorted(set(slots) - set(known[name].slots)):
            problems.append(f"host {name!r} has no slot {', '.join(map(str, missing))}")
    if problems:
        raise ConfigError(
            "the filter does not fit: " + "; ".join(problems),
            code="launch-filter",
            fix=f"The inventory is {_listed(inventory)}.",
        )


def _listed(inventory: Inventory) -> str:
    return ", ".join(f"{host.name} (slots {host.slots[0]}-{host.slots[-1]})" for host in inventory)


def limit(inventory: Inventory, num_hosts: int = -1, num_slots: int = -1) -> Inventory:
    """Keep the first `num_hosts` hosts and use slots 0..num_slots-1 on each; -1 leaves that as it is.

    Raises:
        ConfigError: fewer hosts than asked for, or a number below 1 other than -1 ("launch-filter").
    """
    if 0 in (num_hosts, num_slots) or min(num_hosts, num_slots) < -1 or num_hosts > len(inventory):
        raise ConfigError(
            f"{num_hosts} hosts with {num_slots} slots each were asked for; the inventory has {len(inventory)} hosts",
            code="launch-filter",
            fix="Ask for at least 1 (-1 means all) and at most what the inventory has.",
        )
    hosts = inventory if num_hosts == -1 else inventory[:num_hosts]
    return hosts if num_slots == -1 else tuple(Host(host.name, tuple(range(num_slots))) for host in hosts)


def encode(inventory: Inventory) -> str:
    """Encode an inventory as URL-safe text, for a command line."""
    return base64.urlsafe_b64encode(json.dumps([[h.name, list(h.slots)] for h in inventory]).encode()).decode()


def decode(text: str) -> Inventory:
    """Decode an inventory that `encode` wrote.

    Raises:
        ConfigError: the text was not written by `encode` ("launch-filter").
    """
    try:
        rows = json.loads(base64.urlsafe_b64decode(text))
        hosts = tuple(Host(str(name), tuple(int(s) for s in slots)) for name, slots in rows)
        if not all(is_host(host.name) for host in hosts):
            raise ValueError("a name in it is no name of a host")
        return hosts
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"--world-info is not what `ds run` writes: {error}",
            code="launch-filter",
            fix="It is for commands that `ds run` makes; give --hostfile instead.",
        ) from error


def expand_nodelist(text: str) -> list[str]:
    """Expand Slurm's `node[01-03,7],login` to `node01 node02 node03 node7 login`.

    Several brackets in a name multiply.

    Raises:
        ConfigError: not of this form, or more hosts than there are anywhere ("launch-hostfile").
    """
    names: list[str] = []
    for part in _PART.findall(text):
        expanded = [""]
        for piece in _PIECE.findall(part):
            if piece == "[":
                raise _no_nodelist(text, "has a bracket that does not close")
            choices = _expand_ranges(piece[1:-1], text) if piece.startswith("[") else [piece]
            if len(names) + len(expanded) * len(choices) > _MOST_HOSTS:
                raise _no_nodelist(text, f"names more than {_MOST_HOSTS} hosts")
            # Before they are put together: a hundred thousand long names are gigabytes.
            if len(max(expanded, key=len)) + len(max(choices, key=len)) > _LONGEST_NAME:
                raise _no_nodelist(text, f"has a name of more than {_LONGEST_NAME} characters")
            expanded = [head + choice for head in expanded for choice in choices]
        names += expanded
    if bad := [name for name in names if not is_host(name) or "[" in name or "]" in name]:
        raise _no_nodelist(text, f"has {bad[0][:80]!r}, which is no name of a host")
    return names


_PART = re.compile(r"(?:[^,\[]|\[[^\]]*\]|\[)+")
_PIECE = re.compile(r"\[[^\]]*\]|[^\[]+|\[")


def is_host(name: str) -> bool:
    """Whether this can be the name of a host: a command takes no word that begins with a dash for one."""
    return _NAME.fullmatch(name) is not None


def number_in(text: str) -> int | None:
    """Return the number that a text writes in decimal, of any sensible size; None for another text."""
    digits = text.strip()
    return int(digits) if digits.isdecimal() and len(digits) <= _MOST_DIGITS else None


def _no_nodelist(text: str, what: str) -> ConfigError:
    return ConfigError(
        f"Slurm's node list {text[:200]!r} {what}",
        code="launch-hostfile",
        fix="Set SLURM_JOB_NODELIST as Slurm does, or give --hostfile.",
    )


def _expand_ranges(text: str, nodelist: str) -> list[str]:
    choices: list[str] = []
    for item in text.split(","):
        first, dash, last = item.partition("-")
        low, high = number_in(first), number_in(last)
        if not dash:
            choices.append(item)
        elif low is None or high is None or high < low or len(first) > _LONGEST_NAME:
            raise _no_nodelist(nodelist, f"has the range {item[:80]!r}")
        elif len(choices) + high - low >= _MOST_HOSTS:
            raise _no_nodelist(nodelist, f"names more than {_MOST_HOSTS} hosts")
        else:
            choices += [str(number).zfill(len(first)) for number in range(low, high + 1)]
    return choices


def from_slurm(env: Mapping[str, str], slots: int) -> Inventory | None:
    """Return the hosts of the Slurm allocation in `env`, `slots` on each; None outside of an allocation."""
    nodelist = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    numbers = tuple(range(slots))
    return tuple(Host(name, numbers) for name in expand_nodelist(nodelist)) if nodelist else None


def slurm_gpus(env: Mapping[str, str]) -> int:
    """Return the devices on each node of Slurm's allocation, from `4`, `a100:4` or `gpu:a100:4`; 0 if unset."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        count = env.get(name, "").rpartition(":")[2]
        if (number := number_in(count)) is not None:
            return min(number, _MOST_SLOTS)
    return 0
