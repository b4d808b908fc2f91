"""The gates of DeepSpeed's MoE layer: top-1 (Switch), top-2 (GShard) and top-k, with capacity or without.

`gate` gives what the layer needs; `top1gating`, `top2gating` and `topkgating` give the dense form [T, E, capacity] that GShard
writes down, for programs that use them directly. Formulas: Lepikhin et al. 2020, algorithm 1; Fedus et al. 2021; random token
selection: Kim et al. 2021, section 3. Who keeps a place of a full expert is decided by the original's call, `torch.topk` of the tokens'
scores for that expert, so that among equal ones the same tokens stay. Unlike the original, no gate changes the logits it was given, and a
batch may be smaller than the minimal capacity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ds_comm import GroupLike, ReduceOp, all_reduce, as_group
from ds_moe.balancing_losses import load_balancing_loss, z_loss
from ds_moe.expert_choice import choose_tokens
from ds_moe.noise import NoiseStream, gumbel
from ds_moe.router_output import RouterOutput, bad_routing, capacity_of, positions, probabilities

__all__ = ["GateRule", "Noise", "gate", "top1gating", "top2gating", "topkgating"]

Noise = Literal["Jitter", "RSample"] | None


@dataclass(frozen=True, slots=True)
class GateRule:
    """What a gate does.

    Attributes:
        k: Choices a token.
        capacity_factor: Of the even share of tokens times k, what an expert takes at most.
        min_capacity: An expert takes at least so many.
        drop_tokens: Whether there is a capacity at all.
        use_rts: Random token selection (k = 1): a full expert keeps tokens by lot, not the first ones.
        noise: "RSample" (k = 1): Gumbel noise on the logits when the expert is chosen. "Jitter" is the layer's, on its input.
        second_sampling: k = 2: the second expert is drawn by its probability, not the second best.
        drop_policy: k > 2: a full expert keeps the choices of highest probability, or the first ones.
        z_loss: Of the z-loss, so many times are added to the loss.
        expert_choice: Experts choose tokens; see `ds_moe.expert_choice`.
        bias_rate: Experts are chosen by scores plus a bias, which moves by this much a step.
        general: One or two choices by the rules of more (`topkgating`): every choice counts in the loss, and weights add up to 1.
    """

    k: int = 1
    capacity_factor: float = 1.0
    min_capacity: int = 4
    drop_tokens: bool = True
    use_rts: bool = True
    noise: Noise = None
    second_sampling: bool = True
    drop_policy: Literal["probs", "position"] = "probs"
    z_loss: float = 0.0
    expert_choice: bool = False
    bias_rate: float = 0.0
    general: bool = False

    @property
    def form(self) -> int:
        """Whose rules: 1 top-1's, 2 top-2's, 3 top-k's."""
        return 3 if self.general else min(self.k, 3)

    def __post_init__(self) -> None:
        if self.k < 1 or not 0 < self.capacity_factor < math.inf or self.min_capacity < 0:
            raise bad_routing(
                f"k {self.k}, capacity factor {self.capacity_factor}, minimal capacity {self.min_capacity}",
                "Use k >= 1, a finite factor above 0 and a minimum of at least 0.",
            )
        if not (self.z_loss >= 0 and self.bias_rate >= 0):
            raise bad_routing(f"z_loss {self.z_loss}, bias_rate {self.bias_rate}", "Use 0 or more.")
        drawn = self.noise == "RSample" or (self.form == 2 and self.second_sampling)
        if self.bias_rate and (drawn or self.expert_choice):
            raise bad_routing(
                f"a bias with noise {self.noise}, second_sampling {self.second_sampling}, expert_choice {self.expert_choice}",
                "Balance by bias where tokens take their best experts: no RSample, top2_2nd_expert_sampling=False, no expert_choice.",
            )
        if self.expert_choice and (self.noise == "RSample" or not self.drop_tokens):
            raise bad_routing(
                f"expert_choice with noise {self.noise} and drop_tokens {self.drop_tokens}",
                "Experts choose by scores, and up to their capacity: leave RSample out and drop_tokens at True.",
            )


