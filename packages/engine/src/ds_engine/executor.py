"""The executor of one step's actions on this rank: the extension point of pipelines. A model that is not cut takes `OneStage`.

Words: *actions* are this rank's row of the plan's program; a *pass* is a forward or a backward of one microbatch; a pass
is *open* between its forward and its backward. Any number may be open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from ds_engine.loss_total import SumLoss, loss_of
from ds_pipe import Action, ActionKind, run

__all__ = ["OneStage", "Passes", "ProgramExecutor"]


class Passes(Protocol):
    """What an executor uses of its engine. Whatever runs through it is timed, cast, scaled and averaged as the plan says."""

    def call(self, batch: Any) -> Any:
        """Run this rank's module on a microbatch (a mapping: keywords; a tuple or list: positions; else one argument)."""

    def start(self, loss: Tensor | SumLoss) -> Tensor:
        """Note a microbatch's loss for the step's mean, and return the scalar that backward starts from.

        It is divided by the microbatches and multiplied by the loss scale. Every rank notes the losses of the step, also a rank
        that got them from another: as many on each.
        """

    def backward(self, action: Action) -> AbstractContextManager[None]:
        """Accumulate gradients of backwards inside, and reduce them where the action says so. Collective if it does."""

    def forward(self) -> AbstractContextManager[None]:
        """Cast and checkpoint forwards inside as planned, for an executor that runs parts of the module."""

    def place(self, value: Any, inputs: bool) -> Any:
        """Move `value` to the device; cast inputs of the model to the plan's dtype."""

    def expect_gradients(self) -> None:
        """Announce that this rank's next backward begins at scaled gradients of another rank."""

    def reduce(self) -> None:
        """Reduce what backwards without reduction have left. Collective."""


class ProgramExecutor(Protocol):
    """Runs programs. Collective over the ranks that share the program."""

    def train(self, actions: Sequence[Action], data: Iterator[Any], passes: Passes) -> None:
        """Run every action of one step, in order; take microbatches from `data` where needed.

        Raises:
            StopIteration: `data` ended. Nothing of the step may be kept then.
        """

    def evaluate(self, count: int, data: Iterator[Any], passes: Passes) -> Iterator[Tensor | SumLoss]:
        """Yield the losses of `count` microbatches, without backward; the same number on every rank."""


class OneStage:
    """The whole model is on this rank: a forward takes the next microbatch, its backward begins at its loss."""

    def train(self, actions: Sequence[Action], data: Iterator[Any], passes: Passes) -> None:
        losses: dict[int, Tensor | SumLoss] = {}

        def forward(action: Action) -> None:
            losses[action.microbatch] = loss_of(passes.call(next(data)))

        def backward(action: Action) -> None:
            loss = losses.pop(action.microbatch)
            with passes.backward(action):
                passes.start(loss).backward()

        run(actions, {ActionKind.FORWARD: forward, ActionKind.BACKWARD: backward})

    def evaluate(self, count: int, data: Iterator[Any], passes: Passes) -> Iterator[Tensor | SumLoss]:
        for _ in range(count):
            yield loss_of(passes.call(next(data)))
