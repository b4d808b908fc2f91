"""Who waits for whom, decided from what all ranks reported. Pure: reports in, one line per rank out.

Words: a rank *waits* when a thread of it is blocked in an operation; it *came* to an operation when it has a stamp with
the same mark in the same group; it is *gone* when its process ended or said goodbye.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ds_comm.watch.stamp_ring import UNEVEN, Stamp

__all__ = ["Finding", "RankReport", "differs", "judge", "judge_wait", "rank_names"]

_SHOWN = 3  # culprits named in a line


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank says of itself, or what was found of one that cannot.

    Attributes:
        gone: How it ended ("raised ValueError: ..."); empty while it runs.
        frame: Where its Python code is: `train.py:88 in step`; empty where nobody knows.
        now_s: Its clock when it reported; its stamps are on the same clock.
        stamps: Its last operations, oldest first.
        heads: The last mark in each group, where stamps do not tell.
        standstill: That a signal has stopped it, and how it goes on; empty while it runs.
    """

    rank: int
    gone: str
    frame: str
    now_s: float
    stamps: tuple[Stamp, ...]
    heads: Mapping[str, int] = field(default_factory=dict)
    standstill: str = ""

    def waits(self) -> list[Stamp]:
        """Return the operations in which this rank is blocked, the longest wait first."""
        return sorted((stamp for stamp in self.stamps if stamp.waits), key=lambda stamp: stamp.waited_s)

    def at(self, key: str, mark: int) -> Stamp | None:
        """Return this rank's operation with this mark; None if not reached or no longer in the ring."""
        return next((stamp for stamp in self.stamps if stamp.key == key and stamp.mark == mark), None)

    def head(self, key: str) -> int:
        """Return the last mark that this rank reached in this group."""
        return max((stamp.mark for stamp in self.stamps if stamp.key == key), default=self.heads.get(key, 0))

    def place(self) -> str:
        """Describe the present activity of this rank in plain text."""
        if self.gone:
            last = self.stamps[-1] if self.stamps else None
            return f"has ended ({self.gone})" + (f", last in {last}" if last else "")
        if self.standstill:
            return self.standstill + _last(self)
        waiting = self.waits()
        if waiting:
            return f"waits for {waiting[0]}" + (f" at {self.frame}" if self.frame else "")
        return f"is at {self.frame or 'an unknown place'}"


@dataclass(frozen=True, slots=True)
class Finding:
    """The line of one rank.

    Attributes:
        code: Section of docs/reference/errors.md: "comm-hang", "comm-mismatch" or "comm-peer-left".
    """

    code: str
    line: str


def judge(
    local_report: RankReport, reports: Mapping[int, RankReport], groups: Mapping[str, tuple[int, ...]]
) -> Finding:
    """Decide the finding of the rank that reports `local_report`, from all known reports.

    Args:
        reports: The known report of each rank.
        groups: World ranks of each group that the reporting rank is in, by torch's name.
    """
    me, others = local_report.rank, [report for rank, report in sorted(reports.items()) if rank != local_report.rank]
    for wait in local_report.waits():
        ranks = groups.get(wait.key, ())
        finding = judge_wait(wait, local_report, reports, _awaited(wait, me, ranks))
        return finding or Finding("comm-hang", f"{_waits(wait, local_report)}; all its ranks came, but nothing moves")
    for other in others:
        for wait in other.waits():
            if me in groups.get(wait.key, ()):
                culprit = next(_culprits(wait, [local_report]), None)
                if culprit is not None:
                    code = "comm-hang" if _missing(wait, local_report) else "comm-mismatch"
                    what = (
                        "did not come to"
                        if code == "comm-hang"
                        else f"came with {local_report.at(wait.key, wait.mark)} to"
                    )
                    line = f"rank {me} is at {local_report.frame} and {what} {wait}, for which rank {other.rank} waits at {other.frame}"
                    return Finding(code, line + _last(local_report))
    busy = next((report for report in others if report.waits() or report.gone), None)
    what = "" if busy is None else f"; rank {busy.rank} {busy.place()}"
    return Finding("comm-hang", f"rank {me} is at {local_report.frame}{what}{_last(local_report)}")


def judge_wait(
    wait: Stamp, local_report: RankReport, reports: Mapping[int, RankReport], awaited: Sequence[int]
) -> Finding | None:
    """Explain the operation `wait` of the rank that reports `local_report` by the ranks `awaited`.

    None when none of these world ranks explains the wait.
    """
    culprits = list(_culprits(wait, [reports[rank] for rank in awaited if rank in reports]))
    silent = [rank for rank in awaited if rank not in reports]
    if silent:
        culprits.append(("comm-hang", f"{rank_names(silent)} gave no sign"))
    if not culprits:
        return None
    codes = [code for code, _ in culprits]
    code = next(code for code in ("comm-mismatch", "comm-peer-left", "comm-hang") if code in codes)
    texts = [text for _, text in culprits]
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return Finding(code, f"{_waits(wait, local_report)}; {'; '.join(texts[:_SHOWN])}{more}")


def differs(a: Stamp, b: Stamp) -> bool:
    """Whether two ranks' operations with one mark cannot be the same one."""
    even = a.op not in UNEVEN and a.numel != b.numel
    return a.op != b.op or a.unit != b.unit or a.dtype != b.dtype or a.peer != b.peer or even


def _culprits(wait: Stamp, others: Iterable[RankReport]) -> Iterator[tuple[str, str]]:
    """Yield, for each rank that keeps `wait` from ending, the error code and its description."""
    for other in others:
        stamp = other.at(wait.key, wait.mark) if wait.mark else None
        if stamp is not None and differs(wait, stamp):
            where = (
                f" and has ended ({other.gone})" if other.gone else f" and is at {other.frame}" if other.frame else ""
            )
            yield "comm-mismatch", f"rank {other.rank} came with {stamp} instead{where}"
        elif other.gone or other.standstill:
            if other.head(wait.key) < wait.mark or not wait.mark or (stamp is not None and not stamp.ended_s):
                yield "comm-peer-left" if other.gone else "comm-hang", f"rank {other.rank} {other.place()}"
        elif _missing(wait, other):
            yield "comm-hang", f"rank {other.rank} did not come: it {other.place()}"


def _missing(wait: Stamp, other: RankReport) -> bool:
    if not wait.mark:  # a message needs a send here and a receive there
        return not any(stamp.key == wait.key and {stamp.op, wait.op} == {"send", "recv"} for stamp in other.waits())
    return other.head(wait.key) < wait.mark


def _awaited(wait: Stamp, me: int, ranks: tuple[int, ...]) -> list[int]:
    """Ranks of the world that `wait` needs."""
    if not wait.mark and 0 <= wait.peer < len(ranks):
        return [ranks[wait.peer]]
    return [rank for rank in ranks if rank != me]


def _waits(wait: Stamp, local_report: RankReport) -> str:
    since_s = local_report.now_s - (wait.waited_s or wait.began_s)
    return f"rank {local_report.rank} waits since {since_s:.1f} s for {wait} at {local_report.frame}"


def _last(report: RankReport) -> str:
    return f"; its last operation was {report.stamps[-1]}" if report.stamps else ""


def rank_names(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2, 7`; of many, the first eight."""
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{', ...' if len(ranks) > 8 else ''}"
