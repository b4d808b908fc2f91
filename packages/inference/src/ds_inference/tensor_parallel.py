"""Each layer over several ranks: what a rank computes, as a spec, and its part of every weight. Integers and slices, no communication.

Heads go to ranks in whole groups, the first ranks get what is left over; where there are more ranks than key heads, several ranks hold
the same key head. Feed-forward units are cut as evenly as whole units allow, and so is the vocabulary of the head. Experts are cut
inside, like any feed-forward part, or given to ranks as they are. What a rank computes of a layer's output is a part of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ds_comm import Group, all_gather_single, as_group, init_distributed
from ds_config.errors import PlanError, UnsupportedError
from ds_inference.spec import AttentionSpec, DecoderLayerSpec, DecoderSpec, ExpertsSpec, Mlp
from ds_parallel.heads import HeadCounts, Stretch, spread

__all__ = ["LikeliestTokens", "RankShard", "capture_obstacle", "gather_likeliest", "gather_logits", "ranks_of"]

_SUMMED = (".out.bias", ".down.bias", ".down_bias")
"""Biases of what is summed over ranks: one rank adds them."""


@dataclass(frozen=True, slots=True)
class RankShard:
    """How one rank takes part.

    Attributes:
        whole: What is cut.
        rank, size: Of the ranks that hold each layer together.
        by_expert: Experts are given to ranks whole.
    Raises:
        PlanError: a rank would have no head, unit or expert ("inference-ranks", "tensor-heads").
        UnsupportedError: a norm over all features of keys that several ranks hold ("inference-ranks").
    """

    whole: DecoderSpec
    rank: int
    size: int
    by_expert: bool = False

    def __post_init__(self) -> None:
        for layer in self.whole.layers:
            a, feed = layer.attention, layer.feed
            units = feed.count if isinstance(feed, ExpertsSpec) and self.by_expert else feed.width
            if min(units, self.whole.vocab) < self.size:
                raise PlanError(
                    f"{units} {'experts' if self.by_expert else 'units'} of a {self.whole.family} layer over {self.size} ranks",
                    code="inference-ranks",
                    fix="Use fewer ranks.",
                )
            if a.whole_norm is not None and a.kv_heads < self.size:
                raise UnsupportedError(
                    f"{a.kv_heads} key heads that are normed together, over {self.size} ranks",
                    code="inference-ranks",
                    fix=f"Use at most {a.kv_heads} ranks.",
                )

    def spec(self) -> DecoderSpec:
        """Return the spec of this rank's shard of the model."""
        return replace(self.whole, layers=tuple(map(self._layer, self.whole.layers)))

    def words(self) -> Stretch:
        """Return this rank's vocabulary range, the rows of its shard of the head."""
        return spread(self.whole.vocab, self.size)[self.rank]

    def part(self, role: str, weight: Tensor) -> Tensor | None:
        """Return this rank's shard of a role's full weight; None where another rank adds the weight."""
        if role.startswith("head."):
            return weight[slice(*self.words())]
        if not role.startswith("layers."):
            return weight
        whole_expert = self.by_expert and ".experts." in role  # each expert's bias is added where the expert is
        if role.endswith(_SUMMED) and self.rank and not whole_expert:
            return None
        _, number, kind, *_ = role.split(".")
        layer = self.whole.layers[int(number)]
        if kind == "attention":
            return self._attention_part(role, weight, layer.attention)
        if kind == "feed":
            return self._feed_part(role, weight, layer.feed)
        return weight

    # ---- what a rank computes

    def _heads(self, a: AttentionSpec) -> tuple[Stretch, Stretch]:
        return HeadCounts(a.heads, a.kv_heads).stretches(self.size)[self.rank]

    def _units(self, count: int) -> Stretch:
        return spread(count, self.size)[self.rank]

    def _layer(self, layer: DecoderLayerSpec) -> DecoderLayerSpec:
        a, feed = layer.attention, layer.feed
        (first, last), (kv_first, kv_last) = self._heads(a)
        near = replace(
            a, heads=last - first, kv_heads=kv_last - kv_first, head_offset=first, total_heads=(a.heads, a.kv_heads)
        )
        if isinstance(feed, Mlp):
            return replace(layer, attention=near, feed=replace(feed, width=_length(self._units(feed.width))))
        shared = _length(self._units(feed.shared))
        if self.by_expert:
            return replace(
                layer, attention=near, feed=replace(feed, local_range=self._units(feed.count), shared=shared)
            )
        width = _length(self._units(feed.width))
        return replace(layer, attention=near, feed=replace(feed, width=width, shared=shared))

    # ---- what a rank holds

    def _attention_part(self, role: str, weight: Tensor, a: AttentionSpec) -> Tensor:
        (first, last), (kv_first, kv_last) = self._heads(a)
        queries = (first * a.width, last * a.width)
        keys = (kv_first * a.width, kv_last * a.width)
        values = (kv_first * a.value_width, kv_last * a.value_width)
        name = role.split(".", 3)[3]
        if name.startswith("qkv."):
            sizes = (a.heads * a.width, a.kv_heads * a.width, a.kv_heads * a.value_width)
            return _parts(weight, 0, sizes, (queries, keys, values))
        if name in ("q.weight", "q_up.weight"):
            return weight[slice(*queries)]
        if name == "kv_up.weight":
            each = weight.shape[0] // a.heads
            return weight[first * each : last * each]
        if name == "out.weight":
            return weight[:, first * a.value_width : last * a.value_width]
        if name == "sinks":
            return weight[first:last]
        if (a.whole_norm is not None or a.head_norm_each) and name in ("q_norm.weight", "k_norm.weight"):
            return weight[slice(*(queries if name.startswith("q") else keys))]
        return weight

    def _feed_part(self, role: str, weight: Tensor, feed: Mlp | ExpertsSpec) -> Tensor:
        name = role.split(".", 3)[3]
        if name.startswith("experts.") and isinstance(feed, ExpertsSpec) and self.by_expert:
            return weight[slice(*self._units(feed.count))]
        total = feed.shared if name.startswith("shared.") and isinstance(feed, ExpertsSpec) else feed.width
        units = self._units(total)
        gated = isinstance(feed, ExpertsSpec) or feed.gated
        dim = 1 if name.startswith("experts.") else 0
        if name.endswith((".up", "up.weight", "up.bias", ".up_bias")):
            halves = 2 if gated else 1
            return _parts(weight, dim, (total,) * halves, (units,) * halves)
        if name.endswith((".down", "down.weight")):
            return weight[..., slice(*units)]
        return weight


