"""Which layer gets which technique: decided from names and shapes, before anything is changed. No tensor.

Words: a *layer* is a module with a weight of two and more dims that can be compressed; a *recipe* says for each such layer what is
done to it. A group's `modules` are patterns; the n-th layer that a pattern finds and the n-th that its related patterns find belong
together.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal

from ds_compress.config import CompressionConfig, SparseShared
from ds_compress.layer_groups import LayerGroup
from ds_compress.quantizers import QuantGrid, Symmetry, grid_of
from ds_config.errors import PlanError

__all__ = [
    "CompressibleLayer",
    "CompressionRecipe",
    "InputQuantization",
    "Kind",
    "LayerRecipe",
    "Pruned",
    "SparsePruning",
    "Weights",
    "found_by",
    "make_recipe",
]

_log = logging.getLogger("ds_compress")
Kind = Literal["linear", "conv", "embedding", "norm"]


@dataclass(frozen=True, slots=True)
class CompressibleLayer:
    """A module that can be compressed, or shrinks with one.

    Attributes:
        name: In the model.
        kind: `norm` is only shrunk.
        shape: Of its weight: [out, in, ...], [rows, dim] of an embedding, [features] of a norm.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weights:
    """Quantised weights. `mixed` is what the share of the whole weight loses each step; None: it has none from the start."""

    start: int
    target: int
    period: int
    offset: int
    groups: int = 1
    symmetry: Symmetry = "symmetric"
    stochastic: bool = False
    mixed: float | None = None
    verbose: bool = False


@dataclass(frozen=True, slots=True)
class InputQuantization:
    """Quantised inputs. `static`: one running range; otherwise one for each token."""

    bits: int
    offset: int
    symmetry: Symmetry = "symmetric"
    static: bool = False


@dataclass(frozen=True, slots=True)
class SparsePruning:
    """Single weights, or blocks of them, that are dropped. `end`, `stride` and `block` are of snip_momentum."""

    method: Literal["l1", "topk", "snip_momentum", "2:4"]
    ratio: float
    offset: int
    end: int = 0
    stride: int = 1
    block: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True)
class Pruned:
    """Rows, heads or channels that are dropped. `heads` of an attention layer; `related` shrink with it."""

    method: Literal["l1", "topk"]
    ratio: float
    offset: int
    heads: int = 0
    related: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """What is done to one layer."""

    layer: CompressibleLayer
    weights: Weights | None = None
    inputs: InputQuantization | None = None
    sparse: SparsePruning | None = None
    rows: Pruned | None = None
    heads: Pruned | None = None
    channels: Pruned | None = None


@dataclass(frozen=True, slots=True)
class CompressionRecipe:
    """What is done to all of them, by name."""

    layers: Mapping[str, LayerRecipe] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """Count the layers of each technique."""
        names = [f.name for f in fields(LayerRecipe) if f.name != "layer"]
        return {
            name: count for name in names if (count := sum(getattr(r, name) is not None for r in self.layers.values()))
        }


def found_by(pattern: str, names: Iterable[str]) -> list[str]:
    """Names that a pattern of the configuration finds: all for "*", else those that the expression is found in."""
    return [name for name in names if pattern == "*" or re.search(pattern, name) is not None]


def make_recipe(config: CompressionConfig, layers: Sequence[CompressibleLayer]) -> CompressionRecipe:
    """Decide what is done to each of `layers`.

    Raises:
        PlanError: a pattern finds nothing ("compress-no-module"), one technique has two groups for a layer ("compress-twice"), related
            layers do not pair ("compress-related"), groups, heads or blocks do not divide a weight ("compress-groups").
    """
    making = _Making({layer.name: LayerRecipe(layer) for layer in layers})
    weights = config.weight_quantization
    if weights.enabled:
        shared = weights.shared_parameters
        mixed = shared.fp16_mixed_quantize
        for group_name, group in weights.different_groups.items():
            quantization = Weights(
                group.params.start_bits,
                group.params.target_bits,
                group.params.quantization_period,
                shared.schedule_offset,
                shared.quantize_groups,
                shared.quantization_type,
                shared.rounding == "stochastic",
                mixed.quantize_change_ratio if mixed.enabled else None,
                shared.quantize_verbose,
            )
            place = f"weight_quantization.different_groups.{group_name}"
            making.put("weights", place, group, ("linear", "conv", "embedding"), partial(_weights, quantization))
    inputs = config.activation_quantization
    if inputs.enabled:
        input_options = inputs.shared_parameters
        for group_name, activations in inputs.different_groups.items():
            what = InputQuantization(
                activations.params.bits,
                input_options.schedule_offset,
                input_options.quantization_type,
                input_options.range_calibration == "static",
            )
            place = f"activation_quantization.different_groups.{group_name}"
            making.put("inputs", place, activations, ("linear", "conv"), partial(_as_it_is, what))
    if config.sparse_pruning.enabled:
        _sparse(config, making)
    for name, section, kinds in (
        ("rows", config.row_pruning, ("linear",)),
        ("heads", config.head_pruning, ("linear",)),
        ("channels", config.channel_pruning, ("conv",)),
    ):
        if not section.enabled:
            continue
        common = section.shared_parameters
        heads = getattr(common, "num_heads", None) or 0
        for group_name, pruning in section.different_groups.items():
            pruned = Pruned(common.method, pruning.params.dense_ratio, common.schedule_offset, heads)
            place = f"{'row' if name == 'rows' else name.removesuffix('s')}_pruning.different_groups.{group_name}"
            making.put(name, place, pruning, kinds, partial(_pruned, pruned))
    used = {name: r for name, r in making.recipes.items() if r != LayerRecipe(r.layer)}
    return CompressionRecipe(used)


