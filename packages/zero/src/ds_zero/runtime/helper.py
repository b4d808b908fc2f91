"""Someone to act while the training thread is blocked in a wait.

A thread that looks a few times a second whether a wait has lasted long, and if so calls `help` once, again and again until
the wait ends. It costs nothing while nothing waits long. It ends with `close`, or with its owner.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Helper"]

_PATIENCE_S = 0.02


class Helper:
    """Calls `help` while a `waiting` block lasts.

    Args:
        help_once: A bound method; only a weak reference to its object is kept. Runs on another thread, never at the same
            time as code outside `waiting`.
    """

    def __init__(self, help_once: Callable[[], None]) -> None:
        self._help = weakref.WeakMethod(help_once)
        self._lock = threading.Lock()
        self._since: float | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The block may wait for other ranks."""
        if self._thread is None:
            args = (weakref.ref(self), self._stop)
            self._thread = threading.Thread(target=_watch, args=args, name="ds-zero-helper", daemon=True)
            self._thread.start()
        with self._lock:
            self._since = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._since = None

    def look(self) -> None:
        """Help once if a wait has lasted long."""
        with self._lock:
            if self._since is not None and time.monotonic() - self._since > _PATIENCE_S:
                help_once = self._help()
                if help_once is not None:
                    help_once()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _watch(owner: weakref.ref[Helper], stop: threading.Event) -> None:
    while not stop.wait(_PATIENCE_S):
        helper = owner()
        if helper is None:
            return
        helper.look()
        del helper
