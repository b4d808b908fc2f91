"""What a step really took, beside what its program promised: the measured times of every rank's actions, as data.

    with ds_pipe.tracing(step) as traces:
        step(batches)
        step(batches)
    if rank == 0:
        traces[-1].save("step.json")         # ds pipe trace step.json --png step.png

A *trace* holds one step. Times are seconds from the moment at which all ranks had passed one barrier, so ranks of several hosts
agree as far as they leave a barrier together (some tens of microseconds on one host).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import ds_comm
from ds_config.errors import PlanError
from ds_pipe.actions import Action, ActionKind, Program
from ds_pipe.costs import Costs
from ds_pipe.pipeline_api import Pipeline
from ds_pipe.schedule_timing import ScheduleTiming, Span, simulate

__all__ = ["Trace", "tracing"]

_FORMAT = "ds-pipe trace 1"


@dataclass(frozen=True, slots=True)
class Trace:
    """One step as it was run.

    Attributes:
        ranks: Of every rank of the pipeline all its actions, transfers included, with begin and end in seconds.
    """

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def computing(self) -> tuple[tuple[Span, ...], ...]:
        """The actions that run the model."""
        return tuple(tuple(span for span in row if span[2].op.computes) for row in self.ranks)

    @property
    def span(self) -> float:
        """Seconds from the first rank's first computation to the last one's end."""
        ends = [span[1] for row in self.computing for span in row]
        begins = [span[0] for row in self.computing for span in row]
        return max(ends, default=0.0) - min(begins, default=0.0)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they compute nothing, 0 to 1."""
        busy = sum(end - begin for row in self.computing for begin, end, _ in row)
        return 1 - busy / (len(self.ranks) * self.span) if self.span else 0.0

    @property
    def program(self) -> Program:
        """What was run, without transfers."""
        return Program(tuple(tuple(action for _, _, action in row) for row in self.computing))

    def costs(self) -> Costs:
        """Compute the median times by stage and pass.

        Each half of a whole backward counts as one of the two gradients.

        Raises:
            PlanError: a stage of the pipeline ran nothing ("pipe-trace").
        """
        took: dict[tuple[int, ActionKind], list[float]] = {}
        for begin, end, action in (span for row in self.computing for span in row):
            took.setdefault((action.stage, action.op), []).append(end - begin)

        def median(stage: int, op: ActionKind) -> float:
            return statistics.median(took.get((stage, op), [0.0]))

        rows = []
        for stage in range(self.program.stages):
            if (stage, ActionKind.FORWARD) not in took:
                raise _wrong(f"no forward of stage {stage} was measured")
            half = median(stage, ActionKind.BACKWARD) / 2
            rows.append(
                (
                    median(stage, ActionKind.FORWARD),
                    half or median(stage, ActionKind.INPUT_GRAD),
                    half or median(stage, ActionKind.WEIGHT_GRAD),
                )
            )
        return Costs.measured(rows)

    def planned(self) -> ScheduleTiming:
        """Simulate the same program with every action at its stage's median time and free transfers."""
        return simulate(self.program, self.costs())

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as JSON."""
        rows = [[[begin, end, str(action)] for begin, end, action in row] for row in self.ranks]
        Path(path).write_text(json.dumps({"format": _FORMAT, "unit": "s", "ranks": rows}))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Trace:
        """Read what `save` wrote.

        Raises:
            PlanError: the file is something else ("pipe-trace").
        """
        try:
            document: Any = json.loads(Path(path).read_text())
            if document["format"] != _FORMAT:
                raise _wrong(f"{path} is of format {document['format']!r}")
            rows = [[(float(a), float(b), Action.parse(text)) for a, b, text in row] for row in document["ranks"]]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise _wrong(f"{path} cannot be read ({error!r})") from error
        return cls(tuple(map(tuple, rows)))


def _wrong(message: str) -> PlanError:
    return PlanError(message, code="pipe-trace", fix="Give a file that ds_pipe.Trace.save wrote of a whole step.")


@contextmanager
def tracing(step: Pipeline) -> Iterator[list[Trace]]:
    """Time every training step inside the context; on exit the list has a trace per step, on every rank.

    Args:
        step: The result of `pipeline`; of an engine, `engine.stages.pipeline`.
    Collective over the pipeline, on entry and on exit. Cost: two readings of the clock per action.
    """
    group = step.model.places.pipe
    ds_comm.barrier(group=group, unit="pipe.trace")
    origin = time.perf_counter()
    spans: list[Span] = []
    before, step.executor.timeline = step.executor.timeline, spans
    traces: list[Trace] = []
    try:
        yield traces
    finally:
        step.executor.timeline = before
    gathered: list[Any] = [None] * group.size
    ds_comm.all_gather_object(gathered, [(a - origin, b - origin, str(action)) for a, b, action in spans], group=group)
    everyone = [_steps([(a, b, Action.parse(text)) for a, b, text in row]) for row in gathered]
    traces += [Trace(tuple(map(tuple, rows))) for rows in zip(*everyone, strict=True)]


def _steps(spans: Sequence[Span]) -> list[list[Span]]:
    """Split the actions of a rank by step: a step begins where an action repeats.

    No action occurs twice in a step.
    """
    steps: list[list[Span]] = []
    actions: set[str] = set()
    for span in spans:
        if not steps or str(span[2]) in actions:  # no action comes twice in a step
            steps.append([])
            actions = set()
        steps[-1].append(span)
        actions.add(str(span[2]))
    return steps
