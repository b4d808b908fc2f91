"""A uvicorn server whose end by a signal is a normal end: requests under way are answered, and the exit status is 0."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

__all__ = ["GracefulServer"]


class GracefulServer(uvicorn.Server):
    """Ends gracefully on SIGINT and SIGTERM; uvicorn's own raises the signal once more afterwards, so that the process dies of it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle both signals while inside, in the main thread; elsewhere nothing can be handled."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
