"""Optimizers: `torch.optim.Optimizer` subclasses that step a whole list of tensors in one native pass."""

from ds_ops.optim.adam import Adam, AdamW
from ds_ops.optim.base import NO_FUSION, Fusion, OpsOptimizer

__all__ = ["NO_FUSION", "Adam", "AdamW", "Fusion", "OpsOptimizer"]
