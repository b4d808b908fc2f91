"""The shapes of a model that need not be built: from a Python function that makes it on the meta device."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ds_config.errors import ConfigError
from ds_engine.build import shapes_of
from ds_engine.plan import Shapes

__all__ = ["shapes_from"]


def shapes_from(spec: str) -> Shapes:
    """The shapes of the model that `module:function` or `file.py:function` returns, built on meta: no memory, no values.

    The function is called without arguments; a class works, too.

    Raises:
        ConfigError: there is no such module or name, or it makes no module ("plan-model").
    """
    make = _find(spec)
    with torch.device("meta"):
        model = make()
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{spec} gave a {type(model).__name__}, not a torch.nn.Module", code="plan-model", fix="Return the model."
        )
    return shapes_of(model)


def _find(spec: str) -> Callable[[], object]:
    place, colon, name = spec.rpartition(":")
    if not colon:
        raise ConfigError(
            f"{spec!r} does not say which model", code="plan-model", fix="Write module:function or file.py:function."
        )
    path = Path(place)
    if path.suffix == ".py":
        if not path.is_file():
            raise ConfigError(f"there is no file {path}", code="plan-model", fix="Check the path.")
        sys.path.insert(0, str(path.parent.resolve()))
        place = path.stem
    try:
        found = getattr(importlib.import_module(place), name, None)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{spec}: {error}", code="plan-model", fix="Install it, or give a file.") from error
    if not callable(found):
        raise ConfigError(f"{place} has nothing callable named {name!r}", code="plan-model", fix="Check the name.")
    return found
