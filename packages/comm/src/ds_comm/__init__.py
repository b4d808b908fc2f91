"""Mesh, collectives, placement vocabulary, and the recorder that ends silent hangs."""

from __future__ import annotations

import logging

from ds_comm import differentiable
from ds_comm.collectives import (
    ReduceOp,
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_gather_single,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_pieces,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    monitored_barrier,
    reduce,
    reduce_scatter,
    reduce_scatter_coalesced,
    reduce_scatter_single,
    reduce_scatter_tensor,
    scatter,
)
from ds_comm.family import Assignment, Family, assign, assignment_of
from ds_comm.grid import Grid
from ds_comm.groups import (
    Group,
    GroupLike,
    as_group,
    drop_group,
    new_group,
    single_group,
    twin_group,
    world_group,
)
from ds_comm.init import destroy_process_group, init_distributed, local_rank
from ds_comm.mesh import Mesh, MeshSpec
from ds_comm.metadata import all_gather_json, broadcast_json, exchange_counts
from ds_comm.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from ds_comm.p2p import P2POp, batch_isend_irecv, irecv, isend, recv, send
from ds_comm.placement import Box, Interval, LocalShard, Partial, Replicate, Shard, TensorShard
from ds_comm.recorder import patience
from ds_comm.work import Work

__all__ = [
    "Assignment",
    "Box",
    "Family",
    "Grid",
    "Group",
    "GroupLike",
    "Interval",
    "LocalShard",
    "Mesh",
    "MeshSpec",
    "P2POp",
    "Partial",
    "ReduceOp",
    "Replicate",
    "Shard",
    "TensorShard",
    "Work",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_json",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_pieces",
    "all_to_all_single",
    "as_group",
    "assign",
    "assignment_of",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_json",
    "broadcast_object_list",
    "destroy_process_group",
    "differentiable",
    "drop_group",
    "exchange_counts",
    "gather",
    "gather_object",
    "init_distributed",
    "irecv",
    "isend",
    "local_rank",
    "monitored_barrier",
    "new_group",
    "patience",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "single_group",
    "twin_group",
    "world_group",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())
