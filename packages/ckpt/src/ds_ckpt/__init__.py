"""Logical, pickle-free, atomic checkpoints that resume on any layout.

`save(path, shards, meta)` and `load(path, shards) -> meta` are the whole of it; a shard is a `ds_comm.LocalShard`, and
`full_shards(tensors)` makes them for a process that holds everything.
"""

from ds_ckpt.block_packing import SaveOptions
from ds_ckpt.buffer_limits import MemoryStorage
from ds_ckpt.check import Diff, VerifyReport, diff, verify
from ds_ckpt.checkpoint_list import find_latest, inspect, list_tags, prune, remove
from ds_ckpt.checkpoint_loader import load
from ds_ckpt.engines import AsyncCheckpointer, Checkpointer, SaveHandle, SyncCheckpointer
from ds_ckpt.load_validation import LoadOptions
from ds_ckpt.local import LocalStorage
from ds_ckpt.local_checkpoints import DrainOptions, LocalCheckpointer
from ds_ckpt.local_storage import CheckpointRef
from ds_ckpt.peer_reads import PeerSnapshots
from ds_ckpt.python_objects import ObjectStorage
from ds_ckpt.records import Manifest
from ds_ckpt.retrying import RetryPolicy
from ds_ckpt.save_job import SaveResult, save
from ds_ckpt.shard_tensors import fill_state, full_meta, full_shards

__all__ = [
    "AsyncCheckpointer",
    "CheckpointRef",
    "Checkpointer",
    "Diff",
    "DrainOptions",
    "LoadOptions",
    "LocalCheckpointer",
    "LocalStorage",
    "Manifest",
    "MemoryStorage",
    "ObjectStorage",
    "PeerSnapshots",
    "RetryPolicy",
    "SaveHandle",
    "SaveOptions",
    "SaveResult",
    "SyncCheckpointer",
    "VerifyReport",
    "diff",
    "fill_state",
    "find_latest",
    "full_meta",
    "full_shards",
    "inspect",
    "list_tags",
    "load",
    "prune",
    "remove",
    "save",
    "verify",
]
