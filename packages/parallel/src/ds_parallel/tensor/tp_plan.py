"""The tensor-parallel plan: for every layer what becomes of it, who said so, and what each rank holds. Pure.

print(make_tensor_plan(facts_of(model), TensorOptions(degree=4)))
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ds_config.errors import PlanError, UnsupportedError
from ds_config.option_checks import check_options
from ds_parallel.tensor.dim_shards import DimShards, HeadUnit, ShardPart, cut_dim
from ds_parallel.tensor.half_plan import LayerCut, layers_in_halves
from ds_parallel.tensor.layer_rules import (
    TP_PLAN,
    ConfiguredLayerRule,
    LayerRule,
    ShardKind,
    first_match,
    rules_of_specs,
    rules_of_tp_plan,
)
from ds_parallel.tensor.module_info import (
    BLOCK_COUNTS,
    GROUP_SIZES,
    KEY_VALUE_COUNTS,
    AttentionInfo,
    LayerInfo,
    ModelFacts,
)
from ds_parallel.tensor.presets import preset_for, preset_named

__all__ = ["Decision", "TensorOptions", "TensorPlan", "make_tensor_plan"]

_HEADS = "lm_head_patterns"
_HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm")
_EXPERT_GRAIN = 8  # grouped matrix products need rows of whole 16 bytes


@dataclass(frozen=True, slots=True)
class TensorOptions:
    """What a user asks for.

    Attributes:
        degree: Tensor-parallel ranks.
        specs: The user's own rules; they come first.
        preset: A family's rules by name; None: by the model's type.
        defaults: Whether preset, the model's own plan and its structure are asked at all.
        heads: Names of last layers, cut by vocabulary if no rule matches them.
        rules: More rules, asked last: what an analysis of the model's structure found.
        grain: Elements that stay together where a dim is cut evenly.
        strict: A linear layer that no rule matches is an error.
        embeddings: What becomes of token embeddings that a rule would cut by vocabulary.
        experts: Whether packed experts are cut; False where expert parallelism cuts them by number.
        gather_logits: Whether the last layer's output is put together on every rank; without it the loss must be
            `vocab_parallel_cross_entropy`.
        late_gradients: Sums of gradients of column layers' inputs travel while gradients of weights are computed.
        half_batches: Layers run two half batches in turn, so that one computes while the other's sums travel; with late gradients.
    """

    degree: int
    specs: tuple[ConfiguredLayerRule, ...] = ()
    preset: str | None = None
    defaults: bool = True
    heads: tuple[str, ...] = ()
    rules: tuple[LayerRule, ...] = ()
    grain: int = 1
    strict: bool = False
    embeddings: ShardKind = ShardKind.VOCABULARY
    experts: bool = True
    gather_logits: bool = True
    late_gradients: bool = False
    half_batches: bool = False

    def __post_init__(self) -> None:
        check_options(self, degree=">= 1", grain=">= 1")


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one layer.

    Attributes:
        layer: What it is.
        kind: What becomes of it.
        cuts: By the names of its own parameters; those that are not named are whole on every rank.
        reason: Who said so, and why where it is not cut.
        attention: The attention it is part of, by name.
    """

    layer: LayerInfo
    kind: ShardKind
    cuts: Mapping[str, DimShards]
    reason: str
    gather_output: bool = False
    split_input: bool = False
    sum_gradient: bool = False
    attention: str | None = None

    @property
    def name(self) -> str:
        return self.layer.name


