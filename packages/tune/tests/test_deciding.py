"""The pure part: candidates, predictions, the order of trials, the choice, and what is written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ds_config.errors import ConfigError
from ds_engine import load_config, shapes_of
from ds_engine.autotuning import AutotuningConfig
from ds_engine.trial_results import LayerFacts, LinkCost, TrialResult
from ds_tune import (
    Candidate,
    Result,
    SearchLimits,
    Trial,
    TrialBudget,
    TuningTask,
    asked_by_section,
    asked_of,
    best_candidate,
    calibrate,
    candidates_of,
    next_trial,
    predict,
    rung_sizes,
)
from ds_tune.cost_model import traffic_of
from ds_tune.request import parse_setting
from ds_tune.results_writer import best_text, explained, rows_of, summary_text
from ds_tune.space import ACCUMULATION, CHECKPOINTED, MICRO, STAGE

CONFIG: Mapping[str, Any] = {"train_batch_size": 16, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
SPACE: Mapping[str, Sequence[Any]] = {MICRO: (1, 2, 4, 8), STAGE: (0, 1, 2, 3), CHECKPOINTED: ((), ("*",))}
PROCESS, SAMPLE = 400_000_000, 3_000_000
LINK = LinkCost(1e-4, 1e9)
NO_LIMITS = SearchLimits()


def _task(world: int = 2) -> TuningTask:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    return TuningTask(CONFIG, shapes_of(model), world)


TASK = _task()
CANDIDATES, LEFT = candidates_of(TASK, SPACE, SearchLimits())
BY_NAME = {c.name: c for c in CANDIDATES}


def _measured(candidate: Candidate, *, detail: bool = False, step_s: float | None = None) -> TrialResult:
    """A machine that is as the model of time and memory says, but for stage 3, which takes 2 ms a microbatch more."""
    batch, plan = candidate.plan.batch, candidate.plan
    again = bool(candidate.settings.get(CHECKPOINTED))
    compute = (0.002 + 0.003 * batch.micro) * batch.accumulation * (4 / 3 if again else 1)
    sent = sum(n * LINK.latency_s + size / LINK.bytes_per_s for n, size in traffic_of(plan).values())
    update = 1e-8 * sum(u.layout.shard_numel for u in plan.units)
    extra = 0.002 * batch.accumulation if plan.residency.shard_params else 0.0
    taken = compute + sent + update + extra if step_s is None else step_s
    kept = SAMPLE * batch.micro - (SAMPLE * batch.micro // 2 if again else 0)
    memory = plan.memory
    return TrialResult(
        world=2, micro=batch.micro, accumulation=batch.accumulation, steps_s=(taken, taken, taken), forward_s=compute / 3,
        backward_s=compute * 2 / 3, update_s=update, comm_s=sent, peak_bytes=PROCESS + memory.total_bytes + memory.passing_bytes + kept,
        start_bytes=PROCESS, model_bytes=1, device="cpu", saved_bytes=kept,
        layers=(LayerFacts("*", 4, SAMPLE * batch.micro * 2 // 3, 0, compute / 3),) if detail else (),
        links=dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), LINK) if detail else {},
        shapes=TASK.shapes if detail else None,
    )  # fmt: skip


def _run(
    budget: TrialBudget, *, dead: frozenset[str] = frozenset(), limits: SearchLimits = NO_LIMITS, **how: Any
) -> list[Result]:
    """Every trial that is asked for, on that machine."""
    results: list[Result] = []
    while (step := next_trial(CANDIDATES, results, limits, budget, **how)) is not None:
        name = step.candidate.name
        died = name in dead
        found = None if died else _measured(step.candidate, detail=step.detail)
        results.append(Result(name, step.rung, "memory" if died else "measured", found))
    return results


# ---- candidates


def test_every_combination_is_planned_or_has_a_reason() -> None:
    assert len(CANDIDATES) + len(LEFT) == 32
    assert all(c.plan.batch.train == 16 and c.plan.batch.micro == c.settings[MICRO] for c in CANDIDATES)
    found, left = candidates_of(TASK, {MICRO: (3, 4), STAGE: (1,)}, SearchLimits(micro=(1, 4)))
    assert [c.name for c in found] == ["z1_gas2_tmbspg4"]
    assert [(one.code, one.settings[MICRO]) for one in left] == [("batch-arithmetic", 3)]


@given(st.integers(1, 40_000_000), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=40, deadline=None)
def test_nothing_that_a_limit_forbids_is_a_candidate(memory: int, most: int) -> None:
    found, left = candidates_of(TASK, SPACE, SearchLimits(memory, micro=(1, most)))
    assert all(c.plan.memory.total_bytes <= memory and c.plan.batch.micro <= most for c in found)
    assert len(found) + len(left) == 32
    assert {one.code for one in left} <= {"limit-memory", "limit-micro"}


def test_names_are_deepspeeds_and_differ() -> None:
    assert "z2_gas2_tmbspg4" in BY_NAME
    assert "z2_gas2_tmbspg4_ckpt" in BY_NAME
    assert len(BY_NAME) == len(CANDIDATES)


def test_a_variable_of_the_environment_is_a_setting() -> None:
    found, _ = candidates_of(TASK, {MICRO: (4,), "env.DS_COMM_BACKEND": ("gloo", "shm")}, SearchLimits())
    assert [c.environ for c in found] == [{"DS_COMM_BACKEND": "gloo"}, {"DS_COMM_BACKEND": "shm"}]
    assert all("env.DS_COMM_BACKEND" not in c.changes for c in found)


# ---- predictions


def test_gradients_that_are_summed_in_place_stay_whole_between_microbatches() -> None:
    first, larger = BY_NAME["z0_gas8_tmbspg1"], BY_NAME["z0_gas1_tmbspg8"]
    numbers = calibrate([Trial(first, _measured(first, detail=True)), Trial(larger, _measured(larger))])
    whole = sum(u.numel for u in first.plan.units) * 4
    assert whole == 4 * 128 * 129 * 4
    for stage in (1, 2, 3):
        one, several = BY_NAME[f"z{stage}_gas1_tmbspg8"], BY_NAME[f"z{stage}_gas2_tmbspg4"]
        assert predict(one, numbers).memory["gradients"] == 0  # they take the place of activations
        assert predict(several, numbers).memory["gradients"] == whole
    assert predict(first, numbers).memory["gradients"] == first.plan.memory.grads_bytes


def test_a_prediction_of_what_was_measured_is_what_was_measured() -> None:
    first, larger = BY_NAME["z0_gas8_tmbspg1"], BY_NAME["z0_gas1_tmbspg8"]
    numbers = calibrate([Trial(first, _measured(first, detail=True)), Trial(larger, _measured(larger))])
    for candidate in (first, larger):
        measured, said = _measured(candidate), predict(candidate, numbers)
        assert said.step_s == pytest.approx(measured.step_s, rel=1e-6)
        assert said.peak_bytes == pytest.approx(measured.peak_bytes, rel=1e-6)


@given(st.sampled_from(sorted(BY_NAME)), st.sampled_from([1, 2]))
@settings(max_examples=60, deadline=None)
def test_a_machine_that_is_as_the_model_says_is_predicted(name: str, stage: int) -> None:
    reference = [BY_NAME[f"z{stage}_gas{16 // 2 // m}_tmbspg{m}"] for m in (1, 8)]
    probes = [BY_NAME["z3_gas2_tmbspg4"], BY_NAME[f"z{stage}_gas2_tmbspg4_ckpt"]]
    trials = [Trial(c, _measured(c, detail=i == 0)) for i, c in enumerate([*reference, *probes])]
    said, measured = predict(BY_NAME[name], calibrate(trials)), _measured(BY_NAME[name])
    assert said.step_s == pytest.approx(measured.step_s, rel=0.05)
    assert said.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.05)


def test_parts_add_up_and_are_told() -> None:
    first = BY_NAME["z2_gas8_tmbspg1"]
    numbers = calibrate([Trial(first, _measured(first, detail=True))])
    said = predict(BY_NAME["z3_gas8_tmbspg1_ckpt"], numbers)
    assert said.step_s == pytest.approx(sum(said.time.values()))
    assert {"forward and backward", "computed again", "messages", "update"} <= set(said.time)
    text = explained(BY_NAME["z3_gas8_tmbspg1_ckpt"], said, _measured(first))
    assert "computed again" in text
    assert "measured" in text


def test_more_bytes_travel_at_higher_stages() -> None:
    sent = [sum(size for _, size in traffic_of(BY_NAME[f"z{stage}_gas4_tmbspg2"].plan).values()) for stage in range(4)]
    assert sent[0] == pytest.approx(sent[1], rel=0.01)  # a sum is a scatter and a gather
    assert sent[1] < sent[2] < sent[3]


# ---- the order of trials


@pytest.mark.parametrize("count", range(1, 40))
def test_halving_ends_with_two(count: int) -> None:
    rungs = rung_sizes(count)
    assert list(rungs) == sorted(rungs, reverse=True)
    assert rungs == () if count < 3 else rungs[-1] == 2


@given(st.integers(1, 20), st.sets(st.sampled_from(sorted(BY_NAME)), max_size=20))
@settings(max_examples=60, deadline=None)
def test_the_budget_holds_whatever_dies(trials: int, dead: set[str]) -> None:
    results = _run(TrialBudget(trials), dead=frozenset(dead))
    assert 1 <= len(results) <= trials
    assert len({(r.name, r.rung) for r in results}) == len(results)
    sizes = {r.name: BY_NAME[r.name] for r in results}
    for i, result in enumerate(results):
        smaller = [
            r for r in results[:i]
            if r.outcome == "memory" and sizes[r.name].structure == sizes[result.name].structure
            and sizes[r.name].plan.batch.micro < sizes[result.name].plan.batch.micro
        ]  # fmt: skip
        known = any(r.measured for r in results[:i])
        assert not (known and smaller and result.rung == 0), "a larger microbatch than one that died"


def test_a_quarter_of_the_grid_finds_the_best() -> None:
    results = _run(TrialBudget(8))
    best = min(CANDIDATES, key=lambda c: _measured(c).step_s)
    found = best_candidate(CANDIDATES, results)
    assert found is not None
    assert _measured(found[0]).step_s <= 1.03 * _measured(best).step_s
    assert len(results) <= 8


def test_what_does_not_fit_is_never_started() -> None:
    bound = PROCESS + 20_000_000
    results = _run(TrialBudget(32), limits=SearchLimits(bound))
    assert len(results) > 3
    # Its first trials teach the tuner; what comes after them fits.
    assert all(_measured(BY_NAME[r.name]).peak_bytes <= bound for r in results[2:])


@given(st.integers(1, 8))
@settings(max_examples=8, deadline=None)
def test_an_interrupted_tuning_goes_on_where_it_was(kept: int) -> None:
    whole = _run(TrialBudget(8))
    step = next_trial(CANDIDATES, whole[:kept], SearchLimits(), TrialBudget(8))
    after = [(r.name, r.rung) for r in whole[kept : kept + 1]]
    assert ([] if step is None else [(step.candidate.name, step.rung)]) == after


@pytest.mark.parametrize("tuner", ["gridsearch", "random"])
def test_other_tuners_take_their_own_order_and_stop_early(tuner: Any) -> None:
    every = _run(TrialBudget(50), tuner=tuner)
    assert {r.name for r in every} == set(BY_NAME)
    assert ([r.name for r in every] == list(BY_NAME)) == (tuner == "gridsearch")
    assert len(_run(TrialBudget(50, stopping=5), tuner=tuner)) < 32


def test_latency_is_better_when_it_is_smaller() -> None:
    space = {MICRO: (4,), ACCUMULATION: (1, 8)}
    found, _ = candidates_of(TASK, space, SearchLimits())
    results = [Result(c.name, 0, "measured", _measured(c, detail=True)) for c in found]
    best = best_candidate(found, results, "latency")
    assert best is not None
    assert best[0].plan.batch.accumulation == 1


def test_nothing_measured_is_no_choice() -> None:
    assert best_candidate(CANDIDATES, [Result(CANDIDATES[0].name, 0, "failed")]) is None


# ---- what is asked and what is written


def test_a_section_keeps_what_has_one_value() -> None:
    config = {MICRO: "auto", "zero_optimization": {"stage": 2}, "optimizer": CONFIG["optimizer"]}
    asked = asked_by_section(
        config, AutotuningConfig(enabled=True, max_train_micro_batch_size_per_gpu=64, num_tuning_micro_batch_sizes=2)
    )
    space = asked.space(2)
    assert space == {MICRO: (32, 64)}
    full = asked_by_section(config | {"zero_optimization": {"stage": [1, 3]}}, AutotuningConfig(fast=False)).space(2)
    assert full[STAGE] == (1, 3)
    assert len(full["zero_optimization.reduce_bucket_size"]) == 3


def test_a_configuration_that_fixes_everything_is_an_error() -> None:
    config = {MICRO: 4, "zero_optimization": {"stage": 2}}
    with pytest.raises(ConfigError) as caught:
        asked_by_section(config, AutotuningConfig(enabled=True)).space(2)
    assert caught.value.code == "tune-nothing"


def test_settings_are_read_as_json_or_text() -> None:
    assert parse_setting("zero_optimization.stage=1,2") == ("zero_optimization.stage", (1, 2))
    assert parse_setting("env.DS_COMM_BACKEND=gloo,shm") == ("env.DS_COMM_BACKEND", ("gloo", "shm"))
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_setting("stage")


def test_the_best_file_is_read_as_a_configuration() -> None:
    results = _run(TrialBudget(8))
    found = best_candidate(CANDIDATES, results)
    assert found is not None
    text = best_text({**CONFIG, "zero_optimization": {"stage": 1}, "autotuning": {"enabled": True}}, *found, results)
    read = load_config(text)
    assert read.zero_optimization.stage == found[0].settings[STAGE]
    assert read.train_batch_size == 16
    assert read.autotuning is None
    assert "// Trials: 8 measured" in text or "measured" in text.splitlines()[2]


def test_a_table_and_a_summary_say_what_became_of_every_trial() -> None:
    from ds_tune import fit_and_predict

    results = [*_run(TrialBudget(6)), Result("z3_gas1_tmbspg8", 0, "memory", None, "killed")]
    rows = rows_of(CANDIDATES, results, fit_and_predict(CANDIDATES, results, SearchLimits()), "throughput")
    assert [row["outcome"] for row in rows].count("memory") == 1
    json.dumps(rows)
    text = summary_text(CANDIDATES, results, "throughput")
    assert text.splitlines()[0].split() == ["tuning_space", "num_experiments", "best_metric_val", "best_exp_name"]


def test_lists_and_auto_are_what_is_looked_at() -> None:
    asked = asked_of({MICRO: [2, 4], "zero_optimization": {"stage": "all"}, "train_batch_size": 16})
    assert asked.values == {MICRO: (2, 4)}
    assert asked.space(2)[STAGE] == (0, 1, 2, 3)
