"""Activation checkpointing; `tensor`, `sequence` and `tiling` hold tensor and sequence parallelism and tiles.

`ds_parallel.config` holds the sections of the configuration; it is not imported here.
"""

from ds_parallel.activation_store import ActivationMemory, ActivationPolicy
from ds_parallel.checkpointing import ActivationCheckpointing, checkpoint, checkpoint_reentrant, current_checkpointing
from ds_parallel.modules import Checkpointed, checkpoint_modules, match_modules
from ds_parallel.rng_tracker import TENSOR_PARALLEL, RngTracker, tensor_seed

__all__ = [
    "TENSOR_PARALLEL",
    "ActivationCheckpointing",
    "ActivationMemory",
    "ActivationPolicy",
    "Checkpointed",
    "RngTracker",
    "checkpoint",
    "checkpoint_modules",
    "checkpoint_reentrant",
    "current_checkpointing",
    "match_modules",
    "tensor_seed",
]
