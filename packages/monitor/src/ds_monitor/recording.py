"""Report what happens: `span`, `counter`, `gauge`, `event`, `histogram`, `text`; and say who listens: `configure`, `set_step`, `shutdown`.

There is one sink list in a process and it starts empty. While it is empty every report returns at once (measured in the
README), so library code reports without asking. Who builds the job decides who listens: the usual policy, sinks on rank 0
and none elsewhere, is `configure(sinks if rank == 0 else [])`.

Several runs in a process (a generator and its critic) have a `Run` each, so that the metrics of one do not end up among another's.

A sink that raises is taken off the list with one warning: a full disk under the metrics does not stop training.
Sinks are called under one lock, so they need none of their own. A forked child starts with an empty list.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Protocol

from ds_config.rehearsing import is_rehearsal
from ds_monitor.record import Measurement, RecordKind
from ds_monitor.value_counts import count_values

__all__ = [
    "Run",
    "Sink",
    "active",
    "active_sinks",
    "attach",
    "configure",
    "counter",
    "current_step",
    "detach",
    "event",
    "gauge",
    "histogram",
    "set_step",
    "shutdown",
    "span",
    "span_seconds",
    "text",
]

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes records. Calls come one at a time, from any thread, in the order of reporting.

    A sink may raise: it is then closed, removed and named in a warning.
    """

    def write(self, record: Measurement) -> None:
        """Take one record. Called for every report of every kind; ignore kinds that do not concern you."""

    def end_step(self, step: int) -> None:
        """Finish a step: no more records of the step will come.

        Called when the step advances, and once before `close`.
        """

    def close(self) -> None:
        """Make everything durable and release files and threads. Called once."""


class Run:
    """One of the runs of a process: where its training stands, and sinks of its own (`attach(sinks, run)`).

    What is reported inside `with run:` is the run's: its own sinks are told, and those of no run, but not those of other runs. What is
    reported outside is of nobody, and all are told, each at the step where its run stands.
    """

    def __init__(self) -> None:
        self.sinks: list[Sink] = []
        self.step = 0
        self.samples: int | None = None
        self.open_step = False  # something was reported since the last end_step
        self._before: list[Token[Run | None]] = []

    def __enter__(self) -> None:
        self._before.append(_present.set(self))

    def __exit__(self, *exc: object) -> None:
        _present.reset(self._before.pop())


_present: ContextVar[Run | None] = ContextVar("ds_monitor_run", default=None)


class _MonitorState:
    """Who is told. One instance a process."""

    def __init__(self) -> None:
        self.sinks: list[Sink] = []  # the same list object for ever: the reporting functions hold it
        self.lock = threading.RLock()
        self.nobodys = Run()  # the sinks of no run
        self.runs = [self.nobodys]  # and those with sinks
        self.spent_s: dict[str, float] = {}  # seconds of the spans that ended since the step began, by name
        self.fork_hook = False
        self.inherited: list[Sink] = []  # in a forked child: the parent's sinks, unused


_state = _MonitorState()
_sinks = _state.sinks


class _NoSpan(AbstractContextManager[None]):
    """The span that nobody listens to. One object serves every call."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None


class _Span(AbstractContextManager[None]):
    __slots__ = ("attrs", "began_s", "name", "time_s")

    def __init__(self, name: str, attrs: dict[str, Any]) -> None:
        self.name, self.attrs = name, attrs

    def __enter__(self) -> None:
        self.time_s = time.time()
        self.began_s = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        took_s = time.perf_counter() - self.began_s
        if kind is not None:
            self.attrs["error"] = kind.__name__
        _emit(RecordKind.SPAN, self.name, took_s, self.attrs, self.time_s)


_NO_SPAN = _NoSpan()


def span(name: str, /, **attrs: Any) -> AbstractContextManager[None]:
    """Time a `with` block. One record when it ends, with its seconds; `error=<class name>` is added when it raised."""
    if not _sinks:
        return _NO_SPAN
    return _Span(name, attrs)


def counter(name: str, value: float = 1, /) -> None:
    """Add `value` to a running total (bytes sent, tokens trained). Totals are kept by the sinks, from their start."""
    if _sinks:
        _emit(RecordKind.COUNTER, name, value, None, time.time())


def gauge(name: str, value: float, /) -> None:
    """Report the present value of a metric (loss, learning rate); the last value of a step represents the step.

    `value` may be anything `float()` takes. With a sink configured, a device tensor is read here, which waits for the
    device: report such values once per step, not per layer.
    """
    if _sinks:
        _emit(RecordKind.GAUGE, name, value, None, time.time())


def event(name: str, /, **attrs: Any) -> None:
    """Report that something happened once (configuration resolved, checkpoint saved, step skipped)."""
    if _sinks:
        _emit(RecordKind.EVENT, name, 0.0, attrs, time.time())


def histogram(name: str, values: Any, /, *, bins: int = 64) -> None:
    """Report how numbers are distributed: weights, gradients, lengths. Sinks without pictures of it leave it out.

    With a sink configured, a device tensor is counted on its device and read here, which waits for it.

    Args:
        values: A tensor, an array, or numbers. Those that are not finite are counted apart.
        bins: Of equal width, between the least and the largest value.
    """
    if _sinks:
        counted = count_values(values, bins)
        _emit(RecordKind.HISTOGRAM, name, counted.num, counted.attributes(), time.time())


def text(name: str, content: str, /) -> None:
    """Report words that belong to this step: a sample that was generated, a table in Markdown."""
    if _sinks:
        _emit(RecordKind.TEXT, name, 0.0, {"text": str(content)}, time.time())


def active() -> bool:
    """Whether anyone listens: ask before computing something only a sink would read."""
    return bool(_sinks)


def active_sinks() -> tuple[Sink, ...]:
    """Return the attached sinks, in the order in which they were attached."""
    return tuple(_sinks)


def span_seconds(prefix: str) -> float:
    """Sum the seconds of spans whose names begin with `prefix` and that ended since the step began.

    Overlapping spans count in full.
    """
    with _state.lock:
        return sum(seconds for name, seconds in _state.spent_s.items() if name.startswith(prefix))


def current_step() -> int:
    """Return the step of the last `set_step` call; 0 before the first call."""
    return (_present.get() or _state.nobodys).step


def set_step(step: int, samples: int | None = None) -> None:
    """Place everything reported from now on at `step` (optimizer steps done) and `samples` (training samples seen).

    The step before it is complete: sinks write what they collected for it.
    """
    with _state.lock:
        for run in _told():
            if step != run.step:
                _end_step(run)
                _state.spent_s.clear()
            run.step, run.samples = step, samples


def configure(sinks: Iterable[Sink]) -> None:
    """Replace the sink list; the sinks it held are completed and closed. Closed at exit too, also after an exception."""
    with _state.lock:
        shutdown()
        attach(sinks)


def attach(sinks: Iterable[Sink], run: Run | None = None) -> None:
    """Add sinks to those that listen already: what a library does, which does not own the list. `run`: they are this one's."""
    new = list(sinks)
    if is_rehearsal() and any(getattr(sink, "outlives_process", False) for sink in new):
        _log.warning("a rehearsal keeps no metrics: sinks that write files or send records are left out")
        new = [sink for sink in new if not getattr(sink, "outlives_process", False)]
    with _state.lock:
        if not new:
            return
        _sinks.extend(new)
        run = run or _state.nobodys
        run.sinks.extend(new)
        if run not in _state.runs:
            _state.runs.append(run)
        atexit.register(shutdown)
        if not _state.fork_hook and hasattr(os, "register_at_fork"):
            # A forked data-loader worker shares our open files; two writers would tear each other's lines.
            os.register_at_fork(after_in_child=_forget)
            _state.fork_hook = True


