"""`deepspeed.sequence.cross_entropy`: losses of tokens whose sequence is cut over ranks, and whose vocabulary may be, too.

Words: a rank's logits are [S / sequence ranks, B, V / tensor ranks], the sequence first, and its targets [S / sequence ranks, B], of the
whole vocabulary. A group of sequence ranks that is None is this rank alone, and so is one of tensor ranks. Losses are fp32, and 0
where the target is `ignore_index`. Of the `backend` that upstream names there is one here: it has no effect.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed._ours.base.raising import refused
from ds_comm import ReduceOp, all_gather_json, all_reduce, as_group, differentiable
from ds_parallel.tensor import vocab_parallel_cross_entropy as cut_cross_entropy


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, sp_group: Any, tp_group: Any = None, vocab_start_index: int | None =
    None, vocab_end_index: int | None = None, ignore_index: int = -100, reduction: str = "none", gather_sequence_loss:
    bool = True, backend: str = "torch",
) -> Tensor:  # fmt: skip
    """Compute the loss of every token, [S, B], for a result that all sequence ranks use alike: each has the gradient of its own part.

    Args:
        vocab_start_index, vocab_end_index: This rank's columns; None: every rank has as many.
        reduction, gather_sequence_loss: "mean" or "sum" of all that count, for False; "none" of False is [S / sequence ranks, B].
    Raises:
        ConfigError: a reduction of gathered losses, or an unknown one; a ValueError, too ("compat-argument").
    """
    del backend
    _check(reduction, gather_sequence_loss)
    columns = None if vocab_start_index is None else (vocab_start_index, vocab_end_index)
    losses = _token_losses(vocab_parallel_logits, target, tp_group, columns, ignore_index)
    if not gather_sequence_loss:
        return _reduced(losses, target != ignore_index, sp_group, reduction)
    if sp_group is None:
        return losses
    return cast(Tensor, differentiable.gather(losses, sp_group, 0, unit="losses of a sequence"))


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None, sp_group: Any = None, vocab_start_index: int |
    None = None, vocab_end_index: int | None = None, global_vocab_size: int | None = None, ignore_index: int = -100,
    reduction: str = "mean", gather_sequence_loss: bool = False, backend: str = "torch",
) -> Tensor:  # fmt: skip
    """Compute the loss over all tokens of the sequence ranks, or of every token.

    Args:
        reduction: "mean" of the tokens that count, "sum", or "none".
        gather_sequence_loss: Of "none": [S, B], whose gradients of all sequence ranks are summed; else this rank's.
    Raises:
        ConfigError: a reduction of gathered losses, or an unknown one; a ValueError, too ("compat-argument").
    """
    del global_vocab_size, backend
    _check(reduction, gather_sequence_loss)
    columns = None if vocab_start_index is None else (vocab_start_index, vocab_end_index)
    losses = _token_losses(vocab_parallel_logits, target, tp_group, columns, ignore_index)
    if gather_sequence_loss and sp_group is not None:
        return cast(Tensor, differentiable.all_gather(losses, sp_group, 0, unit="losses of a sequence"))
    return _reduced(losses, target != ignore_index, sp_group, reduction)


class VocabParallelCrossEntropyLoss(nn.Module):
    """`vocab_parallel_cross_entropy` with its options."""

    def __init__(
        self, tp_group: Any = None, sp_group: Any = None, vocab_start_index: int | None = None, vocab_end_index: int |
        None = None, ignore_index: int = -100, reduction: str = "mean", gather_sequence_loss: bool = False, backend: str
        = "torch",
    ) -> None:  # fmt: skip
        super().__init__()
        _check(reduction, gather_sequence_loss)
        self.options = {
            "tp_group": tp_group, "sp_group": sp_group, "vocab_start_index": vocab_start_index, "vocab_end_index": vocab_end_index,
            "ignore_index": ignore_index, "reduction": reduction, "gather_sequence_loss": gather_sequence_loss, "backend": backend,
        }  # fmt: skip

    def forward(self, vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
        """Compute the loss."""
        return vocab_parallel_cross_entropy(vocab_parallel_logits, target, **self.options)


class VocabParallelCausalLMLoss:
    """The loss of a causal model whose head has this rank's columns, called as transformers calls `model.loss_function`.

    Args:
        sp_group: None where the engine shares sequences: it weighs the ranks' means by itself.
    """

    def __init__(
        self, tp_group: Any = None, sp_group: Any = None, vocab_start_index: int | None = None, vocab_end_index: int |
        None = None, ignore_index: int = -100, backend: str = "torch",
    ) -> None:  # fmt: skip
        self.tp_group, self.sp_group, self.ignore_index, self.backend = tp_group, sp_group, ignore_index, backend
        self.vocab_start_index, self.vocab_end_index = vocab_start_index, vocab_end_index

    def __call__(
        self, logits: Tensor, labels: Tensor | None = None, vocab_size: int | None = None, shift_labels: Tensor | None =
        None, num_items_in_batch: Any = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Compute the mean loss of the next tokens, or their sum divided by `num_items_in_batch`.

        Raises:
            ConfigError: neither `labels` nor `shift_labels`; a ValueError, too ("compat-argument").
        """
        del vocab_size, options  # the head's own size holds
        if shift_labels is None:
            if labels is None:
                raise refused("no-labels")
            shift_labels, logits = labels[..., 1:], logits[..., :-1, :]
        loss = vocab_parallel_cross_entropy(
            logits, shift_labels, self.tp_group, self.sp_group, self.vocab_start_index, self.vocab_end_index,
            ignore_index=self.ignore_index, reduction="mean" if num_items_in_batch is None else "sum", backend=self.backend,
        )  # fmt: skip
        if num_items_in_batch is None:
            return loss
        return loss / torch.as_tensor(num_items_in_batch, device=loss.device, dtype=loss.dtype).clamp_min(1)


