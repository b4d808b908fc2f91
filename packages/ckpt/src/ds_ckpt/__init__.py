"""Logical, pickle-free, atomic checkpoints that resume on any layout.

`save(path, shards, meta)` and `load(path, shards) -> meta` are the whole of it; a shard is a `ds_comm.LocalShard`, and
`whole(tensors)` makes them for a process that holds everything.
"""

from ds_ckpt.checkpoint_list import find_latest, inspect, list_tags, prune, remove
from ds_ckpt.check import Diff, Verified, diff, verify
from ds_ckpt.engines import Asynchronous, Checkpointer, Pending, Synchronous
from ds_ckpt.checkpoint_loader import load
from ds_ckpt.local import LocalStorage
from ds_ckpt.load_validation import LoadOptions
from ds_ckpt.buffer_limits import MemoryStorage
from ds_ckpt.local_checkpoints import Draining, NearCopies
from ds_ckpt.python_objects import ObjectStorage
from ds_ckpt.block_packing import Recipe
from ds_ckpt.peer_reads import PeerSnapshots
from ds_ckpt.records import Manifest
from ds_ckpt.retrying import Retries
from ds_ckpt.save_job import Saved, save
from ds_ckpt.local_storage import At
from ds_ckpt.shard_tensors import whole

__all__ = [
    "Asynchronous",
    "At",
    "Checkpointer",
    "Diff",
    "Draining",
    "LoadOptions",
    "LocalStorage",
    "Manifest",
    "MemoryStorage",
    "NearCopies",
    "ObjectStorage",
    "PeerSnapshots",
    "Pending",
    "Recipe",
    "Retries",
    "Saved",
    "Synchronous",
    "Verified",
    "diff",
    "find_latest",
    "inspect",
    "list_tags",
    "load",
    "prune",
    "remove",
    "save",
    "verify",
    "whole",
]
