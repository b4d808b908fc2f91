"""`ds env`: what is installed and visible here, for a bug report or a first look. Imports nothing of what it reports on."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from importlib.metadata import distributions
from typing import Any

from ds_launcher.backends import BACKENDS
from ds_launcher.devices import KINDS, find_devices
from ds_launcher.exports import ALLOWED

__all__ = ["HELP", "main", "register", "report"]

HELP = "report Python, platform, packages and devices (--torch also asks torch)"

_PACKAGES = ("torch", "numpy", "safetensors", "transformers", "triton", "pydantic", "deepspeed", "mpi4py")
_SHOWN = (
    "OMP_NUM_THREADS",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "SLURM_JOB_ID",
    *(k.variable for k in KINDS),
)


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--torch", action="store_true", help="import torch and report its build and devices (seconds)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Print the report."""
    found = report()
    if args.torch:
        found["torch"] = _torch_report()
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    for section, values in found.items():
        print(section)
        for name, value in values.items():
            print(f"  {name:24} {value}")
    return 0


def report() -> dict[str, dict[str, Any]]:
    """Sections of names and values. Variables that may hold secrets are not shown."""
    devices = find_devices(os.environ)
    versions = {(d.metadata["Name"] or "").lower(): d.version for d in distributions()}
    ours = sorted(name for name in versions if name.startswith("ds-"))
    variables = {name: os.environ[name] for name in sorted(os.environ) if name in _SHOWN or name.startswith(_plain())}
    return {
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": {
            "system": platform.platform(),
            "machine": platform.machine(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
        "packages": {name: versions.get(name, "not installed") for name in (*ours, *_PACKAGES)},
        "devices": {"kind": devices.kind or "none", "visible": ",".join(devices.visible) or "none"},
        "tools": {
            tool: shutil.which(tool) or "not found"
            for tool in sorted({b.tool for b in BACKENDS.values()} | {"nvcc", "g++", "numactl"})
        },
        "variables": variables,
    }


def _plain() -> tuple[str, ...]:
    return tuple(prefix for prefix in ALLOWED if prefix not in ("DS_", "MLFLOW"))


def _torch_report() -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        return {"import": f"failed: {error}"}
    return {
        "version": torch.__version__,
        "cuda build": torch.version.cuda or "none",
        "cuda available": torch.cuda.is_available(),
        "devices": ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "none",
        "distributed": torch.distributed.is_available(),
        "threads": torch.get_num_threads(),
    }
