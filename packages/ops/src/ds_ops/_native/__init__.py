"""Loads the compiled modules `_cpu` and `_cuda`, on first use, and remembers why one could not be loaded.

torch is imported first: its libgomp then serves our kernels too, so that both share one thread pool.
A module is looked for in the installed package, then in the folder that `ds ops build` fills.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch  # noqa: F401  (its OpenMP runtime must be the first one loaded)

from ds_ops.module_cache import built_modules

__all__ = ["Loaded", "build_info", "load"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A native module, or why there is none. `reason` is empty exactly if `module` is there."""

    module: ModuleType | None
    reason: str


@functools.cache
def load(name: str) -> Loaded:
    """Load the module `_cpu` or `_cuda`. Never raises: absence is a value, and every op has a reference fallback."""
    try:
        return Loaded(importlib.import_module(f"{__name__}.{name}"), "")
    except ModuleNotFoundError:
        reason = f"module {name} was not built with this installation"
    except ImportError as error:
        reason = f"module {name} does not load: {error}"
    for path in built_modules(name):
        try:
            return Loaded(_load_file(name, path), "")
        except ImportError as error:
            reason = f"{path} does not load: {error}"
    return Loaded(None, reason)


def _load_file(name: str, path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    if spec is None:
        raise ImportError(f"no module specification for {path}")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@functools.cache
def build_info() -> dict[str, str]:
    """Return the build record of the loaded `_cpu`; empty in pure Python.

    The record names the compiler, instruction-set levels, OpenMP and CUDA.
    """
    module = load("_cpu").module
    if module is None or module.__file__ is None:
        return {}
    path = Path(module.__file__).with_name("build_info.json")
    return json.loads(path.read_text()) if path.is_file() else {}
