"""What a plan needs to know of a model: names, sizes, heads. Read once from the modules; no weight is touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ds_parallel.heads import HeadCounts
from ds_parallel.tensor.layer_rules import LayerRule
from ds_parallel.tensor.presets import Scalar, preset_for
from ds_parallel.tensor.sharded_linear import ShardedLinear
from ds_parallel.tensor.structure import rules_of_structure

__all__ = ["AttentionInfo", "LayerInfo", "ModelFacts", "facts_of"]

QUERY_COUNTS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "num_attention_heads_per_partition",
    "encoder_attention_heads",
)
KEY_VALUE_COUNTS = (
    "num_key_value_heads",
    "num_kv_heads",
    "num_multi_query_groups_per_partition",
    "multi_query_group_num",
)
GROUP_SIZES = ("num_key_value_groups",)
BLOCK_COUNTS = ("mp_num",)
"""Of how many blocks, each with queries, values and keys of its own, a fused projection is made (CodeGen)."""
WIDTHS = ("split_size", "inner_dim", "all_head_size", "embed_dim", "hidden_size", "projection_size")
_HEAD_WIDTHS = (
    "head_dim",
    "attention_head_size",
    "key_value_proj_dim",
    "head_size",
    "hidden_size_per_attention_head",
    "qk_head_dim",
)
_FOLLOWED = frozenset((*QUERY_COUNTS, *KEY_VALUE_COUNTS, *GROUP_SIZES, *WIDTHS, *_HEAD_WIDTHS))
_QUERIES, _KEYS = ("q_proj", "query", "q"), ("k_proj", "key", "k")


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """A module that a plan may cut.

    Attributes:
        name: Qualified.
        role: `linear`, `embedding`, `experts`; `cut` for a `ShardedLinear`; `parametrized` for a linear layer or embedding whose weight
            is computed from other parameters; `other` for one with parameters of its own that is none of these.
        shapes: Of its own parameters.
        transposed: A linear layer whose weight is [in, out].
    """

    name: str
    role: str
    shapes: Mapping[str, tuple[int, ...]]
    transposed: bool = False

    @property
    def features(self) -> tuple[int, int]:
        """(output, input) of a linear layer; (rows, columns) of an embedding."""
        first, second = self.shapes["weight"]
        return (second, first) if self.transposed else (first, second)


@dataclass(frozen=True, slots=True)
class AttentionInfo:
    """An attention module.

    Attributes:
        name: Qualified.
        heads: How many.
        width: Elements of one head; 0 where the module does not say.
        attributes: Its own whole numbers that follow from the number of heads.
        stated: Whether the module has numbers of heads itself; else they are those of a configuration, and what its forward does with
            them is not known: layers are cut between whole heads, nothing follows.
    """

    name: str
    heads: HeadCounts
    width: int
    attributes: Mapping[str, int]
    stated: bool = True


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model, as far as cutting it goes.

    Attributes:
        model_type: transformers' name of its family; None for other models.
        flags: Plain values of its configuration.
        layers: In the model's order.
        attentions: By qualified name.
        tp_plan: The model's own plan, names as the plan has them.
        tied: Groups of parameter names that are one parameter.
        attention: transformers' name of the attention function that the model uses.
        structure: Rules from what a trace of its blocks says; only asked of models without a preset and a plan of their own.
        shares_sequences: A module says that it exchanges over the ranks of a sequence.
    """

    model_type: str | None
    flags: Mapping[str, Scalar]
    layers: tuple[LayerInfo, ...]
    attentions: Mapping[str, AttentionInfo]
    tp_plan: Mapping[str, str]
    tied: tuple[tuple[str, ...], ...] = ()
    attention: str | None = None
    shares_sequences: bool = False
    structure: tuple[LayerRule, ...] = ()

    def attention_of(self, name: str) -> AttentionInfo | None:
        """Return the attention that layer `name` is part of; None if there is none.

        This is an ancestor, or the only attention inside an ancestor whose name contains `att`.
        """
        parts = name.split(".")
        for depth in range(len(parts) - 1, 0, -1):
            above = ".".join(parts[:depth])
            if above in self.attentions:
                return self.attentions[above]
            inside = [a for a in self.attentions if a.startswith(f"{above}.")]
            if "att" in parts[depth - 1].lower() and len(inside) == 1:
                return self.attentions[inside[0]]
        return None


