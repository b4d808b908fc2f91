"""How alone a benchmark was: what other processes and the host took of the processors while it ran, kept in the files that it wrote."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Spent", "keep", "others", "said", "watched"]


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds: by the clock, of all processors, of those that the host took away, and of this process with its ended children."""

    wall: float
    busy: float
    stolen: float
    own: float

    @classmethod
    def now(cls) -> Spent:
        """What was spent until now. Linux only: `/proc/stat`."""
        user, nice, system, _idle, _wait, irq, soft, stolen = map(
            int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        )
        tick = os.sysconf("SC_CLK_TCK")
        use = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own = sum(one.ru_utime + one.ru_stime for one in use)
        return cls(time.monotonic(), (user + nice + system + irq + soft) / tick, stolen / tick, own)


def others(before: Spent, after: Spent, cores: int) -> float:
    """The share of the processors that others took."""
    whole = (after.wall - before.wall) * cores
    return max(0.0, after.busy - before.busy - (after.own - before.own)) / whole


def said(before: Spent, after: Spent, cores: int) -> str:
    """One line of what others and the host took."""
    host = (after.stolen - before.stolen) / ((after.wall - before.wall) * cores)
    share = others(before, after, cores)
    return f"{after.wall - before.wall:.0f} s; others took {share:.1%} of {cores} processors, the host {host:.1%}"


def keep(folder: Path, changed_since: dict[Path, int], command: str, line: str) -> list[Path]:
    """Put the line under `alone`, by the command, into every record of a folder that the command wrote."""
    kept = []
    for path in sorted(folder.glob("*.json")):
        if changed_since.get(path) == path.stat().st_mtime_ns:
            continue
        record = json.loads(path.read_text())
        record["alone"] = {**record.get("alone", {}), command: line}
        path.write_text(json.dumps(record, indent=1) + "\n")
        kept.append(path)
    return kept


@contextmanager
def watched(folder: Path, command: str) -> Iterator[None]:
    """Watch the processors while a benchmark runs; where the kernel does not tell, nothing is kept."""
    if not Path("/proc/stat").exists():
        yield
        return
    times = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    before = Spent.now()
    yield
    line = said(before, Spent.now(), os.cpu_count() or 1)
    keep(folder, times, command, line)
    print(f"{command}: {line}")
