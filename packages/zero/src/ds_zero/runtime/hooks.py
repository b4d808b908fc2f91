"""What drives the units of one model: gathers by modules, reductions by gradients. Knows no stage and no dtype.

Order between ranks is that of `order.py`; nothing here depends on which rank is faster or on which path it takes.

Note "two orders". Gathers and reductions travel on channels of their own, each in its own order, because a rank cannot
reduce before it has gathered and computed. Waiting for a reduction inside a backward could therefore wait for a rank that
waits for our next gather. So such a wait helps: while it lasts, gathers whose turn comes next are started. Gathers that no
sequence foresees have a third channel, so that helping cannot come between them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from ds_comm import Group, all_gather_json
from ds_zero.runtime.autograd import Backward
from ds_zero.runtime.gathering import Gathering
from ds_zero.runtime.reducing import Reducing
from ds_zero.runtime.unit import Unit

__all__ = ["Runtime", "Schedule"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How far communication runs ahead of what needs it.

    Attributes:
        overlap: Start collectives without waiting for them; off, each is finished where it starts.
        ahead_numel: Elements gathered before they are needed.
        inflight_bytes: Gradient bytes that may be in unfinished reductions.
    """

    overlap: bool = True
    ahead_numel: int = 0
    inflight_bytes: int = 0


class Runtime:
    """The hooks of one model.

    Args:
        model: Its root module.
        units: In canonical order, the same on every rank.
        schedule: How far to run ahead.
    Attributes:
        gathering, reducing: The two sides.
        begun: Called when a backward begins; what it raises ends that backward.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], schedule: Schedule) -> None:
        self.begun: Callable[[], None] = lambda: None
        self._keys = _keys(units)
        self._model, self._settled = model, False
        backward = Backward(self)
        # Without overlap every reduction is more than may be under way.
        ahead, inflight = (schedule.ahead_numel, schedule.inflight_bytes) if schedule.overlap else (0, -1)
        self.gathering = Gathering(units, backward, ahead)
        self.reducing = Reducing(units, backward, inflight)
        self.gathering.complete = self.reducing.complete
        if self.gathering.released:
            self.reducing.completed, self.reducing.helping = self.gathering.completed, self.gathering.helping
        self.reducing.attach()
        self.gathering.attach(model)

    def detach(self) -> None:
        """Remove every hook. Units must not be released."""
        self.reducing.detach()
        self.gathering.detach()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the model's modules have none of our hooks. Its parameters must stay gathered meanwhile."""
        self.gathering.remove_hooks()
        try:
            yield
        finally:
            self.gathering.attach(self._model)

    # ---- phases of a backward

    def begin_backward(self) -> None:
        """The outermost backward begins."""
        self.begun()
        self.reducing.begin_backward()
        self.gathering.begin_backward()

    def end_backward(self) -> None:
        """It is over: every trained unit has its turn, every released unit goes back."""
        self.gathering.finish_backward()
        self.reducing.finish_backward()
        self.abandon_backward()
        self.gathering.release_all()

    def abandon_backward(self) -> None:
        """It has no end: forget its progress. Gradients it left behind stay, as in torch."""
        self.reducing.clear_backward()
        self.gathering.clear_backward()

    def end_inner(self, units: set[int]) -> None:
        """A backward inside it is over."""
        self.gathering.end_inner(units)

    # ---- between steps

    def settle(self, group: Group) -> None:
        """Once, after the first step: follow the order that was seen, if all ranks saw the same. Collective."""
        if self._settled:
            return
        self._settled = True
        # What is at a place among the units of its family is the same on all of the family's ranks; numbers need not be.
        seen = {"reduces": self.reducing.seen, **self.gathering.seen}
        mine = {"seen": seen, "keys": self._keys, "shared": [self._keys[n] for n in self.gathering.shared]}
        everyone: list[dict[str, Any]] = all_gather_json(mine, group, unit="settle")
        if all((one["seen"], one["keys"]) == (everyone[0]["seen"], everyone[0]["keys"]) for one in everyone):
            self.reducing.adopt(seen["reduces"])
            self.gathering.adopt(seen)
        shared = {(family, place) for one in everyone for family, place in one["shared"]}
        self.gathering.share({number for number, key in enumerate(self._keys) if key in shared})

    def stepped(self) -> None:
        """An update was made, or left out."""
        self.gathering.stepped()
        self.reducing.stepped()


def _keys(units: Sequence[Unit]) -> list[tuple[str, int]]:
    """(family, place among its units) of each unit."""
    counters: dict[str, Iterator[int]] = defaultdict(itertools.count)
    return [(unit.spec.family, next(counters[unit.spec.family])) for unit in units]
