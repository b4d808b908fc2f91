"""Which trial comes next, and which configuration is chosen. Pure: the same results give the same decision, so a tuning that was
interrupted goes on by reading what is on disk.

With a model of time and memory: first *probes* (the reference structure at its smallest and at a larger microbatch, then one of each
other setting), then the best predicted, then successive halving: the best of what was measured are measured again, in ever
fewer and longer trials. Without one: the order of a grid, or a drawn one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ds_config.option_checks import check_options
from ds_engine.trial_results import TrialResult
from ds_tune.cost_model import Calibration, Prediction, Trial, calibrate, predict
from ds_tune.space import Candidate, Rejected, SearchLimits

__all__ = [
    "Metric",
    "NextTrial",
    "Outcome",
    "Result",
    "SearchState",
    "TrialBudget",
    "Tuner",
    "best_candidate",
    "fit_and_predict",
    "next_trial",
    "rung_sizes",
    "value_of",
]

Metric = Literal["throughput", "latency", "flops"]
Tuner = Literal["model_based", "gridsearch", "random"]
Outcome = Literal["measured", "memory", "time limit", "failed", "no steps"]

_NEAR = 1.15  # a prediction that much slower than what was measured is not tried
_NEAREST = 1.05  # what is that near to the best is measured again


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one trial.

    Attributes:
        name: Of its candidate.
        rung: 0 for the first trial of a candidate, then longer ones.
        outcome: Only one of `measured` has numbers.
        message: Why there are none.
        seconds: Wall time of the job.
    """

    name: str
    rung: int
    outcome: Outcome
    measured: TrialResult | None = None
    message: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TrialBudget:
    """How much is tried.

    Attributes:
        trials: Jobs at most, repeats included.
        steps: Measured steps of a first trial; each rung doubles them.
        stopping: End after so many trials without a better one; 0: never.
    """

    trials: int
    steps: int = 3
    stopping: int = 0

    def __post_init__(self) -> None:
        check_options(self, steps=">= 1", stopping=">= 0")


@dataclass(frozen=True, slots=True)
class NextTrial:
    """The next trial."""

    candidate: Candidate
    rung: int
    steps: int
    why: str
    detail: bool = False


@dataclass(frozen=True, slots=True)
class SearchState:
    """What is known: numbers of the model of time and memory (None: nothing yet), a prediction of each candidate, and what is left out by it."""

    numbers: Calibration | None
    predicted: Mapping[str, Prediction] = field(default_factory=dict)
    left: tuple[Rejected, ...] = ()


def value_of(measured: TrialResult, samples: int, metric: Metric) -> float:
    """Return the value by which trials are compared; larger is better for every metric."""
    if metric == "latency":
        return -measured.step_s
    if metric == "flops":
        return 3 * measured.flops * measured.accumulation / measured.step_s
    return samples / measured.step_s


def fit_and_predict(candidates: Sequence[Candidate], results: Sequence[Result], limits: SearchLimits) -> SearchState:
    """Predict every candidate from the trials that went well."""
    by_name = {c.name: c for c in candidates}
    trials = [Trial(by_name[r.name], r.measured) for r in results if r.measured is not None and r.name in by_name]
    detailed = [t for t in trials if t.measured.shapes is not None]
    if not detailed:
        return SearchState(None)
    trials = [detailed[0], *(t for t in trials if t is not detailed[0])]
    numbers = calibrate(trials)
    predicted = {c.name: predict(c, numbers) for c in candidates}
    left = []
    if (most := limits.memory_bytes) is not None:
        for candidate in candidates:
            peak = predicted[candidate.name].peak_bytes
            if peak > most:
                reason = f"needs {peak:,.0f} bytes of {most:,}, by what was measured"
                left.append(Rejected(candidate.settings, "limit-memory", reason))
    return SearchState(numbers, predicted, tuple(left))


