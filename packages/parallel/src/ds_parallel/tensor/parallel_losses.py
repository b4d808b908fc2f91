"""Cross-entropy of logits whose vocabulary is cut over ranks: no rank ever has a whole row.

loss = log(sum exp(x)) - x[label]; the maximum, the sum and x[label] are each reduced over the ranks, [tokens] in fp32.
gradient: softmax(x) - onehot(label), of this rank's columns. (Shoeybi et al., arXiv:1909.08053, section 3)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import ds_comm
from ds_comm import Group
from ds_config.errors import PlanError

__all__ = ["CausalLoss", "causal_loss", "vocab_parallel_cross_entropy"]


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, group: Group, *, widths: Sequence[int] | None = None, ignore_index: int = -100
) -> Tensor:
    """Compute the loss of every token in fp32 from vocabulary-sharded logits; 0 where the label is `ignore_index`.

    Args:
        logits: [tokens, this rank's columns].
        labels: [tokens], of the whole vocabulary, the same on all ranks.
        widths: Columns of each rank; equal widths when None.
    Returns:
        [tokens], the same on all ranks; its gradient reaches this rank's columns.
    Raises:
        PlanError: widths are not this rank's columns ("tensor-vocabulary").
    Cost: three all-reduces of [tokens]; saves the softmax of this rank's columns for backward.
    """
    sizes = list(widths) if widths is not None else [logits.shape[-1]] * group.size
    if len(sizes) != group.size or sizes[group.rank] != logits.shape[-1]:
        raise PlanError(
            f"{logits.shape[-1]} columns on rank {group.rank} of {group.size}, widths {sizes}",
            code="tensor-vocabulary",
            fix="Give the columns of every rank.",
        )
    start = sum(sizes[: group.rank])
    return _VocabParallelCrossEntropy.apply(logits, labels, start, ignore_index, group)


class CausalLoss:
    """A causal model's loss, as transformers calls `model.loss_function`, of logits that are cut.

    Args:
        group: The tensor-parallel ranks.
        widths: Columns of each rank.
    """

    def __init__(self, group: Group, widths: Sequence[int]) -> None:
        self.group, self.widths = group, list(widths)

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Compute the mean loss over labels that count, or their sum divided by `num_items_in_batch`."""
        if shift_labels is None:
            if labels is None:
                raise PlanError("a loss without labels", code="tensor-vocabulary", fix="Pass labels or shift_labels.")
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        flat = shift_labels.reshape(-1).to(logits.device)
        losses = vocab_parallel_cross_entropy(
            logits.reshape(-1, logits.shape[-1]), flat, self.group, widths=self.widths, ignore_index=ignore_index
        )
        if num_items_in_batch is not None:
            return losses.sum() / num_items_in_batch
        return losses.sum() / (flat != ignore_index).sum()


def causal_loss(group: Group, widths: Sequence[int]) -> CausalLoss:
    """Build the loss for `model.loss_function` of a model split with `gather_logits=False`."""
    return CausalLoss(group, widths)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int, ignore_index: int, group: Group) -> Tensor:
        highest = logits.detach().amax(-1).float()
        ds_comm.all_reduce(highest, ds_comm.ReduceOp.MAX, group)
        weights = torch.exp(logits.float() - highest.unsqueeze(-1))
        local = labels - start
        counted = labels != ignore_index
        in_shard = counted & (local >= 0) & (local < logits.shape[-1])
        safe = local.masked_fill(~in_shard, 0).unsqueeze(-1)
        target = logits.gather(-1, safe).squeeze(-1).float().masked_fill(~in_shard, 0)
        both = torch.stack([weights.sum(-1), target])
        ds_comm.all_reduce(both, group=group)
        total, target = both
        ctx.save_for_backward(weights.div_(total.unsqueeze(-1)).to(logits.dtype), safe, in_shard, counted)
        return (total.log() + highest - target).masked_fill(~counted, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None, None]:
        softmax, safe, in_shard, counted = ctx.saved_tensors
        scale = (grads[0] * counted).to(softmax.dtype).unsqueeze(-1)
        grad = softmax * scale
        grad.scatter_add_(-1, safe, -scale * in_shard.unsqueeze(-1))
        return grad, None, None, None, None
