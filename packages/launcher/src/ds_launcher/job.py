"""From what was asked to what will be started. Pure: everything about this host comes in as `HostFacts`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ds_config.errors import ConfigError
from ds_launcher.backends import BACKENDS, LaunchJob
from ds_launcher.cpu_binding import parse_ranges, share_cores
from ds_launcher.devices import Devices, restrict
from ds_launcher.heartbeat import LAUNCHER
from ds_launcher.inventory import Host, Inventory, decode, from_slurm, limit, number_in, select, slurm_gpus
from ds_launcher.launch_options import RunOptions, node_options, parse_nnodes
from ds_launcher.launch_plan import HostWatch, LaunchPlan, Process
from ds_launcher.rank_env import World, node_rank_from, omp_threads, rank_env
from ds_launcher.shim import LOCAL_RANK_WORD

__all__ = ["MANY_HOSTS_PORT", "SECRET", "HostFacts", "is_elastic", "make_launch", "remote_hosts", "world_of"]

MANY_HOSTS_PORT = 29500
SECRET = "DS_JOB_SECRET"  # what ds-comm's watchdogs and rendezvous show each other
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What is true here.

    Attributes:
        hosts: what the hostfile says; None when none was given.
        exports: variables that would travel to other hosts.
        port: for rank 0; held by the caller while the job runs.
        secret: what only the ranks of this job are to know; empty: nothing.
        core_ids: the numbers of the cores that this process may use.
        about: versions that must be the same on every host.
    """

    env: Mapping[str, str]
    hostname: str
    cores: int
    devices: Devices
    python: str
    cwd: str
    run_id: str
    port: int
    hosts: Inventory | None = None
    exports: Mapping[str, str] | None = None
    secret: str = ""
    core_ids: tuple[int, ...] = ()
    about: str = ""


def is_elastic(options: RunOptions) -> bool:
    """Whether ranks may be started again or hosts may come and go: then torch's elastic agent runs the job."""
    low, high = parse_nnodes(options.nnodes)
    return low != high or options.max_restarts > 0 or bool(options.rdzv_endpoint)


def make_launch(options: RunOptions, facts: HostFacts) -> LaunchPlan:
    """Decide everything.

    Raises:
        ConfigError: what was asked contradicts itself or does not fit this host or the inventory.
    """
    watch = None
    if is_elastic(options):
        processes: tuple[Process, ...] = (_elastic(options, facts),)
    elif remote := remote_hosts(options, facts):
        job = _remote_job(options, facts, remote)
        processes = BACKENDS[options.launcher].build(job)
        port = options.master_port or MANY_HOSTS_PORT
        key = job.exports.get(SECRET) or facts.run_id
        watch = _watch(options, remote, LAUNCHER, (options.master_addr or remote[0].name, port, key))
    else:
        processes = _local(options, facts)
        inventory, node_rank = world_of(options, facts)
        address = options.master_addr or inventory[0].name
        key = facts.env.get(SECRET) or options.run_id or f"{address}:{facts.port}"
        watch = _watch(options, inventory, node_rank, (address, facts.port, key))
        watch = watch and replace(watch, about=facts.about)
    return LaunchPlan(processes, options.grace, options.stop_on_eof, watch)


def _watch(options: RunOptions, hosts: Inventory, member: int, centre: tuple[str, int, str]) -> HostWatch | None:
    """Build the heartbeat settings by which hosts notice each other's end; None without peers or timeout."""
    if not options.host_timeout or (len(hosts) == 1 and not options.world_info and member != LAUNCHER):
        return None
    return HostWatch(member, tuple(host.name for host in hosts), *centre, options.host_timeout)


# -- this host


def _local(options: RunOptions, facts: HostFacts) -> tuple[Process, ...]:
    inventory, node_rank = world_of(options, facts)
    host = inventory[node_rank]
    world = World(
        tuple(len(other.slots) for other in inventory),
        node_rank,
        options.master_addr or ("127.0.0.1" if len(inventory) == 1 else inventory[0].name),
        facts.port,
        options.run_id or facts.run_id,
    )
    shared = _restricted(facts.devices, host) if _slots_matter(options, facts) else {}
    cores = _cores(options, facts, len(host.slots))
    if "OMP_NUM_THREADS" not in facts.env and cores[0]:
        shared["OMP_NUM_THREADS"] = str(len(cores[0]))
    elif len(host.slots) > 1 and "OMP_NUM_THREADS" not in facts.env:
        shared["OMP_NUM_THREADS"] = str(omp_threads(facts.cores, len(host.slots)))
    if len(inventory) == 1 and not options.world_info:
        shared.update(_secret(facts))
    processes = [_rank(options, facts, world, (local, shared)) for local in range(len(host.slots))]
    return tuple(replace(process, cores=rank_cores) for process, rank_cores in zip(processes, cores, strict=True))


