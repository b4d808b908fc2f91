"""`deepspeed.ops.deepspeed4science`: attention over alignments with a mask and a pair bias, by ds-ops."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deepspeed._ours.base.raising import refused
from ds_ops.attention import evoformer_attention


class EvoformerFusedAttention:
    """The function with its two biases, as `torch.autograd.Function`s are called."""

    @staticmethod
    def apply(q: Tensor, k: Tensor, v: Tensor, bias1: Tensor | None = None, bias2: Tensor | None = None) -> Tensor:
        """Compute softmax(q k^T / sqrt(d) + bias1 + bias2) v of [*, length, heads, d]; gradients reach both biases."""
        lead = q.shape[:-3]
        a, b, c = (t if len(lead) == 2 else t.reshape(-1, 1, *t.shape[-3:]) for t in (q, k, v))
        return evoformer_attention(a, b, c, bias1, bias2).reshape(q.shape)


def DS4Sci_EvoformerAttention(Q: Tensor, K: Tensor, V: Tensor, biases: Sequence[Tensor | None]) -> Tensor:  # noqa: N802  upstream's names
    """Compute attention of [batch, rows, length, heads, d].

    Args:
        biases: Up to two: [batch, rows, 1, 1, length] and [batch, 1, heads, length, length]; None is none.
    Raises:
        PlanError: more, or other shapes; an AssertionError, too ("compat-call-order").
    """
    if len(biases) > 2:
        raise refused("biases", len(biases))
    first, second = [*biases, None, None][:2]
    for number, bias in enumerate((first, second), 1):
        if bias is None:
            continue
        batch, rows, length, heads = Q.shape[:4]
        shape = (batch, rows, 1, 1, length) if number == 1 else (batch, 1, heads, length, length)
        if tuple(bias.shape) != shape:
            raise refused("bias-shape", number, tuple(bias.shape), shape)
    return EvoformerFusedAttention.apply(Q, K, V, first, second)
