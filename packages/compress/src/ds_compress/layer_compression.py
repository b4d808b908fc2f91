"""One compressed layer: a module stays what it is, and its forward sees another weight.

A `LayerCompression` is a child of the module, named `compression`. Hooks around the module's forward put the compressed weight into the
instance's own attributes, where it hides the parameter of the same name, and take it away again. So parameters keep their names
and identity: optimizers, ZeRO, checkpoints and torch.compile see an ordinary model. (torch's parametrizations would rename every
parameter and give each module a class of its own.)

What is learnt (scores) are parameters of the child; what must be the same after a restart (masks, ranges, where the schedule
stands) are its buffers. Weights are compressed in this order: quantised, single weights dropped, rows, heads, channels.
"""

from __future__ import annotations

import logging
import math
import zlib
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_comm import Group, ReduceOp, all_reduce, world_group
from ds_compress._torch import in_backward
from ds_compress.compression_schedules import Bits, dense_share, fall, mixed_ratio, new_mask_at, starts
from ds_compress.layer_kinds import Convolutions
from ds_compress.masks import (
    block_scores,
    expand_blocks,
    head_scores,
    learnt_mask,
    row_scores,
    snip_update,
    top_mask,
    two_of_four,
)
from ds_compress.quantizers import QuantGrid, quantize, straight_through
from ds_compress.recipe import InputQuantization, LayerRecipe, Pruned, SparsePruning, Weights

__all__ = ["CHILD", "LayerCompression", "attach", "attached", "detach"]

CHILD = "compression"
_CHOSEN_ONCE = ("l1", "2:4")
_MOMENTUM = 0.95  # of running ranges
_log = logging.getLogger("ds_compress")


