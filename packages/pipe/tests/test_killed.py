"""A stage that is killed within a step: the others end, soon, and say which it was."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEADLINE_S = 4.0
SCRIPT = Path(__file__).with_name("ranks_of_killed.py")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_the_other_stages_name_the_one_that_was_killed(tmp_path: Path, backend: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = [sys.executable, "-P", str(SCRIPT), backend, str(DEADLINE_S), str(tmp_path / "note")]
    outputs = [tmp_path / f"{rank}.txt" for rank in range(3)]
    started = []
    for rank, output in enumerate(outputs):
        env = {**os.environ, **places, "DS_COMM_DUMP_DIR": str(tmp_path), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with output.open("w") as file:
            started.append(subprocess.Popen(words, env=env, stdout=file, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(120) for process in started]
        ended = time.time()
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert codes[1] == -9, outputs[1].read_text()
    assert ended - float((tmp_path / "note").read_text()) < DEADLINE_S + 5
    for rank in (0, 2):
        text = outputs[rank].read_text()
        assert codes[rank] not in (0, -9), text
        assert re.search(rf"rank {rank} .*rank 1 has ended \(its process \d+ died without a word\)", text), text
