"""Signals reach the process they are meant for, or nobody."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ds_launcher.procfs import Proc, descendants, open_pidfd, send

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def found(pid: int) -> Proc:
    return next(proc for proc in descendants(os.getpid()) if proc.pid == pid)


def test_descendants_are_found_whatever_their_name(tmp_path: object) -> None:
    code = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'a) S 1 (b', 0, 0, 0); print('up', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            proc = found(process.pid)
            assert (proc.parent, proc.zombie) == (os.getpid(), False)
        finally:
            process.kill()


def test_an_id_that_belongs_to_somebody_else_by_now_is_not_hit(sleeper: subprocess.Popen[bytes]) -> None:
    proc = found(sleeper.pid)
    assert not send(replace(proc, start=proc.start - 1), signal.SIGKILL)
    assert sleeper.poll() is None
    assert send(proc, signal.SIGKILL)
    assert sleeper.wait(timeout=10) == -signal.SIGKILL
    assert not send(proc, signal.SIGKILL)


def test_the_same_without_pidfds(sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", unknown)
    assert open_pidfd(sleeper.pid) is None
    proc = found(sleeper.pid)
    assert not send(replace(proc, start=proc.start - 1), signal.SIGKILL)
    assert send(proc, signal.SIGTERM)
    assert sleeper.wait(timeout=10) == -signal.SIGTERM
