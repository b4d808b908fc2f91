"""Upstream's programs: each is a command of `ds` with upstream's arguments."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from deepspeed._ours.base.raising import not_supported, refused, wrong_argument
from deepspeed._ours.base.version import version
from deepspeed._ours.launcher.elasticity import compute_elastic_config
from deepspeed._ours.launcher.launching import decode_world_info, parse_args, parse_resource_filter
from ds_ckpt.convert.deepspeed_layout import write_universal
from ds_ckpt.convert.fp32 import open_training
from ds_ckpt.convert.pickled import load_pt
from ds_ckpt.manifest_owner import has_manifest
from ds_config import read
from ds_config.errors import ConfigError, DsError
from ds_launcher.cli import main as ds
from ds_launcher.devices import find_devices
from ds_launcher.exports import ALLOWED

HOSTFILE = "/job/hostfile"
"""Where upstream's programs look for the hosts of a job."""

EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]
"""How the variables begin that other hosts get; programs which call `main` add to it. All that `ds_launcher` exports goes as well."""


def _ended(status: int) -> int:
    """Return 0, or end the program: callers of upstream's `main` take no notice of what it returns."""
    if status:
        sys.exit(status)
    return 0


def main(args: Sequence[str] | None = None) -> int:
    """Run `ds run` as upstream does: the script gets `--local_rank=N` unless `--no_local_rank` is given.

    The hostfile is `/job/hostfile` where there is one and none is named. One that is named and not there is no error, as upstream: the
    job runs on this host alone, and a line says so.

    Raises:
        SystemExit: the job failed; its status is that of the rank that failed first.
        ConfigError: `args` contradict each other ("launch-options"). The program prints the error and exits with 2.
    """
    words = list(sys.argv[1:] if args is None else args)
    try:
        options = parse_args(words)
    except ConfigError:
        if args is not None:
            raise
        return _ended(ds(["run", "--local-rank-arg", *words]))  # which prints the error
    default = ["--hostfile", HOSTFILE] if not options.hostfile and Path(HOSTFILE).is_file() else []
    if options.hostfile and not Path(options.hostfile).is_file():
        print(
            f"deepspeed: there is no hostfile {options.hostfile}: the job runs on this host alone",
            file=sys.stderr,
            flush=True,
        )
        # Of an option that is given twice the last one counts; all behind the script is the script's.
        words.insert(len(words) - len(options.user_args) - 1, "--hostfile=")
    added = tuple(prefix for prefix in EXPORT_ENVS if not prefix.startswith(ALLOWED))
    exports = [word for name in os.environ if added and name.startswith(added) for word in ("-x", name)]
    return _ended(ds(["run", "--local-rank-arg", *default, *exports, *words]))


