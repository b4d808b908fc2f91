"""`ds ops build`: build native modules on this machine, once, on request."""

from __future__ import annotations

import argparse
import json
import os
import sys

from ds_config.errors import DsError, KernelError
from ds_ops.build_native import Built, Kind, build, missing_tools, plan
from ds_ops.module_cache import source_dir
from ds_ops.toolchain import find_tools

__all__ = ["HELP", "main", "register"]

HELP = "build native modules on this machine (`ds ops build`)"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    make = actions.add_parser("build", help="compile modules into DS_OPS_CACHE, where ds_ops finds them")
    make.add_argument("kind", nargs="?", choices=["cpu", "cuda"], default="cpu", help="which module (default: cpu)")
    make.add_argument("--force", action="store_true", help="compile even if the module is there")
    make.add_argument("--jobs", type=int, default=0, help="compilers at a time (default: one per core)")
    make.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Build; exit status 1 with the first compiler error if that fails."""
    try:
        done = _build(args.kind, args.jobs, args.force)
    except DsError as error:
        print(error, file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({"module": str(done.module), "fresh": done.fresh, "seconds": done.seconds}))
        return 0
    print(f"{'built' if done.fresh else 'already built'}: {done.module} ({done.seconds:.0f} s)")
    return 0


def _build(kind: Kind, jobs: int, force: bool) -> Built:
    tools, sources = find_tools(os.environ), source_dir()
    if sources is None:
        raise KernelError(
            "the native sources are not installed with this ds-ops.",
            code="ops-build-sources",
            fix="Install ds-ops from its wheel or sdist again: `pip install --force-reinstall --no-deps ds-ops`.",
        )
    if missing := missing_tools(kind, tools):
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
