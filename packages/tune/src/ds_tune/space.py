"""Candidates: every combination of settings that is looked at, with the plan of each, or the reason why it is left out. Pure.

A *setting* is a dotted key of the configuration and a value; a *space* is the values of each key. What the space says nothing of stays
as the configuration has it. `env.NAME` is a variable of the trial's environment (`env.DS_COMM_BACKEND` chooses the transport).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_config.errors import ConfigError, DsError
from ds_config.option_checks import check_options
from ds_engine import Config, Plan, Shapes, load_config, make_plan
from ds_engine.trial_results import LayerFacts
from ds_engine.trial_spec import laid_over

__all__ = [
    "ACCUMULATION",
    "CHECKPOINTED",
    "ENV",
    "MICRO",
    "OFFLOAD",
    "STAGE",
    "TRAIN",
    "Candidate",
    "Rejected",
    "SearchLimits",
    "TuningTask",
    "candidates_of",
    "default_space",
]

MICRO, ACCUMULATION, TRAIN = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
STAGE, CHECKPOINTED = "zero_optimization.stage", "activation_checkpointing.modules"
OFFLOAD = "zero_optimization.offload_optimizer.device"
ENV = "env."
_BATCH = (MICRO, ACCUMULATION, TRAIN)
_SHORT = {STAGE: "z", ACCUMULATION: "gas", MICRO: "tmbspg"}

Space = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class TuningTask:
    """What is to be configured.

    Attributes:
        config: As the user wrote it.
        shapes: Of the model.
        world: Ranks.
        model_ranks: Ranks of the user's own model parallelism, which share their samples.
    """

    config: Mapping[str, Any]
    shapes: Shapes
    world: int
    model_ranks: int = 1


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """What the user does not want.

    Attributes:
        memory_bytes: Most memory of one rank; None: no limit.
        train: Least and most samples of a step; None: no most.
        micro: Least and most samples of a forward.
    """

    memory_bytes: int | None = None
    train: tuple[int, int | None] = (1, None)
    micro: tuple[int, int] = (1, 1024)

    def __post_init__(self) -> None:
        check_options(self, memory_bytes=">= 1")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration.

    Attributes:
        settings: What differs from the user's configuration, the batch keys always among them.
        plan: What it comes to.
    """

    settings: Mapping[str, Any]
    plan: Plan = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """As DeepSpeed names an experiment: `z2_gas4_tmbspg8`, and what else is set."""
        batch = self.plan.batch
        rest = [_word(key, value) for key, value in self.structure.items() if key != STAGE]
        stage = self.plan.config.zero_optimization.stage
        return "_".join([f"z{stage}", f"gas{batch.accumulation}", f"tmbspg{batch.micro}", *filter(None, rest)])

    @property
    def structure(self) -> dict[str, Any]:
        """The settings that are not the batch: candidates of one structure differ in sizes only."""
        return {key: value for key, value in self.settings.items() if key not in _BATCH}

    @property
    def changes(self) -> dict[str, Any]:
        """What is laid over the configuration; nothing is checkpointed where the key is away."""
        return {key: None if value == () else value for key, value in self.settings.items() if not key.startswith(ENV)}

    @property
    def environ(self) -> dict[str, str]:
        """Variables of its trials."""
        return {key.removeprefix(ENV): str(value) for key, value in self.settings.items() if key.startswith(ENV)}


@dataclass(frozen=True, slots=True)
class Rejected:
    """Settings that are not looked at, and why: the code of an error or of a limit, and words."""

    settings: Mapping[str, Any]
    code: str
    reason: str


def _word(key: str, value: Any) -> str:
    """Return a setting as part of a file name; empty for the usual value."""
    if value in (None, (), [], "none", 1, False):
        return ""
    short = key.rsplit(".", 1)[-1].replace("_", "") if key != CHECKPOINTED else "ckpt"
    text = "" if key == CHECKPOINTED else "".join(c if c.isalnum() else "-" for c in str(value))
    return f"{short}{text}"


