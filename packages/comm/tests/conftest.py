"""`forked`: whole processes that share one import of torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

# torch asks a name server who 127.0.0.1 is, for a log line: under a burst of questions that takes 5 s, and says so.
QUIET = {"RES_OPTIONS": "attempts:0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
LAUNCHED = ("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Ended:
    code: int
    output: str
    took_s: float


class Forked:
    """A process that imported torch and forks others from itself."""

    def __init__(self, folder: Path) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHED)}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forked.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**env, **QUIET, "OMP_NUM_THREADS": "1"},
        )
        self._folder, self._times = folder, 0

    def __call__(self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> list[Ended]:
        """Run command lines (a script, or `-m` and a module, and their words) with these variables, all at once."""
        self._times += 1
        outs = [self._folder / f"{self._times}-{index}.out" for index in range(len(commands))]
        tasks = [
            {"words": list(words), "env": dict(env), "out": str(out)}
            for (words, env), out in zip(commands, outs, strict=True)
        ]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(tasks) + "\n")
        self._process.stdin.flush()
        ends = json.loads(self._process.stdout.readline())
        return [Ended(code, out.read_text(), took_s) for (code, took_s), out in zip(ends, outs, strict=True)]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=200)


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forked]:
    made = Forked(tmp_path_factory.mktemp("forked"))
    yield made
    made.close()
