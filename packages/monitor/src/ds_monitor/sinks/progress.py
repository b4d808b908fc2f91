"""A bar with loss, tokens per second and time left on a terminal; one plain line now and then everywhere else."""

from __future__ import annotations

import sys
import time
from typing import IO, Any

from ds_monitor.metric_names import LOSS, TOKENS
from ds_monitor.record import Measurement, RecordKind
from ds_monitor.sinks.sink import require

__all__ = ["ProgressSink", "duration"]


class ProgressSink:
    """Shows how far training is.

    Args:
        total_steps: steps at which the bar is full.
        first_step: the step that training starts or resumes at.
        loss: gauge shown as the loss.
        tokens: counter whose growth per second is shown.
        file: where to write; standard output by default. The bar needs a terminal, a file gets lines.
        every_s: seconds between two lines where there is no terminal.
    Raises:
        UnsupportedError: on a terminal without rich installed ("monitor-extra").
    """

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 0,
        loss: str = LOSS,
        tokens: str = TOKENS,
        file: IO[str] | None = None,
        every_s: float = 5.0,
    ) -> None:
        self._total, self._first, self._loss_name, self._tokens_name = total_steps, first_step, loss, tokens
        self._file = sys.stdout if file is None else file
        self._every_s = every_s
        self._step, self._tokens = first_step, 0.0
        self._loss: float | None = None  # until one is reported: a loss that is not a number would look the same
        self._began_s = self._shown_s = time.monotonic()
        self._shown_step = -1
        self._bar: Any = None
        if self._file.isatty():
            self._bar = self._make_bar()

    def write(self, record: Measurement) -> None:
        """Note the loss and the tokens."""
        if record.kind is RecordKind.GAUGE and record.name == self._loss_name:
            self._loss = record.value
        elif record.kind is RecordKind.COUNTER and record.name == self._tokens_name:
            self._tokens += record.value

    def end_step(self, step: int) -> None:
        """Move on to `step`."""
        self._step = step
        if self._bar is not None:
            self._bar.update(self._task, completed=step, note=self._note())
        elif time.monotonic() - self._shown_s >= self._every_s:
            self._line()

    def close(self) -> None:
        """Show the last state and leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
        elif self._step != self._shown_step:
            self._line()

    def _make_bar(self) -> Any:
        require("rich", "progress")
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        # rich estimates the time left from recent steps; redirecting stdout would hide the lines of other writers.
        bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(file=self._file),
        )
        self._task = bar.add_task("train", total=self._total, completed=self._first, note="")
        bar.start()
        return bar

    def _note(self) -> str:
        elapsed_s = max(time.monotonic() - self._began_s, 1e-9)
        loss = "?" if self._loss is None else f"{self._loss:.4f}"
        return f"loss {loss}  {self._tokens / elapsed_s:,.0f} tokens/s"

    def _line(self) -> None:
        now_s = time.monotonic()
        done = self._step - self._first
        left = (now_s - self._began_s) / done * (self._total - self._step) if done > 0 else float("nan")
        self._shown_s, self._shown_step = now_s, self._step
        self._file.write(f"step {self._step}/{self._total}  {self._note()}  {duration(left)} left\n")
        self._file.flush()


def duration(seconds: float) -> str:
    """Format seconds: `75.2` -> `1:15`, `3700` -> `1:01:40`; NaN or negative: `?`."""
    if not seconds >= 0:
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
