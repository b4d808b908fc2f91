"""A configuration in programs that were written for plain dicts and pydantic: sweeps, workers, saved runs, command lines."""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import multiprocessing
import pickle
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field, ValidationError

from ds_config import ConfigError, StrictModel, load
from ds_config.layers import layered


class Optimizer(StrictModel):
    lr: Annotated[float, Field(gt=0)] = 0.1
    momentum: float = 0.0


class Run(StrictModel):
    steps: int = 5
    start: float = 4.0
    optimizer: Optimizer = Optimizer()


def descend(run: Run) -> list[float]:
    """Values of x on the way down x**2, by gradient descent with momentum."""
    x, speed, found = run.start, 0.0, []
    for _ in range(run.steps):
        speed = run.optimizer.momentum * speed - run.optimizer.lr * 2 * x
        x += speed
        found.append(x)
    return found


def by_hand(steps: int, start: float, lr: float, momentum: float) -> list[float]:
    x, speed, found = start, 0.0, []
    for _ in range(steps):
        speed = momentum * speed - lr * 2 * x
        x += speed
        found.append(x)
    return found


def test_a_sweep_over_overrides_equals_one_by_hand(tmp_path: Path) -> None:
    (tmp_path / "base.json").write_text('{"steps": 4, "optimizer": {"momentum": 0.5}}')
    for lr, start in itertools.product((0.1, 0.25), (1.0, -2.0)):
        run = load(Run, layered(tmp_path / "base.json", overrides=[f"optimizer.lr={lr}", f"start={start}"]))
        assert descend(run) == by_hand(4, start, lr, 0.5)
    again = load(Run, tmp_path / "base.json")
    assert again.optimizer.lr == 0.1  # no override is left behind
    assert Run().optimizer is not again.optimizer


def test_a_run_saved_as_json_is_the_same_run() -> None:
    run = load(Run, {"steps": 3, "optimizer": {"lr": 1e-3}})
    assert load(Run, json.loads(run.model_dump_json())) == run
    assert load(Run, run.model_dump_json()) == run
    assert pickle.loads(pickle.dumps(run)) == copy.deepcopy(run) == run
    assert descend(Run(**run.model_dump())) == descend(run)


def test_workers_compute_what_the_parent_does() -> None:
    runs = [load(Run, {"optimizer": {"lr": lr}}) for lr in (0.1, 0.2)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(descend, runs) == [descend(run) for run in runs]


def test_a_command_line_of_argparse() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--lr", type=float)
    given = parser.parse_args(["--lr", "0.3"])
    run = load(Run, {"steps": given.steps, "optimizer": {"lr": given.lr}})
    assert descend(run) == by_hand(2, 4.0, 0.3, 0.0)


def test_what_a_frozen_run_refuses_is_loud() -> None:
    run = Run()
    with pytest.raises(ValidationError, match="frozen"):
        run.steps = 7
    with pytest.raises(ConfigError, match="did you mean 'momentum'"):
        load(Run, {"optimizer": {"momentun": 0.9}})


def test_a_copy_with_other_values_is_checked() -> None:
    """pydantic's `model_copy(update=)` takes any name and value: a sweep over a misspelt key trained the same run many times."""
    run = Run(optimizer=Optimizer(lr=0.2))
    longer = run.model_copy(update={"steps": 9})
    assert (longer.steps, longer.optimizer, longer.model_fields_set) == (9, run.optimizer, {"steps", "optimizer"})
    assert run.model_copy(update={"start": 3}).start == 3.0  # an int is a float, as everywhere here
    assert run.model_copy(deep=True) == run
    with pytest.raises(ValidationError, match="stepz"):
        run.model_copy(update={"stepz": 9})
    with pytest.raises(ValidationError, match="greater than 0"):
        run.optimizer.model_copy(update={"lr": -1.0})