def gate(
    logits: Tensor,
    rule: GateRule,
    stream: NoiseStream,
    used_token: Tensor | None = None,
    *,
    experts: Tensor | None = None,
    bias: Tensor | None = None,
) -> RouterOutput:
    """Route tokens by the rule.

    Args:
        logits: fp32 [T, E]; unchanged.
        used_token: [T], not 0 where a token counts; k = 1 only, as in the original. Others are dropped and not counted.
        experts: int64 [T, k]: chosen before (`ds_moe.replay_routing`); capacity and weights are computed anew.
        bias: fp32 [E], added to the scores for the choice only; None adds nothing.

    Raises:
        PlanError: k is not in 1..E, or used_token does not fit ("moe-routing").
    """
    if logits.dim() != 2 or not 1 <= rule.k <= logits.shape[1]:
        raise bad_routing(
            f"{rule.k} choices from logits of shape {tuple(logits.shape)}",
            "Give logits [tokens, experts], k <= experts.",
        )
    if used_token is not None and (rule.k != 1 or used_token.shape != logits.shape[:1]):
        raise bad_routing(
            f"used_token of shape {tuple(used_token.shape)} with k = {rule.k} and {logits.shape[0]} tokens",
            "used_token is for k = 1 and has one entry a token.",
        )
    tokens, count = logits.shape
    scores = probabilities(logits)
    if rule.expert_choice:
        if experts is not None:
            raise bad_routing("choices to replay, and experts choose tokens", "Replay routers whose tokens choose.")
        most = capacity_of(tokens, count, rule.capacity_factor * rule.k, rule.min_capacity)
        routed = choose_tokens(scores, most, None if used_token is None else used_token != 0)
        return replace(routed, loss=routed.loss + _z_term(logits, used_token, rule))
    if experts is None:
        experts = _choose(logits, scores, rule, stream, bias)
    # GShard's loss looks at first choices.
    counted = torch.zeros_like(scores).scatter_(1, experts[:, :1] if rule.form == 2 else experts, 1.0)
    asking, keep_mask, capacity = experts, None, None
    if used_token is not None:
        keep_mask = (used_token != 0)[:, None]
        counted = counted * keep_mask
        asking = experts.masked_fill(~keep_mask, count)
    loss = load_balancing_loss(scores, counted, 1 if rule.form == 2 else rule.k) + _z_term(logits, used_token, rule)
    counts = _counts(asking, count)
    if rule.drop_tokens:
        capacity = capacity_of(tokens, count, rule.capacity_factor * rule.k, rule.min_capacity)
        room = _room(asking, scores.detach(), capacity, rule, stream)
        keep_mask = room if keep_mask is None else room & keep_mask
    weights = scores.gather(1, experts)
    if keep_mask is not None:
        weights = weights.masked_fill(~keep_mask, 0.0)
    if rule.form > 1:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
    return RouterOutput(experts, weights, counts, loss, scores.detach(), keep_mask, capacity)


def _z_term(logits: Tensor, used_token: Tensor | None, rule: GateRule) -> Tensor | float:
    """Compute the z-loss of the used tokens times its coefficient."""
    if not rule.z_loss:
        return 0.0
    if used_token is None:
        return rule.z_loss * z_loss(logits)
    used = (used_token != 0).to(logits.dtype)
    squares = torch.logsumexp(logits, -1).square() * used
    return rule.z_loss * squares.sum() / used.sum().clamp(min=1)


def _choose(logits: Tensor, scores: Tensor, rule: GateRule, stream: NoiseStream, bias: Tensor | None) -> Tensor:
    """Choose k experts for each token, int64 [T, k]. Of equal experts the lowest wins; by top-k's rules torch.topk decides."""
    if bias is not None:
        return (scores.detach() + bias).sort(dim=-1, descending=True, stable=True).indices[:, : rule.k]
    if rule.form == 1:
        noisy = logits + gumbel(logits.shape, stream, logits.device) if rule.noise == "RSample" else scores
        return noisy.detach().argmax(-1, keepdim=True)
    if rule.form == 2:
        first = scores.detach().argmax(-1, keepdim=True)
        rest = logits.detach()
        if rule.second_sampling:
            rest = rest + gumbel(logits.shape, stream, logits.device)
        return torch.cat((first, rest.scatter(1, first, float("-inf")).argmax(-1, keepdim=True)), 1)
    return torch.topk(scores.detach(), rule.k, dim=1).indices


