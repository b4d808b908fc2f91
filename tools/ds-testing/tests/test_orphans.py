"""No worker outlives pytest, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TEXT = """
import os, time
from pathlib import Path
from ds_testing import world

@world(2, backend=None)
def test_waits():
    Path(f"rank-{os.environ['RANK']}.tmp").write_text(str(os.getpid()))
    os.rename(f"rank-{os.environ['RANK']}.tmp", f"rank-{os.environ['RANK']}")
    time.sleep(600)
"""


def _await(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone, before or after it was opened
        return False


def _heeds_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what a shell starts in the background ignores them


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_nothing_is_left(tmp_path, number):
    (tmp_path / "test_waits.py").write_text(TEXT)
    files = [tmp_path / "rank-0", tmp_path / "rank-1"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", "test_waits.py"]
    pytest_process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=_heeds_interrupts
    )
    try:
        assert _await(lambda: all(file.is_file() for file in files), 90), "the ranks did not start"
        pids = [int(file.read_text()) for file in files]
        assert all(map(_alive, pids))
        os.kill(pytest_process.pid, number)
        assert _await(lambda: not any(map(_alive, pids)), 30), "a rank outlived pytest by half a minute"
    finally:
        pytest_process.kill()
        pytest_process.wait()
