"""This package's part of `ds report`: which backend runs each op here, why no better one does, and what is wrong with this machine."""

from __future__ import annotations

from collections.abc import Sequence

from ds_config.report_tables import PackageReport, TextTable
from ds_ops.doctor import Diagnosis, OpRow, diagnose
from ds_ops.machine import read_machine

__all__ = ["report", "report_of"]


def report(quick: bool = False) -> PackageReport:
    """Look at this machine; nothing with `quick`, since that takes seconds, most of them torch's import in another process."""
    return PackageReport() if quick else report_of(diagnose(read_machine()))


def report_of(diagnosis: Diagnosis) -> PackageReport:
    """Build the report of a diagnosis for display; the JSON form lists every op separately."""
    heads = ("device", "dtypes", "backend", "why not better", "ops")
    table = TextTable("ops", "the backend that runs, and why a better one does not", heads, tuple(_rows(diagnosis.ops)))
    return PackageReport(diagnosis.checks, (table,), {"ops": diagnosis.as_dict()["ops"]})


def _rows(ops: Sequence[OpRow]) -> list[tuple[str, ...]]:
    """Merge ops that are treated alike into a row each."""
    alike: dict[tuple[object, ...], list[OpRow]] = {}
    for row in ops:
        alike.setdefault((row.device, row.dtypes, row.backend, row.why_not), []).append(row)
    rows: list[tuple[str, ...]] = []
    for first, *rest in alike.values():
        why = "\n".join(f"{backend}: {reason}{f' -> {fix}' if fix else ''}" for backend, reason, fix in first.why_not)
        names = ", ".join(row.op for row in (first, *rest))
        rows.append((first.device, _short(" ".join(first.dtypes)), first.backend or "none", _short(why), names))
    return rows


def _short(text: str) -> str:
    """Replace dtype names by short names: torch.float32 by fp32."""
    return text.replace("torch.", "").replace("bfloat", "bf").replace("float", "fp")
