"""The pool: worker processes that live for the whole pytest run, and one call that runs a test on some of them.

States of a pool: it holds 0 to MAX_RANKS idle workers between tests. A test that fails in a way that leaves a worker in
doubt (a death, a deadline, a leak, an interrupt) costs the pool all its workers; the next test starts new ones.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import IO, cast
from unittest import mock

from ds_testing.cards import card_variables
from ds_testing.protocol import Finish, Finished, Job, Ready, Report, Source
from ds_testing.report import RankResult
from ds_testing.spec import World
from ds_testing.worker import STACKS_SIGNAL, WATCH, Fd, Plumbing
from ds_testing.worker import main as worker_main

__all__ = ["Pool", "Task", "WorldRun"]

START_DEADLINE_S = 180.0  # importing torch on a loaded machine
GRACE_S = 3.0  # for ranks that wait for one that failed; gloo notices a closed connection at once
FINISH_DEADLINE_S = 20.0
_STACKS_S = 2.0


@dataclass(frozen=True, slots=True)
class Task:
    """The test to run: its function by name, the files it comes from, its pickled keyword arguments."""

    qualname: str
    sources: tuple[Source, ...]
    arguments: bytes


@dataclass(frozen=True, slots=True)
class WorldRun:
    """How a test ended: one result a rank, and the deadline that passed (None: it ended by itself)."""

    results: dict[int, RankResult]
    deadline_s: float | None


class Pool:
    """Workers kept between tests, in the environment of the moment when the pool is made: that of no test.

    Args:
        capture: Whether the workers' stdout and stderr go to files that a failure shows, instead of the terminal.
    """

    def __init__(self, *, capture: bool = True) -> None:
        self._capture = capture
        self._environment = _environment()
        self._workers: list[_Worker] = []
        self._count = 0
        self.num_started = 0

    def run(self, task: Task, spec: World) -> WorldRun:
        """Run `task` on `spec.size` ranks. Blocks at most for the deadline and a few seconds to clean up."""
        try:
            ranks = self._take(spec.size)
            self._count += 1
            for rank, worker in enumerate(ranks):
                worker.truncate_output()
                worker.send(self._job(task, spec, rank))
            found, sound = _collect(ranks, spec.timeout)
        except BaseException:  # an interrupt in the middle of a test: no worker can be trusted
            self.close()
            raise
        if not sound:
            self.close()
        return found

    def close(self) -> None:
        """Kill every worker, and what it started in its own process group."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.release()

    def _take(self, size: int) -> list[_Worker]:
        if any(not worker.alive for worker in self._workers):
            self.close()
        fresh = [_Worker(self._capture, self._environment) for _ in range(size - len(self._workers))]
        self._workers += fresh
        self.num_started += len(fresh)
        for worker in fresh:
            worker.await_ready()
        return self._workers[:size]

    def _job(self, task: Task, spec: World, rank: int) -> Job:
        return Job(
            key=f"test-{self._count}",
            qualname=task.qualname,
            sources=task.sources,
            arguments=task.arguments,
            rank=rank,
            size=spec.size,
            backend=spec.backend,
            timeout=spec.timeout,
            store_port=self._workers[0].store_port,
            master_port=self._master_port(spec, rank),
            variables=card_variables(rank, spec.size, spec.cards),
        )

    def _master_port(self, spec: World, rank: int) -> int:
        if spec.backend is not None:
            return 0
        if rank == 0:
            self._free_port = _free_port()
        return self._free_port


def _collect(ranks: Sequence[_Worker], timeout: float) -> tuple[WorldRun, bool]:
    """Wait for every rank; also say whether the workers can run another test."""
    results = {rank: RankResult() for rank in range(len(ranks))}
    expired = _await_reports(ranks, results, time.monotonic() + timeout)
    silent = [rank for rank in results if results[rank].report is None and not results[rank].died]
    for rank in silent:
        results[rank] = replace(results[rank], stacks=ranks[rank].stacks())
    sound = not silent and not any(result.died for result in results.values())
    if sound:
        sound = _finish(ranks, results)
    if any(result.failed for result in results.values()) or not sound:
        for rank, worker in enumerate(ranks):
            results[rank] = replace(results[rank], output=worker.output())
    return WorldRun(results, timeout if expired else None), sound


def _await_reports(ranks: Sequence[_Worker], results: dict[int, RankResult], deadline: float) -> bool:
    """Fill `results`; True when the deadline ended the wait (a first failure shortens it to a grace period)."""
    expired = True
    waiting = {worker.connection: rank for rank, worker in enumerate(ranks)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(waiting), left):
            rank = waiting.pop(cast("Connection", connection))
            results[rank] = ranks[rank].receive_report()
            if results[rank].failed and time.monotonic() + GRACE_S < deadline:
                deadline, expired = time.monotonic() + GRACE_S, False
    return expired and bool(waiting)


