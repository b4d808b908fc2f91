"""Elastic batches: one train batch size for many numbers of ranks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_config.errors import ConfigError, DsError, PlanError
from ds_engine import Shapes, load_config, make_plan
from ds_engine.batch import BatchRequest
from ds_engine.elastic_batch import elastic_batch, rank_counts
from ds_engine.feature_table import ElasticityConfig


def section(**changes: Any) -> ElasticityConfig:
    given: dict[str, Any] = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": (2, 4, 6)}
    return ElasticityConfig(**{**given, "version": 0.1, **changes})


def test_counts_are_all_divisors() -> None:
    assert rank_counts(24, (2, 6), 1, 100) == (1, 2, 3, 4, 6, 12)
    assert rank_counts(24, (2, 6), 3, 6) == (3, 4, 6)
    assert rank_counts(7, (2,), 1, 9) == ()


def test_the_known_example() -> None:
    """Limit 10000, microbatches 8 12 16 17, 32 to 1500 ranks: batch 9792 with 23 numbers of ranks."""
    asked = section(max_train_batch_size=10_000, micro_batch_sizes=(8, 12, 16, 17), min_gpus=32, max_gpus=1500)
    assert elastic_batch(asked, 64).train == 9792
    assert len(rank_counts(9792, (8, 12, 16, 17), 32, 1500)) == 23
    assert elastic_batch(asked, 64).micro == 17


def fitting(asked: ElasticityConfig, world: int) -> BatchRequest | None:
    try:
        return elastic_batch(asked, world)
    except PlanError:
        return None


@given(st.integers(1, 64), st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(12, 4000))
def test_the_train_batch_is_the_same_wherever_it_fits(world: int, micros: list[int], limit: int) -> None:
    asked = section(max_train_batch_size=limit, micro_batch_sizes=tuple(micros))
    found = fitting(asked, world)
    if found is None:
        return
    assert found.train is not None
    assert found.micro in micros
    assert found.train <= limit
    assert found.train % (found.micro * world) == 0
    assert {elastic_batch(asked, n).train for n in rank_counts(found.train, micros, 1, 100)} == {found.train}


def test_whole_nodes() -> None:
    asked = section(version=0.2, num_gpus_per_node=8, max_gpus=64)
    found = elastic_batch(asked, 24)
    assert found.train is not None
    assert found.train % 24 == 0
    assert elastic_batch(asked, 7).train == 2000 // (2 * 7) * 14  # no whole nodes: what fits 7 ranks best
    smaller = section(version=0.2, prefer_larger_batch=False)
    assert elastic_batch(smaller, 11).train == min(2000 // (m * 11) * m * 11 for m in (2, 4, 6))


@pytest.mark.parametrize(
    ("changes", "world"),
    [
        ({"max_gpus": 4}, 8),
        ({"min_gpus": 4}, 2),
        ({"max_train_batch_size": 1}, 1),
        ({"version": 0.2, "num_gpus_per_node": 3, "model_parallel_size": 2}, 6),
    ],
)
def test_what_does_not_fit_is_said(changes: dict[str, Any], world: int) -> None:
    with pytest.raises(PlanError) as caught:
        elastic_batch(section(**changes), world)
    assert caught.value.code == "elasticity-world"


def planned(world: int = 4, **changes: Any) -> Any:
    asked = {"enabled": True, "max_train_batch_size": 96, "micro_batch_sizes": [2, 4]}
    return make_plan(
        load_config({"elasticity": asked | changes.pop("elasticity", {}), **changes}), Shapes((), ()), world
    )


def test_it_gives_the_batch_keys() -> None:
    assert planned(4).batch.train == planned(8).batch.train == 96
    with pytest.raises(DsError) as caught:
        planned(train_batch_size=8)
    assert caught.value.code == "elasticity-batch"
    assert planned(train_batch_size=8, elasticity={"ignore_non_elastic_batch_info": True}).batch.train == 96
    with pytest.raises(ConfigError, match="enabled without micro_batch_sizes"):
        load_config({"elasticity": {"enabled": True, "max_train_batch_size": 8}})
