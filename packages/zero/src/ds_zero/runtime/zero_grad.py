"""The `zero_grad` of a sharded model: an attribute of the instance, until `close`.

Summed gradients are not in `param.grad`, which torch's `zero_grad` clears without a hook: a loop that calls it after a backward it does not
want would step them later.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn

__all__ = ["ZeroGrad"]

_NAME = "zero_grad"


class ZeroGrad:
    """The `zero_grad` of one model. A copied or pickled model has one that does what torch's does.

    Args:
        model: Whose it is.
        forget: Drops what was reduced, or sets it to zero if called with False.
    """

    def __init__(self, model: nn.Module, forget: Callable[[bool], None] | None = None) -> None:
        self._model, self._forget = weakref.ref(model), forget
        self._before = model.__dict__.get(_NAME)

    def attach(self) -> None:
        """Install this object as the model's `zero_grad`."""
        model = self._model()
        if model is not None:
            model.__dict__[_NAME] = self

    def detach(self) -> None:
        """Restore the `zero_grad` that the model had before."""
        model = self._model()
        if model is None or model.__dict__.get(_NAME) is not self:
            return
        del model.__dict__[_NAME]
        if self._before is not None:
            model.__dict__[_NAME] = self._before

    def __call__(self, set_to_none: bool = True) -> None:
        model = self._model()
        if model is None:
            return
        if self._forget is not None:  # first: a stand-in has no values that could be set to zero
            self._forget(set_to_none)
        if self._before is None:
            type(model).zero_grad(model, set_to_none)
        else:
            self._before(set_to_none)

    def __reduce__(self) -> tuple[type[ZeroGrad], tuple[nn.Module | None]]:
        return ZeroGrad, (self._model(),)
