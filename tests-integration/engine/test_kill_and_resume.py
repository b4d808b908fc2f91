"""Twenty steps at once are seven, a kill in the middle of the eighth, and thirteen: on as many ranks to the bit, on others to 1e-6."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parent / "resumed_run.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def train(folder: Path, checkpoints: Path, world: int, stop: str = "") -> list[int]:
    """Run to the end (or the kill); the ranks' exit codes."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(world),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), str(checkpoints), stop],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)},
        )
        for rank in range(world)
    ]
    try:
        return [rank.wait(timeout=150) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def trained_on(*folders: Path) -> dict[int, list[int]]:
    """Sample ids of each step, in any order; a step that was begun twice counts where it was finished."""
    steps: dict[int, list[int]] = {}
    for folder in folders:
        begun: dict[int, list[int]] = {}
        for path in folder.glob("ids-*.txt"):
            for line in path.read_text().splitlines():
                step, sample = map(int, line.split())
                begun.setdefault(step, []).append(sample)
        steps |= begun
    return {step: sorted(ids) for step, ids in steps.items()}


def end(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "end.pt")
    return found


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    straight, killed, checkpoints = tmp_path / "straight", tmp_path / "killed", tmp_path / "ckpt"
    assert train(straight, tmp_path / "other", 2) == [0, 0]
    assert train(killed, checkpoints, 2, "kill") == [-signal.SIGKILL] * 2
    expected, ids = end(straight), trained_on(straight)
    assert {len(found) for found in ids.values()} == {8}
    for world in (2, 4):
        resumed = tmp_path / f"resumed{world}"
        shutil.copytree(checkpoints, tmp_path / f"ckpt{world}")
        assert train(resumed, tmp_path / f"ckpt{world}", world) == [0] * world
        assert trained_on(killed, resumed) == ids
        found = end(resumed)
        assert found["rates"] == expected["rates"][7:]
        for name, value in expected["values"].items():
            if world == 2:
                assert torch.equal(found["values"][name], value)
            torch.testing.assert_close(found["values"][name], value, rtol=0, atol=1e-6)
