"""Layers that are described before they are built, so that a rank builds only its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ds_config.errors import PlanError
from ds_monitor import log_requested

__all__ = ["LayerSpec", "TiedLayerSpec", "class_name", "parameters_of", "shared_parameter"]

_log = logging.getLogger("ds_pipe")


class LayerSpec:
    """A layer to be built: a module class and the arguments of its constructor.

    Args:
        typename: A subclass of nn.Module.
        module_args, module_kwargs: Of its constructor.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise PlanError(
                f"LayerSpec({typename!r}): not a module class",
                code="pipe-layer",
                fix="Give a subclass of nn.Module and its arguments; a function goes into the list as it is.",
            )
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Make the module. `log` is called with what is made."""
        if log:
            log_requested(_log, f"building {self!r}")
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        words = [repr(a) for a in self.module_args] + [f"{k}={v!r}" for k, v in self.module_kwargs.items()]
        return f"{type(self).__name__}({', '.join([self.typename.__name__, *words])})"


class TiedLayerSpec(LayerSpec):
    """A layer whose parameters are those of all other layers with the same key, on whatever stage.

    Args:
        key: What the layers have in common.
        forward_fn: `forward_fn(module, x)` instead of `module(x)`, for another use of the same weights.
        tied_weight_attr: The parameters that are the same, as attribute paths, which may be of properties; others of the layer are
            its own copy, which is equal at the start and may part.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


def class_name(layer: object) -> str:
    """Return the class name against which `type:` patterns are matched."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


def parameters_of(layer: object) -> int:
    """Count the elements of the layer's trained parameters."""
    if isinstance(layer, LayerSpec):
        layer = _on_meta(layer)
    if not isinstance(layer, nn.Module):
        return 0
    return sum(p.numel() for p in layer.parameters() if p.requires_grad)


def shared_parameter(module: nn.Module, path: str, first: LayerSpec) -> tuple[str, str, nn.Parameter] | None:
    """Find the parameter that an attribute path of a tied layer leads to, through properties, too; None if it leads to none.

    Returns:
        Its name in `module`; its name in `first`, the first layer with this key, which all ranks call it by; the parameter.
    """
    local = _named_by(module, path)
    if local is None:
        return None
    named = local if type(module) is first.typename else _named_by(_on_meta(first), path)
    return local[0], (named or local)[0], local[1]


def _named_by(module: nn.Module, path: str) -> tuple[str, nn.Parameter] | None:
    try:
        found = attrgetter(path)(module)
    except AttributeError:
        return None
    return next(((name, param) for name, param in module.named_parameters() if param is found), None)


def _on_meta(spec: LayerSpec) -> nn.Module:
    """Build a layer of which only names and shapes are wanted: it takes no memory and draws no random numbers."""
    state = torch.get_rng_state()
    with torch.device("meta"):
        module = spec.build()
    torch.set_rng_state(state)
    return module
