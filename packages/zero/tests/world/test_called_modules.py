"""A step of a plain model enters few modules of ds-zero, and few of its functions.

What does not change between steps is computed once, and what has nothing to do (no offload, no early update, no codes, no hooks of users) is
not called. docs/decisions/measured/zero.md has the numbers; who raises one says there why.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import ds_zero
from ds_testing import world

PACKAGE = Path(ds_zero.__file__).parent


def calls_of(function: Callable[[], None]) -> Counter[str]:
    """Count the calls of ds-zero's functions on this thread, by module."""
    calls: Counter[str] = Counter()
    root = f"{PACKAGE}/"

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            calls[frame.f_code.co_filename.removeprefix(root)] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


def calls_of_a_step(layers: int, width: int, stage: int, precision: str | None) -> Counter[str]:
    """Return the calls of the fourth step, when orders of gathers are known and memory is there."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = ds_zero.shard(net, torch.optim.AdamW(net.parameters()), stage=stage, precision=precision)
    batch = torch.randn(4, width, dtype=next(net.parameters()).dtype)

    def step() -> None:
        net(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    calls = calls_of(step)
    optimizer.close()
    return calls


def check_modules(stage: int, precision: str | None, most: int) -> None:
    # 320 x 320: stage 3 gathers and releases them, and keeps the biases.
    calls = calls_of_a_step(4, 320, stage, precision)
    assert len(calls) <= most, f"{len(calls)} modules, at most {most}: {', '.join(sorted(calls))}"


PRECISIONS = pytest.mark.parametrize("precision", [None, "bf16"])


@PRECISIONS
@pytest.mark.parametrize(("stage", "most"), [(1, 17), (2, 17), (3, 18)])
@world(2)
def test_the_modules_of_a_step(stage, most, precision):
    check_modules(stage, precision, most)


@PRECISIONS
@pytest.mark.parametrize(("stage", "most"), [(1, 16), (2, 16), (3, 16)])
@world(2, backend="shm")
def test_the_modules_of_a_step_in_shared_memory(stage, most, precision):
    check_modules(stage, precision, most)


@pytest.mark.parametrize("stage", [1, 2, 3])
@world(2)
def test_the_calls_of_a_step_of_small_layers(stage):
    calls = calls_of_a_step(24, 64, stage, None)
    assert calls.total() <= 600, calls.most_common(8)
