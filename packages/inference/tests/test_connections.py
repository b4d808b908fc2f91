"""Connections of `ds serve`: those that are silent, or take nothing, are closed, and make room for others."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
import uvicorn  # noqa: E402

from ds_inference.serve.connections import connection_options  # noqa: E402

HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


@contextmanager
def answering(size: int, stall: float, most: int | None = None) -> Iterator[int]:
    """A server on the port that is yielded, whose answers have `size` bytes."""

    async def app(scope, receive, send) -> None:
        del receive
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        for _ in range(size // 1000):
            await send({"type": "http.response.body", "body": b"a" * 1000, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, lifespan="off", log_level="error", **connection_options(stall, most))
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def connected(port: int, sent: bytes, into: ExitStack) -> socket.socket:
    made = into.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
    made.sendall(sent)
    return made


@pytest.mark.parametrize("sent", [b"", b"G", HEAD])
def test_a_head_that_does_not_come_ends_its_connection(sent):
    with answering(0, stall=0.3) as port, ExitStack() as stack:
        silent = connected(port, sent, stack)
        asked = connected(port, HEAD + b"\r\n", stack)
        assert asked.recv(1000).startswith(b"HTTP/1.1 200")
        assert silent.recv(1) == b""
        asked.sendall(HEAD)  # between requests a client may be silent for longer
        assert asked.recv(1) == b""


def test_more_connections_than_may_be_close_the_oldest_that_waits():
    with answering(0, stall=60, most=5) as port, ExitStack() as stack:
        silent = [connected(port, HEAD, stack) for _ in range(12)]
        for _ in range(3):
            assert httpx.get(f"http://127.0.0.1:{port}/").status_code == 200
        with suppress(ConnectionResetError):
            assert silent[0].recv(1) == b""
        silent[-1].sendall(b"\r\n")
        assert silent[-1].recv(1000).startswith(b"HTTP/1.1 200")


def test_an_answer_that_nobody_takes_ends_its_connection():
    with answering(30_000_000, stall=0.3) as port, ExitStack() as stack:
        stuck = connected(port, HEAD + b"\r\n", stack)
        time.sleep(1.5)
        taken = 0
        while part := stuck.recv(1 << 20):
            taken += len(part)
        assert taken < 30_000_000
        assert len(httpx.get(f"http://127.0.0.1:{port}/").content) == 30_000_000
