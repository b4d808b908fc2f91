"""Ulysses for transformers models: the attention function that a model's configuration names is wrapped in the registry.

    ulysses = UlyssesAttention.register("sdpa", group)     # every model that runs with sdpa now shares its sequences
    ulysses.remove()

A rank is given its part of the sequence with the positions of the whole (`position_ids`), as `sequence_part` makes it.
Masks that a model makes from its part say nothing of the whole: attention is causal, or looks both ways, within documents, which
begin where positions do not follow each other, and windows are kept. A token that no query of its part attends is padding, for all parts
(with causal flex attention, whose masks do not say which tokens those are, padding belongs at the end of a sequence).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ds_comm import GroupLike, Mesh, MeshSpec, as_group, ensure_world
from ds_comm.differentiable import all_gather
from ds_config.errors import PlanError, UnsupportedError
from ds_parallel.heads import HeadCounts
from ds_parallel.sequence.ulysses import assign_heads, to_heads, to_sequence

__all__ = [
    "SUPPORTED",
    "SequenceRanks",
    "UlyssesAttention",
    "block_mask",
    "document_mask",
    "register_with_transformers",
]

SUPPORTED = ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_MASKED = ("sdpa",)  # takes a mask; flash attention takes positions and windows
_BLOCKS = ("flex_attention",)  # takes a mask of blocks, and nothing else that says who attends whom
_HEADS, _SEQUENCE = 1, 2  # transformers' layout inside attention: [batch, heads, sequence, head size]


def _registry() -> Any:
    try:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise UnsupportedError(
            "sequence parallelism of transformers models needs transformers 4.51.3 or later",
            code="sequence-attention",
            fix="Install ds-parallel[hf].",
        ) from error
    return ALL_ATTENTION_FUNCTIONS


class UlyssesAttention:
    """What stands in the registry for an attention function.

    Args:
        core: The function that it wraps.
        name: Its name in the registry.
        group: The ranks that share sequences.
        in_eval: Whether modules in evaluation mode share sequences, too.
    Attributes:
        documents: Whether a sequence may be several documents; None: its positions are looked at, which a graph cannot.
        padding: Whether a sequence may have padding; None: masks of all parts are looked at.
    """

    def __init__(self, core: Callable[..., Any], name: str, group: GroupLike, *, in_eval: bool = True) -> None:
        self.core, self.name, self.group, self.in_eval = core, name, as_group(group), in_eval
        self.documents: bool | None = None
        self.padding: bool | None = None
        self._block_masks: dict[
            tuple[Any, ...], tuple[Tensor, Any]
        ] = {}  # of the last positions, by what else they depend on

    @classmethod
    def register(cls, name: str, group: GroupLike, *, in_eval: bool = True) -> UlyssesAttention:
        """Wrap the attention function `name` for all models of this process.

        Raises:
            UnsupportedError: an attention that cannot be wrapped ("sequence-attention").
            PlanError: it is wrapped already ("sequence-attention").
        """
        registry = _registry()
        if name not in SUPPORTED or name not in registry:
            raise UnsupportedError(
                f"sequence parallelism with attention {name!r}; it works with {', '.join(SUPPORTED)}",
                code="sequence-attention",
                fix='Load the model with attn_implementation="sdpa".',
            )
        core = registry[name]
        if isinstance(core, cls):
            raise PlanError(
                f"attention {name!r} is wrapped already, over {core.group}",
                code="sequence-attention",
                fix="Call remove() on what the first registration returned.",
            )
        wrapped = cls(core, name, group, in_eval=in_eval)
        registry.register(name, wrapped)
        return wrapped

    @classmethod
    def registered(cls, name: str) -> UlyssesAttention | None:
        """Return the wrapper that is registered for the attention function `name`; None if there is none."""
        registry = _registry()
        function = registry.get(name)
        return function if isinstance(function, cls) else None

    def remove(self) -> None:
        """Put the wrapped function back."""
        registry = _registry()
        if registry[self.name] is self:
            registry.register(self.name, self.core)

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
        """Compute the attention of this rank's part of the sequence.

        query [batch, heads, sequence / N, head size]; returns [batch, sequence / N, heads, ...].

        Raises:
            PlanError: there are no position ids ("sequence-positions"), or heads do not fit ("tensor-heads").
        """
        group = self.group
        ranks = len(group.ranks)  # a field: a compiler that captures this does not look into properties of groups
        if ranks == 1 or not (module.training or self.in_eval):
            return self.core(module, query, key, value, attention_mask, *args, **kwargs)
        positions = kwargs.pop("position_ids", None)
        if positions is None:
            raise PlanError(
                "sequence-parallel attention was given no position_ids: this rank's part would count from 0 like all others",
                code="sequence-positions",
                fix="Pass position_ids with the batch; SequenceDataLoader and sequence_part make them.",
            )
        dealt = assign_heads(HeadCounts(query.shape[_HEADS], key.shape[_HEADS]), ranks)
        query, key, value = to_heads(query, key, value, dealt, (_HEADS, _SEQUENCE), group)
        causal = kwargs.pop("is_causal", None)
        causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
        whole, tokens = self._gathered(positions.expand(query.shape[0], -1), attention_mask, causal)
        # A layer that passes None has no window, whatever its module says.
        window = kwargs["sliding_window"] if "sliding_window" in kwargs else getattr(module, "sliding_window", None)
        if self.name in _BLOCKS:
            mask = self._block_mask(whole, causal, window, tokens)
        else:
            mask = document_mask(whole, causal, window, self.documents) if self.name in _MASKED else None
            if tokens is not None:
                mask = _exclude(mask, tokens, causal) if self.name in _MASKED else tokens
        ratio = query.shape[_HEADS] // key.shape[_HEADS]
        attention_module = module if getattr(module, "num_key_value_groups", ratio) == ratio else _Groups(module, ratio)
        plain = causal and mask is None
        out, weights = self.core(
            attention_module, query, key, value, mask, *args, position_ids=whole, is_causal=plain, **kwargs
        )
        return to_sequence(out, dealt, (2, 1), group), weights

    def _block_mask(self, positions: Tensor, causal: bool, window: int | None, tokens: Tensor | None) -> Any:
        """Return the mask of whole sequences for flex attention: that of the layer before where nothing has changed."""
        if tokens is not None:
            return block_mask(positions, causal, window, self.documents, tokens)
        before, mask = self._block_masks.get(key := (causal, window, positions.device), (positions[:0], None))
        if before.shape != positions.shape or not (self.documents is False or torch.equal(before, positions)):
            mask = block_mask(positions, causal, window, self.documents)
            self._block_masks[key] = positions, mask
        return mask

    def _gathered(self, positions: Tensor, local_mask: Any, causal: bool) -> tuple[Tensor, Tensor | None]:
        """Return the positions of whole sequences, and which of their tokens are no padding: both [batch, sequence].

        Every rank calls this, whether its part has padding or not. The second is None where no part has any.

        Args:
            positions: Of this part, [batch, sequence / N].
            local_mask: What the model made of this part; None where it saw no padding.
        """
        attended = None if self.padding is False else _attended(local_mask, positions, causal)
        # Padding is the sign of a position: one message.
        part = positions if attended is None else torch.where(attended, positions, ~positions)
        whole: Tensor = all_gather(part, self.group, 1)
        if self.padding is False:
            return whole, None
        tokens = whole >= 0
        if self.padding is None and bool(tokens.all()):
            return whole, None
        return torch.where(tokens, whole, ~whole), tokens


def _exclude(mask: Tensor | None, tokens: Tensor, causal: bool) -> Tensor:
    """Return `mask` [batch, 1, queries, keys] without keys that are padding; None: of all pairs, or all that look back."""
    rows, length = tokens.shape
    keys = tokens.view(rows, 1, 1, length).expand(rows, 1, length, length)
    if mask is None:
        return keys.tril() if causal else keys
    return mask & keys


def _attended(mask: Any, positions: Tensor, causal: bool) -> Tensor | None:
    """Return which tokens of this part some query attends, [batch, sequence / N]; None for all.

    Raises:
        UnsupportedError: the mask is no tensor of this part, or adds numbers to scores ("sequence-attention").
    """
    if mask is None or (causal and not isinstance(mask, Tensor)):
        return None
    rows, length = positions.shape
    if isinstance(mask, Tensor) and mask.shape[-1] == length and mask.dim() in (2, 4):
        if mask.is_floating_point() and mask.dim() == 4:
            excluded = mask <= torch.finfo(mask.dtype).min / 2
            if bool((mask.masked_fill(excluded, 0) != 0).any()):
                raise UnsupportedError(
                    "sequence parallelism of an attention whose mask adds numbers to scores (position biases)",
                    code="sequence-attention",
                    fix="Use a model whose attention function is given positions, or call ds_parallel.sequence.DistributedAttention in its attention.",
                )
            mask = ~excluded
        keys = mask.bool() if mask.dim() == 2 else mask.bool().any(-2).any(1)
        return keys.expand(rows, length)
    shape = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    raise UnsupportedError(
        f"sequence parallelism of an attention with a mask of {shape}, where this rank has {length} tokens",
        code="sequence-attention",
        fix='Load the model with attn_implementation="sdpa", and give batches without padding or a mask of [batch, sequence].',
    )


class _Groups:
    """A module as an attention function sees it, with this rank's query heads for every key-value head."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module, self.num_key_value_groups = module, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def document_mask(
    positions: Tensor, causal: bool, window: int | None = None, packed: bool | None = None
) -> Tensor | None:
    """Build the mask of token pairs that attend, from the positions of whole sequences.

    [batch, 1, queries, keys]; None where `causal` describes the mask fully.

    A document ends where the next position is not one more. `window`: how many tokens back a token attends, itself
    included.
    `packed`: whether there may be several documents; None: detect from the positions.
    """
    rows, length = positions.shape
    document = _documents(positions, packed)
    windowed = window is not None and window < length
    if document is None and not windowed:
        return None
    at = torch.arange(length, device=positions.device)
    distance = at.unsqueeze(-1) - at
    mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if windowed and window is not None:
        mask = mask & (distance < window) & (distance > -window)
    mask = mask.expand(rows, 1, length, length)
    if document is not None:
        mask = mask & (document.unsqueeze(-1) == document.unsqueeze(-2)).unsqueeze(1)
    return mask


