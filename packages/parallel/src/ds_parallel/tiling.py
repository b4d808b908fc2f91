"""Long sequences a tile at a time: what is computed for each token alone needs memory for one tile only (ALST, arXiv:2506.13996).

`tiled` computes tiles again in backward. `tiled_cross_entropy` and `tiled_loss` compute the gradient in forward, when a tile's
logits are there anyway, and scale it in backward by whatever gradient comes in: right for sums, means, and losses that are
parts of others. Both give autograd one gradient for every parameter, when backward reaches them: hooks see what they always do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ds_config.errors import PlanError

__all__ = ["tiled", "tiled_cross_entropy", "tiled_loss", "tiled_mlp"]

Reduction = Literal["mean", "sum"]


def tiled(function: Callable[[Tensor], Tensor], x: Tensor, tiles: int, dim: int = -2) -> Tensor:
    """Apply `function` to `x` in `tiles` parts, and recompute each part in backward.

    `function` treats each entry of `dim` independently.

    Args:
        x: Any shape; parts are as even as its size allows.
    Returns:
        The results, concatenated along `dim`.
    Cost: a second forward; besides input and output, the activations of `function` for a single tile.
    """
    parts = x.tensor_split(min(tiles, max(x.shape[dim], 1)), dim)
    if not torch.is_grad_enabled():
        return torch.cat([function(part) for part in parts], dim)
    return torch.cat([checkpoint(function, part, use_reentrant=False) for part in parts], dim)


def tiled_mlp(module: nn.Module, tiles: int | None = None) -> Callable[[Tensor], Tensor]:
    """Wrap the forward of an MLP to run in tiles.

    Args:
        tiles: How many; None: the input's length divided by its width, rounded up.
    """
    plain = module.forward

    def forward(x: Tensor) -> Tensor:
        count = tiles if tiles is not None else -(-x.shape[-2] // x.shape[-1])
        return tiled(plain, x, count)

    return forward


def tiled_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    tiles: int = 8,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute `cross_entropy(hidden @ weight.T + bias, labels)` with only a tile of logits in memory.

    Args:
        hidden: [..., width].
        weight: [vocabulary, width].
        labels: [...], of the vocabulary or `ignore_index`.
        tiles: Parts of the tokens.
        reduction: `mean` over the labels that count, or `sum`.
    Returns:
        A scalar, in fp32 at least.
    Raises:
        PlanError: hidden states and labels are of different shapes ("tiled-shapes").
    Under autocast hidden states and weight are multiplied in its format, as `linear` does.
    Cost: three matrix products, as without tiles; saves the gradients of hidden, weight and bias from forward to
    backward. Those of weight and bias add up in fp32, which is 4 bytes an element of them.
    """
    if hidden.shape[:-1] != labels.shape:
        raise PlanError(
            f"hidden states of shape {tuple(hidden.shape)} and labels of shape {tuple(labels.shape)}",
            code="tiled-shapes",
            fix="Give one label for every hidden state.",
        )
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    count = (wanted != ignore_index).sum() if reduction == "mean" else None
    with torch.autocast(hidden.device.type, enabled=False):
        total: Tensor = _TiledCrossEntropy.apply(flat, weight, bias, wanted, tiles, ignore_index)
    return total if count is None else total / count


