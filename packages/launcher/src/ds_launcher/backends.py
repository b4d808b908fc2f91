"""How the nodes of a job are reached: each backend is a pure function from a job to the processes that start it.

On every node the same thing runs: `python -m ds_launcher run --world-info ... --node-rank I script`, so supervision, output
and exit codes are the local ones everywhere; a backend only carries it there. A node started through ssh or pdsh watches its
standard input: when its end on this side is gone, for whatever reason, the node stops its ranks. srun and mpirun end
their tasks themselves.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ds_config.errors import ConfigError
from ds_launcher.exports import split_secrets
from ds_launcher.inventory import Inventory, encode, is_host
from ds_launcher.launch_plan import Process

__all__ = ["BACKENDS", "LaunchBackend", "LaunchJob", "node_command"]


@dataclass(frozen=True, slots=True)
class LaunchJob:
    """What every backend is told.

    Attributes:
        options: of `ds run` on the node, without those that say which node it is.
        command: script and its arguments.
        exports: variables that travel.
        launcher_args: extra arguments for ssh, pdsh, srun or mpirun, split.
        ssh_port: None: ssh's own choice.
        cores: of a node, for the one task on it; 0: not known.
    """

    inventory: Inventory
    python: str
    cwd: str
    options: tuple[str, ...]
    command: tuple[str, ...]
    exports: Mapping[str, str]
    launcher_args: tuple[str, ...] = ()
    ssh_port: int | None = None
    cores: int = 0

    def __post_init__(self) -> None:
        """Raise ConfigError for a host whose name a command would take for an option ("launch-hostfile")."""
        for host in self.inventory:
            if not is_host(host.name):
                raise ConfigError(
                    f"{host.name[:80]!r} is no name of a host", code="launch-hostfile", fix="Correct the list of hosts."
                )


@dataclass(frozen=True, slots=True)
class LaunchBackend:
    """A way to reach nodes.

    Attributes:
        tool: the program that must be on PATH.
        build: the processes that start the job.
    """

    tool: str
    build: Callable[[LaunchJob], tuple[Process, ...]]


def node_command(job: LaunchJob, node_rank: str, *extra: str) -> tuple[str, ...]:
    """Build the command that starts the ranks of one host, on that host.

    `node_rank` is the host's index in the inventory, or `auto`.
    """
    world = ("--world-info", encode(job.inventory), "--node-rank", node_rank)
    return (job.python, "-P", "-m", "ds_launcher", "run", *world, *extra, *job.options, *job.command)


def _with_exports(job: LaunchJob, argv: tuple[str, ...]) -> tuple[str, ...]:
    plain, _ = split_secrets(job.exports)
    return ("env", *(f"{name}={value}" for name, value in plain.items()), *argv) if plain else argv


def _shell(job: LaunchJob, argv: tuple[str, ...]) -> str:
    """Build the command line that a login shell on the node runs for `argv`."""
    return f"cd {shlex.quote(job.cwd)} && exec {shlex.join(_with_exports(job, argv))}"


def _ssh(job: LaunchJob) -> tuple[Process, ...]:
    port = ("-p", str(job.ssh_port)) if job.ssh_port is not None else ()
    # BatchMode: a question for a password would wait for ever. Keep-alives notice a dead host within a minute.
    _, secrets = split_secrets(job.exports)
    flags = ("--stop-on-eof", *(["--secrets-on-stdin"] if secrets else []))
    base = (
        "ssh",
        "-o",
        "BatchMode=yes",
        "-o",
        "ServerAliveInterval=15",
        "-o",
        "ServerAliveCountMax=3",
        "-o",
        "ConnectTimeout=10",
        *port,
    )
    return tuple(
        Process(
            f"host {host.name}",
            (*base, *job.launcher_args, host.name, _shell(job, node_command(job, str(index), *flags))),
            stdin="hold",
            secrets=secrets,
            user_signals=False,
        )
        for index, host in enumerate(job.inventory)
    )


def _pdsh(job: LaunchJob) -> tuple[Process, ...]:
    names = ",".join(host.name for host in job.inventory)
    if secrets := split_secrets(job.exports)[1]:
        raise ConfigError(
            f"pdsh has no way but a command line, which everyone can read, to carry {', '.join(secrets)}",
            code="launch-secrets",
            fix="Use --launcher ssh, or unset them here and set them on the hosts.",
        )
    # pdsh keeps the standard input of its commands open until it ends, whatever its own is, so nodes can watch it.
    # It puts the host's position in the list for %n; a % of the user's is written %%.
    mark = "@NODE-RANK@"
    while mark in shlex.join((job.cwd, job.python, *job.options, *job.command, *job.exports.values())):
        mark = f"@{mark}@"  # the script's own arguments are left alone
    line = _shell(job, node_command(job, mark, "--stop-on-eof")).replace("%", "%%").replace(mark, "%n")
    env = {"PDSH_RCMD_TYPE": "ssh"}
    if job.ssh_port is not None:
        env["PDSH_SSH_ARGS_APPEND"] = f"-p {job.ssh_port}"
    # -S: the largest exit code of the hosts; -N: no host names before lines, ranks carry their own.
    return (
        Process(
            "pdsh", ("pdsh", "-S", "-N", "-f", "1024", "-w", names, *job.launcher_args, line), env, user_signals=False
        ),
    )


def _slurm(job: LaunchJob) -> tuple[Process, ...]:
    count, names = str(len(job.inventory)), ",".join(host.name for host in job.inventory)
    base = ("srun", "--nodes", count, "--ntasks", count, "--ntasks-per-node", "1", "--nodelist", names)
    # One task is one core to srun, unless it is told; what each rank may use is divided on the node.
    wide = ("--cpus-per-task", str(job.cores)) if job.cores else ()
    ends = ("--kill-on-bad-exit=1", "--cpu-bind=none", *wide, "--chdir", job.cwd, *job.launcher_args)
    # srun gives its own environment to its tasks.
    return (
        Process("srun", (*base, *ends, *_with_exports(job, node_command(job, "auto"))), split_secrets(job.exports)[1]),
    )


def _openmpi(job: LaunchJob) -> tuple[Process, ...]:
    names = ",".join(f"{host.name}:1" for host in job.inventory)
    base = (
        "mpirun",
        "-n",
        str(len(job.inventory)),
        "--host",
        names,
        "--map-by",
        "ppr:1:node",
        "--bind-to",
        "none",
        "-wdir",
        job.cwd,
    )
    _, secrets = split_secrets(job.exports)
    named = [word for name in secrets for word in ("-x", name)]  # mpirun takes their values from its own environment
    return (
        Process("mpirun", (*base, *named, *job.launcher_args, *_with_exports(job, node_command(job, "auto"))), secrets),
    )


def _hydra(job: LaunchJob, all_cores: Mapping[str, str] | None = None) -> tuple[Process, ...]:
    """Build the `mpirun` process for Hydra, the process manager of MPICH, Intel MPI and MVAPICH.

    Intel MPI and MVAPICH bind the only task of a node to few cores unless the variables of `all_cores` say otherwise.
    """
    names = ",".join(host.name for host in job.inventory)
    base = ("mpirun", "-n", str(len(job.inventory)), "-ppn", "1", "-hosts", names, "-wdir", job.cwd)
    _, secrets = split_secrets(job.exports)
    named = ("-genvlist", ",".join(secrets)) if secrets else ()  # mpirun takes their values from its own environment
    free = [word for name, value in (all_cores or {}).items() for word in ("-genv", name, value)]
    command = _with_exports(job, node_command(job, "auto"))
    return (Process("mpirun", (*base, *named, *free, *job.launcher_args, *command), secrets),)


def _impi(job: LaunchJob) -> tuple[Process, ...]:
    return _hydra(job, {"I_MPI_PIN": "0"})


def _mvapich(job: LaunchJob) -> tuple[Process, ...]:
    return _hydra(job, {"MV2_ENABLE_AFFINITY": "0"})


BACKENDS: dict[str, LaunchBackend] = {
    "ssh": LaunchBackend("ssh", _ssh),
    "pdsh": LaunchBackend("pdsh", _pdsh),
    "slurm": LaunchBackend("srun", _slurm),
    "openmpi": LaunchBackend("mpirun", _openmpi),
    "mpich": LaunchBackend("mpirun", _hydra),
    "impi": LaunchBackend("mpirun", _impi),
    "mvapich": LaunchBackend("mpirun", _mvapich),
}
