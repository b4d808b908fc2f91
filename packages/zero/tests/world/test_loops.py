"""Loops around an optimizer end as in one process, or in the error that is expected of them: `loops.py` and docs/reference/loops.md."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from ds_testing import world

_SPEC = importlib.util.spec_from_file_location("zero_loops", Path(__file__).parent / "loops.py")
loops = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = loops
_SPEC.loader.exec_module(loops)

GRID = [(name, stage) for name in loops.LOOPS for stage in range(4)]
DRAWN = set(random.Random(55).sample(GRID, 5)) | {("clip_norm", 2)}
CASES = [
    pytest.param(name, stage, marks=() if (name, stage) in DRAWN else pytest.mark.slow, id=f"{name}-{stage}")
    for name, stage in GRID
]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using backward"),
    pytest.mark.filterwarnings("ignore:Detected call of"),
    pytest.mark.filterwarnings("ignore:The epoch parameter"),
]


def check(name, run):
    expected = loops.LOOPS[name].expected(run.stage, run.size)
    assert loops.outcome(name, run) in expected.split(" or ")


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_loops_end_as_expected_on_one_rank(name, stage):
    check(name, loops.Run(stage))


@pytest.mark.parametrize(("name", "stage"), CASES)
@world(2)
def test_loops_end_as_expected_on_two_ranks(name, stage):
    check(name, loops.Run(stage, dist.get_rank(), 2))
