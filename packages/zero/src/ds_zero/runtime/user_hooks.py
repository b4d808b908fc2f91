"""Hooks that users put on accumulated gradients (`register_post_accumulate_grad_hook`), called when the gradients are sums over the ranks.

autograd would call them with this rank's gradient, or with None where that was taken into a buffer already. So they are looked for when a
backward begins, replaced by nothing while it runs, and called when it is over and `param.grad` is the averaged gradient.

Where gradients are not shown (the engine from stage 1 on) they are called with this rank's own gradient before that is taken into a buffer,
whenever they were registered; what they write to it is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

__all__ = ["AccumulatedHooks"]


def _nothing(param: Tensor) -> None:
    """Do nothing: the hook in whose place this is runs at the end of the backward."""


class AccumulatedHooks:
    """The users' hooks on accumulated gradients of one model.

    Args:
        params: Those that are trained, by unit and member.
    Attributes:
        library: Numbers of the hooks that are ds-zero's.
    """

    def __init__(self, params: dict[tuple[int, int], Tensor]) -> None:
        self._params = params
        self.library: set[tuple[tuple[int, int], int]] = set()
        self._silent: list[tuple[tuple[int, int], dict[int, Any], int, Callable[[Tensor], Any]]] = []

    def silence(self) -> None:
        """Take the place of all hooks until `restore`. Their handles stay good."""
        self.restore()
        for place, param in self._params.items():
            hooks: dict[int, Any] = getattr(param, "_post_accumulate_grad_hooks", None) or {}
            for key in list(hooks) if len(hooks) > 1 else ():
                if (place, key) in self.library:
                    continue
                # Values may be replaced while autograd goes through the hooks, keys may not.
                self._silent.append((place, hooks, key, hooks[key]))
                hooks[key] = _nothing

    def call_of(self, place: tuple[int, int]) -> None:
        """Call the hooks of one parameter, whose gradient was accumulated and will be taken; they keep silent until `restore`."""
        for other, hooks, key, hook in list(self._silent):
            if other == place and hooks.get(key) is _nothing:
                hook(self._params[place])

    def restore(self) -> None:
        """Give hooks their places back; those that were removed meanwhile stay away."""
        for _, hooks, key, hook in self._silent:
            if hooks.get(key) is _nothing:
                hooks[key] = hook
        self._silent.clear()

    def call(self, missing: Sequence[Collection[int]]) -> None:
        """Call the hooks, and give them their places back.

        Args:
            missing: Of each unit the members that got no gradient in this backward.
        """
        silent = [(place, hook) for place, hooks, key, hook in self._silent if hooks.get(key) is _nothing]
        self.restore()
        for (number, member), hook in silent:
            if member not in missing[number]:
                hook(self._params[number, member])
