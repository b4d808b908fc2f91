"""Kernels, optimizers, quantizers and asynchronous file I/O, each with a plain torch reference.

Names are loaded when they are first used: `import ds_ops` does not import torch, so that `ds doctor` can say why torch
does not load. No module of this package has the name of a function below: the module would hide it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_ops import optim, reference, registry
    from ds_ops.apply_update import lamb_apply, lamb_moments, update
    from ds_ops.build_kernels import compile_ahead
    from ds_ops.grouped import grouped_matmul, grouped_outer
    from ds_ops.stream import convert, fill, grad_norm, sum_squares
    from ds_ops.update_rules import UpdateRule, UpdateSpec, UpdateTensors

__all__ = [
    "UpdateRule",
    "UpdateSpec",
    "UpdateTensors",
    "compile_ahead",
    "convert",
    "fill",
    "grad_norm",
    "grouped_matmul",
    "grouped_outer",
    "lamb_apply",
    "lamb_moments",
    "optim",
    "reference",
    "registry",
    "sum_squares",
    "update",
]

_MODULES = ("optim", "reference", "registry")
_HOMES = {
    "build_kernels": ("compile_ahead",),
    "grouped": ("grouped_matmul", "grouped_outer"),
    "update_rules": ("UpdateRule", "UpdateSpec", "UpdateTensors"),
    "stream": ("convert", "fill", "grad_norm", "sum_squares"),
    "apply_update": ("lamb_apply", "lamb_moments", "update"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
