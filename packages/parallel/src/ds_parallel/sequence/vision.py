"""Sequences of image patches, and of text with images in it, of which every rank has a part.

Attention over patches is not causal and its module is opaque: the patches of all ranks are gathered for it, and each rank keeps its own
part of the result. What is between two of them is computed, and kept for backward, on a rank's own patches only. Gradients of what is
gathered are summed over the ranks (reduce-scatter), those of the module's weights are parts of a sum over the ranks, as with
`DistributedAttention`.

Text is whole on every rank, images are in parts: `spliced` puts the gathered tokens of the images into the text, `own_part` cuts the result.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_comm
from ds_comm import GroupLike, as_group
from ds_comm.differentiable import all_gather
from ds_config.errors import PlanError

__all__ = ["CLASS_TOKENS", "GatheredAttention", "fill_between", "fill_runs", "gather_vision_attention", "own_part", "replace_tokens", "spliced"]  # fmt: skip

CLASS_TOKENS: MutableMapping[str, bool] = {
    "ViTAttention": True,
    "CLIPAttention": True,
    **dict.fromkeys(
        (
            "SiglipAttention",
            "InternVisionAttention",
            "Qwen2VLVisionAttention",
            "Idefics2VisionAttention",
            "PaliGemmaVisionAttention",
        ),
        False,
    ),
}
"""Classes of attention over patches, by name, and whether a class token is before the patches. Programs may add theirs."""


class GatheredAttention(nn.Module):
    """Runs an attention over the patches of all ranks, each of which gives and gets its own.

    Args:
        attn: Takes [batch, tokens, hidden] first and returns the like, or a tuple that begins with it.
        group: Ranks that share the sequences, in the order of their patches; their numbers of patches may differ.
        has_cls_token: Whether the first token is the same on all ranks, and no patch.
    Cost of a call: (N-1)/N of the patches' bytes, and a message of 8 bytes a rank. The result is the same as on one device.
    """

    def __init__(self, attn: nn.Module, group: GroupLike, has_cls_token: bool = True) -> None:
        super().__init__()
        self.attn, self.has_cls_token = attn, has_cls_token
        self._group = as_group(group)

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """Return this rank's part of the attention's result. Collective."""
        before = int(self.has_cls_token)
        own = hidden_states[:, before:]
        lengths = _lengths(own, self._group)
        patches = all_gather(own, self._group, 1, lengths, unit="patches")
        result = self.attn(torch.cat([hidden_states[:, :before], patches], 1), *args, **options)
        whole, *rest = result if isinstance(result, tuple | list) else (result,)
        start = before + sum(lengths[: self._group.rank])
        part = torch.cat([whole[:, :before], whole[:, start : start + own.shape[1]]], 1)
        return (part, *rest) if rest else part


def gather_vision_attention(
    model: nn.Module, group: GroupLike, wrapper: type[GatheredAttention] = GatheredAttention
) -> list[str]:
    """Put a `wrapper` in the place of every attention whose class is in `CLASS_TOKENS`, and return their names."""
    found = {name: module for name, module in model.named_modules() if type(module).__name__ in CLASS_TOKENS}
    for name, module in found.items():
        parent, _, last = name.rpartition(".")
        wrapped = wrapper(module, group, CLASS_TOKENS[type(module).__name__])
        setattr(model.get_submodule(parent), last, wrapped)
    return list(found)


def _lengths(tokens: Tensor, group: ds_comm.Group) -> list[int]:
    """Return the tokens, dim 1, of every rank."""
    lengths = torch.empty(group.size, dtype=torch.int64, device=tokens.device)
    ds_comm.all_gather_single(lengths, lengths.new_full((1,), tokens.shape[1]), group, unit="patches")
    return [int(length) for length in lengths.tolist()]


# ---- text with images in it


def spliced(
    text: Tensor, image: Tensor, group: GroupLike, splice: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:  # fmt: skip
    """Return this rank's part of a text with the tokens of all ranks' parts of its images in it. Collective, differentiable.

    Args:
        text: [batch, tokens, hidden], the same on every rank.
        image: [batch, this rank's tokens of images, hidden].
        splice: Makes one sequence of the text and all tokens of the images.
    """
    ranks = as_group(group)
    return own_part(splice(text, all_gather(image, ranks, 1, _lengths(image, ranks), unit="images")), ranks)


def own_part(whole: Tensor, group: GroupLike) -> Tensor:
    """Return this rank's part of a sequence [batch, tokens, hidden] that every rank has; zeros make it as long as others'."""
    ranks = as_group(group)
    part = -(-whole.shape[1] // ranks.size)
    padded = functional.pad(whole, (0, 0, 0, part * ranks.size - whole.shape[1]))
    return padded[:, ranks.rank * part : (ranks.rank + 1) * part].contiguous()


def replace_tokens(text: Tensor, image: Tensor, ids: Tensor, token: int) -> Tensor:
    """Put images in the place of single tokens, as LLaVA does: the sequence gets longer. Images of a row are of one length.

    Args:
        ids: [batch, tokens] of the text.
    Returns:
        [batch, the longest row, hidden]; zeros follow the others.
    """
    rows = []
    for words, patches, row in zip(text, image, ids, strict=True):
        places = (row == token).nonzero().flatten().tolist()
        images = iter(torch.chunk(patches, len(places)) if places else ())
        starts, stops = [0, *(place + 1 for place in places)], [*places, len(row)]
        pieces = [words[starts[0] : stops[0]]]
        for start, stop in zip(starts[1:], stops[1:], strict=True):
            pieces += [next(images, patches[:0]), words[start:stop]]
        rows.append(torch.cat(pieces))
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def fill_runs(text: Tensor, image: Tensor, ids: Tensor, token: int) -> Tensor:
    """Put one token of the images in the place of each `token`, in their order, as InternVL does."""
    return _filled(text, image, [(row == token).nonzero().flatten() for row in ids])


def fill_between(text: Tensor, image: Tensor, ids: Tensor, start: int, end: int) -> Tensor:
    """Put one token of the images in the place of each token between a `start` and its `end`, in their order, as Qwen2-VL does."""
    places = []
    for row in ids:
        bounds = zip((row == start).nonzero().flatten(), (row == end).nonzero().flatten(), strict=False)
        inner = [torch.arange(int(first) + 1, int(last), device=row.device) for first, last in bounds]
        places.append(torch.cat(inner) if inner else row.new_empty(0))
    return _filled(text, image, places)


def _filled(text: Tensor, image: Tensor, places: list[Tensor]) -> Tensor:
    short = [(i, len(at)) for i, at in enumerate(places) if len(at) > image.shape[1]]
    if short:
        raise PlanError(
            f"row {short[0][0]} has {short[0][1]} places for tokens of images, and there are {image.shape[1]}",
            code="sequence-length",
            fix="Give as many tokens of images, over all ranks, as the text has places for.",
        )
    filled = text.clone()
    for i, at in enumerate(places):
        filled[i, at] = image[i, : len(at)]
    return filled