def detach(sinks: Iterable[Sink]) -> None:
    """Complete and close these sinks and take them off the list; those that are no longer on it are passed over."""
    leaving = {id(sink) for sink in sinks}
    with _state.lock:
        gone = [sink for sink in _sinks if id(sink) in leaving]
        if not gone:
            return
        for run in [run for run in _state.runs if any(id(sink) in leaving for sink in run.sinks)]:
            _end_step(run)
        # A sink that failed in the last step has left by itself.
        leaving_now = [sink for sink in gone if sink in _sinks]
        for sink in leaving_now:
            _remove(sink)
        _close_all(leaving_now)
        if not _sinks:
            atexit.unregister(shutdown)


def shutdown() -> None:
    """Complete the open step, close every sink and empty the list. Without sinks it does nothing."""
    with _state.lock:
        if not _sinks:
            return
        for run in tuple(_state.runs):
            _end_step(run)
        closing = list(_sinks)
        for sink in closing:
            _remove(sink)
        atexit.unregister(shutdown)
        _close_all(closing)


def _emit(kind: RecordKind, name: str, value: Any, attrs: dict[str, Any] | None, time_s: float) -> None:
    with _state.lock:
        number = float(value)
        if kind is RecordKind.SPAN:
            _state.spent_s[name] = _state.spent_s.get(name, 0.0) + number
        for run in _told():
            record = (
                Measurement(kind, name, number, run.step, run.samples, time_s, attrs)
                if attrs
                else Measurement(kind, name, number, run.step, run.samples, time_s)
            )
            run.open_step = True
            for sink in tuple(run.sinks):
                try:
                    sink.write(record)
                except Exception:
                    _drop(sink)


def _told() -> Sequence[Run]:
    """Return whose sinks are told of what is reported now."""
    run = _present.get()
    return tuple(_state.runs) if run is None else (_state.nobodys, run)


def _end_step(run: Run) -> None:
    if not run.open_step:
        return
    run.open_step = False
    for sink in tuple(run.sinks):
        try:
            sink.end_step(run.step)
        except Exception:
            _drop(sink)


def _remove(sink: Sink) -> None:
    _sinks.remove(sink)
    for run in [run for run in _state.runs if sink in run.sinks]:
        run.sinks.remove(sink)
    _state.runs[:] = [run for run in _state.runs if run.sinks or run is _state.nobodys]


def _drop(sink: Sink) -> None:
    # A warning, not only a log line: the log is silent by default, and losing the metrics should be seen.
    warnings.warn(
        f"monitor sink {_label(sink)} failed and is removed; training goes on without it: {sys.exc_info()[1]!r}",
        RuntimeWarning,
        stacklevel=4,
    )
    _log.info("monitor sink %s failed and is removed", _label(sink), exc_info=True)
    if sink in _sinks:
        _remove(sink)
    _close(sink)


def _close_all(sinks: Sequence[Sink]) -> None:
    for sink in sinks:
        if (begin := getattr(sink, "begin_close", None)) is not None:
            begin()
    for sink in sinks:
        _close(sink)


def _close(sink: Sink) -> None:
    try:
        sink.close()
    except Exception:
        _log.warning("monitor sink %s could not be closed cleanly: %r", _label(sink), sys.exc_info()[1])


def _label(sink: Sink) -> str:
    return str(getattr(sink, "label", type(sink).__name__))


def _forget() -> None:
    _state.inherited = list(_sinks)  # kept alive: collecting one would close, and so write, the parent's file
    for sink in _state.inherited:
        _remove(sink)
    _state.lock = threading.RLock()  # the parent's copy may be held by a thread that does not exist here
    _state.nobodys.open_step = False
