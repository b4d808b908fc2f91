"""What will be started, as data: made by pure functions, printed by `--dry-run`, executed by the keeper.

Words: a *process* is something the keeper starts and watches: a rank on this host, or an `ssh` that holds a node; a
*launch* is all of them and how they end together.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ds_launcher.exports import is_secret

__all__ = ["HostWatch", "LaunchPlan", "Process", "describe", "from_json", "to_json", "without_secrets"]


@dataclass(frozen=True, slots=True)
class Process:
    """One process to start.

    Attributes:
        name: what messages call it: `rank 1`, `host node2`.
        argv: the command; argv[0] is looked up on PATH.
        env: variables added to the keeper's environment.
        prefix: put before every line it writes; empty for plain output.
        shown: whether its output reaches the screen (it always reaches the log file, where there is one).
        log: file that gets both its streams; empty for none.
        stdin: "null"; "inherit" (the launcher's, unless that is a terminal); "hold" (an open pipe that ends when the
            keeper does: a remote end that watches it learns of our death).
        secrets: variables that it reads from its standard input ("hold"), one line of JSON; their values are never printed.
        group: whether polite signals go to its whole process group. For shells and wrappers, which do not pass them on;
            a Python rank takes care of its own workers.
        cores: the processor cores it may use; empty: those of the keeper.
        fork: it is `python -u SCRIPT ...`, and may be a fork of the keeper instead of a new process.
        user_signals: whether SIGUSR1 and SIGUSR2 are sent to it: a rank may handle them, srun, mpirun and the elastic agent pass
            them on; ssh and pdsh would die of them.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    shown: bool = True
    log: str = ""
    stdin: str = "null"
    secrets: Mapping[str, str] = field(default_factory=dict)
    group: bool = False
    cores: tuple[int, ...] = ()
    fork: bool = False
    user_signals: bool = True


@dataclass(frozen=True, slots=True)
class HostWatch:
    """How the hosts of a job watch each other; see `ds_launcher.heartbeat`.

    Attributes:
        member: node rank of this host; -1: the `ds run` that started them.
        names: of the hosts.
        address, port: of node 0.
        key: of the digests.
        lost_after_s: silence after which a host is lost.
        about: versions here, which must be those of node 0; empty: not known.
    """

    member: int
    names: tuple[str, ...]
    address: str
    port: int
    key: str
    lost_after_s: float
    about: str = ""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """All processes of a job on this host.

    Attributes:
        grace_s: seconds between asking the processes to end and killing them.
        stop_on_eof: also stop when our own standard input ends (we are the remote end of an `ssh`).
        watch: how this host and the others notice each other's end; None: there are no others.
    """

    processes: tuple[Process, ...]
    grace_s: float = 30.0
    stop_on_eof: bool = False
    watch: HostWatch | None = None


def to_json(launch: LaunchPlan) -> str:
    """Serialize a launch to text that `from_json` reads back."""
    return json.dumps(asdict(launch))


def from_json(text: str) -> LaunchPlan:
    """Parse the launch that `to_json` wrote."""
    raw = json.loads(text)
    processes = tuple(
        Process(**{**process, "argv": tuple(process["argv"]), "cores": tuple(process["cores"])})
        for process in raw.pop("processes")
    )
    if watch := raw.pop("watch"):
        watch = HostWatch(**{**watch, "names": tuple(watch["names"])})
    return LaunchPlan(processes, **raw, watch=watch)


def without_secrets(launch: LaunchPlan) -> dict[str, Any]:
    """Return the launch as plain values for display: values of secrets are `...`."""
    plain = asdict(launch)
    for process in plain["processes"]:
        process["env"] = _shown(process["env"])
        process["secrets"] = dict.fromkeys(process["secrets"], "...")
    if plain["watch"]:
        plain["watch"]["key"] = "..."
    return plain


def _shown(env: Mapping[str, str]) -> dict[str, str]:
    return {key: "..." if is_secret(key) else value for key, value in env.items()}


def describe(launch: LaunchPlan) -> str:
    """Describe each process by its name and a command line that a shell would accept."""
    lines = []
    for process in launch.processes:
        settings = [f"{key}={value}" for key, value in sorted(_shown(process.env).items())]
        command = shlex.join(["env", *settings, *process.argv] if settings else process.argv)
        log = f"  > {shlex.quote(process.log)}" if process.log else ""
        secrets = f"  # through standard input: {', '.join(process.secrets)}" if process.secrets else ""
        cores = f" (cores {', '.join(map(str, process.cores))})" if process.cores else ""
        lines.append(f"# {process.name}{'' if process.shown else ' (not shown)'}{cores}\n{command}{log}{secrets}")
    return "\n".join(lines)
