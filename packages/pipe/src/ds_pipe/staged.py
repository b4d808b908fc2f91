"""A model in stages, as far as this rank holds it: what the executor runs, however the model was cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ds_comm import Group
from ds_pipe.topology import PipelineGroups

__all__ = ["StagedModel", "Tie", "evaluating"]


@dataclass(frozen=True, slots=True, eq=False)
class Tie:
    """One parameter that several stages hold.

    Attributes:
        param: This rank's copy.
        name: Of it in the unsplit model.
        group: The ranks that hold a copy for the same data, the first one's values count.
        everyone: Those ranks and their replicas for other data.
    """

    param: nn.Parameter
    name: str
    group: Group
    everyone: Group


@dataclass(eq=False)
class StagedModel:
    """Attributes:
    module: All layers of this rank; its parameters are what an optimizer gets.
    parts: The stages of this rank by number; each takes one value and returns one.
    rank_of: The index in `places.pipe` of the rank that holds each stage.
    places: Groups of this rank.
    loss: Of the last stage's output and the labels; None: that output is the loss.
    names: Of parameters and buffers, in the unsplit model, by their names in `module`.
    ties: Parameters that several stages hold.
    reduced: Whether the last step averaged the gradients in `.grad`.
    """

    module: nn.Module
    parts: Mapping[int, nn.Module]
    rank_of: tuple[int, ...]
    places: PipelineGroups
    loss: Callable[..., Any] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    ties: tuple[Tie, ...] = ()
    reduced: bool = False

    @property
    def first(self) -> bool:
        """Whether this rank holds the first stage."""
        return 0 in self.parts

    @property
    def last(self) -> bool:
        """Whether this rank holds the last stage."""
        return len(self.rank_of) - 1 in self.parts

    def logical_name(self, name: str) -> str:
        """Return the name in the unsplit model of the parameter that `module` calls `name`."""
        return self.names.get(name, name)

    def named_logical(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of this rank by their names in the unsplit model."""
        for name, param in self.module.named_parameters():
            yield self.logical_name(name), param


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put `module` into evaluation mode inside the context, and every part of it back into the mode it was in.

    A frozen BatchNorm evaluates in a model that trains.
    """
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
