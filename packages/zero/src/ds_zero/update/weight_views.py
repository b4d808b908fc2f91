"""Optimizers that switch the weights between two views outside of `step`: `eval()` and `train()` of schedule-free ones.

They write to the shards. What forward uses is brought up to date after the call, on every rank, whether the program calls the optimizer it
made or the sharded one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

__all__ = ["WeightViews"]

_SWITCHES = ("eval", "train")


class WeightViews:
    """The switches of one optimizer while its model is sharded. An optimizer without switches stays as it is.

    Args:
        inner: Whose they are.
        before: Brings back what a switch will write to.
        after: Brings copies of the shards up to date. Collective.
    """

    def __init__(self, inner: Optimizer, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._inner, self._before, self._after = inner, before, after
        known = [name for name in _SWITCHES if callable(getattr(type(inner), name, None))]
        self.switches: dict[str, Callable[..., Any]] = {name: partial(self._switch, name) for name in known}
        vars(inner).update(self.switches)

    def _switch(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._before()
        result = getattr(type(self._inner), name)(self._inner, *args, **kwargs)
        self._after()
        return result

    def detach(self) -> None:
        """Give the optimizer its own switches back."""
        for name, switch in self.switches.items():
            if vars(self._inner).get(name) is switch:
                del vars(self._inner)[name]
        self.switches.clear()