def _finish(ranks: Sequence[_Worker], results: dict[int, RankResult]) -> bool:
    for worker in ranks:
        worker.send(Finish())
    sound = True
    for rank, worker in enumerate(ranks):
        answer = worker.receive(FINISH_DEADLINE_S)
        if not isinstance(answer, Finished):
            stacks = worker.stacks() if worker.alive else ""
            results[rank] = replace(results[rank], report=None, died=worker.how_it_died(), stacks=stacks)
        else:
            results[rank] = replace(results[rank], leaks=answer.leaks)
        sound = sound and isinstance(answer, Finished) and answer.restored
    return sound


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class _Worker:
    """One worker process, seen from the pool."""

    def __init__(self, capture: bool, environment: dict[str, str]) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        life_read, self._life = os.pipe()
        self._stacks: IO[bytes] = _temporary_file()
        self._output = _temporary_file() if capture else None
        output = None if self._output is None else Fd(self._output.fileno())
        plumbing = Plumbing(theirs, Fd(life_read), Fd(self._stacks.fileno()), output)
        arguments = (plumbing, environment)
        self._process = _forking(environment).Process(target=worker_main, args=arguments, name="ds-testing-rank")
        self._process.start()
        theirs.close()
        os.close(life_read)
        self.store_port = 0

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def await_ready(self) -> None:
        answer = self.receive(START_DEADLINE_S)
        if not isinstance(answer, Ready):
            raise RuntimeError(f"a test worker did not start ({self.how_it_died() or 'no answer'}):\n{self.output()}")
        self.store_port = answer.store_port

    def send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError:
            # It is dead: whoever receives from it next sees that, with the reason.
            return

    def receive(self, timeout: float) -> object | None:
        """The next message; None when there is none in time or the process is gone."""
        try:
            return self.connection.recv() if self.connection.poll(timeout) else None
        except (EOFError, OSError):
            return None

    def receive_report(self) -> RankResult:
        answer = self.receive(0)
        if isinstance(answer, Report):
            return RankResult(report=answer)
        return RankResult(died=self.how_it_died() or "its connection closed")

    def how_it_died(self) -> str:
        self._process.join(1.0)
        code = self._process.exitcode
        if code is None:
            return ""
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def stacks(self) -> str:
        """The Python stacks of all its threads, written by the C handler of faulthandler: works while the GIL is held."""
        if not self.alive:
            return ""
        start = os.fstat(self._stacks.fileno()).st_size
        os.kill(self._pid, STACKS_SIGNAL)
        end = time.monotonic() + _STACKS_S
        size = _until(end, lambda: os.fstat(self._stacks.fileno()).st_size, start)
        text = os.pread(self._stacks.fileno(), size - start, start).decode(errors="replace")
        return _shown(text) or "(no stack within two seconds: the process is stopped, or blocks signals)"

    def truncate_output(self) -> None:
        if self._output is not None:
            os.ftruncate(self._output.fileno(), 0)

    def output(self) -> str:
        if self._output is None:
            return ""
        fd = self._output.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def kill(self) -> None:
        try:
            os.killpg(self._pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()  # it has no group of its own yet, or is gone

    @property
    def _pid(self) -> int:
        return cast(int, self._process.pid)

    def release(self) -> None:
        self._process.join()
        self._process.close()
        self.connection.close()
        os.close(self._life)
        self._stacks.close()
        if self._output is not None:
            self._output.close()


def _temporary_file() -> IO[bytes]:
    """Without a name, open until closed; every write goes to its end, whoever truncated it before."""
    return tempfile.TemporaryFile(mode="a+b")


def _shown(stacks: str) -> str:
    """Without the thread that only waits for pytest to end."""
    threads = stacks.split("\n\n")
    return "\n\n".join(thread for thread in threads if WATCH not in thread)


def _until(end: float, size: Callable[[], int], start: int) -> int:
    """Poll a growing file until it has grown and then stood still for a moment."""
    last = size()
    while time.monotonic() < end:
        time.sleep(0.05)
        now = size()
        if now == last and now > start:
            break
        last = now
    return last


def _environment() -> dict[str, str]:
    # One thread a rank: more only makes ranks wait for each other. The loopback interface: no name lookup, no network.
    return os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}


def _forking(environment: dict[str, str]) -> ForkServerContext:
    """Processes forked from one that imports torch once, at the first call; it ends when pytest does."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ds_testing.preload"])
    with mock.patch.dict(os.environ, environment, clear=True):
        forkserver.ensure_running()
    return context
