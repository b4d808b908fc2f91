"""What a trial answers: records of what an engine measured, as JSON. `trial_recorder` makes them.

A *trial* is a run of the user's own script whose engine measures a few steps, writes `TrialResult`, and ends the process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ds_config.regular_file import replace_text
from ds_engine.plan import Shapes

__all__ = ["LayerFacts", "LinkCost", "TrialResult", "read_measured", "write_json"]


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Layers of one shape: what one forward of a microbatch keeps and takes in all of them together.

    Attributes:
        pattern: Their names, as `activation_checkpointing.modules` takes them.
        count: How many they are.
        saved_bytes: Kept for backward, parameters left out.
        input_bytes: Of their inputs, which is what is kept of a checkpointed layer.
        forward_s: Time of their forwards.
    """

    pattern: str
    count: int
    saved_bytes: int
    input_bytes: int
    forward_s: float


@dataclass(frozen=True, slots=True)
class LinkCost:
    """What a message between the ranks takes: a fixed time, and time by size."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What one trial measured; of several ranks the slowest and the largest.

    Attributes:
        world: Ranks of the job.
        micro, accumulation: Samples of a forward on one rank; microbatches of a step.
        steps_s: Wall time of each measured step.
        forward_s, backward_s, update_s: Medians of the phases, all microbatches of a step together. Backward holds what it sends.
        comm_s: Of these, in collectives.
        peak_bytes: Most memory in use at any time (on the host: of the whole process).
        start_bytes: In use when the engine was asked for, the model included.
        device: Kind of the accelerator.
        model_bytes: Of the model's parameters then.
        saved_bytes: What one forward keeps for backward.
        layers, links, shapes: With `TrialSpec.detail`.
        flops: Of one forward; 0 where they were not counted.
        rehearsed: The other ranks were not there: times of messages are those of described links.
    """

    world: int
    micro: int
    accumulation: int
    steps_s: tuple[float, ...]
    forward_s: float
    backward_s: float
    update_s: float
    comm_s: float
    peak_bytes: int
    start_bytes: int
    model_bytes: int
    device: str
    saved_bytes: int = 0
    layers: tuple[LayerFacts, ...] = ()
    links: Mapping[str, LinkCost] = field(default_factory=dict)
    shapes: Shapes | None = None
    flops: int = 0
    rehearsed: bool = False

    @property
    def step_s(self) -> float:
        """Median step."""
        ordered = sorted(self.steps_s)
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def read_measured(path: Path) -> TrialResult:
    """Read the measurements that a trial wrote. Raises OSError or ValueError if missing or invalid."""
    return TypeAdapter(TrialResult).validate_json(path.read_bytes())


def write_json(path: Path, record: Any) -> None:
    """Write a record of this module, all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = record if isinstance(record, dict) else TypeAdapter(type(record)).dump_python(record, mode="json")
    replace_text(path, json.dumps(plain, indent=1) + "\n")
