"""Block-sparse attention by configuration: what a transformers model's attention sees, and a module for models of one's own.

The attention function that the model's configuration names is wrapped in transformers' registry; for modules of this model it computes
with a pattern of ds-ops, for all others it is what it was. Patterns are the same on all ranks: random blocks come from one seed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_config.errors import PlanError, UnsupportedError
from ds_engine.model_sections import SparseAttentionConfig
from ds_engine.transforms.transform import BuildContext, Transform, TransformInput
from ds_ops.sparse_attention import (
    Pattern,
    Sparsity,
    bigbird,
    block_sparse_attention,
    bslongformer,
    dense,
    fixed,
    variable,
)

__all__ = ["SparseAttention", "SparseSelfAttention", "pattern_of"]

_CORES = ("sdpa",)


def pattern_of(section: SparseAttentionConfig) -> Pattern:
    """Build the sparsity pattern that a section describes."""
    causal = section.attention == "unidirectional"
    if section.global_block_end_indices is not None:
        everyone = tuple(zip(section.global_block_indices, section.global_block_end_indices, strict=True))
    else:
        everyone = tuple((block, block + 1) for block in section.global_block_indices)
    builders: Mapping[str, Callable[[], Pattern]] = {
        "dense": lambda: dense(causal=causal),
        "fixed": lambda: fixed(
            section.num_local_blocks,
            section.num_global_blocks,
            shifts=section.num_different_global_patterns,
            rows=section.horizontal_global_attention,
            causal=causal,
        ),
        "variable": lambda: variable(
            section.local_window_blocks,
            everyone,
            random=section.num_random_blocks,
            rows=section.horizontal_global_attention,
            causal=causal,
        ),
        "bigbird": lambda: bigbird(
            section.num_random_blocks, section.num_sliding_window_blocks, section.num_global_blocks, causal=causal
        ),
        "bslongformer": lambda: bslongformer(section.num_sliding_window_blocks, everyone, causal=causal),
    }
    return builders[section.mode]()


class SparseSelfAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v over the blocks of a pattern.

    Args:
        section: The pattern, and tokens of a block.
    """

    def __init__(self, section: SparseAttentionConfig) -> None:
        super().__init__()
        self.pattern, self.block = pattern_of(section), section.block
        self.per_head = section.different_layout_per_head or section.num_different_global_patterns > 1
        self._layouts: dict[tuple[int, int, torch.device], Tensor] = {}

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Compute block-sparse attention: tensors [batch, heads, length, d], `key_mask` bool [batch, length].

        The mask is true where a key may be attended to.
        """
        heads = query.shape[1] if self.per_head else 1
        blocks = -(-query.shape[2] // self.block)
        place = blocks, heads, query.device
        if place not in self._layouts:
            self._layouts[place] = self.pattern.layout(blocks, heads).to(query.device)
        sparsity = Sparsity(self._layouts[place], self.block, self.pattern.causal)
        return block_sparse_attention(query, key, value, sparsity, key_mask=key_mask)


@dataclass(frozen=True, slots=True)
class SparseAttentionTransform:
    """The pattern, and transformers' name of the attention function that gives way."""

    section: SparseAttentionConfig
    attention: str


class SparseAttention(Transform[SparseAttentionTransform, "_Wrapped"]):
    """In the plan if the configuration has the section `sparse_attention`."""

    name = "sparse attention"

    def decide(self, inputs: TransformInput) -> SparseAttentionTransform | None:
        section, facts = inputs.config.sparse_attention, inputs.shapes.facts
        if section is None:
            return None
        # Without facts only names and shapes are known: what is built is decided again, with them.
        attention = _CORES[0] if facts is None else facts.attention
        if attention not in _CORES or inputs.mesh.sequence > 1:
            shared = " that shares sequences" if inputs.mesh.sequence > 1 else ""
            raise UnsupportedError(
                f"sparse_attention with a model{shared} whose attention is {attention or 'its own'}",
                code="sparse-attention",
                fix="Load a transformers model with attn_implementation sdpa, or use ds_engine.SparseSelfAttention in the "
                "model and leave the section out.",
            )
        pattern_of(section)
        return SparseAttentionTransform(section, attention)

    def plan_rows(self, what: SparseAttentionTransform) -> Mapping[str, str]:
        values = what.section.model_dump(exclude_unset=True)
        details = ", ".join(f"{key} {value}" for key, value in values.items() if key not in ("mode", "block"))
        return {
            "sparse attention": f"{what.section.mode}, blocks of {what.section.block} tokens{details and ', ' + details}"
        }

    def apply(self, what: SparseAttentionTransform, site: BuildContext) -> _Wrapped:
        return _Wrapped(site.model, what)

    def undo(self, applied: _Wrapped) -> None:
        applied.remove()


class _Wrapped:
    """The entry of transformers' registry, as long as the engine exists."""

    def __init__(self, model: nn.Module, what: SparseAttentionTransform) -> None:
        modeling = importlib.import_module("transformers.modeling_utils")
        self.registry, self.name = modeling.ALL_ATTENTION_FUNCTIONS, what.attention
        self.ours = {id(module) for module in model.modules()}
        self.sparse = SparseSelfAttention(what.section)
        if self.name not in self.registry:
            raise UnsupportedError(
                f"sparse_attention with attention {self.name!r}, which transformers' registry does not have",
                code="sparse-attention",
                fix='Load the model with attn_implementation="sdpa".',
            )
        self.core: Callable[..., Any] = self.registry[self.name]
        self.registry.register(self.name, self)

    def remove(self) -> None:
        """Put the function back that was there."""
        if self.registry[self.name] is self:
            self.registry.register(self.name, self.core)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Compute attention as transformers calls it: [batch, heads, length, d] in, [batch, length, heads, d] out."""
        if id(module) not in self.ours or query.shape[2] != key.shape[2]:  # a cache: one token sees what it sees
            return self.core(module, query, key, value, attention_mask, *args, **kwargs)
        if kwargs.get("dropout") and module.training:
            raise PlanError(
                f"sparse attention with dropout {kwargs['dropout']} of probabilities",
                code="sparse-attention",
                fix="Set the model's attention dropout to 0.",
            )
        copies = query.shape[1] // key.shape[1]
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        scaling = kwargs.get("scaling")
        if scaling is not None:
            query = query * (scaling * query.shape[-1] ** 0.5)
        return self.sparse(query, key, value, _keys(attention_mask)).transpose(1, 2).contiguous(), None


def _keys(mask: Any) -> Tensor | None:
    """Return the keys that the last token may attend to: those that are not padding."""
    if not isinstance(mask, Tensor):
        return None
    last = mask[:, 0, -1, :] if mask.dim() == 4 else mask
    return last if last.dtype is torch.bool else last >= 0 if last.is_floating_point() else last != 0