def next_trial(
    candidates: Sequence[Candidate], results: Sequence[Result], limits: SearchLimits, budget: TrialBudget, *, tuner: Tuner = "model_based",
    metric: Metric = "throughput",
) -> NextTrial | None:  # fmt: skip
    """Choose the next trial, or return None at the end."""
    if len(results) >= budget.trials or _stopped(candidates, results, budget, metric):
        return None
    tried = {r.name for r in results}
    if tuner != "model_based":
        order = list(candidates)
        if tuner == "random":
            random.Random(0).shuffle(order)
        rest = [c for c in order if c.name not in tried]
        return NextTrial(rest[0], 0, budget.steps, tuner, detail=not results) if rest else None
    known = fit_and_predict(candidates, results, limits)
    if known.numbers is None:
        return _first(candidates, results, budget)
    hopeless = {_key(left) for left in known.left}
    open_ = [
        c
        for c in candidates
        if c.name not in tried and _key(c) not in hopeless and not _larger_died(c, candidates, results)
    ]
    return (
        _probe(open_, candidates, results, budget)
        or _promising(open_, known, candidates, results, budget, metric)
        or _again(candidates, results, budget, metric)
    )


def _key(of: Candidate | Rejected) -> str:
    return repr(sorted((k, repr(v)) for k, v in of.settings.items()))


def _first(candidates: Sequence[Candidate], results: Sequence[Result], budget: TrialBudget) -> NextTrial | None:
    """Choose the smallest candidate, or after its failure smaller ones of other structures."""
    tried = {r.name for r in results}
    order = sorted(
        (c for c in candidates if c.name not in tried), key=lambda c: (c.plan.batch.micro, _plainness(c), _states(c))
    )
    if results:  # what needs least memory, whatever else
        order.sort(key=lambda c: (_states(c), c.plan.batch.micro))
    return NextTrial(order[0], 0, budget.steps, "the smallest, with every detail", detail=True) if order else None


def _plainness(candidate: Candidate) -> int:
    """Count the settings of a candidate's structure that are not neutral; a reference has few."""
    return sum(
        bool(value) and key != "zero_optimization.stage" and value != "none"
        for key, value in candidate.structure.items()
    )


def _states(candidate: Candidate) -> int:
    return candidate.plan.memory.total_bytes + candidate.plan.memory.host_bytes


def _larger_died(candidate: Candidate, candidates: Sequence[Candidate], results: Sequence[Result]) -> bool:
    """Whether a smaller microbatch of the same structure died by memory."""
    dead = {r.name for r in results if r.outcome == "memory"}
    return any(
        c.name in dead and c.structure == candidate.structure and c.plan.batch.micro <= candidate.plan.batch.micro
        for c in candidates
    )


