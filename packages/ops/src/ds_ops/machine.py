"""This machine as data: what `ds_ops.doctor` judges. Reads /proc, /sys and the environment, asks compilers for their version,
and starts `ds_ops.probe` for what needs torch.

Every reader answers None (or an empty text) where there is nothing to read: a missing file is a fact, not an error.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ds_ops.module_cache import source_dir
from ds_ops.toolchain import Tool, find_tools

__all__ = ["Machine", "Pair", "ProbeStage", "parse_stages", "read_machine", "run_probe"]

Pair = tuple[int, int]
_VARIABLES = ("DS_OPS", "DS_CPU_ISA", "DS_OPS_CACHE", "OMP_NUM_THREADS", "CC", "CXX", "CUDA_HOME", "CUDACXX", "CUDA_VISIBLE_DEVICES")  # fmt: skip
_DEVICE_FILES = ("nvidia0", "kfd", "dxg", "accel0")
_PROBE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class ProbeStage:
    """What one stage of the probe found, or why it could not: exactly one of the two is filled."""

    results: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts, without judgement. Pairs and numbers are None where this system does not tell.

    Attributes:
        shm_bytes: Size of /dev/shm, and what is free of it.
        memlock_bytes: Soft and hard limit of locked memory; -1 is no limit.
        aio_requests: Requests of kernel AIO in use, and the most there may be.
        huge_pages: Selected mode of transparent huge pages.
        device_files: Names under /dev that tell of an accelerator.
        native_sources: Where `ds ops build` would build from; empty if the installation has no sources.
    """

    python: str
    system: str
    cpus: int
    memory_bytes: int | None = None
    shm_bytes: Pair | None = None
    numa_nodes: int | None = None
    memlock_bytes: Pair | None = None
    aio_requests: Pair | None = None
    huge_pages: str = ""
    device_files: tuple[str, ...] = ()
    native_sources: str = ""
    tools: Mapping[str, Tool] = field(default_factory=lambda: MappingProxyType({}))
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    stages: Mapping[str, ProbeStage] = field(default_factory=lambda: MappingProxyType({}))


def read_machine(root: Path = Path("/")) -> Machine:
    """Look at this machine; takes some seconds, most of them to import torch in another process.

    Args:
        root: Where /proc, /sys and /dev are.
    """
    return Machine(
        python=f"{platform.python_version()} ({sys.executable})",
        system=platform.platform(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=_memory(root / "proc/meminfo"),
        shm_bytes=_space(root / "dev/shm"),
        numa_nodes=_numa_nodes(root / "sys/devices/system/node"),
        memlock_bytes=_memlock(),
        aio_requests=_aio(root / "proc/sys/fs"),
        huge_pages=_selected(root / "sys/kernel/mm/transparent_hugepage/enabled"),
        device_files=tuple(name for name in _DEVICE_FILES if (root / "dev" / name).exists()),
        native_sources=str(source_dir() or ""),
        tools=find_tools(os.environ),
        variables={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        stages=run_probe(),
    )


def run_probe(seconds: float = _PROBE_SECONDS, command: tuple[str, ...] = ()) -> dict[str, ProbeStage]:
    """Run `ds_ops.probe` in another process. A stage that killed it, or did not answer in time, says so."""
    command = command or (sys.executable, "-m", "ds_ops.probe")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, errors="replace")
    except subprocess.TimeoutExpired as late:
        raw = late.stdout or b""
        text = raw if isinstance(raw, str) else raw.decode(errors="replace")
        return parse_stages(text, f"did not answer within {seconds:.0f} s")
    except OSError as error:
        return parse_stages("", f"cannot be started: {error}")
    last = done.stderr.strip().splitlines()[-1:] or [""]
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
    return parse_stages(done.stdout, f"ended with {how} {last[0]}".strip())


def parse_stages(text: str, end: str) -> dict[str, ProbeStage]:
    """Parse the probe's lines into stages.

    `end` is the error of a stage that began and did not report; of stage "probe" if none began.
    """
    stages: dict[str, ProbeStage] = {}
    begun = ""
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # a library that prints
            continue
        if not isinstance(record, dict):
            continue
        begun = str(record.get("begin", "")) if "begin" in record else ""
        if "stage" in record:
            stages[str(record["stage"])] = ProbeStage(record.get("found", {}), str(record.get("error", "")))
    if begun or not stages:
        stages[begun or "probe"] = ProbeStage(error=end)
    return stages


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _memory(meminfo: Path) -> int | None:
    for line in _text(meminfo).splitlines():
        name, _, rest = line.partition(":")
        if name == "MemTotal":
            return int(rest.split()[0]) * 1024
    return None


def _space(folder: Path) -> Pair | None:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.total, usage.free


def _numa_nodes(folder: Path) -> int | None:
    return len(list(folder.glob("node[0-9]*"))) or None


def _memlock() -> Pair | None:
    try:
        import resource
    except ImportError:  # Windows has none
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    infinite = resource.RLIM_INFINITY
    return (-1 if soft == infinite else soft, -1 if hard == infinite else hard)


def _aio(folder: Path) -> Pair | None:
    used, most = _text(folder / "aio-nr"), _text(folder / "aio-max-nr")
    return (int(used), int(most)) if used.isdigit() and most.isdigit() else None


def _selected(path: Path) -> str:
    """Return the choice in brackets of `always [madvise] never`."""
    _, bracket, rest = _text(path).partition("[")
    return rest.partition("]")[0] if bracket else ""
