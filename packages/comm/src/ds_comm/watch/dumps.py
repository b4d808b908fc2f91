"""What the watchdogs wrote when they ended a job, read back and put side by side.

Many jobs leave their dumps in one folder. A *job* here is one world of ranks, from its rendezvous to its end: its ranks agree on a
name that begins with when it started, and each writes `rank-R-pid-P-job-NAME.json`. Files of earlier versions, without a name, are
those of one job whose name is empty.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_comm.watch.stamp_ring import Stamp
from ds_comm.watch.verdict import differs, rank_names
from ds_config.errors import CommError

__all__ = [
    "Dump",
    "DumpFolder",
    "DumpedOp",
    "as_dict",
    "compare",
    "dump_name",
    "jobs_in",
    "new_job",
    "read_dumps",
    "render",
]

_NAME = re.compile(r"rank-(\d+)-pid-(\d+)(?:-job-(.+))?\.json")


def new_job() -> str:
    """Generate a name for a job that starts now, in UTC: `20261125-154501-3fa94c`."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def dump_name(rank: int, pid: int, job: str) -> str:
    """Return the file name of a rank's dump."""
    return f"rank-{rank}-pid-{pid}-job-{job}.json"


@dataclass(frozen=True, slots=True)
class DumpFolder:
    """The dumps of one job in a folder.

    Attributes:
        name: Empty for files that carry none.
        files: The newest one of each rank.
        written_s: When the last of them was written, on the clock of time.time().
    """

    name: str
    files: dict[int, Path]
    written_s: float

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.written_s))
        return f"{self.name or 'without a name'}: {rank_names(sorted(self.files))}, written {when}"


@dataclass(frozen=True, slots=True)
class Dump:
    """One rank's: the line it printed and all its stamps, oldest first."""

    rank: int
    line: str
    stamps: tuple[Stamp, ...]
    job: str = ""


@dataclass(frozen=True, slots=True)
class DumpedOp:
    """One operation of a group: each rank's stamp, None where it did not come (or its ring no longer has it)."""

    group: str
    mark: int
    stamps: dict[int, Stamp | None]
    key: str = ""  # torch's name of the group: several groups may be shown by one name

    @property
    def agree(self) -> bool:
        """Whether every rank came with the same operation."""
        present = [stamp for stamp in self.stamps.values() if stamp is not None]
        return len(present) == len(self.stamps) and not any(differs(present[0], stamp) for stamp in present)


def jobs_in(folder: Path) -> list[DumpFolder]:
    """List the jobs whose dumps are in `folder`, the most recently written first."""
    dumps: dict[str, dict[int, tuple[float, Path]]] = defaultdict(dict)
    for path in folder.glob("rank-*.json"):
        if (name := _NAME.fullmatch(path.name)) is None:
            continue
        rank, written_s, files = int(name[1]), path.stat().st_mtime, dumps[name[3] or ""]
        if rank not in files or files[rank][0] < written_s:
            files[rank] = written_s, path
    jobs = [
        DumpFolder(
            name,
            {rank: path for rank, (_, path) in sorted(files.items())},
            max(written_s for written_s, _ in files.values()),
        )
        for name, files in dumps.items()
    ]
    return sorted(jobs, key=lambda job: (job.written_s, job.name), reverse=True)


def read_dumps(folder: Path, job: str | None = None) -> list[Dump]:
    """Read the dumps of one job in `folder` in rank order: of `job`, or of the job written last.

    Raises:
        CommError: the folder has no such dumps ("comm-no-dump").
    """
    jobs = jobs_in(folder)
    if not jobs:
        raise CommError(
            f"{folder} has no rank-*.json",
            code="comm-no-dump",
            fix="Give the folder that the [ds-comm] line of the job named; each host has its own.",
        )
    chosen = jobs[0] if job is None else next((known for known in jobs if known.name == job), None)
    if chosen is None:
        raise CommError(
            f"{folder} has no dumps of the job {job!r}; it has those of " + "; ".join(map(str, jobs)),
            code="comm-no-dump",
            fix="Give --job one of these names, or leave it out for the one that wrote last.",
        )
    return [_read(rank, path) for rank, path in chosen.files.items()]


