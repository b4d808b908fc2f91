"""Sequence parallelism: ranks that each have a part of every sequence."""

from ds_parallel.sequence.chunked import Chunking, HostChunks, chunked_attention
from ds_parallel.sequence.part_check import check_parts
from ds_parallel.sequence.ring_attention import RingAttention, RingPlan, plan_ring
from ds_parallel.sequence.sequence_batches import SequenceDataLoader, sequence_part, token_weighted_loss
from ds_parallel.sequence.ulysses import DistributedAttention

__all__ = [
    "Chunking",
    "DistributedAttention",
    "HostChunks",
    "RingAttention",
    "RingPlan",
    "SequenceDataLoader",
    "check_parts",
    "chunked_attention",
    "plan_ring",
    "sequence_part",
    "token_weighted_loss",
]
