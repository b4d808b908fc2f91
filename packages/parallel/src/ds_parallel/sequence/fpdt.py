"""FPDT (Yao et al., arXiv:2408.16978): attention, feed-forward layers and losses in chunks of the sequence, as DeepSpeed's layers take them.

A chunk is cut over the ranks that share a sequence, so what a rank has of it is `chunks` pieces, which do not lie beside each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_comm import as_group
from ds_comm.differentiable import gather, seq_all_to_all
from ds_config.errors import PlanError, UnsupportedError
from ds_parallel.sequence.chunked import Chunking, chunked_attention
from ds_parallel.sequence.ulysses import rotated
from ds_parallel.tiling import tiled

__all__ = ["FpdtAttention", "FpdtFfn", "FpdtFunction", "FpdtInput", "FpdtLogitsLoss"]


class FpdtInput:
    """A rank's tokens, labels and positions of whole ones [batch, sequence], in the order of chunks; all ranks' loss mask.

    Args:
        args: Has `ds_sequence_parallel_fpdt_chunk_size`, the tokens of a chunk on all ranks.
    """

    def __init__(
        self, tokens: Tensor, labels: Any, loss_mask: Any, attention_mask: Any, position_ids: Any, args: Any, sp_size: int, sp_rank: int
    ) -> None:  # fmt: skip
        length, chunk = tokens.shape[1], args.ds_sequence_parallel_fpdt_chunk_size
        if length % chunk or chunk % sp_size:
            raise PlanError(
                f"{length} tokens in chunks of {chunk} on {sp_size} ranks",
                code="sequence-chunks",
                fix="Use a chunk that divides the tokens, and that the ranks divide.",
            )
        places = torch.arange(length, device=tokens.device).view(length // chunk, sp_size, -1)
        self._all = places.transpose(0, 1).flatten()
        positions = places[:, sp_rank].flatten()
        self._local_inputs = [None if t is None else t[:, positions] for t in (tokens, labels, position_ids)]
        self._masks = None if loss_mask is None else loss_mask[:, self._all], attention_mask

    def generate(self) -> tuple[Any, Any, Any, Any, Any]:
        """Return tokens, labels, loss mask, attention mask and positions."""
        tokens, labels, positions = self._local_inputs
        return tokens, labels, *self._masks, positions


class FpdtFunction:
    """The function under `FpdtAttention`."""

    @staticmethod
    def apply(
        x: Tensor, attention_mask: Any, inference_params: Any, rotary: Any, group: Any, scatter_idx: int, gather_idx: int,
        hidden_size: int, projection: int, head_size: int, kv_projection: int, weight: Tensor, bias: Tensor | None, dropout: float,
        num_chunks: int = 8, cpu_offloading: bool = True,
    ) -> Tensor:  # fmt: skip
        """Compute causal attention of x [tokens, batch, width]: [batch, tokens, heads, head size].

        Args:
            rotary: Cosines and sines [whole sequence, 1, 1, features], or None.
            weight, bias: Of queries, keys and values, concatenated.
        Raises:
            UnsupportedError: a mask or dropout ("compat-argument").
        """
        del inference_params, scatter_idx, gather_idx, hidden_size
        if attention_mask is not None or dropout:
            raise UnsupportedError(
                f"FPDT attention with {'a mask' if attention_mask is not None else f'dropout {dropout}'}",
                code="sequence-chunks",
                fix="Leave it out: every token sees those before it.",
            )
        angles = None if rotary is None else [part.permute(1, 0, 2, 3) for part in rotary]
        ranks = as_group(group).size

        def project(part: Tensor, index: int) -> tuple[Tensor, Tensor, Tensor]:
            both = F.linear(part, weight, bias).transpose(0, 1)
            qkv = [t.unflatten(-1, (-1, head_size)) for t in both.split([projection, kv_projection, kv_projection], -1)]
            if ranks > 1:
                qkv = [seq_all_to_all(t, group, scatter_dim=2, gather_dim=1) for t in qkv]
            q, k, v = qkv
            if angles is not None:
                here = slice(q.shape[1] * index, q.shape[1] * (index + 1))
                q, k = (rotated(t, angles[0][:, here], angles[1][:, here]) for t in (q, k))
            return q, k, v

        params = [weight] if bias is None else [weight, bias]
        out = chunked_attention(x, project, params, Chunking(num_chunks, on_host=cpu_offloading))
        if ranks == 1:
            return out
        return torch.cat(
            [seq_all_to_all(chunk, group, scatter_dim=1, gather_dim=2) for chunk in out.chunk(num_chunks, 1)], 1
        )


class FpdtAttention(nn.Module):
    """Projection, attention in chunks, projection back: x [tokens, batch, width] in and out.

    Args:
        config: Has `kv_channels`, `num_attention_heads`, `num_key_value_heads`, `hidden_size`, `attention_dropout`.
        chunk_size: Tokens of a chunk on all ranks.
    """

    def __init__(
        self, config: Any, first_weight: Tensor, first_bias: Any, second_weight: Tensor, second_bias: Any, sequence_process_group: Any,
        gather_idx: int = 0, scatter_idx: int = 2, return_bias: bool = True, chunk_size: int = 65536, enable_offloading: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        del gather_idx, scatter_idx
        self.config, self.spg, self.chunk_size, self.on_host = (
            config,
            sequence_process_group,
            chunk_size,
            enable_offloading,
        )
        self.qkv_linear_weight, self.qkv_linear_bias = first_weight, first_bias
        self.qkv_dense_weight, self.qkv_dense_bias, self._return_bias = second_weight, second_bias, return_bias

    def forward(
        self, layernorm_output: Tensor, attention_mask: Any, inference_params: Any, rotary_pos_emb: Any, cpu_offloading: bool = True
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """Compute FPDT attention; return the output, and the bias if the caller adds the bias, else None."""
        size, config = self.config.kv_channels, self.config
        out = FpdtFunction.apply(
            layernorm_output, attention_mask, inference_params, rotary_pos_emb, self.spg, 2, 0, config.hidden_size,
            size * config.num_attention_heads, size, size * config.num_key_value_heads, self.qkv_linear_weight, self.qkv_linear_bias,
            config.attention_dropout, max(1, len(layernorm_output) * as_group(self.spg).size // self.chunk_size),
            cpu_offloading and self.on_host,
        )  # fmt: skip
        out = F.linear(out.flatten(2).transpose(0, 1), self.qkv_dense_weight)
        return (out, self.qkv_dense_bias) if self._return_bias else (out + self.qkv_dense_bias, None)


class FpdtFfn:
    """Two linear layers with a GELU between them, in chunks; a chunk is computed again in backward."""

    @staticmethod
    def apply(
        x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, add_bias: bool, chunk_size: int
    ) -> tuple[Tensor, Any]:
        """Apply the feed-forward layers to x [tokens, ...] chunk by chunk.

        Returns a tensor of the same shape, and the second bias where it is not added.
        """

        def layers(part: Tensor) -> Tensor:
            return F.linear(F.gelu(F.linear(part, w1, b1), approximate="tanh"), w2, b2 if add_bias else None)

        return tiled(layers, x, x.shape[0] // chunk_size, 0), None if add_bias else b2


class FpdtLogitsLoss:
    """The loss of every token of the sequence, from hidden states, in chunks; logits are computed again in backward."""

    @staticmethod
    def apply(
        lm_output: Tensor, labels: Tensor, logit_weights: Tensor, rank: int, spg_size: int, spg: Any, num_chunk: int
    ) -> Tensor:
        """Compute the loss per token in chunks and gather the losses over the group.

        lm_output [tokens, batch, width], labels [batch, tokens] -> fp32 [tokens of all ranks, batch].
        """
        del rank, spg_size

        def losses(part: Tensor, wanted: Tensor) -> Tensor:
            logits = F.linear(part, logit_weights).float()
            return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view(wanted.shape)

        pairs = zip(lm_output.chunk(num_chunk), labels.t().chunk(num_chunk), strict=True)
        gathered: Tensor = gather(torch.cat([checkpoint(losses, *pair, use_reentrant=False) for pair in pairs]), spg, 0)
        return gathered