@dataclass(frozen=True, slots=True)
class Traffic:
    """Elements of activations that are summed over the tensor-parallel ranks for every token.

    Attributes:
        forward: By row layers, experts and embeddings.
        backward: Of the inputs of column layers.
    """

    forward: int
    backward: int


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Decisions in the model's order.

    Attributes:
        attributes: For each attention module that is cut, its own whole numbers: by name one value a rank.
        heads: For each of these, (query heads, key-value heads) of a rank as stretches.
        head_arguments: Names of their arguments that hold something for every head.
        late_gradients: See `TensorOptions`.
        halves: Names of the layers that run half batches in turn; none where that was not asked for.
    """

    degree: int
    decisions: tuple[Decision, ...]
    heads: Mapping[str, tuple[tuple[tuple[int, int], tuple[int, int]], ...]] = field(default_factory=dict)
    attributes: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    head_arguments: tuple[str, ...] = ()
    late_gradients: bool = False
    halves: tuple[str, ...] = ()

    @property
    def cut(self) -> tuple[Decision, ...]:
        """The layers that are cut."""
        return tuple(decision for decision in self.decisions if decision.kind is not ShardKind.SKIP)

    def numel(self, rank: int) -> tuple[int, int]:
        """Return (elements of listed layers on `rank`, elements of these layers in the unsplit model)."""
        local = total = 0
        for decision in self.decisions:
            for key, shape in decision.layer.shapes.items():
                count = 1
                for size in shape:
                    count *= size
                cut = decision.cuts.get(key)
                total += count
                local += count if cut is None else count // cut.size * cut.width(rank)
        return local, total

    def traffic(self) -> Traffic:
        """Return the elements that are all-reduced per token, in forward and in backward."""
        forward = backward = 0
        read: set[tuple[str, int]] = set()  # layers below one module that read one input sum its gradient once
        for decision in self.cut:
            if decision.kind is ShardKind.EXPERTS:
                hidden = decision.layer.shapes["down_proj"][3 - decision.cuts["down_proj"].dim]
                forward, backward = forward + hidden, backward + hidden
                continue
            whole, inner = decision.layer.features
            if decision.kind is ShardKind.ROW:
                forward += whole
            elif decision.kind is ShardKind.VOCABULARY:
                forward += inner
            elif decision.kind is ShardKind.COLUMN:
                fan = (decision.name.rpartition(".")[0], inner)
                backward += 0 if fan in read else inner
                read.add(fan)
        return Traffic(forward, backward)

    def __str__(self) -> str:
        rows: Counter[tuple[str, ...]] = Counter()
        for decision in self.decisions:
            if decision.layer.role in ("other", "cut") and not decision.sum_gradient:
                continue
            rows[(_starred(decision.name), decision.kind.value, _describe(decision), decision.reason)] += 1
        local, total = self.numel(0)
        lines = [f"tensor parallel over {self.degree}: rank 0 holds {local:,} of {total:,} elements"]
        table = [(f"{row[0]} (x{count})" if count > 1 else row[0], *row[1:]) for row, count in rows.items()]
        widths = [max((len(row[at]) for row in table), default=0) for at in range(3)]
        lines += ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in table]
        if self.halves:
            lines.append(f"{len(self.halves)} layers run two half batches in turn: {_starred(self.halves[0])}")
        return "\n".join(line.rstrip() for line in lines)


def make_tensor_plan(facts: ModelFacts, options: TensorOptions) -> TensorPlan:
    """Decide for every layer: the user's rules, then a preset, then the model's own plan, then `options.rules`, then its structure.

    Raises:
        UnsupportedError: a weight that a rule would cut is computed from others ("tensor-layer").
        PlanError: a layer is in no rule and `strict` is set ("tensor-unmatched"); nothing is cut ("tensor-nothing"); see
            `cut_dim`, `rules_of_tp_plan` and `layers_in_halves`.
    """
    rules = rules_of_specs(options.specs, facts.model_type)
    head_arguments: tuple[str, ...] = ()
    if options.defaults:
        preset = (
            preset_named(options.preset, facts.flags) if options.preset else preset_for(facts.model_type, facts.flags)
        )
        if preset is not None:
            rules += preset.rules
            head_arguments = preset.head_arguments
        elif facts.tp_plan:
            rules += rules_of_tp_plan(facts.tp_plan)
        rules += [
            LayerRule(rf"(?:.*\.)?{re.escape(name)}", ShardKind.COLUMN, _HEADS, (ShardPart(),), gather_output=True)
            for name in options.heads
        ]
        rules += [*options.rules, *facts.structure]
    decisions = _with_tied_heads(tuple(_decide(layer, rules, facts, options) for layer in facts.layers), facts)
    decisions = _with_head_norms(decisions, facts)
    _check(decisions, facts, options)
    named = dict.fromkeys(d.attention for d in decisions if d.cuts and d.attention)
    cut = [attention for name in named if (attention := facts.attentions[name]).stated]
    heads = {attention.name: attention.heads.stretches(options.degree) for attention in cut}
    attributes = {attention.name: _attributes(attention, options.degree) for attention in cut}
    in_halves = options.half_batches and options.degree > 1
    halves = layers_in_halves(LayerCut(d.name, d.kind) for d in decisions if d.cuts) if in_halves else ()
    late = options.degree > 1 and (options.late_gradients or options.half_batches)
    return TensorPlan(options.degree, decisions, heads, attributes, head_arguments, late, halves)


def _with_tied_heads(decisions: tuple[Decision, ...], facts: ModelFacts) -> tuple[Decision, ...]:
    """Leave output layers unsplit where the embedding tied to them is unsplit, unless the user's own rule cuts them."""
    whole = {f"{d.name}.weight": d.name for d in decisions if d.kind is ShardKind.SKIP}
    tied = {
        name: next((whole[other] for other in names if other in whole), None) for names in facts.tied for name in names
    }

    def decided(decision: Decision) -> Decision:
        other = tied.get(f"{decision.name}.weight") if decision.reason in (_HEADS, TP_PLAN) else None
        if other is None:
            return decision
        return Decision(decision.layer, ShardKind.SKIP, {}, f"{decision.reason}: tied to {other}, which stays whole")

    return tuple(map(decided, decisions))


