"""Rules: which layer is cut how, by the names of modules. Pure; the first rule that matches a name counts.

A rule is what a user's `partition_config`, a preset of a model family, and a model's own `tp_plan` are all read into. What a
rule leaves open (parts of a dim that are heads or even) is worked out when the plan is made, where the model's sizes are known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ds_config.errors import PlanError
from ds_parallel.tensor.dim_shards import ShardPart

__all__ = [
    "PLAN_STYLES",
    "ConfiguredLayerRule",
    "LayerRule",
    "ShardKind",
    "first_match",
    "rules_of_specs",
    "rules_of_tp_plan",
]


class ShardKind(Enum):
    """What becomes of a layer."""

    COLUMN = "column"  # output features are cut; the input is whole
    ROW = "row"  # input features are cut; results are summed
    VOCABULARY = "vocabulary"  # an embedding's rows are cut; results are summed
    FEATURES = "features"  # an embedding's columns are cut; what reads it is cut alike
    EXPERTS = "experts"  # packed experts: the inner size of each is cut; results are summed
    SKIP = "skip"  # every rank holds and computes all of it


@dataclass(frozen=True, slots=True)
class LayerRule:
    """One layer rule.

    Attributes:
        pattern: Regular expression that a whole qualified module name must match.
        kind: What becomes of it.
        source: Who said so: `partition_config`, `preset llama`, `tp_plan`, `structure`.
        parts: Of the dim that is cut; None: heads where sizes say so inside attention, else even.
        gather_output: A column layer's whole output is put together on every rank.
        split_input: A row layer is given its whole input, and takes its part of it.
        sum_gradient: A layer that is not cut sees a part of the activations only: its gradients are summed over the ranks.
    """

    pattern: str
    kind: ShardKind
    source: str
    parts: tuple[ShardPart, ...] | None = None
    gather_output: bool = False
    split_input: bool = False
    sum_gradient: bool = False

    def matches(self, name: str) -> bool:
        return re.fullmatch(self.pattern, name) is not None


def first_match(rules: Iterable[LayerRule], name: str) -> LayerRule | None:
    """Return the first rule that matches `name`; None if no rule matches."""
    return next((rule for rule in rules if rule.matches(name)), None)


class ConfiguredLayerRule(Protocol):
    """One entry of `partition_config.layer_specs`, as the configuration holds it."""

    @property
    def patterns(self) -> tuple[str, ...]: ...
    @property
    def partition_type(self) -> str: ...
    @property
    def shape(self) -> tuple[int | tuple[int, ...], ...] | None: ...
    @property
    def partition_dim(self) -> int | None: ...
    @property
    def model_types(self) -> tuple[str, ...] | None: ...
    @property
    def gather_output(self) -> bool: ...
    @property
    def grad_allreduce(self) -> bool: ...


def rules_of_specs(specs: Iterable[ConfiguredLayerRule], model_type: str | None) -> list[LayerRule]:
    """Build the rules of `partition_config.layer_specs`.

    Patterns are matched from the start of a parameter's path, `.weight` included.

    Raises:
        PlanError: a shape or a dim is not valid ("tensor-parts").
    """
    rules = []
    for spec in specs:
        if spec.model_types is not None and model_type not in spec.model_types:
            continue
        kind = ShardKind(spec.partition_type)
        if spec.grad_allreduce and kind is not ShardKind.SKIP:
            raise PlanError(
                f"partition_config: {list(spec.patterns)} are {kind.value} layers with grad_allreduce",
                code="tensor-parts",
                fix="grad_allreduce is for layers that are skipped; those that are cut sum what needs to be.",
            )
        parts = None if spec.shape is None or kind is ShardKind.SKIP else _parts_of_shape(spec, kind)
        for pattern in spec.patterns:
            rules.append(
                LayerRule(
                    _module_pattern(pattern),
                    kind,
                    "partition_config",
                    parts,
                    gather_output=spec.gather_output,
                    sum_gradient=spec.grad_allreduce,
                )
            )
    return rules


def _module_pattern(pattern: str) -> str:
    """Convert a pattern over parameter paths into a pattern over module names.

    Matched from the start, followed by anything. Users end patterns in an escaped `.weight` and `$`; a module's name
    has no `.weight`, so the pattern is used without that end.
    """
    stem = re.sub(r"(\\?\.)(weight|bias|\(weight\|bias\)|\(\?:weight\|bias\))\$?$", "", pattern)
    return f"(?:{stem})" if stem != pattern else f"(?:{pattern}).*" if not pattern.endswith("$") else f"(?:{pattern})"


def _parts_of_shape(spec: ConfiguredLayerRule, kind: ShardKind) -> tuple[ShardPart, ...]:
    """Convert a shape into parts.

    `[3, -1]`: three equal parts; `[[q, k, v], -1]`: parts of these sizes; `[-1, n]` and plain sizes: a single part.
    """
    shape = spec.shape or ()
    dim = spec.partition_dim if spec.partition_dim is not None else (0 if kind is ShardKind.COLUMN else 1)
    nested = [at for at, entry in enumerate(shape) if isinstance(entry, tuple)]
    flat = [number for entry in shape for number in (entry if isinstance(entry, tuple) else (entry,))]
    if len(nested) > 1 or any(number == 0 or number < -1 for number in flat) or (nested and nested != [dim]):
        raise PlanError(
            f"partition_config: shape {list(shape)} cut in dim {dim}",
            code="tensor-parts",
            fix="Sizes are positive or -1; one entry at most is a list of part sizes, and it stands at partition_dim.",
        )
    if nested:
        sizes = shape[nested[0]]
        return tuple(ShardPart(size=None if size == -1 else size) for size in sizes)  # type: ignore[union-attr]
    first = shape[0] if shape else -1
    equal = first if dim == 0 and len(shape) > 1 and isinstance(first, int) and 1 < first <= 8 else 1
    return tuple(ShardPart() for _ in range(equal))


TP_PLAN, LATENT = "tp_plan", "mla_kv_a_proj"
_FLAGS = ("gather_output", "split_input", "sum_gradient")
PLAN_STYLES: Mapping[str, tuple[ShardKind, tuple[str, ...]]] = {
    "colwise": (ShardKind.COLUMN, ()),
    "colwise_rep": (ShardKind.COLUMN, ("gather_output",)),
    "colwise_gather_output": (ShardKind.COLUMN, ("gather_output",)),
    "rowwise": (ShardKind.ROW, ()),
    "rowwise_split_input": (ShardKind.ROW, ("split_input",)),
    "embedding_rowwise": (ShardKind.VOCABULARY, ()),
    "replicated_with_grad_allreduce": (ShardKind.SKIP, ("sum_gradient",)),
    "moe_tp_experts": (ShardKind.EXPERTS, ()),
    "replicated": (ShardKind.SKIP, ()),
}
"""Styles of a transformers model's tp_plan: what becomes of a layer, and the flags of its rule."""