def launch(args: Sequence[str] | None = None) -> int:
    """Start the ranks of this host, as `deepspeed.launcher.launch` does.

    Reads upstream's `--world_info`, `--node_rank` and addresses.

    Raises:
        SystemExit: a rank failed.
    """
    parser = argparse.ArgumentParser(prog="deepspeed.launcher.launch")
    parser.add_argument("--node_rank", type=int, default=0)
    parser.add_argument("--master_addr", default="127.0.0.1")
    parser.add_argument("--master_port", type=int, default=29500)
    parser.add_argument("--world_info", default="")
    parser.add_argument("--enable_each_rank_log", default="None")
    parser.add_argument("--save_pid", type=int, default=0)
    parser.add_argument("--bind_core_list", default="")
    parser.add_argument("--log_level", help=argparse.SUPPRESS)  # nothing is told but failures
    parser.add_argument("-q", "--quiet", action="store_true", help=argparse.SUPPRESS)
    for flag in ("--module", "--no_python", "--no_local_rank", "--bind_cores_to_rank"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    options = parser.parse_args(args)
    world = decode_world_info(options.world_info) if options.world_info else {}
    counts = [slots if isinstance(slots, int) else len(slots) for slots in world.values()]
    flags = (
        ("--module", options.module), ("--no-python", options.no_python), ("--local-rank-arg", not options.no_local_rank),
        ("--save-pid", options.save_pid), ("--bind-cores", options.bind_cores_to_rank),
    )  # fmt: skip
    given = [flag for flag, on in flags if on]
    given += [] if options.enable_each_rank_log == "None" else ["--log-dir", options.enable_each_rank_log]
    given += ["--core-list", options.bind_core_list] if options.bind_core_list else []
    many = ["--nnodes", str(len(counts)), "--node-rank", str(options.node_rank), "--master-addr", options.master_addr]
    with _devices_of(list(world.values())[options.node_rank] if world else 0):
        return _ended(ds([
            "run", *given,
            *(["--nproc", str(counts[options.node_rank])] if counts else []),
            *([*many, "--master-port", str(options.master_port)] if len(counts) > 1 else []),
            options.training_script, *options.training_script_args,
        ]))  # fmt: skip


@contextmanager
def _devices_of(slots: int | Sequence[int]) -> Iterator[None]:
    """Show ranks the devices of these slots of this host; those of the first slots are what they see anyway.

    Raises:
        ConfigError: the host has no such slot ("launch-filter").
    """
    devices = find_devices(os.environ)
    if not devices.kind or isinstance(slots, int) or list(slots) == list(range(len(slots))):
        yield
        return
    parse_resource_filter({"localhost": range(len(devices.visible))}, f"localhost:{','.join(map(str, slots))}")
    name, before = devices.variable, os.environ.get(devices.variable)
    os.environ[name] = ",".join(devices.visible[slot] for slot in slots)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def report(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> int:
    """Run `ds env` and return its exit status."""
    del hide_operator_status, hide_errors_and_warnings
    return ds(["env"])


def cli_main() -> int:
    """Run the program `ds_report` and return its exit status."""
    return report()


def _parsed(prog: str, description: str, *options: tuple[str, dict[str, Any]], args: Sequence[str] | None) -> Any:
    """Parse a program's command line by a table of its options."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    for name, how in options:
        parser.add_argument(*name.split(), **how)
    return parser.parse_args(args)


def ssh(args: Sequence[str] | None = None) -> int:
    """Run the program `ds_ssh [-f HOSTFILE] COMMAND...` by `ds ssh`."""
    options = _parsed(
        "ds_ssh", "Run a command on all hosts.",
        ("-f --hostfile", {"default": HOSTFILE}), ("command", {"nargs": argparse.REMAINDER}), args=args,
    )  # fmt: skip
    return ds(["ssh", "--hostfile", options.hostfile, *options.command])


def bench(args: Sequence[str] | None = None) -> int:
    """Run the program `ds_bench` by `ds comm bench`, with the options of the latter."""
    return ds(["comm", "bench", *(sys.argv[1:] if args is None else args)])


def _leave_out(prog: str, options: argparse.Namespace, names: Sequence[str]) -> None:
    """Say of the flags which were given, of `names`, that they change nothing here."""
    given = [f"--{name}" for name in names if getattr(options, name)]
    if given:
        print(f"{prog}: without effect here: {', '.join(given)}", file=sys.stderr)


def _refuse(error: DsError, args: Sequence[str] | None) -> NoReturn:
    """Raise `error` at a caller; the program prints it and exits with 2."""
    if args is not None:
        raise error
    print(error, file=sys.stderr)
    sys.exit(2)


def _flags(*names: str) -> list[tuple[str, dict[str, Any]]]:
    return [(f"--{name}", {"action": "store_true"}) for name in names]


_SUBMISSION = ("single_submit", "sequential_requests")
"""How requests were submitted: the backends of ds-ops keep the queue filled."""

_IO_UNUSED = (*_SUBMISSION, "validate", "slow_bounce_buffer", "torch_legacy_save", "use_accelerator_pin_memory",
              "include_warmup_time", "different_file_each_iteration", "warmup_loops", "fast_io_size")  # fmt: skip


def io(args: Sequence[str] | None = None) -> int:
    """Run the program `ds_io` by `ds io bench`, of which every folder of `--folder_to_device_mapping` has one at the same time, or `--folder` has `--multi_process`.

    Raises:
        ConfigError, UnsupportedError: no folder or both kinds, a folder that is not there, memory of a GPU, or an engine of torch's
            ("compat-argument"). The program prints the error and exits with 2.
    """
    parsed = _parsed(
        "ds_io", "Measure file I/O.",
        ("--folder", {}), ("--folder_to_device_mapping", {"nargs": "+", "default": [], "metavar": "FOLDER:DEVICE"}),
        ("--multi_process", {"type": int, "default": 1, "help": "how many measure at the same time"}),
        ("--read", {"action": "store_true", "help": "reads only; writes only without it"}),
        ("--io_size", {"default": "256M"}), ("--block_size", {}), ("--queue_depth", {}), ("--io_parallel", {"help": "workers"}),
        ("--loops", {"default": "3"}), ("--engine", {"default": "aio_handle"}), ("--warmup_loops", {}), ("--fast_io_size", {}),
        *_flags("gpu", "use_gds", *_IO_UNUSED[:-2]), args=args,
    )  # fmt: skip
    folders = [folder.rpartition(":")[0] for folder in parsed.folder_to_device_mapping]
    if bool(parsed.folder) == bool(folders) or not all(folders):
        _refuse(wrong_argument("--folder and --folder_to_device_mapping: neither, both, or a mapping without a device",
                               "Give --folder DIR, or --folder_to_device_mapping DIR:0 DIR:1."), args)  # fmt: skip
    if parsed.gpu or parsed.use_gds or parsed.engine not in ("aio_handle", "aio_basic"):
        _refuse(not_supported("--gpu, --use_gds or --engine of torch: transfers between files and host memory by ds-ops are measured",
                              "Leave it out."), args)  # fmt: skip
    _leave_out("ds_io", parsed, _IO_UNUSED)
    options = {"--block-size": parsed.block_size, "--queue-depth": parsed.queue_depth, "--workers": parsed.io_parallel}
    chosen = [word for name, value in options.items() if value is not None for word in (name, value)]
    only = "--no-write" if parsed.read else "--no-read"
    folders = folders or [parsed.folder] * parsed.multi_process
    words = [["bench", folder, "--size", parsed.io_size, only, "--loops", parsed.loops, *chosen] for folder in folders]
    if len(words) == 1:
        return ds(["io", *words[0]])
    jobs = [subprocess.Popen([sys.executable, "-m", "ds_ops.cli_io", *each], stdout=subprocess.PIPE) for each in words]
    for job in jobs:
        print(job.communicate()[0].decode(), end="")
    return max(job.returncode for job in jobs)


def tune(args: Sequence[str] | None = None) -> int:
    """Run the program `ds_nvme_tune --nvme_dir DIR...` by `ds io tune`; what was measured is written to `measured.json` in `--log_dir`.

    Raises:
        ConfigError, UnsupportedError: memory of a GPU, or a key of `--sweep_config` that is none of the settings ("compat-argument").
            The program prints the error and exits with 2.
    """
    options = _parsed(
        "ds_nvme_tune", "Find the best settings for file I/O.",
        ("--nvme_dir", {"nargs": "+", "required": True}), ("--io_size", {"default": "400M"}), ("--loops", {"default": "1"}),
        ("--sweep_config", {"type": Path, "help": "JSON: values of block_size, queue_depth and io_parallel to try"}),
        ("--log_dir", {"type": Path}), *_flags("no_read", "no_write", "gpu", "gds", "flush_page_cache", "verbose"), args=args,
    )  # fmt: skip
    if options.gpu or options.gds:
        _refuse(
            not_supported("--gpu or --gds: transfers between files and host memory are measured", "Leave it out."), args
        )
    _leave_out("ds_nvme_tune", options, ("flush_page_cache", "verbose"))  # its own file is dropped from the cache
    flags = [flag for flag, on in (("--no-read", options.no_read), ("--no-write", options.no_write)) if on]
    sweep: dict[str, Any] = {}
    try:
        sweep = json.loads(options.sweep_config.read_text()) if options.sweep_config else {}
        lists = all(isinstance(values, list) for values in sweep.values())
    except (OSError, ValueError, AttributeError):
        lists = False
    if not lists:
        _refuse(wrong_argument(f"--sweep_config {options.sweep_config} is no JSON object of lists", "Use a file like {\"queue_depth\": [8, 32]}."), args)  # fmt: skip
    settings = {"block_size": "--block-size", "queue_depth": "--queue-depth", "io_parallel": "--workers"}
    if unknown := sorted(sweep.keys() - settings.keys() - set(_SUBMISSION)):
        _refuse(
            wrong_argument(f"--sweep_config has {', '.join(unknown)}", f"Use lists of {', '.join(settings)}."), args
        )
    _leave_out("ds_nvme_tune", argparse.Namespace(**dict.fromkeys(_SUBMISSION) | sweep), _SUBMISSION)
    for name, flag in settings.items():
        flags += [flag, *map(str, sweep[name])] if name in sweep else []
    if options.log_dir:
        options.log_dir.mkdir(parents=True, exist_ok=True)
        flags += ["--json", str(options.log_dir / "measured.json")]
    return ds(["io", "tune", *options.nvme_dir, "--size", options.io_size, "--loops", options.loops, *flags])


def elastic(args: Sequence[str] | None = None) -> int:
    """Run the program `ds_elastic -c CONFIG [-w RANKS]`: print the batch sizes of the `elasticity` section."""
    options = _parsed(
        "ds_elastic", "Show what elasticity comes to.",
        ("-c --config", {"required": True}), ("-w --world-size", {"type": int, "default": 0}), args=args,
    )  # fmt: skip
    results = compute_elastic_config(read(options.config).data, version, options.world_size)
    names = ("train batch size", "numbers of ranks", "microbatch size")
    for name, value in zip(names, results, strict=False):
        print(f"{name}: {', '.join(map(str, value)) if isinstance(value, tuple | list) else value}")
    return 0


def universal_arguments(args: Sequence[str] | None = None) -> Any:
    """Parse the command line of `ds_to_universal.py`. Numbers of workers and `--keep_temp_folder` change nothing: there is no such folder."""
    return _parsed(
        "ds_to_universal.py", "Convert a checkpoint to the universal layout.",
        ("--input_folder", {"required": True}), ("--output_folder", {"required": True}),
        ("--num_extract_workers", {"type": int, "help": argparse.SUPPRESS}),
        ("--num_merge_workers", {"type": int, "help": argparse.SUPPRESS}),
        ("--keep_temp_folder", {"action": "store_true", "help": argparse.SUPPRESS}),
        ("--no_strict", {"dest": "strict", "action": "store_false", "help": "let patterns of names fit nothing"}),
        ("--inject_missing_state", {"action": "store_true", "help": "cut along dim 0 where files do not say how"}),
        args=args,
    )  # fmt: skip


def to_universal(args: argparse.Namespace | Sequence[str] | None = None) -> int:
    """Convert a checkpoint, upstream's or ours, to upstream's universal layout.

    The program is `ds_to_universal.py --input_folder TAG --output_folder OUT`.

    Args:
        args: The command line; or, as upstream's `main` has it, an object with `input_folder`, `output_folder`, and the flags.

    Raises:
        CheckpointError: patterns of names in the files fit nothing, unless `--no_strict` ("compat-files").
    """
    options: Any = args if hasattr(args, "input_folder") else universal_arguments(args)
    out, folder = Path(options.output_folder), Path(options.input_folder)
    info = _injected(folder) if getattr(options, "inject_missing_state", False) else None
    source = open_training(folder, allow_pickle=True, parallel_info=info)
    unused = (source.meta.get("source") or {}).get("unused_patterns")
    if unused and getattr(options, "strict", True):
        raise refused("unused-patterns", ", ".join(unused))
    # Of stage 3 upstream's files hold tensors without anything beside them, which tools that read them count on.
    flat = bool(source.meta.get("source")) and unused is None and bool(_models(folder, "zero_pp_rank_"))
    write_universal(source, out.parent, out.name, allow_pickle=True, flat=flat)
    return 0


def _injected(folder: Path) -> dict[str, float] | None:
    """Return the information that is assumed of upstream's files which have none."""
    files = [] if has_manifest(folder) else _models(folder, "")[:1]
    said = [load_pt(file).get("universal_checkpoint_info") or {} for file in files]
    version = {"universal_checkpoint_version": 0.4}
    return version if said and set(said[0]) <= set(version) else None


def _models(folder: Path, prefix: str) -> list[Path]:
    return sorted(folder.glob(f"{prefix}*mp_rank_*_model_states.pt"))
