"""Whole training steps, as functions of a batch. Imports no more than torch: workers run under the interpreters of peers, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Step = Callable[[Any], Tensor]
"""One whole training step on this rank's data; returns the loss."""


def stepping(loss_of: Step, optimizer: Any, *, clipped: nn.Module | None = None, update: bool = True) -> Step:
    """Return forward, backward and update; gradients of `clipped` are clipped to a norm of 1 before. Without `update` they are dropped."""

    def step(data: Any) -> Tensor:
        loss = loss_of(data)
        loss.backward()
        if clipped is not None:
            nn.utils.clip_grad_norm_(clipped.parameters(), 1.0)
        if update:
            optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def engine_step(engine: Any, loss_of: Step | None = None) -> Step:
    """Return the three calls of an engine, ours or DeepSpeed's; by default it is called with the batch and returns the loss."""

    def step(data: Any) -> Tensor:
        loss = (loss_of or engine)(data)
        engine.backward(loss)
        engine.step()
        return loss

    return step
