"""Real `ds` processes, and a way to see every process that descends from one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

DS = (sys.executable, "-P", "-m", "ds_launcher")
_NOT_INHERITED = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Sandbox:
    """A directory, and an environment marked so that every process started from it can be found again."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def env(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        return {**clean, "DS_TEST_MARK": self.mark, "SANDBOX": str(self.folder)}

    def script(self, code: str, name: str = "train.py") -> str:
        (self.folder / name).write_text(textwrap.dedent(code))
        return name

    def ds(
        self, *words: str, env: dict[str, str] | None = None, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*DS, *words],
            cwd=self.folder,
            env={**self.env, **(env or {})},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=200,  # importing torch on a busy machine takes long
        )

    def start(
        self,
        *words: str,
        env: dict[str, str] | None = None,
        screen: int = subprocess.PIPE,
        stdin: int = subprocess.DEVNULL,
        ignored: tuple[signal.Signals, ...] = (),
    ) -> subprocess.Popen[str]:
        def dispositions() -> None:
            # The tests themselves may run under `nohup` or in a shell's background, whose children ignore these.
            for number in (signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

        return subprocess.Popen(
            [*DS, *words],
            cwd=self.folder,
            env={**self.env, **(env or {})},
            stdin=stdin,
            stdout=screen,
            stderr=screen,
            text=True,
            preexec_fn=dispositions,
        )

    def alive(self) -> dict[int, str]:
        """Command lines of the living processes that carry the mark, by id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"DS_TEST_MARK={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ").strip()
            except OSError:
                continue
        return found

    def wait(self, condition: Callable[[], object], seconds: float = 60) -> None:
        """Poll until the condition holds; fail the test when it does not in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"not within {seconds} s; alive: {self.alive()}")
            time.sleep(0.02)

    def file(self, name: str) -> Path:
        return self.folder / name

    def told(self, *names: str) -> bool:
        """Whether all files have been written: one that is only there may still be empty."""
        return all(self.file(name).exists() and self.file(name).stat().st_size > 0 for name in names)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Sandbox]:
    """A sandbox; the test fails when anything that was started in it is still alive at its end."""
    sandbox = Sandbox(tmp_path)
    yield sandbox
    left = sandbox.alive()
    for pid in left:
        os.kill(pid, 9)
    assert not left
