"""The command line of `ds run`: torchrun's options, and those of DeepSpeed's launcher as other spellings of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from ds_config.errors import ConfigError
from ds_launcher.backends import BACKENDS

__all__ = [
    "RunOptions",
    "joined",
    "node_options",
    "options_of",
    "own_options",
    "parse_nnodes",
    "register",
    "without_option",
]

_ELASTIC_PORT, _ELASTIC_RESTARTS = 29500, 100


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What was asked of `ds run`, as parsed. Absent numbers are -1, absent texts empty."""

    script: str
    script_args: tuple[str, ...] = ()
    nproc: int = -1
    nnodes: str = ""
    node_rank: str = "auto"
    master_addr: str = ""
    master_port: int = 0
    module: bool = False
    no_python: bool = False
    local_rank_arg: bool = False
    log_dir: str = ""
    grace: float = 30.0
    dry_run: bool = False
    max_restarts: int = 0
    rdzv_endpoint: str = ""
    run_id: str = ""
    hostfile: str = ""
    include: str = ""
    exclude: str = ""
    launcher: str = "ssh"
    launcher_args: str = ""
    ssh_port: int = -1
    no_ssh: bool = False
    force_multi: bool = False
    export: tuple[str, ...] = ()
    world_info: str = ""
    stop_on_eof: bool = False
    secrets_on_stdin: bool = False
    bind_cores: bool = False
    core_list: str = ""
    host_timeout: float = 30.0
    start: str = "fork"
    save_pid: bool = False
    venv_script: str = ""
    as_json: bool = False


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options. All after the script's name belongs to the script."""
    parser.allow_abbrev = False
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument(
        "--nproc", "--nproc-per-node", "--nproc_per_node", "--num_gpus", "--num-gpus", "--num_accelerators",
        type=int, default=-1, metavar="N", help="ranks on each host (default: one per visible device, or 1)",
    )  # fmt: skip
    ranks.add_argument(
        "--nnodes",
        "--num_nodes",
        default="",
        metavar="N|MIN:MAX",
        help="number of hosts; MIN:MAX lets them come and go",
    )
    ranks.add_argument("--node-rank", "--node_rank", default="auto", metavar="I", help="which of the hosts this one is")
    ranks.add_argument("--master-addr", "--master_addr", default="", metavar="HOST", help="where rank 0 runs")
    ranks.add_argument(
        "--master-port", "--master_port", type=int, default=0, metavar="PORT",
        help="where rank 0 listens (default: a free port; 29500 on several hosts)",
    )  # fmt: skip
    ranks.add_argument(
        "--max-restarts",
        "--max_restarts",
        type=int,
        default=0,
        metavar="N",
        help="start all ranks again after a failure",
    )
    ranks.add_argument(
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        default="",
        metavar="HOST:PORT",
        help="meeting point of hosts that come and go",
    )
    ranks.add_argument(
        "--run-id", "--rdzv-id", "--rdzv_id", default="", metavar="NAME",
        help="job ID, when jobs share a rendezvous (default: ds)",
    )  # fmt: skip
    ranks.add_argument(
        "--elastic-training", "--elastic_training", action="store_true",
        help="as --nnodes MIN:MAX --max-restarts 100 --rdzv-endpoint MASTER_ADDR:MASTER_PORT",
    )  # fmt: skip
    for flag, which in (("--min_elastic_nodes", "least"), ("--max_elastic_nodes", "most")):
        ranks.add_argument(flag, type=int, default=-1, metavar="N", help=f"with --elastic-training: the {which} hosts")
    script = parser.add_argument_group("script")
    script.add_argument("--module", "-m", action="store_true", help="SCRIPT is a module, as in `python -m`")
    script.add_argument("--no-python", "--no_python", action="store_true", help="SCRIPT is a program, not Python")
    script.add_argument(
        "--start", choices=("fork", "spawn"), default="fork",
        help="ranks share one import of torch where that is possible (fork), or are new processes (spawn)",
    )  # fmt: skip
    script.add_argument("--local-rank-arg", action="store_true", help="add --local_rank=N to the script's arguments")
    script.add_argument(
        "--no_local_rank", "--no-local-rank", action="store_false", dest="local_rank_arg", help=argparse.SUPPRESS
    )
    script.add_argument(
        "--venv-script", "--venv_script", default="", metavar="FILE",
        help="source this file, on every host, before each rank is started",
    )  # fmt: skip
    cores = parser.add_argument_group("cores")
    cores.add_argument(
        "--bind-cores", "--bind_cores_to_rank", action="store_true", help="give each rank of a host cores of its own"
    )
    cores.add_argument(
        "--core-list",
        "--bind_core_list",
        default="",
        metavar="LIST",
        help="these cores, as in 0,2-4 (default: all); binds",
    )
    screen = parser.add_argument_group("output and end")
    screen.add_argument(
        "--log-dir", "--log_dir", "--enable_each_rank_log", default="", metavar="DIR",
        help="write rank<r>.log files there; the screen shows rank 0 only",
    )  # fmt: skip
    screen.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds between asking ranks to end, which may be saving, and killing them (30)",
    )
    screen.add_argument(
        "--dry-run", "--dry_run", action="store_true", help="print what would be started, start nothing"
    )
    screen.add_argument("--json", action="store_true", dest="as_json", help="with --dry-run or --print-manifest: JSON")
    screen.add_argument(
        "--save-pid", "--save_pid", action="store_true",
        help="while the job runs, keep the process id of this command in TMP/<that id>.deepspeed",
    )  # fmt: skip
    hosts = parser.add_argument_group("hosts")
    hosts.add_argument("--hostfile", "-H", default="", metavar="FILE", help="lines `host slots=n`")
    hosts.add_argument("--include", "-i", default="", metavar="FILTER", help="use only these: host1@host2:0,2")
    hosts.add_argument("--exclude", "-e", default="", metavar="FILTER", help="use all but these")
    hosts.add_argument(
        "--launcher", default="ssh", metavar="NAME", help=f"how hosts are reached: {', '.join(BACKENDS)} (ssh)"
    )
    hosts.add_argument(
        "--launcher-args",
        "--launcher_args",
        default="",
        metavar="ARGS",
        help="more arguments for ssh, pdsh, srun or mpirun",
    )
    hosts.add_argument(
        "--host-timeout", type=float, default=30.0, metavar="S",
        help="end the job when a host is silent for so long, or with MIN:MAX go on without it (30; 0: never)",
    )  # fmt: skip
    hosts.add_argument("--ssh-port", "--ssh_port", type=int, default=-1, metavar="PORT", help="port of the ssh servers")
    hosts.add_argument(
        "--no-ssh", "--no_ssh", action="store_true", help="start this host's ranks only; do the same on each host"
    )
    hosts.add_argument("--force-multi", "--force_multi", action="store_true", help="use the launcher for one host too")
    hosts.add_argument(
        "--export",
        "-x",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="also set this variable for the ranks, on every host",
    )
    parser.add_argument("--world-info", default="", help=argparse.SUPPRESS)  # said by one `ds run` to the others
    parser.add_argument("--stop-on-eof", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--secrets-on-stdin", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--autotuning",
        choices=("tune", "run"),
        help="find the best configuration by ds-tune; run: and start the script with it",
    )
    parser.add_argument(
        "--words", default="", help=argparse.SUPPRESS
    )  # the command line as it was, for the tuner's jobs
    for flags in (("--log_level",), ("--quiet", "-q")):  # nothing is told but failures
        takes: dict[str, object] = {"action": "store_true"} if "-q" in flags else {"type": str}
        parser.add_argument(*flags, help=argparse.SUPPRESS, **takes)  # type: ignore[arg-type]
    parser.add_argument("--no_ssh_check", action="store_true", help=argparse.SUPPRESS)  # there is no check
    parser.add_argument("script", metavar="SCRIPT", help="what every rank runs")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def joined(words: Sequence[str]) -> list[str]:
    """Join the value of `--launcher-args` to the option by `=`: argparse would take "-mca ..." for an option."""
    tokens = list(words)
    for i, word in enumerate(words[:-1]):
        if word in ("--launcher-args", "--launcher_args") and words[i + 1].startswith("-"):
            return [*tokens[:i], f"{word}={words[i + 1]}", *tokens[i + 2 :]]
    return tokens


