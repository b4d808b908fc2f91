"""Make a compressed model final: values that are quantised, weights that are zero, layers that are smaller.

A row that is dropped leaves its layer, and the column that reads it leaves each related layer. The cleaned model equals the
masked one whatever is computed of each feature alone between them: related layers do not see dropped features from when the mask begins, and the
output of a related batch norm is masked with the layer's. `ds_compress.pruned_paths` refuses the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ds_compress.compress import compressed_layers, is_compressed
from ds_compress.config import CompressionConfig, compression_of
from ds_compress.layer_compression import LayerCompression, attach, detach
from ds_compress.layer_kinds import BatchNorms, Convolutions
from ds_compress.recipe import LayerRecipe
from ds_config.config_file import Source
from ds_config.errors import PlanError

__all__ = ["clean_layers", "redundancy_clean", "resize_to_state_dict"]

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads")


@dataclass(slots=True)
class _Cut:
    """What stays of a module: positions of rows and columns; None is all."""

    rows: Tensor | None = None
    columns: Tensor | None = None


@dataclass(slots=True)
class _Cuts:
    model: nn.Module
    cuts: dict[str, _Cut] = field(default_factory=dict)

    def rows(self, name: str, keep: Tensor) -> None:
        cut = self.cuts.setdefault(name, _Cut())
        if cut.rows is not None:
            raise _related(name, "loses rows for two layers")
        cut.rows = keep

    def columns(self, name: str, keep: Tensor, of: int) -> None:
        """`keep` of `of` features; a linear layer after a flattened convolution has several columns for each."""
        cut, module = self.cuts.setdefault(name, _Cut()), self.model.get_submodule(name)
        if cut.columns is not None:
            raise _related(name, "loses columns for two layers")
        weight: Any = module.weight
        if weight.dim() == 1:
            if weight.shape[0] != of:
                raise _related(name, f"has {weight.shape[0]} features, not {of}")
            cut.rows = keep
            return
        each, rest = divmod(weight.shape[1], of)
        if rest or (each > 1 and weight.dim() > 2) or getattr(module, "groups", 1) != 1:
            raise _related(name, f"has {weight.shape[1]} inputs, not {of}")
        cut.columns = (keep[:, None] * each + torch.arange(each, device=keep.device)).reshape(-1)


def _related(name: str, what: str) -> PlanError:
    return PlanError(
        f"{name} {what}",
        code="compress-related",
        fix="Name as related only layers that read the pruned one, each once.",
    )


def redundancy_clean(
    model: nn.Module, deepspeed_config: Source | CompressionConfig | None = None, mpu: Any = None
) -> nn.Module:
    """Make a compressed model final, as it is when all schedules are over. Changes it in place; returns it.

    Weights take the values that forward saw. What row, head and channel pruning dropped leaves the layer and its `related_modules`,
    together with sizes and head counts of modules and of the model's `config`; without related modules it becomes zero. Quantised
    inputs stay quantised: they are computed in forward.

    Args:
        model: Compressed, whole on this rank (after `engine.close()`, or not sharded).
        deepspeed_config: Not needed, the layers know; if given it is checked.
        mpu: Accepted for scripts that pass it.
    Raises:
        PlanError: the model is not compressed, or related layers do not fit; nothing was changed.
    """
    del mpu
    layers = list(compressed_layers(model))
    before = _heads(model, layers)
    clean_layers(model, deepspeed_config)
    _tell_heads(model, layers, before)
    return model


def clean_layers(model: nn.Module, deepspeed_config: Source | CompressionConfig | None = None) -> None:
    """Make the layers of a compressed model final, as `redundancy_clean` does, and leave what is said of head counts as it was.

    Raises:
        PlanError: as `redundancy_clean` raises it.
    """
    if deepspeed_config is not None:
        compression_of(deepspeed_config)
    if not is_compressed(model):
        raise PlanError(
            "the model is not compressed",
            code="compress-none",
            fix="Call init_compression, load the state, then clean.",
        )
    layers = list(compressed_layers(model))
    finals = {
        name: compression.final(_param(module, "weight"), _maybe(module, "bias"))
        for name, module, compression in layers
    }
    cuts = _Cuts(model)
    for name, module, compression in layers:
        _plan(name, module, compression, cuts)
    with torch.no_grad():
        for name, module, _ in layers:
            weight, bias = finals[name]
            _param(module, "weight").copy_(weight)
            if bias is not None:
                _param(module, "bias").copy_(bias)
        for name, cut in cuts.cuts.items():
            _shrink(model.get_submodule(name), cut)
    for _, module, compression in layers:
        _finish(module, compression)


def _param(module: nn.Module, name: str) -> nn.Parameter:
    return module.get_parameter(name)


def _maybe(module: nn.Module, name: str) -> nn.Parameter | None:
    return module._parameters.get(name)


def _plan(name: str, module: nn.Module, compression: LayerCompression, cuts: _Cuts) -> None:
    weight, recipe = _param(module, "weight"), compression.recipe
    for kind, pruned in (("row", recipe.rows), ("channel", recipe.channels)):
        if pruned is not None and pruned.related:
            mask = compression.mask(kind, weight).reshape(-1).bool()
            keep = mask.nonzero().reshape(-1)
            cuts.rows(name, keep)
            for other in pruned.related:
                cuts.columns(other, keep, mask.numel())
    if recipe.heads is not None and recipe.heads.related:
        mask = compression.mask("head", weight).reshape(-1).bool()
        keep = mask.nonzero().reshape(-1)
        cuts.columns(name, keep, mask.numel())
        for other in recipe.heads.related:
            rows: Any = cuts.model.get_submodule(other).weight
            size, rest = divmod(rows.shape[0], mask.numel())
            if rest or rows.shape[0] != weight.shape[1]:
                raise _related(
                    other, f"has {rows.shape[0]} rows; {name} reads {weight.shape[1]}, in {mask.numel()} heads"
                )
            cuts.rows(other, (keep[:, None] * size + torch.arange(size, device=keep.device)).reshape(-1))


def _shrink(module: nn.Module, cut: _Cut) -> None:
    changes: Mapping[str, Tensor | None] = {"weight": cut.rows, "bias": cut.rows}
    for name, rows in changes.items():
        old = _maybe(module, name)
        if old is None:
            continue
        value = old.detach()
        value = value if rows is None else value[rows]
        if cut.columns is not None and value.dim() > 1:
            value = value[:, cut.columns]
        module.register_parameter(name, nn.Parameter(value.clone(), requires_grad=old.requires_grad))
    if isinstance(module, BatchNorms) and cut.rows is not None:
        for name in ("running_mean", "running_var"):
            buffer = getattr(module, name)
            if buffer is not None:
                module.register_buffer(name, buffer[cut.rows].clone())
    _resize(module)


def _resize(module: Any) -> None:
    """Make a module's own numbers those of its weight."""
    shape = module.weight.shape
    if isinstance(module, BatchNorms):
        module.num_features = shape[0]
    elif isinstance(module, Convolutions):
        module.out_channels, module.in_channels = shape[0], shape[1] * module.groups
    else:
        module.out_features, module.in_features = shape[0], shape[1]