def rules_of_tp_plan(plan: Mapping[str, str], prefixes: Sequence[str] = ("",)) -> list[LayerRule]:
    """Build rules from a transformers model's tp_plan: names with `*` for a number, each with a style.

    Args:
        prefixes: What precedes the plan's names in the model (`"model."` for a model with a head).
    Raises:
        PlanError: a style that is not known ("tensor-style").
    """
    experts = [name for name, style in plan.items() if style == "moe_tp_experts"]
    inside = {name for name in plan if any(name.startswith(f"{owner}.") for owner in experts)}
    unknown = {style for name, style in plan.items() if style not in (*PLAN_STYLES, LATENT) and name not in inside}
    if unknown:
        raise PlanError(
            f"the model's tp_plan has the styles {sorted(unknown)}; known are {sorted(PLAN_STYLES)}",
            code="tensor-style",
            fix="Say what becomes of these layers in tensor_parallel.partition_config.",
        )
    # Latent attention has keys that all heads share, and experts that return their input would be summed over the ranks: they stay whole.
    latent = {f"{name.rpartition('.')[0]}." for name, style in plan.items() if style == LATENT}
    identity = {name.rpartition(".")[0] for name, style in plan.items() if style == "moe_identity_expert"}
    begin = "|".join(re.escape(prefix) for prefix in sorted(prefixes, key=len, reverse=True))
    rules = []
    for name, style in plan.items():
        if name in inside:
            continue
        kind, style_flags = PLAN_STYLES["replicated" if name in identity or name.startswith(tuple(latent)) else style]
        stem = re.escape(name).replace(r"\*", r"[^.]+")
        if name.startswith("*."):  # at any depth
            stem = ".+" + stem.removeprefix("[^.]+")
        rules.append(LayerRule(f"(?:{begin}){stem}", kind, TP_PLAN, None, *(flag in style_flags for flag in _FLAGS)))
    return rules
