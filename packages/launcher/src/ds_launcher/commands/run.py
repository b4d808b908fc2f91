"""`ds run`: start the ranks of a script, on this host or on many, and leave none behind."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import secrets
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from ds_config.did_you_mean import nearest
from ds_config.errors import LaunchError
from ds_launcher import manifests
from ds_launcher.backends import BACKENDS
from ds_launcher.devices import find_devices
from ds_launcher.exports import changes, collect, read_env_files, read_secrets
from ds_launcher.inventory import read_hostfile
from ds_launcher.job import MANY_HOSTS_PORT, HostFacts, is_elastic, make_launch, remote_hosts, world_of
from ds_launcher.launch_options import RunOptions, joined, options_of, without_option
from ds_launcher.launch_options import register as register_options
from ds_launcher.launch_plan import LaunchPlan, describe, without_secrets
from ds_launcher.pods import await_name, in_pod, pod_options
from ds_launcher.ports import hold_port
from ds_launcher.supervise import supervise

__all__ = ["HELP", "main", "prepare", "register"]

HELP = "start a training script on several ranks, here or on many hosts"

TUNERS = "ds.autotuning"
"""Entry points that `--autotuning` calls: functions of (mode, options of the launch, script, its arguments), which return a status."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    register_options(parser)
    manifests.register(parser)


def prepare(words: Sequence[str]) -> list[str]:
    """Rewrite the command line so that argparse reads it correctly."""
    tokens = joined(words)
    before = tokens[: tokens.index("--")] if "--" in tokens else tokens
    if any(word.partition("=")[0] == "--autotuning" for word in before):
        return ["--words", json.dumps(tokens), *tokens]
    return tokens


def main(args: argparse.Namespace) -> int:
    """Start it, wait for its end, return the exit status of the first rank that failed.

    Raises:
        ConfigError, LaunchError: nothing was started.
    """
    options = options_of(args)
    if args.print_manifest:
        return _print_manifest(args, options)
    if args.autotuning:
        return _tune(args, options)
    if sys.platform == "win32":
        raise LaunchError(
            "`ds run` needs signals and process groups, which Windows lacks",
            code="launch-platform",
            fix="Use torchrun there, or run under WSL.",
        )
    if options.secrets_on_stdin:
        os.environ.update(read_secrets(sys.stdin.fileno()))
    options = pod_options(options, os.environ)
    facts = _facts(options)
    elastic, remote = is_elastic(options), bool(remote_hosts(options, facts))
    if options.export and not remote:
        exports = facts.exports or {}
        os.environ.update({name: exports[name] for name in (item.partition("=")[0] for item in options.export)})
        facts = _facts(options)
    if elastic or remote:
        if not options.dry_run:
            _check_tools(options, elastic)
        launch = make_launch(options, facts)
        if options.dry_run:
            return _show(launch, options, changes(facts.env, facts.exports or {}) if remote else ())
        with _pid_file(options):
            return supervise(launch)
    _check_script(options)
    inventory, node_rank = world_of(options, facts)
    if node_rank and in_pod(os.environ) and not options.dry_run:
        await_name(options.master_addr)
    wanted = options.master_port or (0 if len(inventory) == 1 else MANY_HOSTS_PORT)
    # Rank 0's host keeps the port for it; the others need to know it and have nothing to keep.
    with hold_port(wanted) if node_rank == 0 else contextlib.nullcontext(wanted) as port:
        launch = make_launch(options, replace(facts, port=port))
        if options.dry_run:
            return _show(launch, options)
        if options.log_dir:
            _make_log_dir(options.log_dir)
        with _pid_file(options):
            return supervise(launch)


def _print_manifest(args: argparse.Namespace, options: RunOptions) -> int:
    document = manifests.manifest(options, manifests.wanted_of(args, options, os.environ))
    print(
        json.dumps(document, indent=1) if options.as_json else manifests.as_yaml(document),
        end="\n" if options.as_json else "",
    )
    return 0


def _make_log_dir(folder: str) -> None:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"--log-dir {folder} cannot be made: {error.strerror}",
            code="launch-log-dir",
            fix="Give a folder that can be written on every host.",
        ) from error