def _finish(module: nn.Module, compression: LayerCompression) -> None:
    """Detach the compression of a layer, and attach a new compression for quantized inputs if the layer has any."""
    inputs, buffers = compression.recipe.inputs, dict(compression.named_buffers())
    steps, group, layer = compression.steps, compression.group, compression.recipe.layer
    detach(module)
    if inputs is None:
        return
    left = attach(module, LayerRecipe(layer, inputs=inputs))
    left.group = group
    left.at(max(steps, inputs.offset))
    if inputs.static:
        left.input_range.copy_(buffers["input_range"])


# ---- heads


def _heads(model: nn.Module, layers: list[tuple[str, nn.Module, LayerCompression]]) -> dict[str, tuple[int, int]]:
    """Return (heads, rows) of each related projection, before the layers shrink."""
    sizes = {}
    for _, _, compression in layers:
        heads = compression.recipe.heads
        for other in heads.related if heads is not None else ():
            weight: Any = model.get_submodule(other).weight
            sizes[other] = (heads.heads if heads is not None else 0, int(weight.shape[0]))
    return sizes


def _tell_heads(
    model: nn.Module, compressed: list[tuple[str, nn.Module, LayerCompression]], before: Mapping[str, tuple[int, int]]
) -> None:
    counts = set()
    for other, (heads, rows) in before.items():
        parent: Any = model.get_submodule(other.rpartition(".")[0])
        left = _param(model.get_submodule(other), "weight").shape[0]
        count = left * heads // rows
        counts.add(count)
        _renumber(parent, {heads: count}, {rows: left})
    config: Any = getattr(model, "config", None)
    if config is None or len(counts) != 1 or not before:
        return
    # Only where all layers have lost as many: a config has one number.
    pruned = sum(
        compression.recipe.heads is not None and bool(compression.recipe.heads.related)
        for _, _, compression in compressed
    )
    layers = getattr(config, "num_hidden_layers", getattr(config, "n_layer", None))
    if layers is None or pruned == layers:
        heads, rows = next(iter(before.values()))
        if hasattr(config, "head_dim"):
            config.head_dim = config.head_dim or rows // heads
        _renumber(config, {heads: counts.pop()}, {})


def _renumber(owner: Any, heads: Mapping[int, int], sizes: Mapping[int, int]) -> None:
    for name in _HEADS:
        if getattr(owner, name, None) in heads:
            setattr(owner, name, heads[getattr(owner, name)])
    for name in ("all_head_size", "inner_dim", "embed_dim"):
        if getattr(owner, name, None) in sizes:
            setattr(owner, name, sizes[getattr(owner, name)])


def resize_to_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Give the layers of a new model the sizes that they have in the state dict of a cleaned one. Values are not loaded.

    So that `resize_to_state_dict(model, state).load_state_dict(state)` works for models whose configuration cannot say the sizes: each layer has its
    own, or the head size follows from others. Head counts of attention modules follow their query projection.
    """
    for name, module in model.named_modules():
        weight, target = getattr(module, "weight", None), state.get(f"{name}.weight")
        if not isinstance(weight, nn.Parameter) or target is None or weight.shape == target.shape:
            continue
        parent: Any = model.get_submodule(name.rpartition(".")[0])
        old = weight.shape[0]
        for leaf in ("weight", "bias"):
            if _maybe(module, leaf) is not None:
                size = state[f"{name}.{leaf}"].shape
                module.register_parameter(leaf, nn.Parameter(weight.detach().new_empty(size)))
        if isinstance(module, BatchNorms):
            for leaf in ("running_mean", "running_var"):
                if getattr(module, leaf) is not None:
                    module.register_buffer(leaf, getattr(module, leaf).new_zeros(target.shape))
        _resize(module)
        if target.shape[0] != old:
            counts = {n: getattr(parent, n) for n in _HEADS if isinstance(getattr(parent, n, None), int)}
            for heads in set(counts.values()):
                if name.rpartition(".")[2] in ("q", "query", "q_proj", "q_lin", "wq") and not old % heads:
                    _renumber(parent, {heads: target.shape[0] * heads // old}, {old: target.shape[0]})
    return model