def facts_of(model: nn.Module, *, structure: bool = True) -> ModelFacts:
    """Read a model. Parameters may be on the meta device.

    Args:
        structure: Whether to trace a model without a description for its rules. Only a tensor-parallel plan asks for them.
    """
    config = getattr(model, "config", None)
    plain = config.to_dict() if config is not None and hasattr(config, "to_dict") else {}
    flags = {key: value for key, value in plain.items() if isinstance(value, str | int | float | bool | None)}
    places: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(param), []).append(name)
    attentions = {attention.name: attention for attention in _attentions(model)}
    tp_plan, kind = dict(_own_plan(model)), getattr(config, "model_type", None)
    described = bool(tp_plan) or preset_for(kind, flags) is not None
    counts = {a.name: (a.heads.query, a.heads.key_value, a.width) for a in attentions.values() if a.stated}
    return ModelFacts(
        kind,
        flags,
        tuple(_layers(model)),
        attentions,
        tp_plan,
        tuple(tuple(names) for names in places.values() if len(names) > 1),
        getattr(config, "_attn_implementation", None),
        any(getattr(module, "shares_sequences", False) is True for module in model.modules()),
        () if described or not structure else tuple(rules_of_structure(model, counts, _FOLLOWED)),
    )


def _layers(model: nn.Module) -> Iterator[LayerInfo]:
    for name, module in model.named_modules(remove_duplicate=False):
        shapes = {key: tuple(p.shape) for key, p in module.named_parameters(recurse=False, remove_duplicate=False)}
        if not shapes or not name:
            continue
        kind = type(module).__name__
        if isinstance(module, nn.Embedding | nn.Linear) and "weight" not in shapes:
            yield LayerInfo(name, "parametrized", shapes)
        elif isinstance(module, nn.Embedding):
            yield LayerInfo(name, "embedding", shapes)
        elif isinstance(module, nn.Linear):
            yield LayerInfo(name, "linear", shapes)
        elif kind == "Conv1D" and len(shapes.get("weight", ())) == 2:  # transformers' own linear layer, [in, out]
            yield LayerInfo(name, "linear", shapes, transposed=True)
        elif len(shapes.get("gate_up_proj", ())) == len(shapes.get("down_proj", ())) == 3:
            yield LayerInfo(name, "experts", shapes)
        elif isinstance(module, ShardedLinear):
            yield LayerInfo(name, "cut", shapes)
        else:
            yield LayerInfo(name, "other", shapes)


def _attentions(model: nn.Module) -> Iterator[AttentionInfo]:
    of_model = getattr(model, "config", None)
    for name, module in model.named_modules(remove_duplicate=False):
        numbers = {key: value for key, value in vars(module).items() if type(value) is int}
        sizes = {key: child.out_features for key, child in module.named_children() if isinstance(child, nn.Linear)}
        config = getattr(module, "config", None)
        width = next((numbers[key] for key in _HEAD_WIDTHS if key in numbers), 0)
        stated = width > 0
        if not stated and not _first(numbers, QUERY_COUNTS) and "att" in name.rpartition(".")[2].lower():
            config = of_model if config is None else config
            width = _head_width(sizes, _first(config, QUERY_COUNTS))
        if not width or not any(True for _ in module.children()):
            continue
        query = _first(numbers, QUERY_COUNTS) or _wide(sizes, _QUERIES, width) or _first(config, QUERY_COUNTS)
        if not query:
            continue
        groups = _first(numbers, GROUP_SIZES)
        keys = (
            (query // groups if groups else 0)
            or _first(numbers, KEY_VALUE_COUNTS)
            or _wide(sizes, _KEYS, width)
            or _first(config, KEY_VALUE_COUNTS)
            or query
        )
        if query % keys == 0:
            follow = (*QUERY_COUNTS, *KEY_VALUE_COUNTS, *GROUP_SIZES, *BLOCK_COUNTS, *WIDTHS)
            attributes = {key: value for key, value in numbers.items() if key in follow}
            yield AttentionInfo(name, HeadCounts(query, keys), width, attributes if stated else {}, stated)


def _first(values: Any, names: tuple[str, ...]) -> int:
    for key in names:
        value = values.get(key) if isinstance(values, dict) else getattr(values, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return 0


def _wide(sizes: Mapping[str, int], names: tuple[str, ...], width: int) -> int:
    return next((sizes[key] // width for key in names if key in sizes and sizes[key] % width == 0), 0)


def _head_width(sizes: Mapping[str, int], heads: int) -> int:
    """Elements of a head where layers of their own make queries and keys; 0 where they do not divide into as many heads."""
    queries = next((sizes[key] for key in _QUERIES if key in sizes), 0)
    keys = next((sizes[key] for key in _KEYS if key in sizes), 0)
    width = queries // heads if heads else 0
    return width if width and queries == width * heads and keys and keys % width == 0 else 0


def _own_plan(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the tp_plan of the model's classes and configurations, each prefixed with its module's name."""
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        below = f"{name}." if name else ""
        class_plan = type(module).__dict__.get("_tp_plan") if hasattr(module, "base_model_prefix") else None
        for key, style in (class_plan or {}).items():
            yield f"{below}{key}", style
        of_library = hasattr(module, "base_model_prefix")  # others say it of themselves at the top, and nowhere else
        is_base = getattr(module, "base_model", None) is module if of_library else not name
        if is_base:
            for key, style in (getattr(config, "base_model_tp_plan", None) or {}).items():
                yield f"{below}{key}", style
