"""A whole tuning: decide, try, read, until nothing is left to try; then write what was found."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field

from ds_config.errors import LaunchError, PlanError
from ds_config.regular_file import replace_text
from ds_engine import Shapes
from ds_engine.trial_results import TrialResult, write_json
from ds_tune.request import TuningRequest
from ds_tune.results_writer import best_text, rows_of, summary_text, tuned
from ds_tune.search import NextTrial, Result, SearchState, best_candidate, fit_and_predict, next_trial
from ds_tune.space import Candidate, Rejected, TuningTask, candidates_of
from ds_tune.trial_runner import TrialRunner, command_of, results_on_disk, run_trial

__all__ = ["Tuning", "TuningResult"]

NO_SHAPES = Shapes((), ())


@dataclass(frozen=True, slots=True)
class TuningResult:
    """What is known now.

    Attributes:
        candidates, left: What is looked at, and what is not, with reasons.
        results: In the order they were made.
        known: Predictions; `left` of it is what they leave out.
        best: The choice and what was measured of it; None: nothing was measured.
    """

    candidates: list[Candidate]
    left: list[Rejected]
    results: list[Result]
    known: SearchState
    best: tuple[Candidate, TrialResult] | None = field(default=None)


class Tuning:
    """One question, asked of one job.

    Args:
        on_trial: Called before each trial with it, and after it with its result.
        shapes: Of the model, if they are known before the first trial.
    """

    def __init__(
        self,
        request: TuningRequest,
        job: TrialRunner,
        world: int,
        *,
        on_trial: Callable[[NextTrial, Result | None], None],
        shapes: Shapes | None = None,
    ) -> None:
        self._request, self._job, self._report = request, job, on_trial
        self._world, self._shapes = world, shapes
        self._results: list[Result] = []

    def resume(self) -> int:
        """Read the results of an earlier tuning of the same question; how many there are."""
        self._results = results_on_disk(self._job)
        return len(self._results)

    def forget(self) -> None:
        """Take earlier trials away, and nothing else that is in those folders."""
        for order in list(self._job.results.glob("*/order.json")):
            (self._job.exps / f"{order.parent.name}.json").unlink(missing_ok=True)
            shutil.rmtree(order.parent)
        self._results = []

    def outcome(self) -> TuningResult:
        """Compute everything that follows from the results. Pure except for the results read before."""
        facts = next(
            (r.measured for r in self._results if r.measured is not None and r.measured.shapes is not None), None
        )
        shapes = facts.shapes if facts is not None else self._shapes
        world = self._world if facts is None else facts.world
        task = TuningTask(self._request.config, shapes or NO_SHAPES, world, self._request.model_ranks)
        space = self._request.space(world, () if facts is None else facts.layers)
        candidates, left = candidates_of(task, space, self._request.limits)
        names = {c.name for c in candidates}
        results = [r for r in self._results if r.name in names]
        known = fit_and_predict(candidates, results, self._request.limits)
        return TuningResult(candidates, left, results, known, best_candidate(candidates, results, self._request.metric))

    def run(self) -> TuningResult:
        """Try until nothing is left to try. An interruption keeps what ended; `resume` goes on from there.

        Raises:
            PlanError: no candidate fits what was asked ("tune-none-fits").
            LaunchError: the script does not train, or nothing could be measured ("tune-script"); results cannot be written ("tune-results").
        """
        while True:
            outcome = self.outcome()
            if not outcome.candidates:
                raise _none_fits(outcome)
            step = next_trial(
                outcome.candidates,
                outcome.results,
                self._request.limits,
                self._request.budget,
                tuner=self._request.tuner,
                metric=self._request.metric,
            )
            if step is None:
                break
            self._report(step, None)
            result = run_trial(self._job, step, len(self._results))
            self._results.append(result)
            self._report(step, result)
            if result.outcome not in ("measured", "memory") and not any(r.measured for r in self._results):
                raise _does_not_train(result, self._job)
        if outcome.best is None:
            raise _nothing_measured(outcome)
        return outcome

    def write(self, outcome: TuningResult) -> dict[str, str]:
        """Write the files of an outcome; return their paths by kind."""
        if outcome.best is None:
            raise _nothing_measured(outcome)
        candidate, measured = outcome.best
        folder, metric = self._job.results, self._request.metric
        config = tuned(self._request.config, candidate)
        optimal, best = folder / "ds_config_optimal.json", folder / "ds_config_best.json"
        write_json(optimal, config)
        replace_text(best, best_text(self._job.config, candidate, measured, outcome.results))
        command = shlex.join(command_of(self._job, str(optimal.resolve()), candidate.settings))
        replace_text(folder / "cmd_optimal.txt", command + "\n")
        replace_text(folder / "summary.txt", summary_text(outcome.candidates, outcome.results, metric))
        first = next(
            (r.measured for r in outcome.results if r.measured is not None and r.measured.shapes is not None), None
        )
        if first is not None and first.shapes is not None:
            trained = sum(p.numel for p in first.shapes.params if p.group is not None)
            facts = {"num_params": first.shapes.numel, "trainable_num_params": trained, "rank": 0,
                     "activation_mem_per_gpu": first.saved_bytes}  # fmt: skip
            write_json(folder / "profile_model_info" / "model_info.json", facts)
        write_json(
            folder / "trials.json", {"trials": rows_of(outcome.candidates, outcome.results, outcome.known, metric)}
        )
        return {"best": str(best), "optimal": str(optimal), "command": str(folder / "cmd_optimal.txt")}


def _none_fits(outcome: TuningResult) -> PlanError:
    reasons = dict.fromkeys(f"{one.code}: {one.reason}" for one in outcome.left)
    return PlanError(
        f"none of {len(outcome.left)} configurations fits:\n  " + "\n  ".join(list(reasons)[:8]),
        code="tune-none-fits",
        fix="Widen the limits, or what is looked at (--search KEY=VALUE,VALUE).",
    )


def _does_not_train(result: Result, job: TrialRunner) -> LaunchError:
    how = {
        "time limit": f"did not reach its last measured step within {job.time_limit_s:g} s",
        "no steps": "ended before it had made the steps that are measured",
    }.get(result.outcome, "failed")
    return LaunchError(
        f"{job.script} {how}. The last it said:\n{result.message or '(nothing)'}",
        code="tune-script",
        fix=f"Run it once with `ds run`; give its arguments after it, more time with --time-limit; all it said is in {job.results}.",
    )


def _nothing_measured(outcome: TuningResult) -> LaunchError:
    outcomes = ", ".join(f"{r.name}: {r.outcome}" for r in outcome.results)
    return LaunchError(
        f"no trial could be measured ({outcomes})",
        code="tune-script",
        fix="Look at higher ZeRO stages or smaller microbatches (--search), or give more memory.",
    )