def without_option(words: Sequence[str], flag: str) -> tuple[str, ...]:
    """Return `words` without an option and its value."""
    remaining, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word == flag:
            skip = True
        elif not word.startswith(f"{flag}="):
            remaining.append(word)
    return tuple(remaining)


def options_of(args: argparse.Namespace) -> RunOptions:
    """Convert the parsed arguments to a record of options.

    Raises:
        ConfigError: options that contradict each other, or numbers out of range ("launch-options").
    """
    values = {field.name: getattr(args, field.name) for field in fields(RunOptions)}
    for name in ("script_args", "export"):
        values[name] = tuple(values[name])
    values["launcher"] = values["launcher"].lower()
    options = _elastic(RunOptions(**values), args)
    _check(options, bool(getattr(args, "print_manifest", "")))
    return options


def _elastic(options: RunOptions, args: argparse.Namespace) -> RunOptions:
    """Translate `--elastic_training` and its numbers to the options of torch's elastic agent."""
    low, high = args.min_elastic_nodes, args.max_elastic_nodes
    if not args.elastic_training:
        if (low, high) != (-1, -1):
            raise ConfigError(
                "--min_elastic_nodes and --max_elastic_nodes are for --elastic_training",
                code="launch-options",
                fix="Give that, too, or leave them out.",
            )
        return options
    least = max(low, 1)
    most = max(high, least)
    endpoint = options.rdzv_endpoint
    if not endpoint and options.master_addr:
        endpoint = f"{options.master_addr}:{options.master_port or _ELASTIC_PORT}"
    return replace(
        options,
        nnodes=options.nnodes if ":" in options.nnodes else f"{least}:{most}",
        rdzv_endpoint=endpoint,
        max_restarts=options.max_restarts or _ELASTIC_RESTARTS,
    )


