"""A curriculum admits samples as its schedules say, and draws the same batches on any number of ranks, from any saved state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_config.errors import CheckpointError, ConfigError
from ds_data import RankSlice, TokenFile, write_items
from ds_data.config import DataEfficiencyConfig, SamplingCurriculumConfig
from ds_data.curriculum import Curriculum, DifficultyIndex, Metric, cluster_name, make_metrics

LINE = {"total_curriculum_step": 5, "difficulty_step": 1}


def below(values: list[int]) -> Callable[[float], np.ndarray]:
    array = np.asarray(values)
    return lambda difficulty: np.flatnonzero(array <= difficulty)


def curriculum(values: list[int], steps: list[int], **options: Any) -> Curriculum:
    """One metric; its difficulty at step k is the k-th of `steps`, and the last ever after."""
    metric = Metric("rarity", lambda step: steps[min(step, len(steps)) - 1], below(values))
    return Curriculum(len(values), (metric,), **options)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 6), min_size=4, max_size=40), st.integers(1, 12), st.integers(0, 99))
def test_only_what_is_admitted_is_drawn_and_everything_is(values: list[int], batch: int, seed: int) -> None:
    steps = sorted({min(values), 3, 4, 6} - set(range(min(values))))
    made = curriculum(values, steps, seed=seed)
    for step in range(12):
        limit = steps[min(step, len(steps) - 1)]
        drawn = made.draw(batch)
        assert len(drawn) == batch
        assert max(values[i] for i in drawn) <= limit
        assert made.difficulties == {"rarity": limit}
        assert sum(len(c.samples) for c in made.clusters) == sum(v <= limit for v in values)
    assert set(made.draw(1000).tolist()) == set(range(len(values)))


def test_a_sample_of_a_cluster_is_drawn_again_only_after_all_others() -> None:
    made = curriculum([1] * 11, [1], seed=5)
    drawn = [i for _ in range(10) for i in made.draw(11).tolist()]
    for at in range(0, 110, 11):
        assert sorted(drawn[at : at + 11]) == list(range(11))
    assert len({tuple(drawn[at : at + 11]) for at in range(0, 110, 11)}) == 10  # each time in another order


def test_clusters_are_drawn_in_proportion_to_their_sizes() -> None:
    made = curriculum([1] * 30 + [2] * 10, [1, 2])
    made.draw(10)
    drawn = [i for _ in range(300) for i in made.draw(40).tolist()]
    assert abs(sum(i < 30 for i in drawn) / len(drawn) - 0.75) < 0.02


def test_a_sample_must_be_easy_by_every_metric() -> None:
    long, rare = [1, 1, 2, 2, 3, 3], [1, 3, 1, 3, 1, 3]
    metrics = (
        Metric("length", lambda step: min(step, 3), below(long)),
        Metric("rarity", lambda step: 1 + 2 * (step > 2), below(rare)),
    )
    made = Curriculum(6, (*metrics, Metric("told", lambda step: 10 * step)))
    for admitted in ([0], [2], [4, 1, 3, 5]):
        made.draw(2)
        assert sorted(made.clusters[-1].samples.tolist()) == sorted(admitted)
    assert made.difficulties == {"length": 3, "rarity": 3, "told": 30}


def test_a_difficulty_that_falls_takes_nothing_away() -> None:
    made = curriculum([1, 2, 3], [3, 1, 2])
    for _ in range(3):
        made.draw(2)
        assert len(made.clusters) == 1


# ---- any number of ranks, from any point


@settings(deadline=None, max_examples=500)
@given(st.data())
def test_interrupted_anywhere_and_resumed_on_other_ranks(data: st.DataObject) -> None:
    splits = st.sampled_from([(1, 12), (1, 4), (2, 6), (2, 3), (3, 4), (3, 2), (4, 3), (4, 1)])
    before, after = data.draw(splits), data.draw(splits)
    values = data.draw(st.lists(st.integers(1, 5), min_size=3, max_size=30))
    steps = sorted(data.draw(st.sets(st.integers(max(1, min(values)), 5), min_size=1)))
    seed, stop = data.draw(st.integers(0, 1000)), data.draw(st.integers(0, 6))
    whole = curriculum(values, steps, seed=seed)
    expected = [sorted(whole.draw(12).tolist()) for _ in range(stop + 3)]

    def run(
        state: dict[str, Any] | None, taken: int, split: tuple[int, int], count: int
    ) -> tuple[list[list[int]], dict[str, Any]]:
        ranks, micro = split
        batches: list[list[int]] = [[] for _ in range(count)]
        last = curriculum(values, steps, seed=seed if state is None else 7).state_dict()
        for rank in range(ranks):
            made = curriculum(values, steps, seed=seed if state is None else 7)
            if state is not None:
                made.load_state_dict(state)
            rows = made.rows(RankSlice(rank, ranks, micro), 12, taken)
            for number in range(count * 12 // (ranks * micro)):
                row = next(rows)
                batches[number * ranks * micro // 12] += row.samples
                last = dict(row.state)
        return [sorted(batch) for batch in batches], last

    head, state = run(None, 0, before, stop)
    tail, _ = run(state if stop else None, 12 * stop, after, 3)
    assert head + tail == expected


def test_in_the_middle_of_a_batch() -> None:
    made = curriculum([1, 2] * 9, [1, 2], seed=3)
    rows = made.rows(RankSlice(0, 1, 2), 6, 0)
    seen = [next(rows) for _ in range(5)]
    rest = [next(rows).samples for _ in range(4)]
    other = curriculum([1, 2] * 9, [1, 2], seed=9)
    other.load_state_dict(seen[-1].state)
    assert [
        row.samples for row, _ in zip(other.rows(RankSlice(0, 1, 2), 6, seen[-1].consumed), range(4), strict=False)
    ] == rest


def test_it_ends_with_its_total() -> None:
    made = curriculum([1] * 10, [1], total=25)
    assert [row.consumed for row in made.rows(RankSlice(0, 1, 2), 4, 0)] == list(range(2, 25, 2))


# ---- files


def written(folder: Path, values: list[int]) -> tuple[str, str]:
    """What an analyzer writes: for each value its samples, and the value."""
    found = sorted(set(values))
    samples, metric = str(folder / "index_to_sample"), str(folder / "index_to_metric")
    write_items(samples, [[i for i, v in enumerate(values) if v == value] for value in found], np.int32)
    write_items(metric, [[value] for value in found], np.int32)
    return samples, metric


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 10), st.integers(0, 12))
def test_files_of_an_analyzer(
    tmp_path_factory: pytest.TempPathFactory, values: list[int], parts: int, difficulty: int
) -> None:
    samples, metric = written(tmp_path_factory.mktemp("metric"), values)
    by_value = DifficultyIndex(samples, metric, parts=parts, length=len(values))
    assert sorted(by_value(difficulty).tolist()) == [i for i, v in enumerate(values) if v <= difficulty]
    by_share = DifficultyIndex(samples, None, parts=parts, length=len(values))
    count = len(values) if difficulty >= parts else len(values) // parts * difficulty
    easy = sorted(range(len(values)), key=lambda i: (values[i], i))[:count]
    assert sorted(by_share(difficulty).tolist()) == sorted(easy)


def section(folder: Path, **change: Any) -> SamplingCurriculumConfig:
    samples, metric = written(folder, [1, 2, 3, 4, 5, 6])
    told = {
        "index_to_sample_path": samples, "index_to_metric_path": metric, "difficulty_type": "value", "clustering_type": "schedule_based",
        "min_difficulty": 1, "max_difficulty": 6, "schedule_type": "fixed_linear", "schedule_config": LINE, **change,
    }  # fmt: skip
    return SamplingCurriculumConfig.model_validate({"enabled": True, "curriculum_metrics": {"rarity": told}})


def test_a_section_and_the_files_it_leaves(tmp_path: Path) -> None:
    clusters = tmp_path / "clusters"
    made = Curriculum(6, make_metrics(section(tmp_path), 6), folder=clusters)
    for step in range(1, 7):
        made.draw(4)
        assert made.difficulties == {"rarity": min(1 + step, 6)}
    told = made.progress()
    assert told["data_cluster_paths"] == [f"cluster_rarity{d}" for d in (2, 3, 4, 5, 6)]
    assert told["consumed_samples"] == 24
    for name, cluster in zip(told["data_cluster_paths"], made.clusters, strict=True):
        assert TokenFile(clusters / name)[0].tolist() == cluster.samples.tolist()
    assert cluster_name({"a": 1, "b": 2}) == "cluster_a1_b2"


def test_custom_schedules(tmp_path: Path) -> None:
    made = Curriculum(6, make_metrics(section(tmp_path, schedule_type="custom", schedule_config={}), 6))
    with pytest.raises(ConfigError, match="no function was given"):
        made.draw(2)
    with pytest.raises(ConfigError, match="no metric length"):
        made.set_schedules({"length": lambda step: step})
    made.set_schedules({"rarity": lambda step: 7 - step})
    made.draw(2)
    assert made.difficulties == {"rarity": 6}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"index_to_sample_path": None}, "no index_to_sample_path"),
        ({"index_to_metric_path": None}, "no index_to_metric_path"),
        ({"index_to_sample_path": "nowhere"}, "there is no nowhere.idx"),
        ({"schedule_config": {}}, "it takes"),
        (
            {"min_difficulty": 0, "schedule_config": {"total_curriculum_step": 1000, "difficulty_step": 1}},
            "no sample is as easy",
        ),
    ],
)
def test_sections_that_do_not_work(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Curriculum(6, make_metrics(section(tmp_path, **change), 6)).draw(2)


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    samples, metric = written(tmp_path, [1, 2, 3])
    with pytest.raises(ConfigError, match="the data set 2"):
        DifficultyIndex(samples, metric, parts=3, length=2)
    write_items(tmp_path / "two", [[1, 2], [3], [4]], np.int32)
    with pytest.raises(ConfigError, match="more than one value"):
        DifficultyIndex(samples, str(tmp_path / "two"), parts=3, length=3)
    write_items(tmp_path / "far", [[7]], np.int32)
    with pytest.raises(ConfigError, match="names sample 7 of a data set of 3"):
        DifficultyIndex(str(tmp_path / "far"), None, parts=1, length=3)(1)
    with pytest.raises(ConfigError, match="curriculum_metrics is empty"):
        make_metrics(SamplingCurriculumConfig(enabled=True), 3)


def test_other_data_is_refused() -> None:
    made = curriculum([1, 2, 3], [3])
    made.draw(2)
    with pytest.raises(CheckpointError, match="over 3 samples"):
        curriculum([1, 2, 3, 4], [3]).load_state_dict(made.state_dict())
    renamed = Curriculum(3, (Metric("length", lambda step: 3, below([1, 2, 3])),))
    with pytest.raises(CheckpointError, match="its metrics are"):
        renamed.load_state_dict(made.state_dict())


@pytest.mark.parametrize(
    ("sections", "sampling", "curriculum_", "routing"),
    [
        ({}, False, False, False),
        ({"enabled": True}, False, False, False),
        ({"data_sampling": {"num_workers": 2}}, True, False, False),
        ({"data_sampling": {"curriculum_learning": {"enabled": True}}}, True, True, False),
        (
            {"enabled": False, "data_sampling": {"enabled": True, "curriculum_learning": {"enabled": True}}},
            False,
            False,
            False,
        ),
        (
            {"enabled": True, "data_sampling": {"enabled": False, "curriculum_learning": {"enabled": True}}},
            False,
            False,
            False,
        ),
        ({"data_routing": {"random_ltd": {"enabled": True}}}, False, False, True),
        ({"data_routing": {"enabled": False, "random_ltd": {"enabled": True}}}, False, False, False),
    ],
)
def test_what_acts(sections: dict[str, Any], sampling: bool, curriculum_: bool, routing: bool) -> None:
    config = DataEfficiencyConfig.model_validate(sections)
    assert (config.sampling is not None, config.curriculum is not None, config.random_ltd is not None) == (
        sampling,
        curriculum_,
        routing,
    )
