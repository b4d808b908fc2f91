"""Choices of routers, recorded in one run of a model and applied in another: a trainer that repeats what a rollout chose.

    with record(model) as tape:
        model(batch)
    with replay(model, tape):
        model(batch).backward()             # same experts, weights and gradients of the current parameters

Forwards are matched by their order within each router; a forward that backward computes again reuses what its first run used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from ds_config.errors import PlanError
from ds_moe._torch import in_backward

__all__ = ["Replayable", "RoutingTrace", "record_routing", "replay_routing"]


class _Track:
    """The choices of one router, in order of its forwards."""

    def __init__(self, name: str, playing: bool, choices: list[Tensor]) -> None:
        self.name, self.playing, self.choices = name, playing, choices
        self._forwards = self._again = 0

    def next_choices(self, tokens: int) -> Tensor | None:
        """Return the choices that this forward must make; None to choose freely."""
        if not self.playing:
            return None
        again = in_backward()
        at = self._again if again else self._forwards
        if at >= len(self.choices) or self.choices[at].shape[0] != tokens:
            had = f"choices of {self.choices[at].shape[0]} tokens" if at < len(self.choices) else "no more choices"
            raise PlanError(
                f"{self.name}: forward {at} has {tokens} tokens, and the tape has {had}",
                code="moe-replay",
                fix="Replay the same batches in the same order as they were recorded.",
            )
        if again:
            self._again += 1
        else:
            self._forwards += 1
        return self.choices[at]

    def took(self, experts: Tensor) -> None:
        """Note what a forward chose."""
        if not self.playing and not in_backward():
            self.choices.append(experts.detach().clone())


@runtime_checkable
class Replayable(Protocol):
    """A router that asks its track, if it has one, before it chooses."""

    track: _Track | None


class RoutingTrace:
    """Recorded choices: for each router by name, int64 [T, k] of each forward. `choices` may be saved and sent as it is."""

    def __init__(self, choices: dict[str, list[Tensor]] | None = None) -> None:
        self.choices = {} if choices is None else choices


def _routers(model: nn.Module) -> dict[str, Replayable]:
    routers: dict[str, Replayable] = {}
    for name, module in model.named_modules():
        if isinstance(module, Replayable):
            routers[name] = module
    return routers


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingTrace]:
    """Note the choices of all routers of `model`. Choices on devices stay there."""
    tape = RoutingTrace({name: [] for name in _routers(model)})
    with _running(model, tape, playing=False):
        yield tape


@contextmanager
def replay_routing(model: nn.Module, tape: RoutingTrace) -> Iterator[None]:
    """Let all routers of `model` choose what is on the tape.

    Raises:
        PlanError: the tape is of other routers, or a forward has other tokens ("moe-replay").
    """
    if set(tape.choices) != set(_routers(model)):
        raise PlanError(
            f"the tape has routers {sorted(tape.choices)}, the model {sorted(_routers(model))}",
            code="moe-replay",
            fix="Replay a tape in the model that it was recorded from.",
        )
    with _running(model, tape, playing=True):
        yield


@contextmanager
def _running(model: nn.Module, tape: RoutingTrace, *, playing: bool) -> Iterator[None]:
    routers = _routers(model)
    if any(router.track is not None for router in routers.values()):
        raise PlanError("a tape is running already", code="moe-replay", fix="End one `with` block before the next.")
    for name, router in routers.items():
        router.track = _Track(name, playing, tape.choices[name])
    try:
        yield
    finally:
        for router in routers.values():
            router.track = None
