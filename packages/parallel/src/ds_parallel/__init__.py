"""Activation checkpointing; `tensor`, `sequence` and `tiling` hold tensor and sequence parallelism and tiles.

`ds_parallel.config` holds the sections of the configuration; it is not imported here.
"""

from ds_parallel.checkpointing import ActivationCheckpointing, checkpoint, checkpoint_reentrant, current
from ds_parallel.activation_store import Account, Keeping
from ds_parallel.modules import Checkpointed, checkpoint_modules, matching
from ds_parallel.rng_tracker import TENSOR_PARALLEL, RngTracker, tensor_seed

__all__ = [
    "TENSOR_PARALLEL",
    "Account",
    "ActivationCheckpointing",
    "Checkpointed",
    "Keeping",
    "RngTracker",
    "checkpoint",
    "checkpoint_modules",
    "checkpoint_reentrant",
    "current",
    "matching",
    "tensor_seed",
]
