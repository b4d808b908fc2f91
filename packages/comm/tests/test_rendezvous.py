"""Waiting for rank 0's store: it is seen as soon as it is there, and nothing waits for what cannot come."""

from __future__ import annotations

import socket
import threading

import pytest

from ds_comm import store_rendezvous


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_store_that_comes_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused three times; the fourth try finds it, and no pause is torch's half second."""
    port, pauses, server = free_port(), [], socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            server.bind(("127.0.0.1", port))
            server.listen()

    monkeypatch.setattr(store_rendezvous.time, "sleep", pause)
    with server:
        store_rendezvous._await_server("127.0.0.1", port, 60.0)
        server.settimeout(60)
        connection, _ = server.accept()
        connection.close()
    assert len(pauses) == 3
    assert max(pauses) <= 0.01


def test_a_store_that_never_comes_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(store_rendezvous.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(store_rendezvous.time, "sleep", lambda seconds: None)
    with pytest.raises(TimeoutError, match="rank 0 did not come"):
        store_rendezvous._await_server("127.0.0.1", free_port(), 5.0)
    assert next(clock) < 10


def test_a_host_that_is_not_there_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("no such host")

    monkeypatch.setattr(store_rendezvous.socket, "create_connection", refuse)
    waiting = threading.Event()
    monkeypatch.setattr(store_rendezvous.time, "sleep", lambda seconds: waiting.set())
    store_rendezvous._await_server("nowhere.invalid", 1, 60.0)
    assert not waiting.is_set()