def _probe(
    open_: Sequence[Candidate], candidates: Sequence[Candidate], results: Sequence[Result], budget: TrialBudget
) -> NextTrial | None:
    """Choose a second size of the reference, then one trial per other setting; with half of the budget at most."""
    if len(results) >= max(2, (budget.trials + 1) // 2):
        return None
    measured = [c for c in candidates if any(r.name == c.name and r.measured for r in results)]
    first = next(
        c
        for r in results
        if r.measured is not None and r.measured.shapes is not None
        for c in candidates
        if c.name == r.name
    )
    same = sorted((c for c in open_ if c.structure == first.structure), key=lambda c: c.plan.batch.micro)
    if same and not any(c.structure == first.structure for c in measured if c is not first):
        return NextTrial(same[-1], 0, budget.steps, "the reference at its largest microbatch")
    tried_values = {
        (key, repr(value))
        for c in candidates
        if any(r.name == c.name for r in results)
        for key, value in c.structure.items()
    }
    for key, value in dict.fromkeys((k, repr(v)) for c in open_ for k, v in c.structure.items()):
        if (key, value) in tried_values:
            continue
        only = [c for c in open_ if repr(c.structure.get(key)) == value and _alike(c, first, key)]
        if only:
            middle = sorted(only, key=lambda c: c.plan.batch.micro)[len(only) // 2]
            return NextTrial(middle, 0, budget.steps, f"{key.rsplit('.', 1)[-1]} = {value}, for the first time")
    return None


def _alike(candidate: Candidate, first: Candidate, but: str) -> bool:
    return {k: v for k, v in candidate.structure.items() if k != but} == {
        k: v for k, v in first.structure.items() if k != but
    }


def _promising(
    open_: Sequence[Candidate], known: SearchState, candidates: Sequence[Candidate], results: Sequence[Result], budget: TrialBudget, metric: Metric
) -> NextTrial | None:  # fmt: skip
    """Choose the best predicted untried candidate.

    None if a measured candidate is clearly better, or the repeats need the rest of the budget.
    """
    repeats = max(1, budget.trials // 4)
    if not open_ or len(results) >= budget.trials - repeats:
        return None
    best = max(open_, key=lambda c: _predicted(c, known, metric))
    had = [value_of(r.measured, _samples(candidates, r.name), metric) for r in results if r.measured is not None]
    bound = max(had)
    value = _predicted(best, known, metric)
    slower = value < bound * (_NEAR if bound < 0 else 1 / _NEAR)
    return None if slower else NextTrial(best, 0, budget.steps, "the best predicted of what was not tried")


def _predicted(candidate: Candidate, known: SearchState, metric: Metric) -> float:
    seconds = known.predicted[candidate.name].step_s
    batch = candidate.plan.batch
    return (
        -seconds
        if metric == "latency"
        else batch.train / seconds
        if metric == "throughput"
        else batch.micro * batch.accumulation / seconds
    )


def _samples(candidates: Sequence[Candidate], name: str) -> int:
    return next((c.plan.batch.train for c in candidates if c.name == name), 1)


def rung_sizes(count: int) -> tuple[int, ...]:
    """Return how many of `count` measured candidates each rung of successive halving repeats: 8 -> 4, 2.

    The last rung compares two: there is nothing to learn from measuring a single candidate.
    """
    rungs = []
    while (count := math.ceil(count / 2)) >= 2:
        rungs.append(count)
        if count == 2:
            break
    return tuple(rungs)


def _again(
    candidates: Sequence[Candidate], results: Sequence[Result], budget: TrialBudget, metric: Metric
) -> NextTrial | None:
    """Choose the next repeat of successive halving."""
    measured = [r for r in results if r.measured is not None]
    near = _ranked(measured, 0, candidates, metric)
    values = {
        r.name: value_of(r.measured, _samples(candidates, r.name), metric)
        for r in measured
        if r.measured is not None and r.rung == 0
    }
    near = [
        n
        for n in near
        if values[n] >= (values[near[0]] / _NEAREST if values[near[0]] >= 0 else values[near[0]] * _NEAREST)
    ]
    if len(near) < 2:
        return None
    for rung, keep in enumerate(rung_sizes(len(near)) or (2,), 1):
        inside = _ranked(measured, rung - 1, candidates, metric)[: max(2, keep)]
        inside = [n for n in inside if n in near]
        for name in inside:
            if not any(r.name == name and r.rung == rung for r in results):
                candidate = next(c for c in candidates if c.name == name)
                return NextTrial(
                    candidate, rung, budget.steps << rung, f"among the best {len(inside)}, measured longer"
                )
    return None


def _ranked(measured: Sequence[Result], rung: int, candidates: Sequence[Candidate], metric: Metric) -> list[str]:
    of_rung = [r for r in measured if r.rung == rung and r.measured is not None]
    return [r.name for r in sorted(of_rung, key=lambda r: -value_of(r.measured, _samples(candidates, r.name), metric))]  # type: ignore[arg-type]


def _stopped(candidates: Sequence[Candidate], results: Sequence[Result], budget: TrialBudget, metric: Metric) -> bool:
    """Whether the last trials brought nothing better."""
    if not budget.stopping:
        return False
    best, since = -math.inf, 0
    for result in results:
        value = (
            -math.inf
            if result.measured is None
            else value_of(result.measured, _samples(candidates, result.name), metric)
        )
        best, since = (value, 0) if value > best else (best, since + 1)
    return since >= budget.stopping


def best_candidate(
    candidates: Sequence[Candidate], results: Sequence[Result], metric: Metric = "throughput"
) -> tuple[Candidate, TrialResult] | None:
    """Return the best candidate: the fastest in the last rung reached; None if nothing was measured."""
    measured = [r for r in results if r.measured is not None and any(c.name == r.name for c in candidates)]
    if not measured:
        return None
    last = max(r.rung for r in measured)
    best = _ranked(measured, last, candidates, metric)[0]
    measurement = next(r.measured for r in measured if r.name == best and r.rung == last)
    if measurement is None:
        return None
    return next(c for c in candidates if c.name == best), measurement