def _with_head_norms(decisions: tuple[Decision, ...], facts: ModelFacts) -> tuple[Decision, ...]:
    """Sum the gradients of norms of each query or key that no rule names, where their attention is cut by heads.

    An eager forward finds them in its graph, with whatever else is trained there (`PartialGradients`); a compiled one has the plan only.
    """
    cut = {d.attention for d in decisions if d.cuts and d.attention}

    def decided(decision: Decision) -> Decision:
        attention = facts.attention_of(decision.name)
        if attention is None or attention.name not in cut or decision.reason != "no rule":
            return decision
        sizes = set(decision.layer.shapes.values())
        if decision.name.rpartition(".")[2] not in _HEAD_NORMS or sizes != {(attention.width,)}:
            return decision
        return replace(decision, reason="structure: a norm of each head", sum_gradient=True)

    return tuple(map(decided, decisions))


def _decide(layer: LayerInfo, rules: list[LayerRule], facts: ModelFacts, options: TensorOptions) -> Decision:
    rule = first_match(rules, layer.name)
    if rule is None:
        return Decision(layer, ShardKind.SKIP, {}, "no rule")
    kind = options.embeddings if rule.kind is ShardKind.VOCABULARY else rule.kind
    if kind is ShardKind.SKIP or options.degree == 1:
        return Decision(layer, ShardKind.SKIP, {}, rule.source, sum_gradient=rule.sum_gradient and options.degree > 1)
    if layer.role == "parametrized":
        raise UnsupportedError(
            f"{layer.name}.weight is computed from other parameters (weight_norm, spectral_norm), and {rule.source} would cut it",
            code="tensor-layer",
            fix="Remove the parametrization (torch.nn.utils.parametrize.remove_parametrizations) and put it back on the parts, or skip this layer.",
        )
    if kind is ShardKind.EXPERTS and not options.experts:
        return Decision(layer, ShardKind.SKIP, {}, f"{rule.source}: expert parallelism cuts them by number")
    roles = {
        "linear": (ShardKind.COLUMN, ShardKind.ROW),
        "embedding": (ShardKind.VOCABULARY, ShardKind.FEATURES),
        "experts": (ShardKind.EXPERTS,),
    }
    if kind not in roles.get(layer.role, ()):
        return Decision(layer, ShardKind.SKIP, {}, f"{rule.source}: a layer of this sort cannot be cut by {kind.value}")
    attention = facts.attention_of(layer.name)
    if rule.parts is None and (rule.gather_output or rule.split_input):
        attention = None  # every rank computes all heads
    try:
        cuts = _cuts(layer, kind, rule, attention, options)
    except PlanError as error:
        raise PlanError(f"{layer.name}: {error.message}", code=error.code, fix=error.fix) from None
    attention_name = attention.name if attention is not None and _by_heads(rule, layer, kind, attention) else None
    outside = not any(part.isdigit() for part in layer.name.split("."))  # of all blocks, as the last layer is
    gather = rule.gather_output and (options.gather_logits or kind is not ShardKind.COLUMN or not outside)
    gather |= kind is ShardKind.FEATURES and rule.parts is None  # its readers expect all of it
    return Decision(
        layer, kind, cuts, rule.source, gather_output=gather, split_input=rule.split_input, attention=attention_name
    )


