"""`deepspeed.runtime.sequence_parallel` and `deepspeed.sequence`, with upstream's signatures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed._ours.base.raising import refused
from deepspeed._ours.communication import group_getters
from ds_parallel.sequence import SequenceDataLoader
from ds_parallel.sequence.hf_attention import SequenceRanks, register_with_transformers
from ds_parallel.tiling import sequence_tiled_compute, tiled, tiled_loss


class UlyssesSPAttentionHF:
    """Attention of transformers models over ranks that share sequences."""

    @staticmethod
    def register_with_transformers(
        model_name_or_path: Any, core_attn_implementation: str, sequence_parallel_size: int, micro_batch_size: int |
        None = None, seq_length: int | None = None, seq_length_is_variable: bool = True, disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> SequenceRanks | None:  # fmt: skip
        """Register sequence-parallel attention with Transformers and return `mpu` for `initialize`.

        See `ds_parallel.sequence.hf_attention.register_with_transformers`.
        """
        ranks = register_with_transformers(
            model_name_or_path, core_attn_implementation, sequence_parallel_size, micro_batch_size, seq_length,
            seq_length_is_variable, disable_in_eval, max_length,
        )  # fmt: skip
        group_getters.share_sequences(ranks)
        return ranks


class UlyssesSPDataLoaderAdapter(SequenceDataLoader):
    """Every rank reads its own batches; the ranks of a sequence train on each of them together."""

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        super().__init__(dl, sp_group, device)
        if (sp_rank, sp_world_size) != (self.group.rank, self.group.size):
            raise refused("sequence-rank", sp_rank, sp_world_size, self.group.rank, self.group.size)
        self.dl = dl


class TiledMLP:
    """`TiledMLP.apply(fn, module, x, shards, compute_params)`: `fn(module, x)` in tiles of the sequence."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor], self: Any, x: Tensor, shards: int, compute_params: Sequence[Tensor] | None
        = None,
    ) -> Tensor:  # fmt: skip
        """Run `fn` tile by tile and recompute each tile in backward.

        A parameter's gradient is complete after the last tile.
        """
        del compute_params  # autograd knows them
        return tiled(lambda part: fn(self, part), x, shards)


class TiledFusedLogitsLoss:
    """`TiledFusedLogitsLoss.apply(fn, module, x, y, mask, shards, compute_params, output_reduction)`.

    The mean is over all tokens that count, whatever tile they are in, and every gradient follows the one that comes in.
    """

    @staticmethod
    def apply(
        fn: Callable[..., Tensor], self: Any, x: Tensor, y: Tensor, mask: Tensor | None, shards: int, compute_params:
        Sequence[Tensor] | None = None, output_reduction: str = "mean",
    ) -> Tensor:  # fmt: skip
        if output_reduction not in ("mean", "sum"):
            raise refused("tiled-reduction", output_reduction)
        others = [y] if mask is None else [y, mask]
        params = list(compute_params) if compute_params else _reached(fn, self, x, others)
        return tiled_loss(
            lambda *parts: fn(self, *parts),
            x,
            others,
            params,
            tiles=shards,
            weights=mask,
            reduction="mean" if output_reduction == "mean" else "sum",
        )


def _reached(fn: Callable[..., Tensor], module: Any, x: Tensor, others: Sequence[Tensor]) -> list[Tensor]:
    """List the parameters that contribute to the loss, found with a probe of a single token."""
    with torch.enable_grad():
        probe = x.detach().flatten(0, 1)[:1].requires_grad_()
        loss = fn(module, probe, *(other.flatten(0, 1)[:1] for other in others))
    leaves: list[Tensor] = []
    visited: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            leaves.append(leaf)
        waiting += [following for following, _ in node.next_functions]
    return leaves


class SequenceTiledCompute:
    """`SequenceTiledCompute.apply(...)`: tiles, with the arguments of tensors named by keys."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor], seqlen: int, shards: int, keys_to_shard: Sequence[str], keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str, compute_params: Sequence[Tensor] | None, output_unshard_dimension: int,
        output_reduction: Any, *args: Any,
    ) -> Tensor:  # fmt: skip
        """Compute `fn` tile by tile along the sequence.

        `args`: the values of `keys_to_shard`, then those of `keys_to_pass`.
        """
        cut = dict(zip(keys_to_shard, args, strict=False))
        passed = dict(zip(keys_to_pass, args[len(keys_to_shard) :], strict=True))
        return sequence_tiled_compute(
            fn, seqlen, shards, cut, passed, grad_requiring_tensor_key, compute_params, output_unshard_dimension, output_reduction
        )  # fmt: skip


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Blocks of consecutive ranks share sequences. Collective over the world."""
    group_getters.share_sequences(SequenceRanks(sequence_parallel_size))
