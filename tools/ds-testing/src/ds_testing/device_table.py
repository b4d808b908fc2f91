"""The table of a run on devices: what ran, on how many ranks, with which backend, in how many seconds. Pure: rows to text and to a record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["DeviceRow", "DeviceRun", "merge_record", "package_of", "render_table", "summarize", "to_record"]

_HEAD = ("package", "device", "ranks", "backend", "passed", "failed", "skipped", "seconds")


@dataclass(frozen=True, slots=True)
class DeviceRun:
    """One case of a test.

    Attributes:
        device: `cuda`, or what stands for it: `device-only`, `cpu`.
        outcome: `passed`, `failed` or `skipped`.
    """

    package: str
    device: str
    ranks: int
    backend: str
    outcome: str
    seconds: float


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """All cases of a package on one device, with one number of ranks and one backend."""

    package: str
    device: str
    ranks: int
    backend: str
    passed: int
    failed: int
    skipped: int
    seconds: float


def package_of(nodeid: str) -> str:
    """Return the package that a test belongs to: `packages/zero/tests/...` is `zero`."""
    parts = nodeid.partition("::")[0].split("/")
    return parts[1] if parts[0] in ("packages", "tools") and len(parts) > 2 else parts[0]


def summarize(runs: Iterable[DeviceRun]) -> list[DeviceRow]:
    """Return one row for each package, device, number of ranks and backend, in this order."""
    counts: dict[tuple[str, str, int, str], Counter[str]] = {}
    seconds: Counter[tuple[str, str, int, str]] = Counter()
    for run in runs:
        key = (run.package, run.device, run.ranks, run.backend)
        counts.setdefault(key, Counter())[run.outcome] += 1
        seconds[key] += run.seconds  # type: ignore[assignment]  # a Counter adds floats as well
    return [
        DeviceRow(*key, counts[key]["passed"], counts[key]["failed"], counts[key]["skipped"], round(seconds[key], 1))
        for key in sorted(counts)
    ]


def render_table(rows: Sequence[DeviceRow]) -> str:
    """Return the rows as a table of plain text that Markdown reads, too; without rows, that nothing ran."""
    if not rows:
        return "no test of a device was selected"
    total = sum(row.seconds for row in rows)
    cells = [_HEAD, *(tuple(map(str, asdict(row).values())) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_HEAD))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join([*lines, "", f"{sum(row.passed for row in rows)} passed, {sum(row.failed for row in rows)} failed, "
                      f"{sum(row.skipped for row in rows)} skipped in {total:.0f} s"])  # fmt: skip


def to_record(
    rows: Sequence[DeviceRow], facts: Mapping[str, str], answers: Mapping[int, str], date: str
) -> dict[str, Any]:
    """Return what is written down of a run on a card.

    Args:
        facts: `card` and versions.
        answers: What NCCL answered, by the number of ranks.
    """
    on_card = [asdict(row) for row in rows if row.device == "cuda"]
    return {**facts, "date": date, "nccl": {str(size): text for size, text in sorted(answers.items())}, "rows": on_card}


def merge_record(records: Sequence[Mapping[str, Any]], new: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the records with `new` in the place of an earlier run on the same card, by card."""
    others = [record for record in records if record["card"] != new["card"]]
    return sorted([*others, new], key=lambda record: str(record["card"]))