def _cuts(
    layer: LayerInfo, kind: ShardKind, rule: LayerRule, attention: AttentionInfo | None, options: TensorOptions
) -> dict[str, DimShards]:
    def cut(size: int, dim: int, parts: tuple[ShardPart, ...]) -> DimShards:
        heads = attention.heads if attention is not None else None
        grain = max(options.grain, _EXPERT_GRAIN) if kind is ShardKind.EXPERTS else options.grain
        return cut_dim(size, dim, parts, options.degree, heads=heads, grain=grain)

    if kind is ShardKind.EXPERTS:
        return _expert_cuts(layer, cut)
    whole, inner = layer.features
    first, second = (1, 0) if layer.transposed else (0, 1)
    if kind is ShardKind.VOCABULARY:
        return {"weight": cut(whole, 0, (ShardPart(),))}
    if kind in (ShardKind.ROW, ShardKind.FEATURES):
        parts = rule.parts or _parts_by_size(inner, attention)
        return {"weight": cut(inner, second, parts)}
    parts = rule.parts or _parts_by_size(whole, attention)
    if attention is not None:
        _check_fused(whole, parts, attention)
    weight_cut = cut(whole, first, parts)
    return {"weight": weight_cut} | (
        {"bias": DimShards(0, weight_cut.size, weight_cut.parts)} if "bias" in layer.shapes else {}
    )


def _expert_cuts(layer: LayerInfo, cut: object) -> dict[str, DimShards]:
    gate_up, down = layer.shapes["gate_up_proj"], layer.shapes["down_proj"]
    extra = sorted(set(layer.shapes) - {"gate_up_proj", "down_proj"})
    first = next((dim for dim in (1, 2) if (gate_up[dim], gate_up[3 - dim]) == (2 * down[3 - dim], down[dim])), 0)
    if extra or not first:
        raise PlanError(
            f"packed experts with gate_up_proj {gate_up}, down_proj {down}"
            + (f" and {', '.join(extra)}" if extra else ""),
            code="tensor-parts",
            fix="Known are gate_up_proj [experts, 2 * inner, hidden] and down_proj [experts, hidden, inner], or both with their last two dims exchanged. Skip this layer.",
        )
    return {
        "gate_up_proj": cut(gate_up[first], first, (ShardPart(), ShardPart())),  # type: ignore[operator]
        "down_proj": cut(down[3 - first], 3 - first, (ShardPart(),)),  # type: ignore[operator]
    }


def _parts_by_size(size: int, attention: AttentionInfo | None) -> tuple[ShardPart, ...]:
    """Return the parts of a rule without parts: inside attention whole heads, by the size; elsewhere a single part."""
    if attention is None:
        return (ShardPart(),)
    query, keys, width = attention.heads.query, attention.heads.key_value, attention.width
    if query == keys or size == query * width:
        return (ShardPart(HeadUnit.QUERY),) if size % query == 0 else (ShardPart(),)
    if size == keys * width:
        return (ShardPart(HeadUnit.KEY_VALUE),)
    return (ShardPart(HeadUnit.GROUP),) if size % keys == 0 else (ShardPart(),)


def _check_fused(size: int, parts: tuple[ShardPart, ...], attention: AttentionInfo) -> None:
    """Queries, keys and values in one weight must be as wide together as the heads that the module says it has.

    A configuration may say a number of key-value heads that the layers were not made with; they would be cut in the wrong places.
    """
    query, keys, width = attention.heads.query, attention.heads.key_value, attention.width
    heads = {HeadUnit.QUERY: query, HeadUnit.KEY_VALUE: keys, HeadUnit.GROUP: query + 2 * keys}
    units = {part.unit for part in parts}
    fused = HeadUnit.GROUP in units or (len(parts) > 1 and HeadUnit.GRAIN not in units)
    expected = [heads.get(part.unit, 0) * width for part in parts]
    if width and fused and all(part.size is None for part in parts) and sum(expected) != size:
        raise PlanError(
            f"it is {size} wide, and {query} query heads with {keys} key-value heads of {width} are {' + '.join(map(str, expected))} = {sum(expected)}",
            code="tensor-parts",
            fix="Correct the number of key-value heads in the model's configuration, or give the sizes of the parts in partition_config.",
        )