_MOST_RANKS = 1 << 16  # of one host
_LONGEST_S = 1_000_000  # twelve days: what waits for it counts in milliseconds of 32 bits


def _check(options: RunOptions, manifest: bool) -> None:
    problems = []
    if options.nproc != -1 and not 1 <= options.nproc <= _MOST_RANKS:
        problems.append(f"--nproc is {options.nproc}; it must be at least 1 and at most {_MOST_RANKS}")
    if options.module and options.no_python:
        problems.append("--module and --no-python are both given; a module is Python")
    if options.launcher not in BACKENDS:
        problems.append(f"--launcher is {options.launcher!r}; known are {', '.join(BACKENDS)}")
    if (options.include or options.exclude) and (options.nproc != -1 or options.nnodes not in ("", "-1")):
        problems.append("--include/--exclude and --nproc/--nnodes are both given; each says how many ranks run where")
    for name, seconds in (("--grace", options.grace), ("--host-timeout", options.host_timeout)):
        if not 0 <= seconds <= _LONGEST_S:
            problems.append(f"{name} is {seconds}; it cannot be negative, nor more than {_LONGEST_S} seconds")
    if options.max_restarts < 0:
        problems.append(f"--max-restarts is {options.max_restarts}; it cannot be negative")
    if not 0 <= options.master_port < 65536:
        problems.append(f"--master-port is {options.master_port}; ports are 1 to 65535")
    if options.as_json and not (options.dry_run or manifest):
        problems.append("--json is given without --dry-run or --print-manifest; a job's output is its ranks'")
    if options.node_rank != "auto" and not options.node_rank.isdecimal():
        problems.append(f"--node-rank is {options.node_rank!r}; it is a number from 0, or auto")
    if problems:
        raise ConfigError("\n  ".join(problems), code="launch-options", fix="See `ds run --help`.")


def parse_nnodes(text: str) -> tuple[int, int]:
    """Parse a node count: `4` -> (4, 4), `1:4` -> (1, 4), empty or `-1` -> (-1, -1), unspecified.

    Raises:
        ConfigError: anything else ("launch-options").
    """
    if text in ("", "-1"):
        return -1, -1
    low, colon, high = text.partition(":")
    if not low.isdecimal() or (colon and not high.isdecimal()) or not 1 <= int(low) <= int(high or low):
        raise ConfigError(
            f"--nnodes is {text!r}; it is a number from 1, or MIN:MAX",
            code="launch-options",
            fix="For example --nnodes 4, or --nnodes 2:4.",
        )
    return int(low), int(high or low)


def node_options(options: RunOptions, master_addr: str, master_port: int, run_id: str) -> tuple[str, ...]:
    """Return the options that a node of this job is started with, except those that identify the node."""
    return (
        *("--master-addr", master_addr, "--master-port", str(master_port), "--run-id", run_id),
        *own_options(options),
    )


def own_options(options: RunOptions) -> tuple[str, ...]:
    """Return the options that say how a host starts, binds and ends its ranks."""
    flags = [
        name
        for name, enabled in (
            ("--module", options.module),
            ("--no-python", options.no_python),
            ("--local-rank-arg", options.local_rank_arg),
            ("--bind-cores", options.bind_cores),
        )
        if enabled
    ]
    flags += ["--core-list", options.core_list] if options.core_list else []
    log_dir = ["--log-dir", options.log_dir] if options.log_dir else []
    ends = ("--grace", str(options.grace), "--host-timeout", str(options.host_timeout))
    start = [] if options.start == "fork" else ["--start", options.start]
    venv = ["--venv-script", options.venv_script] if options.venv_script else []
    return (*ends, *log_dir, *start, *venv, *flags)