class LayerCompression(nn.Module):
    """What is done to one layer's weight and input, and its state.

    Attributes:
        recipe: What is done.
        steps: Updates applied so far.
        bits: Where the schedule of weight bits stands; None without one.
        factor: Periods of bits that begin now are this many times longer.
        group: Ranks whose batches are one batch; None is all ranks.
    """

    state: Tensor
    input_range: Tensor
    sparse_mask: Tensor
    sparse_scores: Tensor
    sensitivity: Tensor

    def __init__(self, recipe: LayerRecipe, device: torch.device | None = None) -> None:
        super().__init__()
        self.recipe = recipe
        self.steps, self.factor = 0, 1
        weights = recipe.weights
        self.bits = None if weights is None else Bits(weights.start, weights.period)
        self.group: Group | None = None
        self._handles: list[RemovableHandle] = []
        self._chosen_masks: set[str] = set()  # masks that have been chosen
        self._followed: set[str] = set()  # masks that norms and readers behind the layer take
        self._output_masks: dict[str, Tensor] = {}  # of the layer's last forward
        self.register_buffer("state", torch.zeros(4, dtype=torch.int64, device=device))
        if recipe.inputs is not None and recipe.inputs.static:
            empty = torch.tensor([math.inf, -math.inf], dtype=torch.float32, device=device)
            self.register_buffer("input_range", empty)
        self._make_masks(device)
        self._push()
        self.register_load_state_dict_post_hook(_loaded)

    def _make_masks(self, device: torch.device | None) -> None:
        shape, sparse = self.recipe.layer.shape, self.recipe.sparse
        if sparse is not None and sparse.method == "snip_momentum":
            blocks = block_scores(torch.empty(shape[0], math.prod(shape[1:]), device="meta"), sparse.block).shape
            self.register_buffer("sparse_mask", torch.ones(blocks, dtype=torch.bool, device=device))
            self.register_buffer("sparse_scores", torch.zeros(blocks, dtype=torch.float32, device=device))
            self.register_buffer("sensitivity", torch.zeros(blocks, device=device), persistent=False)
        sizes = {"sparse": shape, "row": shape[:1], "head": (0,), "channel": shape[:1]}
        for name, what in self._pruning().items():
            size = (what.heads,) if isinstance(what, Pruned) and what.heads else sizes[name]
            if what.method in _CHOSEN_ONCE:
                self.register_buffer(f"{name}_mask", torch.zeros(size, dtype=torch.bool, device=device))
            elif what.method == "topk":
                scores = torch.empty(size if len(size) > 1 else (*size, 1), device=device)
                nn.init.kaiming_uniform_(scores.view(scores.shape[0], -1), a=math.sqrt(5))
                self.register_parameter(f"{name}_scores", nn.Parameter(scores))

    def _pruning(self) -> dict[str, SparsePruning | Pruned]:
        methods = {
            "sparse": self.recipe.sparse, "row": self.recipe.rows, "head": self.recipe.heads,
            "channel": self.recipe.channels,
        }  # fmt: skip
        return {name: what for name, what in methods.items() if what is not None}

    # ---- time

    def at(self, steps: int) -> None:
        """Go to the time after `steps` updates."""
        self.steps = steps
        weights = self.recipe.weights
        if weights is not None and self.bits is not None and steps >= weights.offset:
            before, self.bits = self.bits, fall(self.bits, steps - weights.offset, weights.target, self.factor)
            if weights.verbose and before.bits != self.bits.bits:
                _log.info(
                    "step %d: %s has %d bits; the next falls at step %d",
                    steps, self.recipe.layer.name, self.bits.bits, weights.offset + self.bits.due,
                )  # fmt: skip
        self._push()

    def prune_blocks(self) -> None:
        """End a step of snip_momentum: `sensitivity`, summed over ranks by now, goes into the scores, and a new mask is made if due."""
        sparse = self.recipe.sparse
        if sparse is None or sparse.method != "snip_momentum":
            return
        scores = self.sparse_scores
        scores.copy_(snip_update(scores, self.sensitivity))
        self.sensitivity.zero_()
        if new_mask_at(self.steps, sparse.offset, sparse.end, sparse.stride):
            # What was dropped has sensitivity, too: the loss as it would be with it back. So masks may change until the end.
            self.sparse_mask.copy_(top_mask(scores, dense_share(self.steps, sparse.offset, sparse.end, sparse.ratio)))

    def _push(self) -> None:
        bits = self.bits or Bits(0, 0)
        if not self.state.is_meta:
            self.state.copy_(torch.tensor([self.steps, bits.bits, bits.due, bits.since], device="cpu"))

    def pull(self) -> None:
        """Take over what was loaded into buffers."""
        self.steps, *bits = (int(number) for number in self.state.tolist())
        if self.bits is not None:
            self.bits = Bits(*bits)
        masks = (name for name, what in self._pruning().items() if what.method in _CHOSEN_ONCE)
        self._chosen_masks = {name for name in masks if bool(getattr(self, f"{name}_mask").any())}

    # ---- weights

    def touches_weight(self) -> bool:
        """Whether forward sees another weight now."""
        if self._waiting_scores():
            return True
        acts = [what.offset for what in self._pruning().values()]
        if self.recipe.weights is not None and self.bits is not None and self.bits.bits < 16:
            acts.append(self.recipe.weights.offset)
        return any(starts(self.steps, offset) for offset in acts) or self._senses()

    def forward(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the weight and bias that the layer computes with.

        Gradients reach `weight` straight through quantization.
        """
        weights = self.recipe.weights
        if weights is not None and self.bits is not None and starts(self.steps, weights.offset):
            weight = self._quantised(weight, weights, self.bits)
        for name, what in self._pruning().items():
            if name == "sparse" and what.method == "snip_momentum":
                weight = self._sensed(weight)
            elif starts(self.steps, what.offset):
                mask = self.mask(name, weight)
                weight = weight * self.shaped(name, mask, weight.dim()).to(weight.dtype)
                if bias is not None and name in ("row", "channel"):
                    bias = bias * mask.reshape(-1).to(bias.dtype)
                if name in self._followed:
                    self._output_masks[name] = mask
        for name in self._waiting_scores():
            weight = _WithoutGradient.apply(weight, getattr(self, f"{name}_scores"))
        return weight, bias

    def _waiting_scores(self) -> list[str]:
        """List the learnt scores that do not act yet. They take part with a gradient of zero: DDP waits for one from each parameter."""
        if not torch.is_grad_enabled():
            return []
        pruning = self._pruning().items()
        return [name for name, what in pruning if what.method == "topk" and not starts(self.steps, what.offset)]

    def mask_norm(self, name: Literal["row", "channel"], norm: nn.Module) -> None:
        """Mask the output of a batch norm behind the layer as the layer's, until the compression is detached.

        A channel that is zero leaves its norm as bias - mean * weight / deviation, which the next layer would read until the model is cleaned.
        """
        self._followed.add(name)
        self._handles.append(norm.register_forward_hook(partial(self._mask_output, name)))

    def mask_reader(self, name: Literal["row", "channel"], reader: nn.Module) -> None:
        """Hide from a layer that reads this one what the mask drops, until the compression is detached. Call when `reader` has its own compression.

        An activation that maps 0 to something else (sigmoid) would let it through until the model is cleaned. Gradients pass as without this.
        """
        self._followed.add(name)
        compression = attached(reader)
        if compression is not None and compression.recipe.inputs is not None:
            # Ranges of inputs are those of the features that stay, so the reader's own compression sees none of the dropped.
            before = reader.register_forward_pre_hook(partial(self._hide, name, True), prepend=True, with_kwargs=True)
            self._handles.append(before)
        after = reader.register_forward_pre_hook(partial(self._hide, name, False), with_kwargs=True)
        self._handles.append(after)

    def _mask_output(self, name: str, norm: nn.Module, args: Any, output: Tensor) -> Tensor:
        mask = self._output_masks.get(name)  # not computed again: ZeRO may have taken the scores away
        if mask is None:
            return output
        return output * mask.reshape(1, -1, *[1] * (output.dim() - 2)).to(output.dtype)

    def _hide(
        self, name: str, fill: bool, reader: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the dropped features of a reader's input: by zero, or by a feature that stays (`fill`)."""
        mask = self._output_masks.get(name)
        if mask is None:
            return args, kwargs
        if args:
            return (_hidden(args[0], mask, _feature_dim(reader), fill), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: _hidden(kwargs[first], mask, _feature_dim(reader), fill)}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without masks of the last forward, which are results of autograd and cannot be copied."""
        return {**self.__dict__, "_output_masks": {}}

    def final(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the weight and bias of `forward` after the end of all schedules, detached."""
        weights, weight = self.recipe.weights, weight.detach()
        if weights is not None:
            weight = self._rounded(weight, weights, weights.target)
        for name in self._pruning():
            mask = self.mask(name, weight)
            weight = weight * self.shaped(name, mask, weight.dim()).to(weight.dtype)
            if bias is not None and name in ("row", "channel"):
                bias = bias * mask.reshape(-1).to(bias.dtype)
        return weight.detach(), None if bias is None else bias.detach()

    def mask(self, name: str, weight: Tensor) -> Tensor:
        """Return the mask "sparse", "row", "head" or "channel": an entry for each element that is pruned or not.

        A mask of method l1 or 2:4 is computed on first use, from the weight of that moment, and does not change afterwards.
        """
        what = self._pruning()[name]
        if what.method == "topk":
            return learnt_mask(getattr(self, f"{name}_scores"), what.ratio)
        mask: Tensor = getattr(self, f"{name}_mask")
        if what.method in _CHOSEN_ONCE and name not in self._chosen_masks:
            with torch.no_grad():
                fours = what.method == "2:4"
                mask.copy_(two_of_four(weight) if fours else top_mask(self._size(name, what, weight), what.ratio))
            self._chosen_masks.add(name)
        return mask

    def _size(self, name: str, what: SparsePruning | Pruned, weight: Tensor) -> Tensor:
        if name == "sparse":
            return weight.detach().abs()
        if name == "head" and isinstance(what, Pruned):
            return head_scores(weight, what.heads)
        return row_scores(weight)

    def shaped(self, name: str, mask: Tensor, dims: int) -> Tensor:
        """Reshape a mask so that it broadcasts against the weight."""
        if name == "sparse":
            sparse, shape = self.recipe.sparse, self.recipe.layer.shape
            if sparse is not None and sparse.method == "snip_momentum":
                return expand_blocks(mask, sparse.block, (shape[0], math.prod(shape[1:]))).reshape(shape)
            return mask
        if name == "head":
            heads = self.recipe.heads
            count = 1 if heads is None else heads.heads
            return mask.reshape(-1).repeat_interleave(self.recipe.layer.shape[1] // count)[None, :]
        return mask.reshape(-1, *[1] * (dims - 1))

    def _quantised(self, weight: Tensor, weights: Weights, now: Bits) -> Tensor:
        value = self._rounded(weight, weights, now.bits)
        if weights.mixed is not None:
            ratio = mixed_ratio(now, self.steps - weights.offset, weights.mixed)
            value = ratio * weight.detach() + (1 - ratio) * value
        return straight_through(weight, value)

    def _rounded(self, weight: Tensor, weights: Weights, bits: int) -> Tensor:
        noise = None
        if weights.stochastic and bits > 2:
            # The same for all ranks, microbatches and recomputed forwards of a step.
            seed = zlib.crc32(f"{self.recipe.layer.name} {self.steps}".encode())
            drawn = torch.Generator(weight.device).manual_seed(seed)
            noise = torch.rand(weight.shape, generator=drawn, device=weight.device) - 0.5
        with torch.no_grad():
            return quantize(weight, QuantGrid(bits, weights.groups, weights.symmetry), noise)

    def _senses(self) -> bool:
        sparse = self.recipe.sparse
        return sparse is not None and sparse.method == "snip_momentum" and self.training and self.steps < sparse.end

    def _sensed(self, weight: Tensor) -> Tensor:
        mask = self.shaped("sparse", self.sparse_mask, weight.dim())
        result = weight * mask.to(weight.dtype)
        if self._senses() and result.requires_grad:
            block = self.recipe.sparse.block if self.recipe.sparse is not None else (1, 1)
            weight_copy = weight.detach().clone()  # ZeRO may take the weight away before the gradient comes

            def note(grad: Tensor) -> None:
                product = (weight_copy * grad).flatten(1).float()
                self.sensitivity += block_scores(product, block)

            result.register_hook(note)
        return result

    # ---- inputs

    def quantised_input(self, x: Tensor, weight: Tensor) -> Tensor:
        """Quantize a layer's input on a grid with a range for each token, or with the running range."""
        inputs = self.recipe.inputs
        if inputs is None or not starts(self.steps, inputs.offset) or not x.is_floating_point() or not x.numel():
            return x
        heads = self.recipe.heads
        if heads is not None and starts(self.steps, heads.offset):
            # Dropped heads do not count in ranges: they are not there any more when the model is cleaned.
            x = _hidden(x, self.mask("head", weight), -1, fill=True)
        if not inputs.static:
            groups = x.numel() // x.shape[-1]
            return straight_through(x, quantize(x.detach(), QuantGrid(inputs.bits, groups, inputs.symmetry)))
        if self.training and not in_backward():
            self._widen(x)
        return straight_through(x, _on_range(x.detach(), self.input_range, inputs))

    @torch.no_grad()
    def _widen(self, x: Tensor) -> None:
        now = torch.stack([-x.detach().amin(), x.detach().amax()]).float()
        group = self.group or world_group()
        if group.size > 1:
            all_reduce(now, ReduceOp.MAX, group)
        now = now * now.new_tensor([-1.0, 1.0])
        old = self.input_range
        old.copy_(torch.where(old.isfinite(), _MOMENTUM * old + (1 - _MOMENTUM) * now, now))


def _on_range(x: Tensor, span: Tensor, inputs: InputQuantization) -> Tensor:
    """Quantize `x` as `quantizers.symmetric` and `asymmetric` do, with a range that was measured before.

    Without a usable range `x` is returned unchanged.
    """
    low, high = span[0], span[1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if inputs.symmetry == "symmetric":
        scale = torch.maximum(low.abs(), high.abs()) * 2 / 2**inputs.bits
        zero, first, last = torch.zeros_like(scale), -(2 ** (inputs.bits - 1)), 2 ** (inputs.bits - 1) - 1
    else:
        scale = (high - low) / 2**inputs.bits
        first, last = 0, 2**inputs.bits - 1
        zero = (low / scale).round() * scale
    usable = torch.isfinite(scale) & (scale > 0)
    scale, zero = torch.where(usable, scale, torch.ones_like(scale)), torch.where(usable, zero, torch.zeros_like(zero))
    value = ((wide - zero) / scale).round().clamp(first, last) * scale + zero
    return torch.where(usable, value, wide).to(x.dtype)


class _WithoutGradient(torch.autograd.Function):
    """A weight as it is, and a gradient of zero for scores that do not act on it yet."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scores: Tensor) -> Tensor:
        ctx.scores = (scores.shape, scores.dtype, scores.device)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.scores
        return grads[0], torch.zeros(shape, dtype=dtype, device=device)


def _feature_dim(reader: nn.Module) -> int:
    """Return the dim of a layer's input that its weight's columns read."""
    weight: Any = reader.weight
    return -1 if not isinstance(reader, Convolutions) else 1 - weight.dim()


def _hidden(x: Tensor, mask: Tensor, dim: int, fill: bool) -> Tensor:
    """Replace the dropped features of `x` along `dim`, of which there may be several for each of `mask`. The gradient is that of `x`."""
    keep = mask.detach().reshape(-1).bool()
    keep = keep.repeat_interleave(x.shape[dim] // keep.numel())
    shape = (-1, *[1] * (-1 - dim))
    other = x.index_select(dim, keep.to(torch.int8).argmax().reshape(1)) if fill else torch.zeros_like(x)
    return straight_through(x, torch.where(keep.view(shape), x, other))


# ---- on a module


def attach(module: nn.Module, recipe: LayerRecipe) -> LayerCompression:
    """Compress one module from now on."""
    compression = LayerCompression(recipe, module.weight.device)  # type: ignore[arg-type]
    compression.train(module.training)
    module.add_module(CHILD, compression)
    compression._handles = [
        module.register_forward_pre_hook(_before, with_kwargs=True),
        module.register_forward_hook(_after, always_call=True),
    ]
    return compression


def attached(module: nn.Module) -> LayerCompression | None:
    """Return the compression of a module, or None if the module is not compressed."""
    compression = module._modules.get(CHILD)
    return compression if isinstance(compression, LayerCompression) else None


def detach(module: nn.Module) -> None:
    """Take the compression of a module away; its weight stays as it is."""
    compression = attached(module)
    if compression is not None:
        for handle in compression._handles:
            handle.remove()
        del module._modules[CHILD]


def _before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    compression: Any = module._modules[CHILD]
    if compression.touches_weight():
        old = module._parameters.get("bias")
        weight, bias = compression(module._parameters["weight"], old)
        module.__dict__["weight"] = weight
        if bias is not old:
            module.__dict__["bias"] = bias
    if compression.recipe.inputs is not None:
        param = module._parameters["weight"]
        if args:
            args = (compression.quantised_input(args[0], param), *args[1:])
        elif kwargs:
            first = next(iter(kwargs))
            kwargs = {**kwargs, first: compression.quantised_input(kwargs[first], param)}
    return args, kwargs


def _after(module: nn.Module, args: Any, output: Any) -> None:
    module.__dict__.pop("weight", None)
    module.__dict__.pop("bias", None)


def _loaded(compression: nn.Module, keys: Any) -> None:
    if isinstance(compression, LayerCompression) and not compression.state.is_meta:
        compression.pull()
