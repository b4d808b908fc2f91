"""Marks on modules: those whose whole subtree is one unit at stage 3, and the parameters of others that a module uses in its forward.

A parameter of ds-zero is gathered when it is touched, in whatever module, and stays for backward; so a list of external parameters is of
what a program has registered, and nothing else depends on it. `module.ds_external_parameters()` is there on modules of a stage 3 model, and
where something was registered.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable
from functools import partial
from typing import Any

from torch import nn

from deepspeed._ours.base.raising import refused
from deepspeed._ours.config.section_models import DEFAULT_LEAF_MODULE_CLASSES
from deepspeed._ours.monitor.upstream_logging import logger

_LEAF = "_z3_leaf"


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Set whether a module's whole subtree is a single unit at stage 3. A hint: results do not depend on the flag."""
    setattr(model, _LEAF, flag)


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether it was said."""
    return bool(getattr(model, _LEAF, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether a parameter belongs to a leaf module; upstream marks parameters, here modules are."""
    return bool(getattr(model, "ds_z3_leaf_module", False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """List all leaf modules of a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make all modules of these classes (or class names) leaves.

    Raises:
        ValueError: there is none ("compat-leaf").
    """
    wanted = list(leaf_module_classes)

    def fits(name: str, module: nn.Module) -> bool:
        del name
        kind = type(module)
        names = {kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"}
        return any(isinstance(module, cls) if isinstance(cls, type) else cls in names for cls in wanted)

    return _flag(model, fits, f"classes {wanted}", raise_if_not_found, True)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Clear the leaf mark of modules of these classes, and return the modules."""
    wanted = tuple(leaf_module_classes)
    return _flag(model, lambda name, module: isinstance(module, wanted), f"classes {wanted}", raise_if_not_found, False)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make the modules of these qualified names leaves, or none any more; return them, and the names that no module has."""
    names = list(module_names)
    return _flag_by_text(model, names, "names", raise_if_not_found, str.__eq__, flag)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make the modules whose qualified name ends so leaves, or none any more; return them, and the ends that no name has."""
    ends = list(module_name_suffixes)
    return _flag_by_text(model, ends, "suffixes", raise_if_not_found, str.endswith, flag)


def _flag_by_text(
    model: nn.Module, texts: list[str], what: str, required: bool, fits: Callable[[str, str], bool], flag: bool
) -> tuple[list[nn.Module], list[str]]:
    names = [name for name, _ in model.named_modules()]
    missing = [text for text in texts if not any(fits(name, text) for name in names)]
    flagged = _flag(
        model,
        lambda name, module: any(fits(name, text) for text in texts),
        f"{what} {texts}",
        required and bool(texts),
        flag,
    )
    return flagged, missing


def mark_leaf_modules(model: nn.Module, section: Any) -> None:
    """Mark the leaf modules of `zero_optimization.leaf_module`.

    What the program named and no module has is told in a warning; the default classes name many models.
    """
    classes = [cls for cls in section.classes if not set_z3_leaf_modules(model, [cls], raise_if_not_found=False)]
    _, names = set_z3_leaf_modules_by_name(model, section.names, raise_if_not_found=False)
    _, suffixes = set_z3_leaf_modules_by_suffix(model, section.name_suffixes, raise_if_not_found=False)
    missing = [cls for cls in classes if cls not in DEFAULT_LEAF_MODULE_CLASSES] + names + suffixes
    if missing:
        logger.warning("zero_optimization.leaf_module: no module of %s is %s", type(model).__name__, ", ".join(missing))


def _flag(
    model: nn.Module, fits: Callable[[str, nn.Module], bool], what: str, required: bool, flag: bool
) -> list[nn.Module]:
    matches = [module for name, module in model.named_modules() if fits(name, module)]
    if required and not matches:
        raise refused("no-leaf", type(model).__name__, what)
    for module in matches:
        set_z3_leaf_module(module, flag)
    return matches


_NAMES = ("_external_params", "ds_external_parameters")


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """List a parameter of another module among those that `module` uses.

    Raises:
        ConfigError: it is no Parameter; a RuntimeError, too ("compat-argument").
    """
    _check_parameter("register_external_parameter", parameter)
    list_external(module)
    vars(module)["_external_params"][id(parameter)] = parameter


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take a parameter off the list of `register_external_parameter`.

    Raises:
        ConfigError: it is no Parameter, or not on the list; a RuntimeError, too ("compat-argument").
    """
    _check_parameter("unregister_external_parameter", parameter)
    if vars(module).get("_external_params", {}).pop(id(parameter), None) is None:
        raise refused("external-unlisted", tuple(parameter.shape), type(module).__name__)


def _check_parameter(function: str, parameter: object) -> None:
    if not isinstance(parameter, nn.Parameter):
        raise refused("external-kind", function, type(parameter).__name__)


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
