"""`deepspeed.ops.transformer`: the trainable BERT layer (Vaswani et al. 2017; Devlin et al. 2019), by torch's own operations.

Parameters have upstream's names, so that its checkpoints fit: `attn_qkvw` is queries, keys and values one under the other, `attn_n*` is the
norm beside the feed-forward's input, `norm_*` the other one. Where normalisation comes first (`pre_layer_norm`)
r = x + attention(norm(x)) and out = r + feed_forward(attn_n(r)); else r = attn_n(x + attention(x)) and out = norm(r + feed_forward(r)).
The activation is GELU by tanh, as upstream's kernel has it.

What upstream drops and computes again is computed again here (`gelu_checkpoint`, `attn_dropout_checkpoint`, `normalize_invertible`), with the
same dropout. Dropout draws from torch's generator, which `torch.manual_seed` seeds: `seed` and `stochastic_mode` are notes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from deepspeed._ours.base.raising import refused


class DeepSpeedTransformerConfig:
    """The sizes and options of a layer.

    Args:
        batch_size, fp16, local_rank, seed, stochastic_mode, training: Notes: any batch fits, formats are the parameters', and the layer's
            mode is `train()`'s.
        intermediate_size: Of the feed-forward part; by default 4 x `hidden_size`.
        initializer_range, adjust_init_range, num_hidden_layers: Standard deviation of the first weights; adjusted, that of the two
            output projections is divided by sqrt(2 x layers).
        normalize_invertible, gelu_checkpoint, attn_dropout_checkpoint: Compute norms, activation or attention again in backward.
        return_tuple: Return `(output,)`, as layers of transformers did.
    """

    def __init__(
        self, batch_size: int = -1, hidden_size: int = -1, intermediate_size: int = -1, heads: int = -1,
        attn_dropout_ratio: float = -1, hidden_dropout_ratio: float = -1, num_hidden_layers: int = -1,
        initializer_range: float = -1, layer_norm_eps: float = 1e-12, local_rank: int = -1, seed: int = -1, fp16: bool =
        False, pre_layer_norm: bool = True, normalize_invertible: bool = False, gelu_checkpoint: bool = False,
        adjust_init_range: bool = True, attn_dropout_checkpoint: bool = False, stochastic_mode: bool = False,
        return_tuple: bool = False, training: bool = True,
    ) -> None:  # fmt: skip
        self.layer_id = -1
        self.batch_size, self.hidden_size, self.heads = batch_size, hidden_size, heads
        self.intermediate_size = intermediate_size if intermediate_size > 0 else 4 * hidden_size
        self.attn_dropout_ratio, self.hidden_dropout_ratio = attn_dropout_ratio, hidden_dropout_ratio
        self.num_hidden_layers, self.initializer_range = num_hidden_layers, initializer_range
        self.layer_norm_eps, self.pre_layer_norm = layer_norm_eps, pre_layer_norm
        self.local_rank, self.seed, self.fp16, self.training = local_rank, seed, fp16, training
        self.normalize_invertible, self.gelu_checkpoint = normalize_invertible, gelu_checkpoint
        self.attn_dropout_checkpoint, self.adjust_init_range = attn_dropout_checkpoint, adjust_init_range
        self.stochastic_mode, self.return_tuple = stochastic_mode, return_tuple

    @classmethod
    def from_dict(cls, json_object: Mapping[str, Any]) -> DeepSpeedTransformerConfig:
        """Make one of a dict; unknown keys become attributes, as upstream's do."""
        config = cls()
        vars(config).update(json_object)
        return config

    @classmethod
    def from_json_file(cls, json_file: str) -> DeepSpeedTransformerConfig:
        """Make one of a JSON file in any of Unicode's encodings."""
        return cls.from_dict(json.loads(Path(json_file).read_bytes()))


