"""What to write in the configuration: what fits and is fastest, predicted from facts and measured in short trials.

    ds tune train.py --config ds.json

Decisions are pure (`candidates_of`, `predict`, `next_trial`, `best_candidate`); `ds_tune.tuning` does what they say. Names are loaded when they
are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_tune.cost_model import Calibration, Prediction, Trial, calibrate, predict
    from ds_tune.request import TuningRequest, asked_by_section, asked_of
    from ds_tune.search import NextTrial, Result, TrialBudget, best_candidate, fit_and_predict, next_trial, rung_sizes
    from ds_tune.space import Candidate, Rejected, SearchLimits, TuningTask, candidates_of

__all__ = [
    "Calibration",
    "Candidate",
    "NextTrial",
    "Prediction",
    "Rejected",
    "Result",
    "SearchLimits",
    "Trial",
    "TrialBudget",
    "TuningRequest",
    "TuningTask",
    "asked_by_section",
    "asked_of",
    "best_candidate",
    "calibrate",
    "candidates_of",
    "fit_and_predict",
    "next_trial",
    "predict",
    "rung_sizes",
]

_HOMES = {
    "request": ("TuningRequest", "asked_by_section", "asked_of"),
    "search": ("TrialBudget", "Result", "NextTrial", "best_candidate", "next_trial", "rung_sizes", "fit_and_predict"),
    "cost_model": ("Calibration", "Prediction", "Trial", "calibrate", "predict"),
    "space": ("Candidate", "Rejected", "SearchLimits", "TuningTask", "candidates_of"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
