"""Expert-choice routing (Zhou et al. 2022): every expert takes the tokens that it scores highest, as many as its capacity.

All experts are loaded alike, without a loss; a token goes to as many experts as chose it, perhaps none. An expert's choice depends on the other tokens of the
batch, also later ones: a decoder that generates token by token cannot make it again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_moe.router_output import RouterOutput

__all__ = ["choose_tokens"]


def choose_tokens(scores: Tensor, capacity: int, used: Tensor | None = None) -> RouterOutput:
    """Let each expert choose its `capacity` best tokens; of equal ones the first.

    Args:
        scores: [T, E] fp32 with gradient: the softmax over experts, which are also the weights.
        capacity: Tokens of an expert; all T if there are fewer.
        used: bool [T]: tokens that may be chosen; None: all.
    Returns: all E experts of each token as its choices, of which `kept_mask` has those that chose it. The loss is 0.
    """
    tokens, count = scores.shape
    worth = scores.detach() if used is None else scores.detach().masked_fill(~used[:, None], -1.0)
    best = worth.sort(dim=0, descending=True, stable=True).indices[:capacity]
    chosen = torch.zeros(tokens, count, dtype=torch.bool, device=scores.device).scatter_(0, best, True)
    if used is not None:
        chosen &= used[:, None]
    experts = torch.arange(count, device=scores.device).expand(tokens, count).contiguous()
    weights = scores.masked_fill(~chosen, 0.0)
    return RouterOutput(
        experts, weights, chosen.sum(0), scores.sum() * 0.0, scores.detach(), chosen, capacity, expert_choice=True
    )