def _cores(options: RunOptions, facts: HostFacts, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the cores of each rank of this host; empty where none are bound."""
    if not (options.bind_cores or options.core_list):
        return ((),) * ranks
    if "KMP_AFFINITY" in facts.env:
        raise ConfigError(
            "KMP_AFFINITY is set and would move threads off the cores of their rank",
            code="launch-cores",
            fix="Unset it, or bind no cores.",
        )
    listed = parse_ranges(options.core_list) if options.core_list else facts.core_ids
    if missing := sorted(set(listed) - set(facts.core_ids)):
        raise ConfigError(
            f"--core-list has {', '.join(map(str, missing))}, which this process may not use on {facts.hostname}",
            code="launch-cores",
            fix="Name cores of every host that are there and allowed (`taskset -p $$` tells).",
        )
    return share_cores(listed, ranks)


def _secret(facts: HostFacts) -> dict[str, str]:
    """Return the job's secret for the ranks, if this launch starts all of them and no secret is set.

    Nodes that are started by hand, one at a time, cannot agree on a secret.
    """
    return {SECRET: facts.secret} if facts.secret and SECRET not in facts.env else {}


def _rank(options: RunOptions, facts: HostFacts, world: World, local: tuple[int, Mapping[str, str]]) -> Process:
    local_rank, shared = local
    rank = world.first_rank + local_rank
    return Process(
        f"rank {rank}",
        _command(options, facts.python, f"--local_rank={local_rank}"),
        {**shared, **rank_env(world, local_rank), "DS_RUN_ID": world.run_id},
        prefix="" if rank == 0 else f"[rank{rank}] ",
        shown=rank == 0 or not options.log_dir,
        log=f"{options.log_dir}/rank{rank}.log" if options.log_dir else "",
        stdin="inherit" if rank == 0 and not options.stop_on_eof else "null",
        group=options.no_python,
        fork=options.start == "fork" and not (options.no_python or options.module or options.venv_script),
    )


def _command(options: RunOptions, python: str, local_rank: str) -> tuple[str, ...]:
    """Return the command of a rank; `local_rank`, where it is asked for, is before the script's own words: these may begin a subcommand."""
    # -u: a line is on the screen when it is printed, and not lost when the rank is killed.
    words = () if options.no_python else (python, "-u", *(["-m"] if options.module else []))
    command = (*words, options.script, *([local_rank] if options.local_rank_arg else []), *options.script_args)
    # The shell becomes the rank, so signals and exit codes are the rank's own.
    sourced = ("bash", "-c", 'source "$0" && exec "$@"', options.venv_script)
    return (*sourced, *command) if options.venv_script else command


def world_of(options: RunOptions, facts: HostFacts) -> tuple[Inventory, int]:
    """Return all hosts of a job of fixed size with their slots, and the index of this host.

    Raises:
        ConfigError: a filter does not fit, or this host cannot be identified.
    """
    low, _ = parse_nnodes(options.nnodes)
    if options.world_info:
        inventory = decode(options.world_info)
    elif facts.hosts is not None:
        inventory = _narrowed(options, facts.hosts)
    elif low > 1:
        if not options.master_addr or options.node_rank == "auto":
            raise ConfigError(
                f"--nnodes {low} without a hostfile needs --master-addr and --node-rank on every host",
                code="launch-node-rank",
                fix="Give both, or --hostfile to have the other hosts started from here.",
            )
        inventory = tuple(Host(f"node{i}", tuple(range(_local_slots(options, facts)))) for i in range(low))
    else:
        inventory = _narrowed(options, (Host("localhost", tuple(range(_local_slots(options, facts)))),))
    names = tuple(host.name for host in inventory)
    auto = options.node_rank == "auto"
    node_rank = node_rank_from(facts.env, names, facts.hostname) if auto else int(options.node_rank)
    if node_rank >= len(inventory):
        raise ConfigError(
            f"node rank {node_rank} was asked for; the job has {len(inventory)} hosts, numbered from 0",
            code="launch-node-rank",
            fix="Give --node-rank below the number of hosts.",
        )
    return inventory, node_rank


def _local_slots(options: RunOptions, facts: HostFacts) -> int:
    if options.nproc > 0:
        return options.nproc
    # Where `ds run` itself has no devices (a login or batch node), Slurm says what the nodes of the allocation have.
    return max(1, len(facts.devices.visible) or slurm_gpus(facts.env))


def _narrowed(options: RunOptions, inventory: Inventory) -> Inventory:
    if options.include or options.exclude:
        return select(inventory, options.include, options.exclude)
    low, _ = parse_nnodes(options.nnodes)
    return limit(inventory, low, options.nproc)


def _slots_matter(options: RunOptions, facts: HostFacts) -> bool:
    return bool(options.world_info or options.include or options.exclude or facts.hosts is not None)


def _restricted(devices: Devices, host: Host) -> dict[str, str]:
    everything = host.slots == tuple(range(len(devices.visible)))
    return {} if everything else restrict(devices, host.slots)


# -- other hosts


def remote_hosts(options: RunOptions, facts: HostFacts) -> Inventory:
    """Return the hosts that are started from here; empty for a job on this host only, or on a node of a job."""
    if options.no_ssh or options.world_info:
        return ()
    candidates = facts.hosts
    if candidates is None and options.launcher == "slurm":
        candidates = from_slurm(facts.env, _local_slots(options, facts))
    if candidates is None:
        return ()
    inventory = _narrowed(options, candidates)
    local = len(inventory) == 1 and inventory[0].name in (*_LOCAL_NAMES, facts.hostname, facts.hostname.split(".")[0])
    return inventory if options.force_multi or not local else ()


def _remote_job(options: RunOptions, facts: HostFacts, inventory: Inventory) -> LaunchJob:
    addr = options.master_addr or inventory[0].name
    exports = {name: value for name, value in (facts.exports or {}).items() if name != SECRET}
    if options.launcher != "pdsh":  # which can carry none
        exports |= {SECRET: facts.env[SECRET]} if SECRET in facts.env else _secret(facts)
    return LaunchJob(
        inventory,
        facts.python,
        facts.cwd,
        node_options(options, addr, options.master_port or MANY_HOSTS_PORT, facts.run_id),
        (options.script, *options.script_args),
        exports,
        _words(options.launcher_args),
        None if options.ssh_port == -1 else options.ssh_port,
        number_in(facts.env.get("SLURM_CPUS_ON_NODE", "")) or 0,
    )


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(
            f"--launcher-args {text[:200]!r} is no command line: {error}",
            code="launch-options",
            fix="Close every quotation mark.",
        ) from error


# -- hosts that come and go


def _elastic(options: RunOptions, facts: HostFacts) -> Process:
    low, high = parse_nnodes(options.nnodes)
    nproc = _local_slots(options, facts)
    if high > 1 and not options.rdzv_endpoint:
        raise ConfigError(
            f"--nnodes {options.nnodes} needs a place where the hosts meet",
            code="launch-options",
            fix="Give --rdzv-endpoint HOST:PORT, the same on every host; HOST is one of them.",
        )
    if facts.hosts is not None or options.include or options.exclude:
        raise ConfigError(
            "--hostfile, --include and --exclude fix the hosts; --max-restarts, --rdzv-endpoint and --nnodes MIN:MAX let "
            "them come and go",
            code="launch-options",
            fix="Leave one side out. Hosts that come and go start `ds run` themselves.",
        )
    if options.bind_cores or options.core_list:
        raise ConfigError(
            "--bind-cores and --core-list are for a fixed number of hosts; torch's elastic agent starts these ranks",
            code="launch-options",
            fix="Leave out --max-restarts, --rdzv-endpoint and MIN:MAX, or bind no cores.",
        )
    spec = {
        "min_nodes": max(low, 1),
        "max_nodes": max(high, 1),
        "nproc": nproc,
        "endpoint": options.rdzv_endpoint or "127.0.0.1:0",
        "run_id": options.run_id or ("ds" if options.rdzv_endpoint else facts.run_id),
        "max_restarts": options.max_restarts,
        "host_timeout": options.host_timeout,
        "grace": options.grace,
        "log_dir": options.log_dir,
        "command": _command(options, facts.python, LOCAL_RANK_WORD),
    }
    env = {"DS_RUN_ID": facts.run_id, **(_secret(facts) if high <= 1 else {})}
    if nproc > 1 and "OMP_NUM_THREADS" not in facts.env:
        env["OMP_NUM_THREADS"] = str(omp_threads(facts.cores, nproc))
    return Process("the elastic agent", (facts.python, "-P", "-m", "ds_launcher.elastic_launch", json.dumps(spec)), env)