@dataclass(slots=True)
class _Making:
    recipes: dict[str, LayerRecipe]

    def put(
        self,
        technique: str,
        place: str,
        group: LayerGroup,
        kinds: tuple[str, ...],
        make: Callable[[CompressibleLayer, tuple[str, ...]], Any],
    ) -> None:
        able = [name for name, recipe in self.recipes.items() if recipe.layer.kind in kinds]
        related_rows = group.related_modules or ((),) * len(group.modules)
        for pattern, related in zip(group.modules, related_rows, strict=True):
            names = found_by(pattern, able)
            if not names:
                raise PlanError(
                    f"compression_training.{place}: {pattern!r} finds no layer of {len(able)} that can be compressed so "
                    f"({', '.join(able[:3])}{', ...' if len(able) > 3 else ''})",
                    code="compress-no-module",
                    fix="Use names of the model's layers; GPT-2's Conv1D must be converted by convert_conv1d_to_linear first.",
                )
            if related and technique in ("weights", "inputs", "sparse"):
                _log.warning(
                    "compression_training.%s.related_modules has no effect: no layer shrinks by this technique", place
                )
            found = {one: found_by(one, self.recipes) for one in related}
            absent = [one for one, row in found.items() if not row]
            if absent:  # one configuration serves models with norms and without
                _log.warning("compression_training.%s: related %s find no layer of this model", place, absent)
            others = [row for row in found.values() if row]
            for one, row in found.items():
                if len(row) not in (0, len(names)):
                    raise PlanError(
                        f"compression_training.{place}: {pattern!r} finds {len(names)} layers, its related {one!r} {len(row)}",
                        code="compress-related",
                        fix="Related patterns find one layer for each layer of modules, in the same order.",
                    )
            for number, name in enumerate(names):
                recipe = self.recipes[name]
                if getattr(recipe, technique) is not None:
                    raise PlanError(
                        f"compression_training.{place}: {pattern!r} finds {name}, which another pattern found",
                        code="compress-twice",
                        fix="Make the patterns of a technique find different layers.",
                    )
                settings = make(recipe.layer, tuple(row[number] for row in others))
                self.recipes[name] = replace(recipe, **{technique: settings})


def _as_it_is(what: Any, layer: CompressibleLayer, related: tuple[str, ...]) -> Any:
    del layer, related
    return what


def _weights(weights: Weights, layer: CompressibleLayer, related: tuple[str, ...]) -> Weights:
    del related
    groups = layer.shape[0] if layer.kind == "embedding" else weights.groups
    numel = 1
    for size in layer.shape:
        numel *= size
    grid_of(numel, QuantGrid(weights.target, groups, weights.symmetry), f"{layer.name}.weight {list(layer.shape)}")
    return replace(weights, groups=groups)


def _sparse(config: CompressionConfig, making: _Making) -> None:
    shared: SparseShared = config.sparse_pruning.shared_parameters
    end = shared.schedule_offset if shared.schedule_offset_end is None else shared.schedule_offset_end
    for group_name, group in config.sparse_pruning.different_groups.items():
        place = f"sparse_pruning.different_groups.{group_name}"
        settings = SparsePruning(
            shared.method,
            group.params.dense_ratio,
            shared.schedule_offset,
            end,
            shared.schedule_offset_stride,
            shared.block,
        )
        making.put("sparse", place, group, ("linear", "conv"), partial(_sparse_layer, settings))
    if shared.method == "snip_momentum":
        rest = SparsePruning(
            shared.method, shared.dense_ratio, shared.schedule_offset, end, shared.schedule_offset_stride, shared.block
        )
        for name, recipe in making.recipes.items():
            if (
                recipe.sparse is None
                and recipe.layer.kind in ("linear", "conv")
                and not config.sparse_pruning.different_groups
            ):
                making.recipes[name] = replace(recipe, sparse=rest)
    left_out = {name for pattern in shared.excluded_modules for name in found_by(pattern, making.recipes)}
    for name in left_out:
        making.recipes[name] = replace(making.recipes[name], sparse=None)


def _sparse_layer(sparse: SparsePruning, layer: CompressibleLayer, related: tuple[str, ...]) -> SparsePruning:
    del related
    if sparse.method == "2:4" and layer.shape[1] % 4:
        raise PlanError(
            f"{layer.name} has {layer.shape[1]} inputs, of which sparse_pruning.method 2:4 keeps two of every four",
            code="compress-groups",
            fix="Leave it out by its name, or use method l1.",
        )
    return sparse


def _pruned(pruned: Pruned, layer: CompressibleLayer, related: tuple[str, ...]) -> Pruned:
    if pruned.heads and layer.shape[1] % pruned.heads:
        raise PlanError(
            f"{layer.name} has {layer.shape[1]} inputs, head_pruning.num_heads is {pruned.heads}",
            code="compress-groups",
            fix="Name the output projections of attention, whose inputs are heads side by side, and the model's number of heads.",
        )
    return replace(pruned, related=related)
