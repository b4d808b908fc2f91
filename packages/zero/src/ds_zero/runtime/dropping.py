"""`model.zero_grad()` drops what was summed, too: sums are not in `param.grad`, where torch's own looks.

Note "an attribute of the model". torch has no hook on `zero_grad`, and a loop that calls it after a backward it does not want would
step those gradients later. So the instance gets an attribute of that name, until `close`. What cannot be seen is a loop over
`param.grad = None`; use the optimizer's `zero_grad` there.
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
        forget: Drops what was reduced.
    """

    def __init__(self, model: nn.Module, forget: Callable[[], None] | None = None) -> None:
        self._model, self._forget = weakref.ref(model), forget
        self._before = model.__dict__.get(_NAME)

    def attach(self) -> None:
        """The model has it from now on."""
        model = self._model()
        if model is not None:
            model.__dict__[_NAME] = self

    def detach(self) -> None:
        """The model has what it had before."""
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
        if self._before is None:
            type(model).zero_grad(model, set_to_none)
        else:
            self._before(set_to_none)
        if self._forget is not None:
            self._forget()

    def __reduce__(self) -> tuple[type[ZeroGrad], tuple[nn.Module | None]]:
        return ZeroGrad, (self._model(),)
