"""One rank: a process that runs job after job, forked from one that has imported torch (`preload.py`).

It never outlives pytest: the kernel kills it when the process it was forked from dies (Linux), which ends with pytest, and a
thread watches a pipe whose other end only pytest holds (everywhere).
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any

from ds_testing.protocol import Finish, Finished, Job, Outcome, Ready, Report

__all__ = ["STACKS_SIGNAL", "WATCH", "Fd", "Plumbing", "main"]

STACKS_SIGNAL = signal.SIGRTMIN + 5  # tests may use SIGUSR1 and SIGUSR2 themselves
WATCH = "in watch_parent"  # how the thread that waits for pytest's end shows in a dump of stacks
_PR_SET_PDEATHSIG = 1
_EXIT_ORPHANED = 3


@dataclass(frozen=True, slots=True)
class Fd:
    """A file descriptor that arrives in the worker as its own copy of it."""

    number: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (DupFd(self.number),)


def _arrived(sent: Any) -> Fd:
    return Fd(sent.detach())


@dataclass(frozen=True, slots=True)
class Plumbing:
    """What connects a worker with the pool.

    Attributes:
        life: Read end of a pipe that closes when pytest ends.
        stacks: Where stacks are written on request.
        output: What becomes stdout and stderr; None: pytest's own.
    """

    connection: Connection
    life: Fd
    stacks: Fd
    output: Fd | None


def main(plumbing: Plumbing, environment: Mapping[str, str]) -> None:
    """The whole life of a worker."""
    os.setsid()  # Ctrl-C reaches pytest only, which then takes the pool down in order
    _die_with_pytest(plumbing.life.number)
    if plumbing.output is not None:
        for standard in (1, 2):
            os.dup2(plumbing.output.number, standard)
        os.close(plumbing.output.number)
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.register(STACKS_SIGNAL, file=plumbing.stacks.number, all_threads=True)
    _Rank(plumbing.connection).serve()


def _die_with_pytest(life_fd: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch_parent() -> None:
        while os.read(life_fd, 1):
            pass
        os._exit(_EXIT_ORPHANED)

    threading.Thread(target=watch_parent, name="ds-testing-life", daemon=True).start()


class _Rank:
    """Runs jobs. Holds the stores it has met: a connection to one costs more than a test of a few collectives."""

    def __init__(self, connection: Connection) -> None:
        import torch.distributed as dist

        from ds_testing import loading, preload, state

        preload.settle()

        self._connection, self._dist, self._loading, self._state = connection, dist, loading, state
        served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stores = {served.port: served}
        state.seed(0)
        state.restore(state.ProcessState.now())
        connection.send(Ready(served.port))

    def serve(self) -> None:
        while True:
            try:
                job = self._connection.recv()
            except EOFError:
                return
            self._run(job)

    def _run(self, job: Job) -> None:
        before = self._state.ProcessState.now()
        report = self._body(job)
        failed = report.outcome is Outcome.FAILED
        if failed:
            # The others may wait for us in a collective: with our connections gone they fail now, not at a timeout.
            self._take_down()
        self._connection.send(report)
        if not isinstance(self._connection.recv(), Finish):
            raise TypeError("a report is answered by Finish")
        self._take_down()
        for name in _launcher_variables(job):
            os.environ.pop(name, None)
            if name in before.environment:
                os.environ[name] = before.environment[name]
        found = () if failed else self._state.leaks(before)
        if found:  # what a cycle still held when the groups were destroyed was frozen with everything else
            gc.unfreeze()
            gc.collect()
            found = self._state.leaks(before)
        self._state.restore(before)
        self._connection.send(Finished(found, restored=failed or not (found and self._state.leaks(before))))

    def _body(self, job: Job) -> Report:
        os.environ.update(_launcher_variables(job))
        try:
            self._state.seed(0)
            call = self._loading.function(job.sources[0], job.qualname)
            arguments = self._loading.ArgumentReader(job.arguments, job.sources).load()
            self._join(job)
            with _undone(arguments):
                call(**arguments)
        except BaseException as error:
            return _report(error, (__file__, self._loading.__file__))
        return Report(Outcome.PASSED, "", time.monotonic())

    def _join(self, job: Job) -> None:
        if job.variables:
            import torch

            torch.cuda.set_device(int(job.variables["LOCAL_RANK"]))
        if job.backend is None:
            return
        if "shm" in job.backend:
            import ds_comm  # noqa: F401  registers it; the packages import it when they first need it
        if job.store_port not in self._stores:
            self._stores[job.store_port] = self._dist.TCPStore("127.0.0.1", job.store_port, is_master=False)
        self._dist.init_process_group(
            job.backend,
            store=self._dist.PrefixStore(job.key, self._stores[job.store_port]),
            rank=job.rank,
            world_size=job.size,
            timeout=timedelta(seconds=job.timeout),
        )

    def _take_down(self) -> None:
        compiler = sys.modules.get("torch._dynamo")
        if compiler is not None:  # breaks of graphs that it remembers for code would be other tests' too
            compiler.reset()
        gc.collect()
        if self._dist.is_initialized():
            self._dist.destroy_process_group()
        gc.freeze()  # modules, mostly: looking at them again after every test took a third of a rank's time


def _launcher_variables(job: Job) -> dict[str, str]:
    found = {
        "RANK": str(job.rank),
        "LOCAL_RANK": str(job.rank),
        "WORLD_SIZE": str(job.size),
        "LOCAL_WORLD_SIZE": str(job.size),
    }
    if job.backend is None:
        found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.master_port)}
    return found | dict(job.variables)


@contextmanager
def _undone(arguments: dict[str, object]) -> Iterator[None]:
    """Undo what the body did with the `monkeypatch` it was given."""
    import pytest

    try:
        yield
    finally:
        for value in arguments.values():
            if isinstance(value, pytest.MonkeyPatch):
                value.undo()


def _report(error: BaseException, ours: tuple[str, ...]) -> Report:
    """The outcome that `error` means. Skips and expected failures are exceptions in pytest."""
    import pytest

    when = time.monotonic()
    if isinstance(error, pytest.skip.Exception):
        return Report(Outcome.SKIPPED, str(error.msg), when)
    if isinstance(error, pytest.xfail.Exception):
        return Report(Outcome.XFAILED, str(error.msg), when)
    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_code.co_filename in ours and shown.tb_next:
        shown = shown.tb_next
    return Report(Outcome.FAILED, "".join(traceback.format_exception(type(error), error, shown)).rstrip(), when)