def default_space(
    config: Config, world: int, limits: SearchLimits, layers: Sequence[LayerFacts] = ()
) -> dict[str, tuple[Any, ...]]:
    """Build the default search space: microbatch sizes, ZeRO stages, and checkpointing of the measured layers.

    Degrees of parallelism change what a training script must do and are searched on request only.
    """
    low, high = limits.micro
    train = config.train_batch_size or high * world
    micros = [m for m in (1 << i for i in range(21)) if low <= m <= min(high, train)]
    space: dict[str, tuple[Any, ...]] = {MICRO: tuple(micros) or (low,), STAGE: (0, 1, 2, 3) if world > 1 else (0,)}
    checkpointed = config.activation_checkpointing.modules
    if layers and not checkpointed:
        space[CHECKPOINTED] = ((), tuple(layer.pattern for layer in layers))
    return space


def candidates_of(task: TuningTask, space: Space, limits: SearchLimits) -> tuple[list[Candidate], list[Rejected]]:
    """Plan every combination of the space's values; return the candidates and the rejected ones.

    Of the three batch keys two are enough: where the configuration or the space gives `train_batch_size`, accumulation
    follows.

    Raises:
        ConfigError: the space has a key without values ("tune-space").
    """
    empty = [key for key, values in space.items() if not values]
    if empty:
        raise ConfigError(f"no values for {', '.join(empty)}", code="tune-space", fix="Give one value at least.")
    candidates: list[Candidate] = []
    left: list[Rejected] = []
    for values in itertools.product(*space.values()):
        planned = _planned(task, dict(zip(space, values, strict=True)), limits)
        (candidates if isinstance(planned, Candidate) else left).append(planned)  # type: ignore[arg-type]
    return list(_distinct(candidates)), left


def _distinct(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    names = set()
    for candidate in candidates:
        if candidate.name not in names:
            names.add(candidate.name)
            yield candidate


def _planned(task: TuningTask, chosen: dict[str, Any], limits: SearchLimits) -> Candidate | Rejected:
    batch_keys = {key: chosen.get(key, task.config.get(key)) for key in _BATCH}
    batch_keys = {key: value for key, value in batch_keys.items() if isinstance(value, int)}
    train = batch_keys.get(TRAIN)
    changes = {key: None if value == () else value for key, value in chosen.items() if not key.startswith(ENV)}
    # Accumulation is what follows where a train batch is given, except where the space asks for it.
    changes |= {ACCUMULATION: batch_keys.get(ACCUMULATION) if train is None or ACCUMULATION in chosen else None}
    if train is not None and MICRO in chosen and ACCUMULATION in chosen:
        changes[TRAIN] = None
    try:
        config = load_config(laid_over(task.config, changes))
        plan = make_plan(config, task.shapes, task.world // task.model_ranks)
    except DsError as error:
        return Rejected(chosen, error.code, error.message.splitlines()[-1].strip() or error.message)
    batch = plan.batch
    settings = chosen | {MICRO: batch.micro, ACCUMULATION: batch.accumulation, TRAIN: batch.train}
    if not limits.micro[0] <= batch.micro <= limits.micro[1]:
        return Rejected(
            chosen, "limit-micro", f"a microbatch of {batch.micro}, asked for {limits.micro[0]} to {limits.micro[1]}"
        )
    least, most = limits.train
    if batch.train < least or (most is not None and batch.train > most):
        return Rejected(
            chosen, "limit-train", f"a step of {batch.train} samples, asked for {least} to {most or 'any number'}"
        )
    if (bound := limits.memory_bytes) is not None and (states := plan.memory.total_bytes) > bound:
        return Rejected(chosen, "limit-memory", f"model states alone take {states:,} bytes of {bound:,}")
    return Candidate(settings, plan)
