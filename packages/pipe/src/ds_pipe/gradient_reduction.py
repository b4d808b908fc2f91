"""How gradients become one over the ranks that hold a stage: by themselves (`PlainReduction`), or by an optimizer that reduces
while backwards run (`OptimizerReduction`, which ds-zero's is)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ds_comm.part_gradients import average_gradients, clip_gradients, family_holders, gradient_norm, guard_gradient
from ds_pipe.actions import Action, ActionKind
from ds_pipe.staged import StagedModel

__all__ = [
    "BackwardReducer",
    "HasStages",
    "OptimizerReduction",
    "PlainReduction",
    "ReducingOptimizer",
    "StageReduction",
    "begin_step",
    "clip_grad_norm_",
    "global_norm",
    "reduce_gradients",
    "stages_of",
]

_ADVICE = "Call ds_pipe.clip_grad_norm_(model, max_norm): a stage is scaled by the norm of all stages."


class HasStages(Protocol):
    """A `PipelineModule`, `DecoderStages` or `TracedStages`."""

    @property
    def staged(self) -> StagedModel:
        """Return the stages of this rank."""


class PlainReduction:
    """Averages `.grad` of every stage over `places.gradient` when its last backward ends, and sums tied ones over their stages."""

    def __init__(self, model: StagedModel) -> None:
        self._model = model
        self.scaler: torch.amp.GradScaler | None = None
        tied = {id(one.param) for one in model.ties}
        claimed: set[int] = set()
        self._params: dict[int, list[torch.nn.Parameter]] = {}
        for stage, part in model.parts.items():
            stage_params = [p for p in part.parameters() if p.requires_grad and id(p) not in tied | claimed]
            claimed |= {id(p) for p in stage_params}
            self._params[stage] = stage_params

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Reduce after the action if it says so."""
        yield
        if action.reduce:
            self.reduce(action.stage)

    def reduce(self, stage: int) -> None:
        """Average the stage's gradients. Collective over `places.gradient`."""
        average_gradients(self._params[stage], self._model.places.gradient, self._model.places.gradient.size)

    def gather(self, stage: int) -> None:
        """Do nothing: parameters are not sharded."""

    def release(self, stage: int) -> None:
        """Do nothing: parameters are not sharded."""

    def finish(self) -> None:
        """Reduce the gradients of tied parameters: sum over stages, average over data.

        Collective over the ranks that share the parameters.
        """
        for one in self._model.ties:
            average_gradients([one.param], one.everyone, one.everyone.size // one.group.size)
        if self._model.places.model.size > 1:
            for param in self._model.module.parameters():
                guard_gradient(param, _ADVICE)
        self._model.reduced = True

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale of the GradScaler, if there is one."""
        return loss if self.scaler is None else self.scaler.scale(loss)


class ReducingOptimizer(Protocol):
    """What an optimizer that reduces gradients offers: a `ds_zero.ShardedOptimizer`."""

    def reduction(self, now: bool) -> AbstractContextManager[None]:
        """Whether backwards inside reduce their gradients."""

    def reduce(self) -> None:
        """Reduce what backwards without reduction have left. Collective."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate, multiplied by the loss scale."""


class BackwardReducer(Protocol):
    """What reduces gradients while backwards run: an engine's passes, or an optimizer."""

    def backward(self, action: Action) -> AbstractContextManager[None]:
        """Return a context to enter around an action that adds to weight gradients.

        `action.reduce` says whether the gradients are reduced inside the context.
        """

    def expect_gradients(self) -> None:
        """Prepare for gradients from another stage, which scaled the loss."""

    def reduce(self) -> None:
        """Reduce what backwards without reduction have left. Collective."""


class StageReduction:
    """Gradients are reduced inside whole backwards, or at once when a rank with several stages or split backwards has all of them.

    Args:
        model: The stages of this rank.
        reducing: Does it.
        every_backward: Only a share of gradients is kept (ZeRO 2 and 3), so that every microbatch is reduced.
    """

    def __init__(self, model: StagedModel, reducing: BackwardReducer, every_backward: bool) -> None:
        self._reducing, self._every, self._last = reducing, every_backward, model.last
        self._left = self._stages = len(model.parts)

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Return a context that reduces during a whole backward where the rank has one stage, else after the action.

        With several stages, a rank's gradients are reduced when all of them are complete.
        """
        inside = action.op is ActionKind.BACKWARD and self._stages == 1
        if not self._last:
            self._reducing.expect_gradients()
        with self._reducing.backward(action if inside else replace(action, reduce=False)):
            yield
        if action.reduce and not inside:
            self.reduce(action.stage)

    def reduce(self, stage: int) -> None:
        """Reduce the rank's gradients if due. Collective over the ranks that share these parameters."""
        del stage
        self._left -= 1
        if self._every or self._left == 0:
            self._reducing.reduce()

    def gather(self, stage: int) -> None:
        """Do nothing: the hooks of the sharding layer all-gather parameters."""

    def release(self, stage: int) -> None:
        """Do nothing: the hooks of the sharding layer free parameters."""

    def finish(self) -> None:
        """Reset the count of unreduced stages for the next step; the update finishes pending reductions."""
        self._left = self._stages

    def scale(self, loss: Tensor) -> Tensor:
        """Return `loss` unchanged: the loss was scaled where it was computed."""
        return loss


class OptimizerReduction(StageReduction):
    """The same by an optimizer: over `model.module`; its `step` reduces what is left."""

    def __init__(self, model: StagedModel, optimizer: ReducingOptimizer, every_backward: bool) -> None:
        super().__init__(model, _ByOptimizer(optimizer), every_backward)
        self._optimizer = optimizer

    def scale(self, loss: Tensor) -> Tensor:
        """Times the optimizer's loss scale."""
        return self._optimizer.scale(loss)


class _ByOptimizer:
    def __init__(self, optimizer: ReducingOptimizer) -> None:
        self._optimizer, self.reduce = optimizer, optimizer.reduce

    def backward(self, action: Action) -> AbstractContextManager[None]:
        return self._optimizer.reduction(action.reduce)

    def expect_gradients(self) -> None:
        self._optimizer.scale(torch.zeros((), device="cpu"))


def reduce_gradients(model: StagedModel | HasStages) -> None:
    """Average gradients over data and sum tied ones over stages, as a step of `ds_pipe.pipeline` has done already: then nothing is left to do.

    For loops that run stages by themselves. Collective over the ranks that share parameters.
    """
    staged = stages_of(model)
    if staged.reduced:
        return
    reduction = PlainReduction(staged)
    for stage in staged.parts:
        reduction.reduce(stage)
    reduction.finish()


def global_norm(model: StagedModel | HasStages, norm_type: float = 2.0) -> Tensor:
    """Compute the norm of all gradients of the whole model after a step; a tied parameter counts once.

    Args:
        norm_type: 2 or infinity.
    Returns a float64 scalar, the same on all ranks. Collective over the world.
    """
    staged = stages_of(model)
    return gradient_norm(list(staged.module.parameters()), lambda param: _holders(staged, param), norm_type)


def clip_grad_norm_(model: StagedModel | HasStages, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients so that their norm over all stages is at most `max_norm`; returns the norm before.

    Between `step(microbatches)` and the optimizer's step. Collective over the world.
    """
    norm = global_norm(model, norm_type)
    clip_gradients(stages_of(model).module.parameters(), norm, max_norm)
    return norm


def stages_of(model: StagedModel | HasStages) -> StagedModel:
    """Return the stages of this rank of a model, however it was cut."""
    return model if isinstance(model, StagedModel) else model.staged


def _holders(model: StagedModel, param: torch.nn.Parameter) -> int:
    """Count the ranks with equal gradients of `param`. Megatron's layers say of a parameter whether it is a slice."""
    is_slice = any(getattr(param, name, False) for name in ("tensor_model_parallel", "model_parallel"))
    return family_holders(param, model.places.gradient.size * (1 if is_slice else model.places.slice.size))


def begin_step(model: StagedModel) -> None:
    """Prepare gradients that the last step has reduced for more: a sum over stages counts a tied one once."""
    if model.reduced:
        for one in model.ties:
            if one.group.rank != 0:
                one.param.grad = None
    model.reduced = False
