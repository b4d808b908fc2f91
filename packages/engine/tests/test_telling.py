"""What a plain script, which configures no logging, reads on standard error."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, os, sys
import torch
from torch import nn
import ds_engine

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 1)
    def forward(self, x):
        return self.line(x).square().mean()

torch.manual_seed(0)
engine, *_ = ds_engine.initialize(model=Model(), config=json.loads(sys.argv[1]))
print("READY", file=sys.stderr)
for _ in range(int(sys.argv[2])):
    engine.train_batch(iter([torch.ones(2, 4)] * 2))
if len(sys.argv) > 3:
    engine.load_checkpoint(sys.argv[3])
    engine.load_checkpoint(sys.argv[3])
engine.close()
"""
PLAIN = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
}


def said(config: dict[str, Any], steps: int = 3, *more: str, ranks: int = 1, before: str = "") -> list[str]:
    """Standard error of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = textwrap.dedent(before) + SCRIPT
    base = {k: v for k, v in os.environ.items() if not k.startswith(("DS_TEST", "TORCHELASTIC"))}
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(PLAIN | config), str(steps), *more],
            env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    texts = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [0] * ranks, texts
    return texts


def lines(text: str, part: str) -> list[str]:
    return [line for line in text.splitlines() if part in line]


def test_what_the_configuration_asks_for_is_read_once_on_rank_0(tmp_path: Path) -> None:
    config = {
        "steps_per_print": 2,
        "wall_clock_breakdown": True,
        "dump_state": True,
        "memory_breakdown": True,
        "flops_profiler": {"enabled": True, "profile_step": 2},
        "comms_logger": {"enabled": True},
        "zero_optimization": {"stage": 1, "cpu_offload": False, "round_robin_gradients": False},
        "disable_allgather": True,
        "vocabulary_size": 8,
        "zero_allow_untested_optimizer": True,
    }
    first, second = said(config, 4, str(tmp_path), ranks=2)
    assert [line for line in second.splitlines() if "ds_" in line] == []
    assert len(lines(first, "zero_allow_untested_optimizer has no effect")) == 1
    assert len(lines(first, "disable_allgather has no effect")) == 1
    assert len(lines(first, "holds no complete checkpoint; nothing was loaded")) == 1
    assert len(lines(first, "cpu_offload is deprecated: use zero_optimization.offload_optimizer")) == 1
    steps = lines(first, "[Rank 0] step=")
    pattern = r"\[Rank 0\] step=(\d+), skipped=0, lr=\[0\.001\], mom=\[\(0\.9, 0\.999\)\], loss=[\d.e-]+$"
    assert [re.search(pattern, line).group(1) for line in steps] == ["2", "4"]  # type: ignore[union-attr]
    speed = lines(first, "RunningAvgSamplesPerSec=")
    assert [
        re.search(r"epoch=0/micro_step=8/global_step=4, RunningAvgSamplesPerSec=[\d.e+]+, Curr", s) is not None
        for s in speed
    ] == [True]
    times = lines(first, "time (ms) |")
    parts = ("fwd", "bwd", "bwd_inner", "bwd_allreduce", "step")  # DeepSpeed's names
    whole, micro = ([f"{part}{ending}" for part in parts] for ending in ("", "_microstep"))
    assert [re.findall(r"\| (\w+): [\d.]+", line) for line in times] == [micro, whole] * 2
    assert len(lines(first, "flops profile of step 2")) == 1
    assert len(lines(first, "memory after each phase")) == 2
    assert len(lines(first, '"train_micro_batch_size_per_gpu": 2')) == 1
    assert len(lines(first, "2 = 2 per rank") + lines(first, "8 = 2 per rank")) == 1
    assert len(lines(first, "communication so far")) == 1


@pytest.mark.slow
def test_without_a_wish_nothing_is_said() -> None:
    (text,) = said({"steps_per_print": None})
    assert text == "READY\n"


@pytest.mark.slow
def test_a_script_that_configures_logging_reads_it_there_and_once() -> None:
    before = "import logging; logging.basicConfig(level=logging.INFO, format='MINE %(name)s %(message)s')"
    (text,) = said({"steps_per_print": 1, "disable_allgather": True}, 1, before=before)
    assert len(lines(text, "MINE ds_engine.steps [Rank 0] step=1")) == len(lines(text, "step=1")) == 1
    assert len(lines(text, "MINE ds_config")) == len(lines(text, "has no effect")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("level", ["info", pytest.param("error", marks=pytest.mark.slow)])
def test_log_level_is_that_of_the_lines(level: str) -> None:
    (text,) = said({"log_level": level, "steps_per_print": 1}, 1)
    assert len(lines(text, "[Rank 0] step=1")) == 1