def _room(experts: Tensor, scores: Tensor, capacity: int, rule: GateRule, stream: NoiseStream) -> Tensor:
    """Return which choices get one of the `capacity` places of their expert, bool [T, k].

    Args:
        experts: int64 [T, k], each in 0..E; E for those that do not count.
    """
    if rule.form == 2 or (rule.form == 3 and rule.drop_policy == "position"):
        return positions(experts, scores.shape[1], _order(experts, rule)) < capacity
    tokens, count = scores.shape
    mask = torch.zeros(tokens, count + 1, dtype=torch.int64, device=scores.device).scatter_(1, experts, 1)[:, :count]
    if rule.form == 3:
        ranked = torch.where(mask.bool(), scores, 0.0)
    else:
        ranked = mask * stream.uniform(mask.shape, mask.device) if rule.use_rts else mask
    places = torch.topk(ranked, min(capacity, tokens), dim=0, sorted=rule.form == 1).indices  # as the original calls it
    room = torch.zeros_like(mask, dtype=torch.bool).scatter_(0, places, True) & mask.bool()
    return torch.nn.functional.pad(room, (0, 1)).gather(1, experts)


def _order(experts: Tensor, rule: GateRule) -> Tensor | None:
    """Order the choices by their priority at an expert, first to last; None for the order of their numbers."""
    if rule.form != 2:
        return None
    # All first choices before all second ones.
    return torch.arange(experts.numel(), device=experts.device).view(experts.shape).t().reshape(-1)


def _counts(experts: Tensor, count: int) -> Tensor:
    flat = experts.reshape(-1)
    out = torch.zeros(count + 1, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    return out[:count]


# ---- the dense form --------------------------------------------------------------------------------------------------


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: GroupLike = None,
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """Compute (loss, weights [T, E, C], mask [T, E, C], counts [E]) of the top-1 gate; C is the capacity.

    Args:
        sparse_routes: Compute (loss, C, E, experts, places, weights, counts) instead: int32 [k, T], the expert of each choice, -1 where it
            was dropped, its place there, and its weight.
    Cost: T * E * C elements, unless sparse, which no layer here needs; without capacity a MAX over `ep_group`, if one is given.
    """
    noise: Noise = "RSample" if noisy_gate_policy == "RSample" else None
    rule = GateRule(1, capacity_factor, min_capacity, drop_tokens, use_rts, noise)
    return _outputs(gate(logits, rule, NoiseStream("top1gating"), used_token), rule, ep_group, sparse_routes)


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: GroupLike = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """Compute the outputs of `top1gating` for a gate with two choices."""
    rule = GateRule(2, capacity_factor, min_capacity, drop_tokens, second_sampling=top2_2nd_expert_sampling)
    return _outputs(gate(logits, rule, NoiseStream("top2gating")), rule, ep_group, sparse_routes)


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: GroupLike = None,
    drop_policy: Literal["probs", "position"] = "probs",
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """Compute the outputs of `top1gating` for k choices of the highest probability; one or two have the loss and weights of more."""
    rule = GateRule(k, capacity_factor, min_capacity, drop_tokens, drop_policy=drop_policy, general=True)
    return _outputs(gate(logits, rule, NoiseStream("topkgating")), rule, ep_group, sparse_routes)


def _outputs(routed: RouterOutput, rule: GateRule, group: GroupLike, sparse: bool) -> tuple[Any, ...]:
    tokens, count = routed.scores.shape
    capacity = routed.capacity
    if capacity is None:
        most = routed.counts.max() if tokens else routed.counts.new_zeros(())
        if group is not None and as_group(group).size > 1:
            all_reduce(most, ReduceOp.MAX, as_group(group), unit="moe capacity")
        capacity = min(int(most), tokens) if rule.form == 1 else int(most)
    # GShard numbers the places of two choices before it drops any; the others number what is kept.
    order = _order(routed.experts, rule)
    gone = torch.zeros_like(routed.experts, dtype=torch.bool) if routed.kept_mask is None else ~routed.kept_mask
    place = positions(routed.experts if rule.form == 2 else routed.experts.masked_fill(gone, count), count, order)
    if sparse:
        routes = (
            routed.experts.masked_fill(gone, -1).t().int(),
            place.masked_fill(gone, 0).t().int(),
            routed.weights.t(),
        )
        return routed.loss, capacity, count, *routes, routed.counts
    width = max(capacity, 1)
    flat = torch.zeros(tokens, (count + 1) * width, dtype=routed.weights.dtype, device=routed.weights.device)
    at = (routed.experts * width + place.clamp(max=width - 1)).masked_fill(gone, count * width)
    weights = flat.scatter_add(1, at, routed.weights)[:, : count * width].view(tokens, count, width)
    return routed.loss, weights, weights.bool(), routed.counts
