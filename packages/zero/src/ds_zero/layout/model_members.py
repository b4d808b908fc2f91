"""The parameters that are trained together: a model's, and those of its optimizer that are in no module of it, as a learned temperature or the head of a loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.parameter import Parameter

from ds_zero.layout.units import OUTSIDE

__all__ = ["drop_outside", "named_members", "set_outside"]

_outside: WeakKeyDictionary[nn.Module, dict[str, Parameter]] = WeakKeyDictionary()


def named_members(model: nn.Module) -> dict[str, Parameter]:
    """Return the parameters that are trained with `model` by qualified name, its own first."""
    return dict(model.named_parameters()) | _outside.get(model, {})


def set_outside(model: nn.Module, params: Iterable[Tensor]) -> Mapping[str, Parameter]:
    """Let these be the parameters in no module of `model` that are trained with it: `outside_model.0`, ...; return them, for `drop_outside`.

    Parameters of the model are left out, so an optimizer's may be passed.
    """
    own = set(map(id, model.parameters()))
    outside = [param for param in params if isinstance(param, Parameter) and id(param) not in own]
    _outside[model] = members = {f"{OUTSIDE}{number}": param for number, param in enumerate(outside)}
    return members


def drop_outside(model: nn.Module, members: Mapping[str, Parameter]) -> None:
    """End what a call of `set_outside` did, unless there has been another one since."""
    if _outside.get(model) is members:
        del _outside[model]
