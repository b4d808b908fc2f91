"""Parameters that another module uses in its forward: the lists that clients read. Nothing else depends on them.

A parameter of ds-zero is gathered when it is touched, in whatever module, and stays for backward; so a list is of what a program has
registered. `module.ds_external_parameters()` is there on modules of a stage 3 model, and where something was registered.
"""

from __future__ import annotations

from collections.abc import ItemsView
from functools import partial

from torch import nn

from deepspeed._ours.base.raising import refused

_NAMES = ("_external_params", "ds_external_parameters")


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """List a parameter of another module among those that `module` uses.

    Raises:
        ConfigError: it is no Parameter; a RuntimeError, too ("compat-argument").
    """
    if not isinstance(parameter, nn.Parameter):
        raise refused("external-kind", type(parameter).__name__)
    list_external(module)
    vars(module)["_external_params"][id(parameter)] = parameter


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take a parameter off the list of `register_external_parameter`.

    Raises:
        ConfigError: it is no Parameter, or not on the list; a RuntimeError, too ("compat-argument").
    """
    if not isinstance(parameter, nn.Parameter):
        raise refused("external-kind-removed", type(parameter).__name__)
    if vars(module).get("_external_params", {}).pop(id(parameter), None) is None:
        raise refused("external-unlisted", tuple(parameter.shape), type(module).__name__)


def external_of(module: nn.Module) -> ItemsView[int, nn.Parameter]:
    """Return the list of a module: the id of each parameter, and the parameter."""
    listed: dict[int, nn.Parameter] = vars(module).get("_external_params", {})
    return listed.items()


def list_external(module: nn.Module) -> None:
    """Give a module its list, empty at first, and `ds_external_parameters`."""
    vars(module).setdefault("_external_params", {})
    vars(module).setdefault("ds_external_parameters", partial(external_of, module))


def unlist_external(model: nn.Module) -> None:
    """Take the lists of all modules of a model away."""
    for module in model.modules():
        for name in _NAMES:
            vars(module).pop(name, None)
