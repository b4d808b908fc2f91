"""What `ds report` tells: the parts that installed packages say of this machine (`ds_config.report_tables`), put together; and our own part.

Nothing of a package is imported before its part is asked for, and a package that cannot be imported is a line of the report.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, distributions, entry_points
from typing import Any

from ds_config.installed import distributions_of
from ds_config.report_tables import GROUP, Check, PackageReport, ReportLevel, TextTable
from ds_launcher.backends import BACKENDS
from ds_launcher.devices import KINDS, find_devices
from ds_launcher.exports import ALLOWED

__all__ = ["as_dict", "environment", "gather", "merged", "torch_here"]

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
_GRAVITY = tuple(ReportLevel)


def gather(quick: bool = False) -> PackageReport:
    """Collect every part of the report, from packages in the order of their names."""
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    return merged(_part(point, quick) for point in points)


def _part(point: EntryPoint, quick: bool) -> PackageReport:
    try:
        part: PackageReport = point.load()(quick)
    except Exception as error:
        package = point.dist.name if point.dist is not None else point.value
        fix = f"pip install --force-reinstall --no-deps {package}"
        finding = f"its part of the report failed: {type(error).__name__}: {error}"
        return PackageReport((Check("report", package, ReportLevel.BROKEN, finding, fix),))
    return part


def merged(parts: Iterable[PackageReport]) -> PackageReport:
    """Merge the parts into a report.

    A check that two packages report appears once, with the graver verdict; the first of equals.
    """
    checks: dict[tuple[str, str], Check] = {}
    tables: list[TextTable] = []
    data: dict[str, Any] = {}
    for part in parts:
        for check in part.checks:
            before = checks.get((check.section, check.name))
            if before is None or _GRAVITY.index(check.verdict) > _GRAVITY.index(before.verdict):
                checks[check.section, check.name] = check
        tables += part.tables
        data |= part.data
    order = list(dict.fromkeys(section for section, _ in checks))
    return PackageReport(
        tuple(sorted(checks.values(), key=lambda check: order.index(check.section))), tuple(tables), data
    )


def as_dict(report: PackageReport) -> dict[str, Any]:
    """Convert a report to plain values for JSON."""
    checks = [
        {"section": c.section, "name": c.name, "verdict": c.verdict.value, "found": c.result, "fix": c.fix}
        for c in report.checks
    ]
    return {"ok": all(c.verdict is not ReportLevel.BROKEN for c in report.checks), "checks": checks, **report.data}


# -- our own part


def environment(quick: bool = False) -> PackageReport:
    """Report the software, devices and settings visible on this host.

    Imports nothing of what the report covers. Variables that may hold secrets are not shown.
    """
    del quick  # it is quick
    data = _facts()
    python, system, devices = data["python"], data["platform"], data["devices"]
    checks = [
        ("system", "Python", f"{python['version']} ({python['executable']})"),
        ("system", "platform", str(system["system"])),
        ("system", "cores", str(system["cores"])),
        ("device", "visible", "none" if devices["kind"] == "none" else f"{devices['kind']}: {devices['visible']}"),
        *(("packages", name, value) for name, value in data["packages"].items()),
        *(("tools", name, value) for name, value in data["tools"].items()),
        *(("settings", name, value) for name, value in data["variables"].items()),
    ]
    return PackageReport(
        tuple(Check(section, name, ReportLevel.INFO, value) for section, name, value in checks), data=data
    )


def _facts() -> dict[str, dict[str, Any]]:
    devices = find_devices(os.environ)
    versions = {(d.metadata["Name"] or "").lower(): d.version for d in distributions()}
    ours = sorted(distributions_of())
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


def torch_here() -> PackageReport:
    """Report torch's build and devices by importing torch into this process."""
    facts = _torch()
    broken = "import" in facts
    verdict = ReportLevel.BROKEN if broken else ReportLevel.INFO
    fix = "pip install --force-reinstall torch" if broken else ""
    return PackageReport(
        tuple(Check("torch", name, verdict, str(value), fix) for name, value in facts.items()), data={"torch": facts}
    )


def _torch() -> Mapping[str, Any]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of it cannot be loaded
        return {"import": f"failed: {error}"}
    return {
        "version": torch.__version__,
        "cuda build": torch.version.cuda or "none",
        "cuda available": torch.cuda.is_available(),
        "devices": ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "none",
        "distributed": torch.distributed.is_available(),
        "threads": torch.get_num_threads(),
    }
