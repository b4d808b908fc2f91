"""One client state for all ranks: rank 0's; an error in it is everybody's, and leaves files and run as they were."""

from __future__ import annotations

import dataclasses
import enum
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ds_ckpt
import ds_engine
from ds_config.errors import CheckpointError, PlanError, UnsupportedError
from ds_testing import world


class Mode(enum.Enum):
    MIN = "min"


@dataclasses.dataclass
class Stopping:
    mode: Mode
    patience: int = 3


def started() -> Any:
    torch.manual_seed(0)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    return ds_engine.initialize(model=nn.Linear(2, 2), config=config)[0]


@world(2)
def test_the_state_of_the_first_rank_is_everybodys(tmp_path: Path) -> None:
    engine = started()
    rank = engine.mesh["world"].rank
    state = {"at": datetime(2024, 2, 29, tzinfo=UTC), "stop": Stopping(Mode.MIN), "pair": (1, 2), 3: {4}}
    path = engine.save_checkpoint(tmp_path, "t", client_state=state if rank == 0 else {"f": print})
    assert ds_ckpt.inspect(path).meta["format"] == 2
    back = engine.load_checkpoint(tmp_path)[1]
    assert back == state
    assert type(back["stop"]) is Stopping
    plain = engine.save_checkpoint(tmp_path, "plain", client_state={"epoch": [1]})
    assert ds_ckpt.inspect(plain).meta["format"] == 1
    engine.close()


@world(2)
def test_a_refusal_is_everybodys_and_nothing_is_written(tmp_path: Path) -> None:
    engine = started()
    rank = engine.mesh["world"].rank
    with pytest.raises(UnsupportedError, match=r'client_state\["sched"\]\["f"\] is code') as caught:
        engine.save_checkpoint(tmp_path, client_state={"sched": {"f": lambda: 1}} if rank == 0 else {})
    assert caught.value.code == "ckpt-client-state"
    assert list(tmp_path.iterdir()) == []
    engine.save_checkpoint(tmp_path, client_state={"x": 1})
    assert engine.load_checkpoint(tmp_path)[1] == {"x": 1}
    engine.close()


@world(2)
def test_a_class_that_one_rank_has_not_ends_the_load_before_the_run_changes(tmp_path: Path) -> None:
    engine = started()
    engine.save_checkpoint(tmp_path, client_state={"stop": Stopping(Mode.MIN)})
    with torch.no_grad():
        engine.module.weight.fill_(5.0)
    module = sys.modules.pop(__name__) if engine.mesh["world"].rank else None
    with pytest.raises(PlanError if module is None else CheckpointError, match="is not imported") as caught:
        engine.load_checkpoint(tmp_path)
    assert caught.value.code == ("engine-other-rank" if module is None else "ckpt-client-class")
    assert bool((engine.module.weight == 5.0).all())
    if module is not None:
        sys.modules[__name__] = module
    assert engine.load_checkpoint(tmp_path)[1] == {"stop": Stopping(Mode.MIN)}
    engine.close()


def test_a_meta_of_a_newer_version_says_so(tmp_path: Path) -> None:
    ds_ckpt.save(tmp_path / "t", [], {"format": 3, "client": {}})
    engine = started()
    with pytest.raises(CheckpointError, match="its format is 3, this one reads up to 2") as caught:
        engine.load_checkpoint(tmp_path)
    assert caught.value.code == "ckpt-version"
    engine.close()