def configure_vocab_parallel_loss(
    model: nn.Module, vocab_parallel_head: Any, sp_group: Any = None, ignore_index: int = -100, backend: str = "torch"
) -> nn.Module:
    """Let `model.loss_function` be the loss of a head of this rank's columns; the model.

    `model._deepspeed_original_loss_function` is the one that it had first.

    Args:
        vocab_parallel_head: Has `mp_group`, `vocab_start_index` and `vocab_end_index`.
    Raises:
        ConfigError: the model has no such function, or it cannot be set; a ValueError, too ("compat-argument").
    """
    head = vocab_parallel_head
    first = _set_loss(
        model,
        VocabParallelCausalLMLoss(
            head.mp_group, sp_group, head.vocab_start_index, head.vocab_end_index, ignore_index, backend
        ),
    )
    if not hasattr(model, "_deepspeed_original_loss_function"):
        model._deepspeed_original_loss_function = first
    return model


def validate_vocab_parallel_loss(model: nn.Module) -> None:
    """Check that `configure_vocab_parallel_loss` can set the model's loss, which stays. Raises as that does."""
    _set_loss(model, _set_loss(model, VocabParallelCausalLMLoss()))


def _set_loss(model: nn.Module, loss: Any) -> Any:
    """Set `model.loss_function` and return what it was; a loss that is not taken leaves the model as it was."""
    name, kind = "loss_function", type(model).__name__
    if not hasattr(model, name):
        raise refused("no-loss-function", kind)
    before = getattr(model, name)
    is_module = model._modules.pop(name, None) is not None  # which torch lets only a module replace
    try:
        model.loss_function = loss
    except (AttributeError, TypeError):
        taken = False
    else:
        taken = getattr(model, name) is loss
    if not taken:
        if is_module:
            model.loss_function = before
        raise refused("loss-function-set", kind)
    return before


def _check(reduction: str, gathers: bool) -> None:
    if reduction not in ("none", "sum", "mean") or (gathers and reduction != "none"):
        raise refused("reduction-of-gathered", reduction, gathers)


def _token_losses(
    logits: Tensor, target: Tensor, tp_group: Any, columns: tuple[int, int | None] | None, ignore_index: int
) -> Tensor:
    """The loss of every token of this rank, in the shape of `target`."""
    rows, labels = logits.flatten(0, -2), target.flatten()
    if tp_group is None:
        losses = functional.cross_entropy(rows.float(), labels, ignore_index=ignore_index, reduction="none")
    else:
        ranks = as_group(tp_group)
        widths = None if columns is None else cast(list[int], all_gather_json(logits.shape[-1], ranks))
        losses = cut_cross_entropy(rows, labels, ranks, widths=widths, ignore_index=ignore_index)
    return losses.view(target.shape)


def _reduced(losses: Tensor, counted: Tensor, sp_group: Any, reduction: str) -> Tensor:
    """The sum or mean over all sequence ranks; a rank's gradient is that of its own tokens."""
    if reduction == "none":
        return losses
    total, tokens = losses.sum(), counted.sum()
    if sp_group is not None:
        total = differentiable.reduce(total, sp_group, unit="losses of a sequence")
        all_reduce(tokens, ReduceOp.SUM, as_group(sp_group))
    return total if reduction == "sum" else total / tokens.clamp(min=1)