# ---- logits of all ranks


@dataclass(frozen=True, slots=True, eq=False)
class LikeliestTokens:
    """The likeliest token of each row in the place of logits.

    Attributes:
        tokens: int64 [R], on the device.
        vocab: Tokens that there are.
    """

    tokens: Tensor
    vocab: int


def gather_logits(part: Tensor, vocab: int, group: Group) -> Tensor:
    """Gather the logits of all ranks' vocabulary ranges: fp32 [R, range] to [R, vocab], in the order of the ranks.

    Cost: sends this rank's part to each other rank, in one all-gather; copies the whole once.
    """
    sizes = [_length(stretch) for stretch in spread(vocab, group.size)]
    padded = torch.nn.functional.pad(part, (0, max(sizes) - part.shape[1])).contiguous()
    parts = part.new_empty(group.size, len(part), max(sizes))
    all_gather_single(parts, padded, group, unit="logits")
    return torch.cat([one[:, :size] for one, size in zip(parts, sizes, strict=True)], 1)


def gather_likeliest(part: Tensor, shard: RankShard, group: Group) -> LikeliestTokens:
    """Choose the likeliest token of each row from the ranks' ranges [R, range]; of equal ones the first, as argmax does.

    Cost: sends a value and a number for each row to each other rank, in one all-gather.
    """
    most, at = part.max(-1)
    pair = torch.stack([most.view(torch.int32), (at + shard.words()[0]).to(torch.int32)])
    pairs = pair.new_empty(group.size, *pair.shape)
    all_gather_single(pairs, pair, group, unit="likeliest")
    values, tokens = pairs.unbind(1)
    best = values.contiguous().view(torch.float32).argmax(0, keepdim=True)
    return LikeliestTokens(tokens.gather(0, best)[0].long(), shard.whole.vocab)


def capture_obstacle(group: Group, device: torch.device) -> str:
    """Return why collectives of the ranks cannot be part of a CUDA graph; an empty string if they can."""
    backend = group.backend(device.type)
    if group.size == 1 or backend == "nccl":
        return ""
    return (
        f"the ranks meet in every layer, by {backend or 'no backend'} for {device.type} tensors, which needs the host"
    )


def ranks_of(size: int, group: Any = None) -> Group | None:
    """Return the group of `size` tensor-parallel ranks: `group`, or all ranks; None for a size of 1.

    Without a group the ranks are connected here if they are not yet.

    Raises:
        PlanError: there are more or fewer ranks ("inference-ranks").
    """
    if size == 1:
        return None
    ranks = init_distributed() if group is None else as_group(group)
    if ranks.size != size:
        raise PlanError(
            f"layers over {size} ranks, and {ranks.size} ranks are there",
            code="inference-ranks",
            fix="Start as many ranks (ds run), or give the group of these ranks.",
        )
    return ranks


def _length(stretch: Stretch) -> int:
    return stretch[1] - stretch[0]


def _parts(weight: Tensor, dim: int, sizes: Sequence[int], stretches: Sequence[Stretch]) -> Tensor:
    """Concatenate the stretch of each part of a weight along `dim`; `sizes` are those of the parts."""
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    cut = [
        weight.narrow(dim, start + first, last - first)
        for (start, _), (first, last) in zip(pairwise(starts), stretches, strict=True)
    ]
    return torch.cat(cut, dim)
