"""Optimizers: `torch.optim.Optimizer` subclasses that step a whole list of tensors in one native pass."""

from ds_ops.optim.adafactor import Adafactor
from ds_ops.optim.adagrad import Adagrad
from ds_ops.optim.adam import Adam, AdamW
from ds_ops.optim.adam_8bit import Adam8bit, AdamW8bit
from ds_ops.optim.lamb import Lamb
from ds_ops.optim.lion import Lion
from ds_ops.optim.muon import Muon, orthogonalize
from ds_ops.optim.optimizer_base import NO_FUSION, FusedOps, OpsOptimizer
from ds_ops.optim.sgd import SGD
from ds_ops.optim.step_options import StepOptions

__all__ = [
    "NO_FUSION",
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "FusedOps",
    "Lamb",
    "Lion",
    "Muon",
    "OpsOptimizer",
    "StepOptions",
    "orthogonalize",
]
