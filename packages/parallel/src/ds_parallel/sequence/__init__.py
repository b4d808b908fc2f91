"""Sequence parallelism: ranks that each have a part of every sequence."""

from ds_parallel.sequence.data import SequenceDataLoader, sequence_part, token_weighted_loss
from ds_parallel.sequence.ulysses import DistributedAttention

__all__ = ["DistributedAttention", "SequenceDataLoader", "sequence_part", "token_weighted_loss"]
