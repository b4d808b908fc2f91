"""Sequence parallelism: ranks that each have a part of every sequence."""

from ds_parallel.sequence.data import SequenceDataLoader, sequence_part, token_weighted_loss
from ds_parallel.sequence.ring import RingAttention, RingPlan, plan_ring
from ds_parallel.sequence.ulysses import DistributedAttention

__all__ = [
    "DistributedAttention",
    "RingAttention",
    "RingPlan",
    "SequenceDataLoader",
    "plan_ring",
    "sequence_part",
    "token_weighted_loss",
]
