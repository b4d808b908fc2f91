"""What a failed world test says: every failing rank, the first one first. Pure text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ds_testing.protocol import Outcome, Report

__all__ = ["RankResult", "render", "verdict"]

_RULE = "─" * 8


@dataclass(frozen=True, slots=True)
class RankResult:
    """What the pool knows of one rank after a test.

    Attributes:
        report: What the rank said; None when it never did.
        died: How its process ended on its own ("killed by SIGKILL", "exit code 1"); empty while it lives.
        stacks: The Python stacks of a rank that did not answer in time.
        leaks: State the test left changed.
        output: What it wrote to stdout and stderr.
    """

    report: Report | None = None
    died: str = ""
    stacks: str = ""
    leaks: Sequence[str] = ()
    output: str = field(default="", repr=False)

    @property
    def failed(self) -> bool:
        return self.report is None or self.report.outcome is Outcome.FAILED or bool(self.leaks)

    @property
    def when(self) -> float:
        """When it went wrong, for the order of the text: deaths (the others fail because of them), failures by time,
        then who never answered."""
        if self.died:
            return 0.0
        return self.report.when if self.report is not None else float("inf")


def verdict(results: Mapping[int, RankResult]) -> tuple[Outcome, str]:
    """One outcome for all ranks, with the reason of a skip. Ranks that disagree are a failure."""
    if any(result.failed for result in results.values()):
        return Outcome.FAILED, ""
    reports = [result.report for result in results.values() if result.report is not None]
    outcomes = {report.outcome for report in reports}
    if len(outcomes) == 1:
        return outcomes.pop(), reports[0].text
    return Outcome.FAILED, ""


def render(results: Mapping[int, RankResult], *, deadline_s: float | None) -> str:
    """The text of a failed test.

    Args:
        deadline_s: The deadline that passed, None when the test ended by itself.
    """
    size = len(results)
    failing = sorted((rank for rank in results if results[rank].failed), key=lambda rank: (results[rank].when, rank))
    head = f"{len(failing)} of {size} ranks failed"
    if deadline_s is not None:
        silent = [rank for rank in results if results[rank].stacks]
        head = f"the deadline of {deadline_s:g} s passed: {_ranks(silent)} did not finish"
    elif not failing:
        said = "; ".join(f"rank {rank} {_outcome(results[rank])}" for rank in sorted(results))
        head = f"the ranks disagree: {said}"
    elif len(failing) > 1:
        head += f", rank {failing[0]} first"
    lines = [head]
    for rank in failing:
        lines += [f"{_RULE} rank {rank}/{size}: {_what(results[rank])} {_RULE}", _detail(results[rank])]
    for rank in sorted(results):
        if results[rank].output.strip():
            lines += [f"{_RULE} rank {rank}/{size}: captured output {_RULE}", results[rank].output.rstrip()]
    return "\n".join(line for line in lines if line)


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def _outcome(result: RankResult) -> str:
    return result.report.outcome.value if result.report is not None else "did not report"


def _what(result: RankResult) -> str:
    if result.died:
        return f"the process died ({result.died})"
    if result.report is None:
        return "did not answer; its stacks"
    if result.report.outcome is Outcome.FAILED:
        return "failed"
    return "the test left state behind"


def _detail(result: RankResult) -> str:
    if result.report is not None and result.report.outcome is Outcome.FAILED:
        return result.report.text
    if result.stacks:
        return result.stacks.rstrip()
    return "\n".join(f"  {leak}" for leak in result.leaks)
