"""What a transform is: one thing that is done to a model, decided in data, done, and undone.

Words: to *decide* is pure: no tensor, no group; what comes out is part of the plan and is printed with it. To *apply* is to
change the model as decided, on all ranks. To *undo* is to give the model back as it was. A transform that has nothing to do
decides None and is not in the plan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from ds_comm import Mesh, MeshSpec
from ds_engine.all_or_nothing import all_or_nothing
from ds_engine.compiling import Shares
from ds_engine.config import Config
from ds_engine.executor import OneStage, ProgramExecutor
from ds_engine.init_args import Follower, InitArgs
from ds_engine.plan import Plan, Shapes, TransformPlan
from ds_parallel import ActivationCheckpointing
from ds_zero import ShardedModel, ShardedOptimizer

__all__ = ["Applied", "BuildContext", "Transform", "TransformInput", "apply_all", "decide_all"]

What = TypeVar("What")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class TransformInput:
    """What a transform decides from.

    Attributes:
        config: The whole configuration; rules have been checked.
        shapes: Of the model as the transforms before this one leave it on a rank.
        mesh: Degrees of the axes.
    """

    config: Config
    shapes: Shapes
    mesh: MeshSpec


@dataclass(slots=True)
class BuildContext:
    """What a transform works on, and where it leaves what the engine holds afterwards.

    Attributes:
        model: On this rank's device; a transform changes it in place, or puts another module here (a pipeline stage).
        plan: All that was decided.
        mesh: The groups of this rank.
        device: This rank's.
        parts: What the caller brought.
        executor: Runs the program of this rank.
        activations: What a checkpointed call means.
        followers: What goes on with each applied update.
        shares: How a compiled run shares sequences that all ranks are given whole.
        optimizer, sharding, scheduler: Left by ZeRO, the last transform.
    """

    model: nn.Module
    plan: Plan
    mesh: Mesh
    device: torch.device
    parts: InitArgs
    executor: ProgramExecutor = field(default_factory=OneStage)
    activations: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    followers: list[Follower] = field(default_factory=list)
    shares: Shares | None = None
    optimizer: ShardedOptimizer | None = None
    sharding: ShardedModel | None = None
    scheduler: Any = None


class Transform(ABC, Generic[What, Made]):
    """One thing that is done to a model. Stateless; `TRANSFORMS` lists one of each, in order.

    Attributes:
        name: As the plan prints it.
        axes: Axes of the mesh that only this transform knows how to use: without it a degree above 1 is refused.
    """

    name: ClassVar[str]
    axes: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def decide(self, inputs: TransformInput) -> What | None:
        """Decide how to transform a model of these shapes; None for no change. Pure.

        Raises:
            PlanError, ConfigError, UnsupportedError: it cannot be done to a model of these shapes.
        """

    def plan_rows(self, what: What) -> Mapping[str, str]:
        """Describe the decision in words, by topic, for `print(plan)`."""
        del what
        return {}

    def shapes(self, what: What, shapes: Shapes) -> Shapes:
        """Return the model's shapes on one rank after this transform."""
        del what
        return shapes

    @abstractmethod
    def apply(self, what: What, site: BuildContext) -> Made:
        """Do it. Collective. What is returned goes to `undo`.

        Whatever can fail is looked at before the model is changed: a transform that raises leaves the model as it was.
        """

    @abstractmethod
    def undo(self, applied: Made) -> None:
        """Give the model back as it was, on all ranks. Collective. Later transforms have been undone before."""


class Applied:
    """Transforms that were applied to a model, and what they made."""

    def __init__(self) -> None:
        self._done: list[tuple[Transform[Any, Any], Any]] = []

    def add(self, transform: Transform[Any, Any], applied: Any) -> None:
        """Note one."""
        self._done.append((transform, applied))

    def undo(self) -> None:
        """Undo all of them, the last one first; a second call does nothing. Collective."""
        while self._done:
            transform, applied = self._done.pop()
            transform.undo(applied)


def decide_all(
    transforms: tuple[Transform[Any, Any], ...], inputs: TransformInput
) -> tuple[tuple[TransformPlan, ...], Shapes]:
    """Decide every transform in order; return the decisions and the shapes left on a rank. Pure."""
    changes = []
    for transform in transforms:
        what = transform.decide(inputs)
        if what is not None:
            changes.append(TransformPlan(transform.name, what, dict(transform.plan_rows(what))))
            inputs = replace(inputs, shapes=transform.shapes(what, inputs.shapes))
    return tuple(changes), inputs.shapes


@contextmanager
def apply_all(transforms: tuple[Transform[Any, Any], ...], site: BuildContext) -> Iterator[Applied]:
    """Apply what `site.plan` says. If one of them fails on any rank, or the body does, all are undone. Collective."""
    by_name = {transform.name: transform for transform in transforms}
    applied, world = Applied(), site.mesh["world"]

    def apply(change: TransformPlan) -> None:
        transform = by_name[change.name]
        applied.add(transform, transform.apply(change.what, site))

    try:
        for change in site.plan.transforms:
            all_or_nothing(world, lambda change=change: apply(change))  # type: ignore[misc]
        yield applied
    except BaseException:
        applied.undo()
        raise
