"""Which combinations of degrees have been compared with one process: a record of runs, and what it says of pairs of features.

`support.json` is written by the drawn test of combinations (`python tools/support.py`), four ranks each. Rules and the printed plan ask
here; `docs/reference/support-matrix` is made from it. Pure: no tensor, no group.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

from ds_comm import MeshSpec
from ds_engine.config import Config

__all__ = ["FEATURES", "Pair", "PairVerdict", "features_of", "matrix", "never_run", "refused"]

FEATURES = ("data", "tensor", "sequence", "pipe", "experts", "zero0", "zero1", "zero2", "zero3", "checkpointing", "fp32",
            "bf16", "fp16")  # fmt: skip
_AXES = ("data", "tensor", "sequence", "pipe", "experts")
Pair = tuple[str, str]


@dataclass(slots=True)
class PairVerdict:
    """The results of runs with two features.

    Attributes:
        equal: How many had the losses, norms and weights of one process.
        refused: How many were refused before anything ran, by code.
    """

    equal: int = 0
    refused: Counter[str] = field(default_factory=Counter)


def features_of(config: Config, mesh: MeshSpec) -> tuple[str, ...]:
    """Return the features that a configuration uses on a mesh, in the order of `FEATURES`."""
    degrees = {
        "data": mesh.data,
        "tensor": mesh.tensor,
        "sequence": mesh.sequence,
        "pipe": mesh.pipe,
        "experts": mesh.expert,
    }
    used = {axis for axis, degree in degrees.items() if degree > 1} | {f"zero{config.zero_optimization.stage}"}
    if config.pipeline.activation_checkpoint_interval or config.activation_checkpointing.modules:
        used.add("checkpointing")
    used.add("fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32")
    return tuple(feature for feature in FEATURES if feature in used)


@cache
def matrix() -> Mapping[Pair, PairVerdict]:
    """Load the verdicts of the recorded runs on every drawn pair of features, in the order of `FEATURES`."""
    rows = json.loads(resources.files("ds_engine").joinpath("support.json").read_text())["combinations"]
    verdicts: dict[Pair, PairVerdict] = {}
    for row in rows:
        used = {axis for axis in _AXES if row[axis] > 1} | {f"zero{row['zero']}", row["precision"]}
        used |= {"checkpointing"} if row["checkpointing"] else set()
        for pair in itertools.combinations([feature for feature in FEATURES if feature in used], 2):
            verdict = verdicts.setdefault(pair, PairVerdict())
            if row["found"] == "equal":
                verdict.equal += 1
            else:
                verdict.refused[row["found"].removeprefix("refused: ")] += 1
    return verdicts


def refused(features: tuple[str, ...]) -> dict[Pair, str]:
    """Return the pairs of these features that every recorded run refused, with the commonest code."""
    pairs = itertools.combinations(features, 2)
    verdicts = {pair: matrix()[pair] for pair in pairs if pair in matrix()}
    return {pair: v.refused.most_common(1)[0][0] for pair, v in verdicts.items() if v.refused and not v.equal}


def never_run(features: tuple[str, ...]) -> tuple[Pair, ...]:
    """Return the pairs of these features that no recorded run had."""
    return tuple(pair for pair in itertools.combinations(features, 2) if pair not in matrix())
