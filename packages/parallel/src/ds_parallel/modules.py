"""Checkpoint the forward of whole modules of a model, chosen by name; nothing in the model's code changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

from torch import nn
from torch.jit import ScriptModule

from ds_config import nearest
from ds_config.errors import PlanError
from ds_parallel.checkpointing import ActivationCheckpointing, current_checkpointing

__all__ = ["Checkpointed", "checkpoint_modules", "match_modules"]

_NO_FORWARD = nn.Module.forward  # of a ModuleList: there is nothing to checkpoint


class _Forward:
    """Mixed into the class of a module: its forward is a checkpointed call. Hooks of the module run outside of it."""

    _plain: type[nn.Module]
    _policy: ActivationCheckpointing | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kind = type(self)
        return (kind._policy or current_checkpointing()).checkpoint(
            MethodType(kind._plain.forward, self), *args, **kwargs
        )


class Checkpointed:
    """What `checkpoint_modules` did.

    Attributes:
        names: Qualified names of the modules, in the model's order.
    """

    def __init__(self, names: tuple[str, ...], modules: Sequence[nn.Module]) -> None:
        self.names, self._modules = names, list(modules)

    def remove(self) -> None:
        """Give the modules their own forwards back."""
        for module in self._modules:
            kind = type(module)
            if issubclass(kind, _Forward):
                module.__class__ = kind._plain
        self._modules.clear()


def checkpoint_modules(
    model: nn.Module, patterns: Iterable[str], policy: ActivationCheckpointing | None = None
) -> Checkpointed:
    """Recompute in backward the forward of the modules of `model` whose names match `patterns`.

    Names, parameters, hooks and state dicts do not change.

    Args:
        patterns: Qualified names; in them `*` is any single part (`layers.*`), `**` any number of parts.
        policy: The policy to use; by default the policy that is active when the forward runs.
    Raises:
        PlanError: a pattern matches no module ("activations-modules"); a module has a forward that is not its class's
            ("activations-forward").
    """
    called = {name: module for name, module in model.named_modules() if name and not isinstance(module, ScriptModule)}
    callables = [name for name, module in called.items() if type(module).forward is not _NO_FORWARD]
    names = match_modules(callables, tuple(patterns))
    modules = [module for name, module in model.named_modules() if name in names]
    overridden = [name for name, module in zip(names, modules, strict=True) if "forward" in vars(module)]
    if overridden:
        raise PlanError(
            f"the forward of {overridden[0]!r} was replaced on the module itself, so that its class's is never called",
            code="activations-forward",
            fix="Checkpoint before whatever replaces it, or call ds_parallel.checkpoint in the model's forward.",
        )
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    for module in modules:
        plain = type(module)
        if issubclass(plain, _Forward):
            continue
        if plain not in kinds:
            space = {"_plain": plain, "_policy": policy, "__module__": plain.__module__, "__doc__": plain.__doc__}
            kinds[plain] = type(plain.__name__, (_Forward, plain), space)
        module.__class__ = kinds[plain]
    return Checkpointed(names, modules)


def match_modules(names: Sequence[str], patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the names that match any pattern, in their order. Pure.

    Raises:
        PlanError: a pattern matches no name ("activations-modules").
    """
    matches = {
        pattern: {name for name in names if _matches(name.split("."), pattern.split("."))} for pattern in patterns
    }
    empty = [pattern for pattern, matched in matches.items() if not matched]
    if empty:
        close = nearest(empty[0], names)
        raise PlanError(
            f"activation checkpointing: no module's name matches {', '.join(map(repr, empty))} among {len(names)}",
            code="activations-modules",
            fix=f"Did you mean {close[0]!r}?" if close else "Use names as model.named_modules() gives them.",
        )
    chosen = set().union(*matches.values())
    return tuple(name for name in names if name in chosen)


def _matches(name: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_matches(name[skip:], pattern[1:]) for skip in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])
