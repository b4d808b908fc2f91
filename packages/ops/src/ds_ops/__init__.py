"""Kernels, optimizers, quantizers and asynchronous file I/O, each with a plain torch reference."""

from ds_ops import optim, reference, registry
from ds_ops.rules import Rule, UpdateSpec, UpdateTensors
from ds_ops.stream import convert, fill, grad_norm, sum_squares
from ds_ops.update import lamb_apply, lamb_moments, update

__all__ = [
    "Rule",
    "UpdateSpec",
    "UpdateTensors",
    "convert",
    "fill",
    "grad_norm",
    "lamb_apply",
    "lamb_moments",
    "optim",
    "reference",
    "registry",
    "sum_squares",
    "update",
]
