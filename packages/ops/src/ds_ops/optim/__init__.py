"""Optimizers: `torch.optim.Optimizer` subclasses that step a whole list of tensors in one native pass."""

from ds_ops.optim.adagrad import Adagrad
from ds_ops.optim.adam import Adam, AdamW
from ds_ops.optim.lamb import Lamb
from ds_ops.optim.lion import Lion
from ds_ops.optim.muon import Muon, orthogonalize
from ds_ops.optim.optimizer_base import NO_FUSION, FusedOps, OpsOptimizer
from ds_ops.optim.sgd import SGD

__all__ = [
    "NO_FUSION",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "FusedOps",
    "Lamb",
    "Lion",
    "Muon",
    "OpsOptimizer",
    "orthogonalize",
]
