"""How gradients become one over the ranks that hold a stage: by themselves (`PlainReduction`), or by an optimizer that reduces
while backwards run (`OptimizerReduction`, which ds-zero's is)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

import ds_comm
from ds_comm import Group
from ds_pipe.actions import Action, ActionKind
from ds_pipe.staged import StagedModel

__all__ = [
    "BackwardReducer",
    "OptimizerReduction",
    "PlainReduction",
    "ReducingOptimizer",
    "StageReduction",
    "clip_grad_norm",
    "global_norm",
]


class PlainReduction:
    """Averages `.grad` of every stage over `places.gradient` when its last backward ends, and sums tied ones over their stages."""

    def __init__(self, model: StagedModel) -> None:
        self._model = model
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
        _average(self._params[stage], self._model.places.gradient, self._model.places.gradient.size)

    def gather(self, stage: int) -> None:
        """Do nothing: parameters are not sharded."""

    def release(self, stage: int) -> None:
        """Do nothing: parameters are not sharded."""

    def finish(self) -> None:
        """Reduce the gradients of tied parameters: sum over stages, average over data.

        Collective over the ranks that share the parameters.
        """
        for one in self._model.ties:
            _average([one.param], one.everyone, one.everyone.size // one.group.size)

    def scale(self, loss: Tensor) -> Tensor:
        """Return `loss` unscaled: this reduction has no loss scale."""
        return loss


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
        self._optimizer.scale(torch.zeros(()))


def _average(params: Sequence[torch.nn.Parameter], group: Group, divisor: int) -> None:
    if group.size == 1 or not params:
        return
    by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    for param in params:
        by_dtype.setdefault(param.dtype, []).append(param)
    for members in by_dtype.values():
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in members]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        ds_comm.all_reduce(flat, group=group, unit="pipe.gradients")
        if divisor > 1:
            flat /= divisor
        at = 0
        for param, grad in zip(members, grads, strict=True):
            param.grad = grad.copy_(flat[at : at + grad.numel()].view_as(grad))
            at += grad.numel()


def global_norm(model: StagedModel) -> Tensor:
    """Compute the 2-norm of all gradients of the whole model after a step; a tied parameter counts once.

    Returns a float64 scalar on the host, the same on all ranks of the pipeline. Collective over `places.model`.
    """
    counted = {id(one.param) for one in model.ties if one.group.rank != 0}
    squares = [
        torch.linalg.vector_norm(p.grad, dtype=torch.float64).square().cpu()
        for p in model.module.parameters()
        if p.grad is not None and id(p) not in counted
    ]
    total = torch.stack(squares).sum().reshape(1) if squares else torch.zeros(1, dtype=torch.float64)
    ds_comm.all_reduce(total, group=model.places.pipe, unit="pipe.norm")
    return total.sqrt()[0]


def clip_grad_norm(model: StagedModel, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm over all stages is at most `max_norm`; returns the norm before.

    Collective over the pipeline.
    """
    norm = global_norm(model)
    factor = min(1.0, max_norm / (float(norm) + 1e-6))
    if factor < 1.0:
        for param in model.module.parameters():
            if param.grad is not None:
                param.grad.mul_(factor)
    return norm
