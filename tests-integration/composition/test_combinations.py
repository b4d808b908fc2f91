"""Drawn combinations of degrees on four ranks come to what one process comes to, or are refused with a code before anything runs."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist
from combinations import Combination, configuration, drawn, outcome

import ds_engine
from ds_config.errors import PlanError
from ds_engine import support
from ds_engine.config import load_config
from ds_engine.config_rules import check_rules
from ds_engine.planner import known_axes
from ds_engine.support import PairVerdict, features_of
from ds_testing import world

pytest.importorskip("transformers")
DRAWN = drawn(100)


def check(few: list[Combination]) -> None:
    for one in few:
        found = outcome(one)
        record = os.environ.get("DS_SUPPORT_RECORD")
        if record and dist.get_rank() == 0:
            with Path(record).open("a") as file:
                file.write(json.dumps(one.as_dict() | {"found": found}) + "\n")


def test_the_record_is_of_what_is_drawn_and_of_what_the_rules_say() -> None:
    """What was equal is accepted by the rules on every rank's plan; what was refused is refused with the recorded code."""
    record = json.loads((Path(ds_engine.__file__).parent / "support.json").read_text())
    runs = {
        Combination(**{k: v for k, v in row.items() if k != "found"}): row["found"] for row in record["combinations"]
    }
    assert set(runs) == set(DRAWN)
    for one, found in runs.items():
        config = load_config(configuration(one))
        mesh = check_rules(config, 4, known_axes(), one.pipe)
        assert set(features_of(config, mesh)) == set(one.features)
        assert found == "equal", f"{one}: {found}; a rule should say so before shapes are known"


def test_a_pair_that_was_always_refused_is_refused_by_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    always = {
        ("tensor", "zero3"): PairVerdict(refused=Counter({"some-code": 2})),
        ("tensor", "fp32"): PairVerdict(equal=1),
    }
    monkeypatch.setattr(support, "matrix", lambda: always)
    config = load_config(
        {"train_batch_size": 2, "zero_optimization": {"stage": 3}, "tensor_parallel": {"autotp_size": 2}}
    )
    with pytest.raises(PlanError, match="tensor with zero3 was refused in every recorded run") as caught:
        check_rules(config, 2, known_axes())
    assert caught.value.code == "support-refused"
    assert support.never_run(("data", "tensor", "fp32")) == (("data", "tensor"), ("data", "fp32"))


@pytest.mark.slow
@world(4, timeout=200)
def test_some() -> None:
    check(DRAWN[:4])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(100))
@world(4, timeout=200)
def test_a_hundred(number: int) -> None:
    check([DRAWN[number]])
