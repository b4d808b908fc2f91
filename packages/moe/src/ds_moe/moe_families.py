"""Families of Hugging Face models with experts, as data: how their routers choose, and what their experts are called in files.

Two generations of code exist. Since transformers 5 the experts of a block are one module with packed weights [E, ...] that is called
with (tokens, chosen experts, weights): only that module is replaced here, and the family's own router stays. Before, experts
were a list of modules and the block looped over it: there the block is replaced, and its router is the `RouterOptions` of this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ds_moe.selection import GroupScore, RouterOptions, Score

__all__ = ["FAMILIES", "PRESETS", "MoEFamily", "family_of"]


@dataclass(frozen=True, slots=True)
class MoEFamily:
    """One family.

    Attributes:
        name: `model_type` of its configuration.
        score: What its router makes of logits.
        normalize: Whether weights are divided by their sum; a string is the attribute of the configuration that says so.
        scaled: Whether weights are multiplied by `routed_scaling_factor`.
        grouped: What a group of experts is worth, where `n_group` and `topk_group` limit them.
        grouped_if: Only if the configuration's `topk_method` is this.
        epsilon: Added to the sum of weights.
        k_attr: Attribute: experts a token.
        count_attrs: Attributes: experts in all, the first that is there.
        files: In files of the family, the names of an expert's gate, up and down; empty: files hold packed weights.
        block_in_files: (name of a block in memory, in files).
        returns_logits: Whether a block of the older code returns (output, router logits).
    """

    name: str
    score: Score = "softmax"
    normalize: bool | str = True
    scaled: bool = False
    grouped: GroupScore | None = None
    grouped_if: str | None = None
    epsilon: float = 0.0
    k_attr: str = "num_experts_per_tok"
    count_attrs: tuple[str, ...] = ("num_experts", "num_local_experts", "n_routed_experts")
    files: tuple[str, ...] = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    block_in_files: tuple[str, str] | None = None
    returns_logits: bool = True

    def selection(self, config: Any) -> RouterOptions:
        """Build the router options for a model of this configuration."""
        normalize = getattr(config, self.normalize, False) if isinstance(self.normalize, str) else self.normalize
        limited = self.grouped is not None and getattr(config, "n_group", None) is not None
        if self.grouped_if is not None and getattr(config, "topk_method", None) != self.grouped_if:
            limited = False
        return RouterOptions(
            k=int(getattr(config, self.k_attr)),
            score=self.score,
            normalize=bool(normalize),
            scale=float(getattr(config, "routed_scaling_factor", 1.0)) if self.scaled else 1.0,
            groups=int(config.n_group) if limited else 1,
            limited_groups=int(config.topk_group) if limited else 1,
            group_score=self.grouped or "max",
            epsilon=self.epsilon,
        )


_MIXTRAL_FILES = ("w1.weight", "w3.weight", "w2.weight")
_V3 = MoEFamily(
    "deepseek_v3", "sigmoid", "norm_topk_prob", scaled=True, grouped="top2", epsilon=1e-20, returns_logits=False
)

FAMILIES: Mapping[str, MoEFamily] = {
    family.name: family
    for family in (
        MoEFamily("mixtral", files=_MIXTRAL_FILES, block_in_files=("mlp", "block_sparse_moe")),
        MoEFamily("minimax", files=_MIXTRAL_FILES, block_in_files=("mlp", "block_sparse_moe")),
        MoEFamily("qwen2_moe", normalize="norm_topk_prob"),
        MoEFamily("qwen3_moe", normalize="norm_topk_prob"),
        MoEFamily("olmoe", normalize="norm_topk_prob"),
        MoEFamily("flex_olmo", normalize="norm_topk_prob"),
        MoEFamily(
            "deepseek_v2",
            normalize=False,
            scaled=True,
            grouped="max",
            grouped_if="group_limited_greedy",
            returns_logits=False,
        ),
        _V3,
        replace(_V3, name="glm4_moe"),
        replace(_V3, name="dots1"),
        MoEFamily("gpt_oss", score="softmax_of_chosen", normalize=False, files=()),
        MoEFamily("qwen3_5_moe_text"),
        MoEFamily(
            "minimax_m3_vl_text",
            "sigmoid",
            epsilon=1e-20,
            files=_MIXTRAL_FILES,
            block_in_files=("mlp", "block_sparse_moe"),
        ),
    )
}
PRESETS: Mapping[str, str] = {"qwen3_5_moe": "qwen3_5_moe_text", "minimax_m3": "minimax_m3_vl_text"}
"""Names that `expert_parallel.preset_model` has for families whose `model_type` is another word."""


def family_of(config: Any) -> MoEFamily | None:
    """Return the family of a model's configuration; None if the table has no such family."""
    return FAMILIES.get(str(getattr(config, "model_type", "")))