@contextlib.contextmanager
def _pid_file(options: RunOptions) -> Iterator[None]:
    """Create, with --save-pid, a file named after our process id that marks the process as a job's launcher.

    Scripts that know the id look for the file. The file is removed at exit.
    """
    if not options.save_pid:
        yield
        return
    path = Path(tempfile.gettempdir()) / f"{os.getpid()}.deepspeed"
    try:
        path.write_text(str(os.getpid()))
    except OSError as error:
        raise LaunchError(
            f"--save-pid: {path} cannot be written: {error.strerror}",
            code="launch-save-pid",
            fix="Set TMPDIR to a folder that can be written, or leave --save-pid out: ending `ds run` ends the job.",
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _tune(args: argparse.Namespace, options: RunOptions) -> int:
    """Run `--autotuning`: pass this command line without that option to the installed tuner, which starts the jobs."""
    tuners = sorted(entry_points(group=TUNERS), key=lambda point: point.name)
    if not tuners:
        raise LaunchError(
            f"--autotuning is done by ds-tune, which is not installed (no entry point in the group {TUNERS})",
            code="launch-tuner",
            fix="Install it: pip install ds-tune.",
        )
    words = json.loads(args.words)
    launch = without_option(words[: len(words) - len(options.script_args) - 1], "--autotuning")
    status: int = tuners[0].load()(args.autotuning, launch, options.script, options.script_args)
    return status


def _facts(options: RunOptions) -> HostFacts:
    env = dict(os.environ)
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    return HostFacts(
        env=env,
        hostname=socket.gethostname(),
        cores=len(cores) or os.cpu_count() or 1,
        core_ids=cores,
        about=_about() if options.world_info or options.nnodes not in ("", "1", "-1") or options.no_ssh else "",
        devices=find_devices(env),
        python=sys.executable,
        cwd=_working_directory(),
        run_id=options.run_id or uuid.uuid4().hex,
        secret=secrets.token_hex(16),
        port=0,
        hosts=read_hostfile(options.hostfile) if options.hostfile else None,
        exports=collect(env, options.export, read_env_files(env, _home(), Path(_working_directory()))),
    )


def _home() -> Path | None:
    """Return the home of this user; None for a user without one, as containers have them."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise LaunchError(
            "the working directory of this process has been removed",
            code="launch-cwd",
            fix="Change to a directory that exists (`cd`), and start again.",
        ) from error


def _about() -> str:
    versions = {"Python": platform.python_version()}
    for name in ("torch", "ds-launcher", "ds-comm"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def _check_script(options: RunOptions) -> None:
    path = Path(options.script)
    if options.module or (options.no_python and shutil.which(options.script)) or path.exists():
        return
    there = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = "".join(f" Did you mean {path.parent / near}?" for near in nearest(path.name, there))
    raise LaunchError(
        f"there is no script {options.script} (working directory {_working_directory()})",
        code="launch-script",
        fix=f"Check the path.{hint} Options of `ds run` stand before the script.",
    )


def _check_tools(options: RunOptions, elastic: bool) -> None:
    if elastic and importlib.util.find_spec("torch") is None:
        raise LaunchError(
            "--max-restarts, --rdzv-endpoint and --nnodes MIN:MAX run on torch's elastic agent; torch is not installed",
            code="launch-torch",
            fix="Install it: pip install 'ds-launcher[elastic]'.",
        )
    tool = BACKENDS[options.launcher].tool
    if not elastic and shutil.which(tool) is None:
        raise LaunchError(
            f"hosts are reached through {options.launcher}, and there is no `{tool}` on PATH",
            code="launch-tool",
            fix=f"Install {tool}, or choose another way with --launcher ({', '.join(BACKENDS)}).",
        )


def _show(launch: LaunchPlan, options: RunOptions, travels: Sequence[str] = ()) -> int:
    """Print the planned launch and, as a diff, the variables that the other hosts get."""
    if options.as_json:
        print(json.dumps({**without_secrets(launch), "variables": list(travels)}, indent=1))
        return 0
    section = ["# variables: what the hosts get (- stays here)", *travels] if travels else []
    print("\n".join([describe(launch), *section]))
    return 0


if __name__ == "__main__":
    from ds_config.ds_command import main as ds

    sys.exit(ds(["run", *sys.argv[1:]]))