class DeepSpeedTransformerLayer(nn.Module):
    """One layer: [batch, length, hidden] to the same.

    Args:
        config: Sizes and options; it gets the layer's number.
        initial_weights, initial_biases: Of queries, keys, values, the output of attention, its norm, the two projections, the last norm.
    Raises:
        ConfigError: sizes are missing or do not fit; a ValueError, too ("compat-argument").
    """

    layer_id: ClassVar[int] = 0
    attn_qkvw: nn.Parameter
    attn_qkvb: nn.Parameter
    attn_ow: nn.Parameter
    attn_ob: nn.Parameter
    inter_w: nn.Parameter
    inter_b: nn.Parameter
    output_w: nn.Parameter
    output_b: nn.Parameter

    def __init__(
        self,
        config: DeepSpeedTransformerConfig,
        initial_weights: Sequence[Tensor] | None = None,
        initial_biases: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        config.layer_id = DeepSpeedTransformerLayer.layer_id
        DeepSpeedTransformerLayer.layer_id += 1
        _check(config)
        hidden, inner = config.hidden_size, config.intermediate_size
        shapes = ((3 * hidden, hidden), (hidden, hidden), (hidden,), (inner, hidden), (hidden, inner), (hidden,))
        for part, shape in zip(_PARTS, shapes, strict=True):
            setattr(self, f"{part}w", nn.Parameter(torch.empty(shape)))
            setattr(self, f"{part}b", nn.Parameter(torch.empty(shape[0])))
        self.init_transformer_weights(config.adjust_init_range)
        for letter, values in (("w", initial_weights), ("b", initial_biases)):
            if values is not None:
                self._set(letter, values)

    def init_transformer_weights(self, adjust_init_range: bool = False) -> None:
        """Draw the weights; biases are zeros and norms ones."""
        config = self.config
        spread = max(config.initializer_range, 0.0)
        out = spread / math.sqrt(2.0 * config.num_hidden_layers) if adjust_init_range else spread
        with torch.no_grad():
            for part, std in zip(_PARTS, (spread, out, None, spread, out, None), strict=True):
                getattr(self, f"{part}b").zero_()
                weight: Tensor = getattr(self, f"{part}w")
                weight.fill_(1.0) if std is None else weight.normal_(0.0, std)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, head_mask: Any = None, layer_head_mask: Any =
        None, encoder_hidden_states: Any = None, encoder_attention_mask: Any = None, past_key_value: Any = None,
        output_attentions: bool = False, grads: Any = None,
    ) -> Any:  # fmt: skip
        """Compute the layer.

        Args:
            attention_mask: Added to the scores: floats that broadcast to [batch, heads, length, length].
        Raises:
            UnsupportedError: another argument, none of which upstream's kernel reads ("compat-argument").
        """
        others = {
            "head_mask": head_mask, "layer_head_mask": layer_head_mask, "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask, "past_key_value": past_key_value, "output_attentions":
            output_attentions or None, "grads": grads,
        }  # fmt: skip
        if given := [name for name, value in others.items() if value is not None]:
            raise refused("bert-arguments", ", ".join(given))
        attend = self._again(self._attend, self.config.attn_dropout_checkpoint)
        if self.config.pre_layer_norm:
            rest = hidden_states + attend(self._norm("norm_", hidden_states), attention_mask)
            out = rest + self._feed_forward(self._norm("attn_n", rest))
        else:
            rest = self._norm("attn_n", hidden_states + attend(hidden_states, attention_mask))
            out = self._norm("norm_", rest + self._feed_forward(rest))
        return (out,) if self.config.return_tuple else out

    def _attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, hidden = x.shape
        qkv = functional.linear(x, self.attn_qkvw, self.attn_qkvb).view(batch, length, 3, self.config.heads, -1)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        drop = max(self.config.attn_dropout_ratio, 0.0) if self.training else 0.0
        bias = None if mask is None else mask.to(q.dtype)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=drop)
        return self._dropped(
            functional.linear(mixed.transpose(1, 2).reshape(batch, length, hidden), self.attn_ow, self.attn_ob)
        )

    def _feed_forward(self, x: Tensor) -> Tensor:
        activate = self._again(_gelu, self.config.gelu_checkpoint)
        inner = activate(functional.linear(x, self.inter_w, self.inter_b))
        return self._dropped(functional.linear(inner, self.output_w, self.output_b))

    def _norm(self, part: str, x: Tensor) -> Tensor:
        weight, bias = getattr(self, f"{part}w"), getattr(self, f"{part}b")
        norm = self._again(functional.layer_norm, self.config.normalize_invertible)
        return norm(x, (self.config.hidden_size,), weight, bias, self.config.layer_norm_eps)

    def _dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, max(self.config.hidden_dropout_ratio, 0.0), self.training)

    def _again(self, function: Callable[..., Tensor], recomputed: bool) -> Callable[..., Tensor]:
        """Let a function be computed again in backward."""
        if not (recomputed and torch.is_grad_enabled()):
            return function
        return lambda *args: checkpoint(function, *args, use_reentrant=False)

    def _set(self, letter: str, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            qkv: Tensor = getattr(self, f"attn_qkv{letter}")
            qkv.copy_(torch.cat([value.detach() for value in values[:3]]))
            for part, value in zip(_PARTS[1:], values[3:], strict=True):
                getattr(self, f"{part}{letter}").copy_(value.detach())


_PARTS = ("attn_qkv", "attn_o", "attn_n", "inter_", "output_", "norm_")


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _check(config: DeepSpeedTransformerConfig) -> None:
    sizes = {name: getattr(config, name) for name in ("hidden_size", "heads", "intermediate_size")}
    if config.adjust_init_range:
        sizes["num_hidden_layers"] = config.num_hidden_layers
    if wrong := [f"{name} = {size}" for name, size in sizes.items() if size < 1]:
        raise refused("bert-sizes", ", ".join(wrong))
    if config.hidden_size % config.heads:
        raise refused("bert-heads", config.heads, config.hidden_size)


def revert_transformer_layer(
    orig_layer_impl: Callable[[Any], nn.Module], model: nn.Module, config: Any, preln: bool = False
) -> nn.Module:
    """Replace every `DeepSpeedTransformerLayer` in `model` by `orig_layer_impl(config)` with its weights; the model.

    Args:
        orig_layer_impl: A BERT layer of transformers, or one whose parts have the same names.
        preln: Its norms are `PreAttentionLayerNorm` and `PostAttentionLayerNorm`, its first projection `intermediate.dense_act`.
    """
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, DeepSpeedTransformerLayer):
                setattr(parent, name, _reverted(layer, orig_layer_impl(config), preln))
    return model


def _reverted(layer: DeepSpeedTransformerLayer, plain: nn.Module, preln: bool) -> nn.Module:
    norms = (
        ("PostAttentionLayerNorm", "PreAttentionLayerNorm")
        if preln
        else ("attention.output.LayerNorm", "output.LayerNorm")
    )
    homes = {
        "attn_o": "attention.output.dense", "attn_n": norms[0], "inter_": f"intermediate.dense{'_act' if preln else ''}",
        "output_": "output.dense", "norm_": norms[1],
    }  # fmt: skip
    pieces = [(f"attention.self.{name}", i) for i, name in enumerate(("query", "key", "value"))]
    with torch.no_grad():
        for letter, attribute in (("w", "weight"), ("b", "bias")):
            for home, i in pieces:
                _param(plain, home, attribute).copy_(getattr(layer, f"attn_qkv{letter}").chunk(3)[i])
            for part, home in homes.items():
                _param(plain, home, attribute).copy_(getattr(layer, f"{part}{letter}"))
    example = layer.attn_qkvw
    return plain.to(device=example.device, dtype=example.dtype).train(layer.training)


def _param(module: nn.Module, home: str, attribute: str) -> Tensor:
    found: Tensor = getattr(module.get_submodule(home), attribute)
    return found
