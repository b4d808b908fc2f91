"""Which backward is running, so that the outermost one has a beginning and an end.

autograd numbers its backwards. One that runs inside another (a checkpointed segment) has its own number and belongs to the
outermost one. A backward that raised has no end; the next event notices.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from ds_zero._torch import graph_task_id, queue_callback

__all__ = ["Backward", "Phases"]


class Phases(Protocol):
    """Who is told."""

    def begin_backward(self) -> None:
        """The outermost backward begins. What this raises ends it, and it never began."""

    def end_backward(self) -> None:
        """It is over."""

    def abandon_backward(self) -> None:
        """It raised: its progress is to be forgotten."""

    def end_inner(self, units: set[int]) -> None:
        """A backward inside it is over, in which modules of `units` were entered."""


class Backward:
    """Where one model is. `enter` is called by every event in a backward.

    Attributes:
        task: The number of the outermost backward that runs; None between backwards.
    """

    def __init__(self, phases: Phases) -> None:
        self.task: int | None = None
        self._phases = phases
        self._inner: dict[int, set[int]] = {}
        self._end: Callable[[], _End | None] = lambda: None

    def enter(self) -> None:
        """Something happens in a backward: the first time it begins."""
        task = graph_task_id()
        if task == self.task:
            return
        if self.task is not None and self._end() is None:
            self.abandon()
        if self.task is None:
            self._phases.begin_backward()
            self.task = task
            end = _End(self)
            self._end = weakref.ref(end)
            queue_callback(end)
        elif task != self.task and task not in self._inner:
            self._inner[task] = set()
            queue_callback(lambda: self._end_inner(task))

    @property
    def inside(self) -> bool:
        """Whether this thread runs a backward inside the outermost one."""
        return graph_task_id() != self.task

    @property
    def inner_units(self) -> set[int] | None:
        """Units entered in the backward inside the outermost one that this thread runs; None outside of any."""
        return self._inner.get(graph_task_id())

    def end(self) -> None:
        """The outermost backward is over."""
        self.task = None
        self._phases.end_backward()
        self._inner.clear()

    def abandon(self) -> None:
        """Forget a backward that has no end."""
        if self.task is not None:
            self.task = None
            self._inner.clear()
            self._phases.abandon_backward()

    def _end_inner(self, task: int) -> None:
        self._phases.end_inner(self._inner.pop(task, set()))


class _End:
    """The callback of the outermost backward. Only that backward holds it: once it is dead without having run, it raised."""

    __slots__ = ("__weakref__", "backward")

    def __init__(self, backward: Backward) -> None:
        self.backward = backward

    def __call__(self) -> None:
        self.backward.end()