def _by_heads(rule: LayerRule, layer: LayerInfo, kind: ShardKind, attention: AttentionInfo) -> bool:
    if kind is ShardKind.EXPERTS:
        return False
    size = layer.features[0 if kind is ShardKind.COLUMN else 1]
    return any(part.unit is not HeadUnit.GRAIN for part in rule.parts or _parts_by_size(size, attention))


def _attributes(attention: AttentionInfo, degree: int) -> dict[str, tuple[int, ...]]:
    """Compute the head counts and widths that an attention module stores as attributes, for each rank."""
    values: dict[str, tuple[int, ...]] = {}
    counts = [(q[1] - q[0], kv[1] - kv[0]) for q, kv in attention.heads.stretches(degree)]
    query, keys = attention.heads.query, attention.heads.key_value
    for key, value in attention.attributes.items():
        if key in GROUP_SIZES:
            values[key] = tuple(q // kv for q, kv in counts)
        elif key in BLOCK_COUNTS:
            if any(value * q % query for q, _ in counts):
                raise PlanError(
                    f"{attention.name}: {degree} tensor-parallel ranks would get parts of the {value} blocks that its queries and keys lie in ({key})",
                    code="tensor-heads",
                    fix=f"Use a number of tensor-parallel ranks that divides {value}.",
                )
            values[key] = tuple(value * q // query for q, _ in counts)
        elif key in KEY_VALUE_COUNTS and value == keys:
            values[key] = tuple(kv for _, kv in counts)
        elif value == query:
            values[key] = tuple(q for q, _ in counts)
        elif attention.width and value == query * attention.width:
            values[key] = tuple(q * attention.width for q, _ in counts)
    return values


def _check(decisions: tuple[Decision, ...], facts: ModelFacts, options: TensorOptions) -> None:
    unmatched = [d.name for d in decisions if d.reason == "no rule" and d.layer.role == "linear"]
    if options.strict and unmatched:
        names = list(dict.fromkeys(map(_starred, unmatched)))
        raise PlanError(
            f"no rule matches {len(unmatched)} linear layers: {', '.join(names)}",
            code="tensor-unmatched",
            fix="Add a layer spec for each (partition_type skip keeps a layer whole), or leave strict_mode off.",
        )
    linear = [decision for decision in decisions if decision.layer.role == "linear"]
    all_skipped = bool(linear) and not unmatched and all(decision.kind is ShardKind.SKIP for decision in linear)
    was_cut = any(decision.cuts or decision.layer.role == "cut" for decision in decisions)
    if options.degree > 1 and not all_skipped and not was_cut:
        known = f"a model of type {facts.model_type!r}" if facts.model_type else "a model of no known type"
        raise PlanError(
            f"no layer of {known} is cut: no preset and no plan of its own, and its layers are in no rule",
            code="tensor-nothing",
            fix="Describe its layers in tensor_parallel.partition_config, or name a preset_model.",
        )


def _starred(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?=\.|$)", "*", name)


def _describe(decision: Decision) -> str:
    cut = decision.cuts.get("weight") or decision.cuts.get("gate_up_proj")
    summary = "gradient summed" if decision.sum_gradient else ""
    if cut is None:
        return summary
    parts = []
    for part in cut.parts:
        widths = [stop - start for start, stop in part]
        text = f"{widths[0]}" if len(set(widths)) == 1 else "/".join(map(str, widths))
        parts.append(text + (" shared" if len(set(part)) < len(part) else ""))
    summary = f"{cut.size} -> " + " + ".join(parts)
    return (
        summary + (", gathered" if decision.gather_output else "") + (", input split" if decision.split_input else "")
    )
