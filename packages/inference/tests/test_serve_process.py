"""`ds serve` as a process, on one rank and two: what it says, how it ends, and what becomes of requests meanwhile."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")
httpx = pytest.importorskip("httpx")
_where = importlib.util.spec_from_file_location("inference_serve_folder", Path(__file__).with_name("test_serve.py"))
assert _where is not None
assert _where.loader is not None
serving_tests: Any = importlib.util.module_from_spec(_where)
_where.loader.exec_module(serving_tests)
folder = serving_tests.folder
pytestmark = pytest.mark.timeout(
    500
)  # processes that start: a loaded machine takes minutes; each wait below has its own limit


class Process:
    """A server of `ranks` processes."""

    def __init__(self, folder: Path, ranks: int, *options: str, **env: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = ["serve", str(folder), "--name", "tiny", "--port", str(port), *options]
        ds = [sys.executable, "-P", "-m", "ds_launcher"]
        if ranks > 1:
            pytest.importorskip("ds_launcher")
            words = ["run", "--nproc", str(ranks), "--grace", "20", "--module", "ds_launcher", *words]
        self.popen = subprocess.Popen(
            [*ds, *words], stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **env}
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
        end = time.monotonic() + 180
        while time.monotonic() < end and self.popen.poll() is None:
            try:
                self.http.get("/health")
                return
            except httpx.TransportError:
                time.sleep(0.05)
        pytest.fail(f"it did not start: {self.popen.communicate()[1]}")

    def ask(self, count: int, answers: list[Any]) -> threading.Thread:
        """Ask for `count` tokens beside; what comes is put into `answers`."""
        body = {"prompt": "a", "max_tokens": count, "ignore_eos": True}

        def run() -> None:
            try:
                answers.append(self.http.post("/v1/completions", json=body))
            except httpx.HTTPError as error:
                answers.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_lets_requests_finish_and_the_end_is_a_normal_one(folder: Path, ranks: int, number: int) -> None:
    server, answers = Process(folder, ranks), list[Any]()
    threads = [server.ask(400, answers) for _ in range(3)]
    time.sleep(0.3)
    server.popen.send_signal(number)
    said = server.popen.communicate(timeout=180)[1]
    for thread in threads:
        thread.join(60)
    assert server.popen.returncode == 0, said
    assert [a.json()["usage"]["completion_tokens"] for a in answers] == [400] * 3
    assert "answers as model 'tiny'" in said
    assert "MB of memory in use" in said
    assert "/docs" in said


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once_and_in_order(folder: Path) -> None:
    """The engine's thread went on while Python ended, and the process aborted."""
    server, answers = Process(folder, 1), list[Any]()
    for _ in range(3):
        server.ask(2000, answers)
    time.sleep(0.5)
    for _ in range(2):
        server.popen.send_signal(signal.SIGINT)
        time.sleep(0.3)
    said = server.popen.communicate(timeout=200)[1]
    assert server.popen.returncode == 0, said


@pytest.mark.slow
def test_a_follower_that_is_stuck_ends_the_job_within_the_deadline(folder: Path) -> None:
    server, answers = Process(folder, 2, DS_COMM_DEADLINE_S="3"), list[Any]()
    server.ask(2, answers).join(30)
    assert answers[0].status_code == 200
    time.sleep(
        4.0
    )  # nobody asks for longer than the deadline: the follower waits for the leader, which is as it should be
    assert server.http.get("/health").status_code == 200
    children = subprocess.run(
        ["ps", "-eww", "-o", "pid,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    ranks = [int(line.split()[0]) for line in children if str(folder) in line and "ds_launcher serve" in line]
    follower = next(pid for pid in ranks if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(follower, signal.SIGSTOP)
    begin = time.monotonic()
    server.ask(4, answers)
    said = server.popen.communicate(timeout=180)[1]
    assert time.monotonic() - begin < 150
    assert server.popen.returncode == 86, said
    assert "rank 1" in said


@pytest.mark.slow
def test_a_key_from_the_environment(folder: Path) -> None:
    server = Process(folder, 1, DS_SERVE_API_KEY="sesame")
    assert server.http.get("/v1/models").status_code == 401
    assert server.http.get("/v1/models", headers={"authorization": "Bearer sesame"}).status_code == 200
    assert server.http.get("/health", headers={"host": "evil.example"}).status_code == 403
    server.popen.send_signal(signal.SIGTERM)
    server.popen.communicate(timeout=180)
    assert server.popen.returncode == 0


@pytest.mark.parametrize("port", ["-1", "65536", "x", ""])
def test_a_port_that_is_none_is_refused(port):
    from ds_inference import cli_serve

    parser = argparse.ArgumentParser()
    cli_serve.register(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["folder", "--port", port])
