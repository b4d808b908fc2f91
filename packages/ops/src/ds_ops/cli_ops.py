"""`ds ops build`: build native modules and kernels on this machine, on request. `ds ops kernels`: where CUDA kernels come from."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from typing import Any

from ds_config.errors import DsError, KernelError
from ds_ops.build_native import Built, Kind, build, missing_tools, plan
from ds_ops.module_cache import source_dir
from ds_ops.toolchain import find_tools

__all__ = ["HELP", "main", "register"]

HELP = "build native modules and kernels on this machine (`ds ops build`), list CUDA kernels (`ds ops kernels`)"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    make = actions.add_parser("build", help="compile into DS_OPS_CACHE, where ds_ops finds it")
    make.add_argument(
        "kind",
        nargs="?",
        choices=["cpu", "cuda"],
        default="cpu",
        help="the CPU's module, or all CUDA kernels (default: cpu)",
    )
    make.add_argument("--force", action="store_true", help="compile even if it is there")
    make.add_argument(
        "--jobs", type=int, default=0, help="compilers of the CPU's module at a time (default: one per core)"
    )
    listing = actions.add_parser("kernels", help="where each CUDA kernel comes from")
    for action in (make, listing):
        action.add_argument(
            "--arch", action="append", metavar="9.0", help="a compute capability (default: this machine's)"
        )
        action.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Build or list; exit status 1 with the first compiler error if that fails."""
    try:
        if args.action == "kernels" or args.kind == "cuda":
            return _kernels(args)
        done = _build("cpu", args.jobs, args.force)
    except DsError as error:
        print(error, file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({"module": str(done.module), "fresh": done.fresh, "seconds": done.seconds}))
        return 0
    print(f"{'built' if done.fresh else 'already built'}: {done.module} ({done.seconds:.0f} s)")
    return 0


def _kernels(args: argparse.Namespace) -> int:
    kernels: Any = importlib.import_module("ds_ops.build_kernels")  # imports torch
    compiler = kernels.any_compiler()
    chosen = [_capability(text) for text in args.arch or ()] or kernels.present_capabilities()
    if not chosen:
        raise KernelError(
            "this machine has no CUDA device to compile for.",
            code="ops-build-arch",
            fix="Name one: `--arch 9.0` (8.0: A100, 8.9: L4 and L40S, 9.0: H100 and H200, 10.0: B200, 7.5: T4).",
        )
    rows = kernels.kernel_rows(compiler, chosen, kernels.kernel_table())
    if args.action == "build":
        rows = kernels.build_kernels(compiler, rows, force=args.force, say=_say)
    if args.json:
        each = [
            {"kernel": r.kernel.instance, "architecture": r.architecture, "image": r.path, "seconds": r.seconds}
            for r in rows
        ]
        print(json.dumps({"compiler": compiler.name, "kernels": each}))
        return 0
    for row in rows:
        print(
            f"{row.architecture}  {row.kernel.instance:<72}  {row.path or 'not compiled yet: NVRTC does when it is first used'}"
        )
    print(f"{sum(bool(r.path) for r in rows)} of {len(rows)} kernels are compiled; compiler: {compiler.name}")
    return 0


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.removeprefix("sm_").partition(".")
    if not minor and major.isdigit() and len(major) > 1:
        major, minor = major[:-1], major[-1]
    if not (major.isdigit() and minor.isdigit()):
        raise KernelError(
            f"--arch {text}: expected a compute capability.", code="ops-build-arch", fix="Write it as 9.0, or as sm_90."
        )
    return int(major), int(minor)


def _build(kind: Kind, jobs: int, force: bool) -> Built:
    tools, sources = find_tools(os.environ), source_dir()
    if sources is None:
        raise KernelError(
            "the native sources are not installed with this ds-ops.",
            code="ops-build-sources",
            fix="Install ds-ops from its wheel or sdist again: `pip install --force-reinstall --no-deps ds-ops`.",
        )
    if missing := missing_tools(tools):
        raise KernelError(
            "the native module cannot be built here:\n" + "\n".join(f"  {line}" for line in missing),
            code="ops-build-tools",
            fix="pip install 'ds-ops[build]' brings CMake, Ninja and pybind11; install a compiler (apt-get install g++), "
            "or correct CC and CXX.",
        )
    return build(plan(kind, sources, tools, jobs=jobs), force=force, say=_say)


def _say(line: str) -> None:
    print(f"{line} ...", file=sys.stderr, flush=True)


if __name__ == "__main__":
    from ds_config.ds_command import main as ds

    sys.exit(ds(["ops", *sys.argv[1:]]))