def block_mask(
    positions: Tensor, causal: bool, window: int | None = None, packed: bool | None = None, tokens: Tensor | None = None
) -> Any:
    """Build flex attention's mask of token pairs that attend, from the positions of whole sequences; None where all do.

    Cost: a byte for each pair of tokens, while it is built.

    Args:
        positions, causal, window, packed: As of `document_mask`.
        tokens: Which are no padding, [batch, sequence]; None: all.
    """
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    rows, length = positions.shape
    document = _documents(positions, packed)
    rules: list[Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = []
    if causal:
        rules.append(lambda batch, head, query, key: query >= key)
    if window is not None and window < length:
        rules.append(lambda batch, head, query, key: (query - key < window) & (key - query < window))
    if document is not None:
        rules.append(lambda batch, head, query, key: document[batch, query] == document[batch, key])
    if tokens is not None:
        rules.append(lambda batch, head, query, key: tokens[batch, key])
    if not rules:
        return None
    every = None if document is None and tokens is None else rows
    return create_block_mask(and_masks(*rules), every, None, length, length, device=str(positions.device))


def _documents(positions: Tensor, packed: bool | None) -> Tensor | None:
    """Number the document of each token, [batch, sequence]: one ends where the next position is not one more. None where sequences are one each."""
    if packed is False:
        return None
    first = torch.ones_like(positions[:, :1], dtype=torch.bool)
    document = torch.cat([first, positions[:, 1:] != positions[:, :-1] + 1], 1).cumsum(1)
    return document if packed or bool((document > 1).any()) else None


class SequenceRanks:
    """Who shares sequences with whom: blocks of consecutive ranks; the others are for data. What `mpu` is to an engine."""

    def __init__(self, size: int) -> None:
        """Build the mesh with a sequence-parallel degree of `size`. Collective over the world.

        Raises:
            PlanError: `size` does not divide the world size ("mesh-size").
        """
        self.mesh = Mesh.build(MeshSpec.fit(ensure_world().size, sequence=size))

    def get_sequence_parallel_group(self) -> Any:
        return self.mesh["sequence"].pg

    def get_sequence_parallel_world_size(self) -> int:
        return self.mesh["sequence"].size

    def get_sequence_parallel_rank(self) -> int:
        return self.mesh["sequence"].rank

    def get_data_parallel_group(self) -> Any:
        return self.mesh["data"].pg

    def get_data_parallel_world_size(self) -> int:
        return self.mesh["data"].size

    def get_data_parallel_rank(self) -> int:
        return self.mesh["data"].rank


def register_with_transformers(
    model_name_or_path: Any,
    core_attn_implementation: str,
    sequence_parallel_size: int,
    micro_batch_size: int | None = None,
    seq_length: int | None = None,
    seq_length_is_variable: bool = True,
    disable_in_eval: bool = False,
    max_length: int | None = None,
) -> SequenceRanks | None:
    """Let models share sequences over blocks of `sequence_parallel_size` ranks. Collective over the world; None for a size of 1.

    Args:
        model_name_or_path: A model, its configuration, or where it is: its heads are checked before anything is made.
        core_attn_implementation: The attention function to wrap.
        micro_batch_size, seq_length, seq_length_is_variable, max_length: Shapes are taken from each call; a fixed length that does
            not divide is refused.
        disable_in_eval: Modules in evaluation mode do not share.
    Raises:
        PlanError: heads or a fixed length do not fit; UnsupportedError: see `UlyssesAttention.register`.
    """
    if sequence_parallel_size == 1:
        return None
    fixed = seq_length if seq_length is not None else max_length
    if not seq_length_is_variable and fixed is not None and fixed % sequence_parallel_size:
        raise PlanError(
            f"a sequence of {fixed} tokens over {sequence_parallel_size} ranks",
            code="sequence-length",
            fix="Use a length that divides.",
        )
    config = getattr(model_name_or_path, "config", model_name_or_path)
    if isinstance(config, str) or not hasattr(config, "to_dict"):
        config = importlib.import_module("transformers").AutoConfig.from_pretrained(config)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = text.num_attention_heads
    assign_heads(HeadCounts(heads, getattr(text, "num_key_value_heads", None) or heads), sequence_parallel_size)
    ranks = SequenceRanks(sequence_parallel_size)
    UlyssesAttention.register(core_attn_implementation, ranks.mesh["sequence"], in_eval=not disable_in_eval)
    return ranks