def _read(rank: int, path: Path) -> Dump:
    content = json.loads(path.read_text())
    return Dump(rank, content["line"], tuple(_stamp(stamp) for stamp in content["stamps"]), content.get("job", ""))


def compare(dumps: Sequence[Dump]) -> list[DumpedOp]:
    """Align the operations of all dumps by group and mark.

    A group's ranks are those of the dumps that have a stamp of the group.
    """
    by_group: dict[str, dict[int, dict[int, Stamp]]] = defaultdict(lambda: defaultdict(dict))
    ranks: dict[str, set[int]] = defaultdict(set)
    for dump in dumps:
        for stamp in dump.stamps:
            if stamp.mark:
                by_group[stamp.key][stamp.mark][dump.rank] = stamp
                ranks[stamp.key].add(dump.rank)
    return [
        DumpedOp(next(iter(stamps.values())).group, mark, {rank: stamps.get(rank) for rank in sorted(ranks[key])}, key)
        for key, marks in sorted(by_group.items())
        for mark, stamps in sorted(marks.items())
    ]


def render(dumps: Sequence[Dump], before: int = 5) -> str:
    """Render the lines of all ranks, and per group the operations around the first that differs between ranks."""
    lines = [dump.line for dump in dumps]
    for group, rows in _remembered(dumps):
        odd = next((i for i, row in enumerate(rows) if not row.agree), None)
        if odd is None:
            lines += ["", f"group {group!r}: all {len(rows)} remembered operations agree, up to #{rows[-1].mark}"]
            continue
        lines += ["", f"group {group!r}: ranks differ at #{rows[odd].mark}"]
        for row in rows[max(0, odd - before) : odd + before]:
            lines.append(f"  #{row.mark}" + ("" if row.agree else "   <- differs"))
            texts = dict.fromkeys(_short(stamp) for stamp in row.stamps.values())
            for text in texts:
                who = [str(rank) for rank, stamp in row.stamps.items() if _short(stamp) == text]
                lines.append(f"      rank{'s' if len(who) > 1 else ''} {', '.join(who)}: {text}")
    return "\n".join(lines)


def as_dict(dumps: Sequence[Dump]) -> dict[str, Any]:
    """Return each rank's line, and per group all operations that every rank remembers, as plain values.

    `differs_at` is the mark of the first operation that differs between ranks; None where all agree.
    """
    groups = []
    for group, rows in _remembered(dumps):
        odd = next((row.mark for row in rows if not row.agree), None)
        operations = [
            {
                "mark": row.mark,
                "agree": row.agree,
                "ranks": {str(r): asdict(s) if s else None for r, s in row.stamps.items()},
            }
            for row in rows
        ]
        groups.append({"group": group, "differs_at": odd, "operations": operations})
    return {"ranks": [{"rank": dump.rank, "line": dump.line} for dump in dumps], "groups": groups}


def _remembered(dumps: Sequence[Dump]) -> list[tuple[str, list[DumpedOp]]]:
    """Group the rows of operations by process group, from the first operation that all ranks remember.

    A ring overwrites old operations on some ranks sooner than on others.
    """
    rows, remembered = compare(dumps), []
    for key in dict.fromkeys(row.key for row in rows):
        group_rows = [row for row in rows if row.key == key]
        start = max(
            min(mark for row in group_rows for mark in [row.mark] if row.stamps[rank]) for rank in group_rows[0].stamps
        )
        remembered.append((group_rows[0].group, [row for row in group_rows if row.mark >= start]))
    return remembered


def _short(stamp: Stamp | None) -> str:
    if stamp is None:
        return "did not come"
    state = "waits" if stamp.waits else "done" if stamp.ended_s else "started"
    return f"{stamp.op}[{stamp.unit}] {stamp.dtype}{list(stamp.shape)} {state}"


def _stamp(data: dict[str, Any]) -> Stamp:
    return Stamp(**{**data, "shape": tuple(data["shape"])})
