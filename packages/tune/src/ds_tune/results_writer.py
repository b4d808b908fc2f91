"""What a tuning leaves: the best configuration as a file with comments, DeepSpeed's summary, tables, and words for one candidate. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ds_config.sizes import bytes_text
from ds_engine.trial_results import TrialResult
from ds_engine.trial_spec import laid_over
from ds_tune.cost_model import Prediction
from ds_tune.search import Metric, Result, SearchState, value_of
from ds_tune.space import ACCUMULATION, MICRO, TRAIN, Candidate, Rejected

__all__ = ["best_text", "explained", "left_text", "rows_of", "summary_text", "tuned"]


def tuned(config: Mapping[str, Any], candidate: Candidate) -> dict[str, Any]:
    """Return the user's configuration with the candidate's settings, and without the autotuning section."""
    result = laid_over(config, candidate.changes)
    result.pop("autotuning", None)
    return result


def best_text(config: Mapping[str, Any], candidate: Candidate, measured: TrialResult, tried: Sequence[Result]) -> str:
    """Format the best configuration as JSON with comments about the changes and measurements.

    `ds_engine.load_config` reads the result.
    """
    tuned_config = tuned(config, candidate)
    counts = {outcome: sum(r.outcome == outcome for r in tried) for outcome in dict.fromkeys(r.outcome for r in tried)}
    rehearsed = ", as rehearsed by one of them" if measured.rehearsed else ""
    lines = [
        "// Written by ds tune. A step of "
        f"{candidate.plan.batch.train} samples took {measured.step_s * 1e3:.4g} ms on {measured.world} {measured.device} ranks{rehearsed}",
        f"// ({candidate.plan.batch.train / measured.step_s:.4g} samples a second) and at most {bytes_text(measured.peak_bytes)} of memory on one rank.",
        f"// Trials: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}.",
    ]
    if candidate.environ:
        lines.append(f"// Start it with {' '.join(f'{k}={v}' for k, v in candidate.environ.items())}.")
    return "\n".join([*lines, *_object(tuned_config, _flat(config), "", 0)]) + "\n"


def _flat(config: Mapping[str, Any], under: str = "") -> dict[str, Any]:
    flattened: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{under}{key}"
        flattened |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flattened


def _object(config: Mapping[str, Any], before: Mapping[str, Any], under: str, depth: int) -> list[str]:
    lines, pad = ["{"], "  " * (depth + 1)
    for i, (key, value) in enumerate(config.items()):
        comma = "," if i + 1 < len(config) else ""
        name = f"{under}{key}"
        if isinstance(value, Mapping) and value:
            first, *rest = _object(value, before, f"{name}.", depth + 1)
            lines += [f"{pad}{json.dumps(key)}: {first}", *rest[:-1], rest[-1] + comma]
            continue
        if name not in before:
            lines.append(f"{pad}// not there before")
        elif before[name] != value and json.dumps(before[name]) != json.dumps(value):
            lines.append(f"{pad}// was {json.dumps(before[name])}")
        lines.append(f"{pad}{json.dumps(key)}: {json.dumps(value)}{comma}")
    return [*lines, "  " * depth + "}"]


def explained(candidate: Candidate, prediction: Prediction, measured: TrialResult | None = None) -> str:
    """Describe a candidate in words: every part of its prediction, and its measurements."""
    lines = [f"{candidate.name}: {candidate.plan.batch}"]
    suffix = "" if measured is None else f", measured {bytes_text(measured.peak_bytes)}"
    lines.append(f"  memory of a rank  {bytes_text(int(prediction.peak_bytes))}{suffix}")
    lines += [f"    {name:<28} {_bytes(value):>12}" for name, value in prediction.memory.items() if round(value)]
    suffix = "" if measured is None else f", measured {measured.step_s * 1e3:.2f} ms"
    lines.append(f"  one step  {prediction.step_s * 1e3:.2f} ms{suffix}")
    lines += [f"    {name:<28} {value * 1e3:>9.2f} ms" for name, value in prediction.time.items() if value]
    return "\n".join(lines)


def _bytes(value: float) -> str:
    return f"-{bytes_text(int(-value))}" if value < 0 else bytes_text(int(value))


def rows_of(
    candidates: Sequence[Candidate], results: Sequence[Result], known: SearchState, metric: Metric
) -> list[dict[str, Any]]:
    """Build a row per trial, in their order: the prediction from all current knowledge, and the measurements."""
    by_name = {c.name: c for c in candidates}
    rows = []
    for result in results:
        candidate, measured = by_name[result.name], result.measured
        prediction = known.predicted.get(result.name)
        rows.append({
            "name": result.name, "rung": result.rung, "outcome": result.outcome, "message": result.message,
            "seconds": round(result.seconds, 2), "settings": dict(candidate.settings),
            "predicted_ms": None if prediction is None else prediction.step_s * 1e3,
            "measured_ms": None if measured is None else measured.step_s * 1e3,
            "predicted_bytes": None if prediction is None else int(prediction.peak_bytes),
            "measured_bytes": None if measured is None else measured.peak_bytes,
            metric: None if measured is None else value_of(measured, candidate.plan.batch.train, metric),
        })  # fmt: skip
    return rows


def summary_text(candidates: Sequence[Candidate], results: Sequence[Result], metric: Metric) -> str:
    """Format DeepSpeed's `summary.txt`: per tuning space (ZeRO stage) the experiments, best value and its name."""
    by_name = {c.name: c for c in candidates}
    spaces: dict[str, list[Result]] = {}
    for result in results:
        spaces.setdefault(f"z{by_name[result.name].plan.config.zero_optimization.stage}", []).append(result)
    rows = [("tuning_space", "num_experiments", "best_metric_val", "best_exp_name")]
    for name, inside in sorted(spaces.items()):
        values = [
            (value_of(r.measured, by_name[r.name].plan.batch.train, metric), r.name)
            for r in inside
            if r.measured is not None
        ]
        best = max(values, default=(0.0, "none was measured"))
        rows.append((name, str(len(inside)), f"{abs(best[0]):.6g}" if values else "", best[1]))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return (
        "\n".join(
            "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )
        + "\n"
    )


def left_text(left: Sequence[Rejected]) -> str:
    """Format the rejected configurations by reason: how often, and the first of each."""
    reasons: dict[str, list[Rejected]] = {}
    for one in left:
        reasons.setdefault(one.code, []).append(one)
    return "\n".join(
        f"  {len(inside):>4} x {code}: {inside[0].reason}  (first: {_settings(inside[0].settings)})"
        for code, inside in reasons.items()
    )


def _settings(settings: Mapping[str, Any]) -> str:
    order = sorted(settings, key=lambda key: key not in (MICRO, ACCUMULATION, TRAIN))
    return ", ".join(f"{key.rsplit('.', 1)[-1]} {settings[key]}" for key in order)