class _TiledCrossEntropy(torch.autograd.Function):
    """The sum of losses; its gradients are made with the logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, tiles: int, ignore_index: int
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)  # products of many tiles add up in it
        needs = [tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)]
        grads = [
            torch.zeros_like(t, dtype=wide) if need and t is not None else None
            for t, need in zip((hidden, weight, bias), needs, strict=True)
        ]
        grads[0] = torch.empty_like(hidden) if needs[0] else None
        total = hidden.new_zeros((), dtype=wide)
        rows = max(1, -(-hidden.shape[0] // tiles))
        for start in range(0, hidden.shape[0], rows):
            part, wanted = hidden[start : start + rows], labels[start : start + rows]
            logits = functional.linear(part, weight, bias).to(total.dtype)
            counted = (wanted != ignore_index).unsqueeze(-1)
            at = wanted.masked_fill(~counted.squeeze(-1), 0).unsqueeze(-1)
            peak = logits.logsumexp(-1, keepdim=True)
            total += ((peak - logits.gather(-1, at)) * counted).sum()
            if not any(needs):
                continue
            logits.sub_(peak).exp_().mul_(counted)  # softmax, in the memory of the logits
            logits.scatter_add_(-1, at, -counted.to(logits.dtype))
            slope = logits.to(hidden.dtype)
            if grads[0] is not None:
                torch.mm(slope, weight, out=grads[0][start : start + rows])
            if grads[1] is not None:
                _add_product(grads[1], slope.t(), part)
            if grads[2] is not None:
                grads[2] += slope.sum(0, dtype=wide)
        grads = [
            g if g is None or t is None else g.to(t.dtype) for g, t in zip(grads, (hidden, weight, bias), strict=True)
        ]
        ctx.has = [grad is not None for grad in grads]
        ctx.save_for_backward(*(grad for grad in grads if grad is not None))
        return total

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        grads = [_scaled(next(saved), incoming[0]) if has else None for has in ctx.has]
        return (*grads, None, None, None)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total`, which may be in a wider format; each product is rounded once."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right))


def tiled_loss(
    function: Callable[..., Tensor],
    x: Tensor,
    others: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
    *,
    tiles: int = 8,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute a loss of any form over tiles of tokens; forward computes the gradient of each tile.

    Args:
        function: Of a tile of `x` and of each of `others`; returns a scalar: the tile's mean or sum, as `reduction`
        says.
        x: [batch, sequence, ...]; tiles are of the flattened first two dims.
        others: [batch, sequence, ...] each, or None: labels, masks. They get no gradient.
        parameters: What `function` computes with and that needs a gradient.
        weights: [batch, sequence]: how much each token counts in a tile's mean; by default labels other than -100 if
        the
            first of `others` is a tensor of integers, else every token.
        reduction: `mean`: the mean over all tokens, in whatever tile; `sum`.
    Returns:
        A scalar in the dtype that `function` returns; accumulated in fp32 at least.
    Cost: saves the gradients of `x` and `parameters` from forward to backward.
    """
    rows = [None if other is None else other.flatten(0, 1) for other in others]
    labels = others[0] if others else None
    if weights is None and labels is not None and not labels.is_floating_point():
        weights = torch.ne(labels, -100)
    counts = None if weights is None else weights.flatten().float()
    used = [param for param in parameters if param.requires_grad]
    result: Tensor = _Loss.apply(function, x.flatten(0, 1), rows, counts, tiles, reduction, *used)
    return result


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Tensor],
        x: Tensor,
        others: Sequence[Tensor | None],
        counts: Tensor | None,
        tiles: int,
        reduction: Reduction,
        *parameters: Tensor,
    ) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        total, kind = x.new_zeros((), dtype=exact), x.dtype
        slope = torch.zeros_like(x) if x.requires_grad else None
        slopes = [torch.zeros_like(param, dtype=torch.promote_types(param.dtype, exact)) for param in parameters]
        every = x.shape[0] if counts is None else counts.sum().clamp(min=1)
        rows = -(-x.shape[0] // tiles)
        for start in range(0, x.shape[0], rows):
            cut = slice(start, start + rows)
            share: Any = 1.0
            if reduction == "mean":
                share = (x[cut].shape[0] if counts is None else counts[cut].sum()) / every
                if counts is not None and not bool(share):
                    continue  # no token of it counts: its mean is no number
            with torch.enable_grad():
                part = x[cut].detach().requires_grad_(slope is not None)
                loss = function(part, *(None if other is None else other[cut] for other in others))
                wanted = [*([part] if slope is not None else []), *parameters]
                tile_grads = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ()
            total, kind = total + loss.detach().to(exact) * share, loss.dtype
            remaining_grads = iter(tile_grads)
            if slope is not None:
                x_grad = next(remaining_grads)
                if x_grad is not None:
                    slope[cut] = (x_grad.to(exact) * share).to(x_grad.dtype)
            for accumulated, grad in zip(slopes, remaining_grads, strict=True):
                if grad is not None:
                    accumulated += (
                        grad.to(accumulated.dtype) * share
                    )  # a share of few bits would scale the whole tile wrongly
        ctx.with_x = slope is not None
        slopes = [accumulated.to(param.dtype) for accumulated, param in zip(slopes, parameters, strict=True)]
        ctx.save_for_backward(*([slope] if slope is not None else []), *slopes)
        return total.to(kind)

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> tuple[Any, ...]:
        grads = [_scaled(saved, incoming[0]) for saved in ctx.saved_tensors]
        first = grads.pop(0) if ctx.with_x else None
        return (None, first, None, None, None, None, *grads)


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Any],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: Reduction | None = "mean",
) -> Tensor:
    """Run `fn(**kwargs)` over tiles of the sequence, dim 1 of `kwargs_to_shard`; recompute each tile in backward.

    Args:
        seqlen: Size of dim 1 of the tensors to split.
        kwargs_to_pass: Passed unsplit to every tile.
        grad_requiring_tensor_key: The entry of `kwargs_to_shard` that needs a gradient; others may also have gradients.
        compute_params: Parameters that `fn` computes with. Autograd detects them; the argument is for compatibility
        with
            DeepSpeed.
        output_unshard_dimension: Results are concatenated along this dim, if `output_reduction` is None.
        output_reduction: Results are scalars: their `sum`, or their `mean` with each tile weighted by its length.
    Raises:
        PlanError: sizes do not fit ("tiled-shapes").
    """
    wrong = {
        key: tuple(v.shape) for key, v in kwargs_to_shard.items() if isinstance(v, Tensor) and v.shape[1] != seqlen
    }
    if wrong or grad_requiring_tensor_key not in kwargs_to_shard:
        raise PlanError(
            f"seqlen = {seqlen}, kwargs_to_shard {wrong or sorted(kwargs_to_shard)}, gradient of {grad_requiring_tensor_key!r}",
            code="tiled-shapes",
            fix="Give tensors [batch, seqlen, ...], and name one of them for the gradient.",
        )
    outs, lengths = [], []
    for low, high in _bounds(seqlen, shards):
        cut = {key: v[:, low:high] if isinstance(v, Tensor) else v for key, v in kwargs_to_shard.items()}
        outs.append(checkpoint(partial(fn, **cut, **kwargs_to_pass), use_reentrant=False))
        lengths.append(high - low)
    if output_reduction is None:
        return torch.cat(outs, output_unshard_dimension)
    if output_reduction == "sum":
        return torch.stack(outs).sum()
    return torch.stack([out * (length / seqlen) for out, length in zip(outs, lengths, strict=True)]).sum()


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """Multiply a saved gradient by `factor` in the gradient's dtype, as a factor in fp32 would widen the gradient."""
    return (
        gradient * factor.to(gradient.dtype)
        if gradient.dtype != torch.float16
        else (gradient * factor.float()).to(gradient.dtype)
    )


def _bounds(length: int, tiles: int) -> list[tuple[int, int]]:
    each = -(-length // tiles)
    return [(low, min(low + each, length)) for low in range(0, length, each)]
