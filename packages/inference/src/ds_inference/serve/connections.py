"""Connections whose clients neither send a request nor take an answer are closed, so that others are served.

An application sees a request when its head is there. Before that, and between requests, a connection costs a file descriptor and nothing
that the application could count; a thousand silent ones are all that a process may have.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Collection
from typing import Any, Final

from uvicorn.protocols.http.auto import AutoHTTPProtocol

__all__ = ["connection_options"]

_FILES: Final = 1 << 16
"""File descriptors that a server asks for, where the system lets it have them; most systems begin with 1024."""
_Base: Any = AutoHTTPProtocol


def connection_options(stall: float, most: int | None = None) -> dict[str, Any]:
    """Return arguments of uvicorn's `Config`, which give connections deadlines and a limit to their number.

    Args:
        stall: Seconds for the head of a request after its first byte or the connection, and for the client to take what fills the buffer.
        most: Connections at a time; one more closes the oldest of those whose request is not there. None: half of the files that the
            process may open. asyncio accepts as many as `backlog` before it tells, and some such rounds may be on their way.
    """
    files = _raise_files()
    return {"http": _protocol(stall, most or files // 2), "ws": "none", "backlog": min(2048, files // 8)}


def _raise_files() -> int:
    """Raise the number of files that this process may open, as far as it may itself, to `_FILES`; return what it is then."""
    soft, hard = (_FILES if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    if soft < min(hard, _FILES):
        soft = min(hard, _FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return soft


def _protocol(stall: float, most: int) -> type[asyncio.Protocol]:
    """Make the class of one server's connections."""
    waiting: dict[Any, asyncio.TimerHandle] = {}

    class Connection(_Base):
        """A connection of HTTP with deadlines."""

        _unread: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                _oldest(waiting, self.connections, self).transport.abort()
            waiting[self] = self.loop.call_later(stall, self._no_head)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not _is_waiting(self):
                self._forget()
            elif self not in waiting:
                waiting[self] = self.loop.call_later(stall, self._no_head)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = self.loop.call_later(stall, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._unread is not None:
                self._unread.cancel()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            if self._unread is not None:
                self._unread.cancel()
            super().connection_lost(exc)

        def _forget(self) -> None:
            if (timer := waiting.pop(self, None)) is not None:
                timer.cancel()

        def _no_head(self) -> None:
            self._forget()
            if self.cycle is None or self.cycle.response_complete:  # else the application waits for the body
                self.transport.abort()

    return Connection


def _is_waiting(connection: Any) -> bool:
    """Whether no request is under way, or its body is not there yet."""
    cycle = connection.cycle
    return cycle is None or cycle.response_complete or cycle.more_body


def _oldest(waiting: Collection[Any], connections: Collection[Any], new: Any) -> Any:
    """Return the connection that makes room for a new one: the first that waits, else an idle one, else the new one itself."""
    idle = (each for each in connections if each is not new and _is_waiting(each))
    return next(iter(waiting), None) or next(idle, new)
