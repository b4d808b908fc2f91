"""Terms that keep experts evenly loaded and logits small, and the balancing that needs no term.

Words: of T tokens and E experts, me[e] is the mean probability of e and ce[e] the share of tokens that chose it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_moe.router_output import wide

__all__ = ["entropy", "load_balancing_loss", "update_expert_bias", "z_loss"]


def load_balancing_loss(scores: Tensor, chosen: Tensor, k: int = 1) -> Tensor:
    """Compute E / k * sum over e of me[e] * ce[e], the load-balancing loss: 1 when all is even.

    Source: Shazeer 2017; Lepikhin 2020, algorithm 1.

    Args:
        scores: [T, E] fp32 with gradient. chosen: [T, E], 1 where a token chose an expert; no gradient.
    """
    if scores.shape[0] == 0:
        return scores.sum() * 0.0
    return (scores.mean(0) * chosen.to(scores.dtype).mean(0)).sum() * (scores.shape[1] / k)


def z_loss(logits: Tensor) -> Tensor:
    """Compute the mean of logsumexp(logits)^2 over tokens (Zoph et al. 2022, equation 5). 0 without tokens."""
    if logits.shape[0] == 0:
        return logits.sum() * 0.0
    return torch.logsumexp(wide(logits), -1).square().mean()


def update_expert_bias(bias: Tensor, counts: Tensor, rate: float) -> None:
    """Add rate * sign(mean load - load of e) to bias[e], in place (Wang et al. 2024, algorithm 1).

    Args:
        bias: floats [E]; it is added to scores when experts are chosen, not to weights. counts: [E] over all ranks of a
            step.
    """
    load = counts.to(bias.dtype)
    bias.add_(torch.sign(load.mean() - load), alpha=rate)


def entropy(counts: Tensor) -> Tensor:
    """Compute the entropy of the distribution `counts` [..., E] in nats, over log E.

    1 when all experts are loaded alike, 0 when one takes all.
    """
    share = counts.float() / counts.sum(-1, keepdim=True).clamp(min=1)
    if counts.shape[-1] == 1:
        return torch.ones(counts.shape[:-1], device=counts.device)
    terms = torch.special.entr(share).sum(-1)
    return terms / torch.log(torch.tensor(float(counts.shape[-1]), device=counts.device))
