"""Every op there is: an op is registered when its module is imported, so this imports all of them."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path

from ds_ops.registry import Op, ops

__all__ = ["Catalog", "every_op"]


@dataclass(frozen=True, slots=True)
class Catalog:
    """ops: all that could be registered, by name. broken: modules that could not be imported, and why."""

    ops: tuple[Op, ...]
    broken: tuple[tuple[str, str], ...]


def every_op() -> Catalog:
    """Import all modules of ds_ops but commands and private ones. Never raises: what is broken is part of the answer."""
    broken = []
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name.startswith(("_", "cli")):
            continue
        try:
            importlib.import_module(f"ds_ops.{module.name}")
        except Exception as error:  # whatever a broken machine can raise is what the caller wants to know
            broken.append((f"ds_ops.{module.name}", f"{type(error).__name__}: {error}"))
    return Catalog(ops(), tuple(broken))
