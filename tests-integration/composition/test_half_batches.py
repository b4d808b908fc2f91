"""Half batches in turn beside other axes, schedules, precisions and checkpointing: four ranks come to what one process comes to."""

from __future__ import annotations

from typing import Any
from unittest import mock

import combinations
import pytest
from combinations import Combination, configuration, outcome

from ds_parallel.tensor.half_batches import Turns
from ds_testing import world

pytest.importorskip("transformers")

RUNS = [
    Combination(2, 2, 1, 1, 1, zero=3, checkpointing=True, precision="bf16", accumulation=2, schedule="1f1b"),
    Combination(2, 2, 1, 1, 1, zero=2, checkpointing=False, precision="fp16", accumulation=1, schedule="1f1b"),
    Combination(1, 4, 1, 1, 1, zero=1, checkpointing=True, precision="fp32", accumulation=2, schedule="1f1b"),
    Combination(1, 2, 1, 2, 1, zero=0, checkpointing=False, precision="fp32", accumulation=2, schedule="1f1b"),
    Combination(1, 2, 1, 2, 1, zero=1, checkpointing=True, precision="fp32", accumulation=2, schedule="1f1b"),
    Combination(1, 2, 1, 2, 1, zero=1, checkpointing=False, precision="fp32", accumulation=2, schedule="zb-h1"),
    Combination(1, 2, 1, 2, 1, zero=3, checkpointing=True, precision="fp32", accumulation=2, schedule="zbv"),
    Combination(1, 2, 2, 1, 1, zero=0, checkpointing=False, precision="fp32", accumulation=1, schedule="1f1b"),
    Combination(1, 2, 2, 1, 1, zero=3, checkpointing=True, precision="fp32", accumulation=1, schedule="1f1b"),
]


def in_halves(one: Combination) -> dict[str, Any]:
    found = configuration(one)
    found["tensor_parallel"]["half_batches"] = True
    return found


@pytest.mark.slow
@pytest.mark.parametrize("one", RUNS, ids=str)
@world(4, timeout=300)
def test_half_batches(one: Combination) -> None:
    with (
        mock.patch.object(combinations, "configuration", in_halves),
        mock.patch.object(Turns, "run", autospec=True, side_effect=Turns.run) as run,
    ):
        assert outcome(one) == "equal"
    assert run.called
