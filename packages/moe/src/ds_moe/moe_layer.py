"""The layer: a gate, experts on one rank or several, and the sum. Signatures and parameter names are DeepSpeed's.

    layer = MoE(hidden_size=64, expert=mlp, num_experts=8, ep_size=2, k=2)
    place(model)                                  # once, before ZeRO; an engine does it
    output, loss, counts = layer(hidden_states)   # add a small multiple of loss to the model's

A layer with `ep_size` 1 needs no `place_experts`: all ranks have all experts. With capacity (`drop_tokens`) the same tokens are dropped as there, but
nothing is padded, and the experts of a rank never see a row that counts for nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from ds_comm import all_gather_single, differentiable
from ds_config.errors import CommError, PlanError
from ds_config.option_checks import check_options
from ds_moe._torch import in_backward
from ds_moe.dispatch import Compute, WithShared, through_experts
from ds_moe.expert_groups import ExpertGroups, alone, make_places
from ds_moe.experts import Experts, draw_seed
from ds_moe.gates import GateRule, Noise, gate
from ds_moe.load import ExpertLoad
from ds_moe.moe_options import MoEOptions
from ds_moe.noise import NoiseStream, jitter
from ds_moe.router_output import RouterOutput, wide
from ds_moe.router_replay import _Track

__all__ = ["MOELayer", "MoE", "TopKGate", "route_through"]


class TopKGate(nn.Module):
    """Logits of a bias-free linear in at least fp32, and a gate over them.

    Args:
        model_dim: Width of the input.
        rule: What the gate does in training.
        eval_capacity_factor: Instead of the rule's factor outside training; None: no capacity there, so that an answer does not depend on the
            other rows of its batch. Nothing is drawn outside training: the second expert is the second best, first tokens come first.
    """

    def __init__(
        self, model_dim: int, num_experts: int, rule: GateRule, eval_capacity_factor: float | None = None
    ) -> None:
        check_options(rule)  # not where a rule is made: `top1gating` makes one in every call, compiled ones too
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.rule, self.name = rule, "moe.gate"
        self._eval_rule = replace(
            rule,
            capacity_factor=rule.capacity_factor if eval_capacity_factor is None else eval_capacity_factor,
            drop_tokens=rule.drop_tokens and (eval_capacity_factor is not None or rule.expert_choice),
            use_rts=False,
            noise=None,
            second_sampling=False,
        )
        self.track: _Track | None = None
        self.expert_bias: Tensor | None
        self.register_buffer("expert_bias", torch.zeros(num_experts) if rule.bias_rate else None)
        self._counts: Tensor | None = None  # no buffer: DDP would broadcast those of rank 0

    def take_counts(self) -> Tensor:
        """Return the choices of each expert in training since the last call, int64 [E]."""
        counts, self._counts = self._counts, None
        weight = self.wg.weight
        return torch.zeros(weight.shape[0], dtype=torch.int64, device=weight.device) if counts is None else counts

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self.expert_bias is not None:
            self.expert_bias = self.expert_bias.float()  # steps of 1e-3 are lost in 16 bits
        return self

    def forward(self, x: Tensor, used_token: Tensor | None = None) -> RouterOutput:
        """Route tokens x [T, n]; `used_token` as in `ds_moe.gate`."""
        rule, stream = self.rule if self.training else self._eval_rule, NoiseStream(self.name)
        with torch.autocast(x.device.type, enabled=False):
            x = wide(x)
            if rule.noise == "Jitter":
                x = jitter(x, stream)
            logits = nn.functional.linear(x, self.wg.weight.to(x.dtype))
        replayed = None if self.track is None else self.track.next_choices(x.shape[0])
        routed = gate(logits, rule, stream, used_token, experts=replayed, bias=self.expert_bias)
        if self.expert_bias is not None and self.training and not in_backward():
            self._counts = routed.counts if self._counts is None else self._counts + routed.counts
        if self.track is not None:
            self.track.took(routed.experts)
        return routed


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """How a layer's tokens go through its experts.

    Attributes:
        weigh_first: Weigh what goes into experts.
        split: Tensor-parallel ranks, which have the same tokens, take a part of them each.
        compare: Compare the routing of tensor-parallel ranks in every forward, which reads the device.
    """

    weigh_first: bool = False
    split: bool = True
    compare: bool = False


def route_through(
    x: Tensor, routed: RouterOutput, compute: Compute, places: ExpertGroups, how: RoutingOptions
) -> Tensor:
    """Dispatch as `through_experts` does, on ranks that may have the same tokens as their tensor-parallel peers.

    Raises:
        CommError: those peers routed differently and `how.compare` ("moe-routing-differs").
    """
    tensor = places.tensor
    if how.compare and tensor.size > 1:
        _compare(routed, places)
    if tensor.size == 1 or not how.split:
        return through_experts(x, routed, compute, places, weigh_first=how.weigh_first)
    base, more = divmod(x.shape[0], tensor.size)
    sizes = [base + (rank < more) for rank in range(tensor.size)]
    start = sum(sizes[: tensor.rank])
    part = replace(
        routed,
        experts=routed.experts[start : start + sizes[tensor.rank]],
        weights=differentiable.split(routed.weights, tensor, 0, sizes, unit="moe weights"),
        kept_mask=None if routed.kept_mask is None else routed.kept_mask[start : start + sizes[tensor.rank]],
    )
    tokens = differentiable.split(x, tensor, 0, sizes, unit="moe tokens")
    out = through_experts(tokens, part, compute, places, weigh_first=how.weigh_first)
    return cast(Tensor, differentiable.gather(out, tensor, 0, sizes, unit="moe tokens"))


def _compare(routed: RouterOutput, places: ExpertGroups) -> None:
    flat = routed.experts.reshape(-1)
    place = torch.arange(1, flat.numel() + 1, device=flat.device)
    digest = torch.stack((((flat + 1) * place * 0x9E3779B1).sum(), flat.sum(), place.new_tensor(flat.numel())))
    digests = digest.new_empty((places.tensor.size, 3))
    all_gather_single(digests, digest, group=places.tensor, unit="moe routing")
    if (digests != digests[0]).any():
        raise CommError(
            f"ranks {places.tensor.ranks} have the same tokens and route them differently (digests {digests[:, 0].tolist()})",
            code="moe-routing-differs",
            fix="Seed noise and dropout alike on tensor-parallel ranks, and keep routers replicated.",
        )


class MOELayer(nn.Module):
    """A gate and the experts of this rank.

    Attributes:
        places: Where the experts are; None until `place_experts`, where they are on several ranks.
        load: How they are loaded.
    """

    def __init__(self, gate_: TopKGate, experts: nn.Module, num_experts: int, ep_size: int) -> None:
        super().__init__()
        self.gate, self.experts = gate_, experts
        self.num_experts, self.ep_size = num_experts, ep_size
        self.places: ExpertGroups | None = alone() if ep_size == 1 else None
        self.how = RoutingOptions()
        self.load = ExpertLoad()
        self.l_aux: Tensor | None = None
        self.exp_counts: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the graph of the last loss: a model is copied between its steps, for an average of its weights."""
        return {**self.__dict__, "l_aux": None if self.l_aux is None else self.l_aux.detach()}

    def forward(
        self, hidden_states: Tensor, used_token: Tensor | None = None, compute: WithShared | None = None
    ) -> Tensor:
        """Route tokens to their experts, [..., n] to [..., m], and set `l_aux` and `exp_counts`.

        Args:
            compute: The layer's experts beside others, which are computed while tokens travel; None: the experts alone.
        """
        if self.places is None:
            raise PlanError(
                f"{self.num_experts} experts are to be on {self.ep_size} ranks, and nobody said on which",
                code="moe-places",
                fix="Call ds_moe.place_experts(model) on all ranks before the first forward (and before ds_zero.shard).",
            )
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        used = None if used_token is None else used_token.reshape(-1)
        routed = self.gate(x, used)
        self.load.note(routed)
        self.l_aux, self.exp_counts = routed.loss, routed.counts
        out = route_through(x, routed, compute or self.experts, self.places, self.how)
        return out.reshape(*hidden_states.shape[:-1], out.shape[-1])


class MoE(nn.Module):
    """Mixture of experts, with DeepSpeed's parameters.

    Args:
        hidden_size: Width of the input.
        expert: Copied for each local expert; maps [rows, hidden_size] to the same.
        num_experts: On all ranks together.
        ep_size: Ranks that share one copy of all experts.
        k: Choices a token.
        capacity_factor, min_capacity: See `GateRule`.
        eval_capacity_factor: The factor outside training, where nothing is drawn; None: nothing is dropped there.
        use_residual: Add the output of one more expert that sees all tokens, mixed by two learned coefficients
            (Rajbhandari et al. 2022).
        noisy_gate_policy: None, "Jitter" or "RSample".
        drop_tokens: In training, as in DeepSpeed's layer. False: no capacity; no token is dropped, and no rank waits to agree on one.
        use_rts: k = 1: a full expert keeps tokens by lot.
        use_tutel: Accepted with a warning: there is nothing it could make faster here.
        enable_expert_tensor_parallelism: The expert module is cut over tensor-parallel ranks itself, so each of those sees all rows.
        top2_2nd_expert_sampling: k = 2: draw the second expert.
        options: What goes beyond DeepSpeed's layer; see `MoEOptions`.

    Raises:
        PlanError: ep_size does not divide num_experts ("moe-places"); k, factors or the policy make no sense ("moe-routing"); experts cannot be
            drawn ("moe-experts").
        UnsupportedError: experts that grouped products cannot compute ("moe-grouped").
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float | None = None,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
        options: MoEOptions = MoEOptions(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__()
        if ep_size < 1 or num_experts < 1 or num_experts % ep_size:
            raise PlanError(
                f"{num_experts} experts over expert groups of {ep_size} ranks",
                code="moe-places",
                fix="Use an ep_size that divides num_experts.",
            )
        if noisy_gate_policy not in (None, "None", "Jitter", "RSample"):
            raise PlanError(
                f"noisy_gate_policy {noisy_gate_policy!r}", code="moe-routing", fix='Use None, "Jitter" or "RSample".'
            )
        if use_tutel:
            warnings.warn("use_tutel changes nothing: no token is padded and no one-hot is made here", stacklevel=2)
        noise = cast(Noise, None if noisy_gate_policy == "None" else noisy_gate_policy)
        rule = GateRule(k, capacity_factor, min_capacity, drop_tokens, use_rts, noise, top2_2nd_expert_sampling)
        rule = replace(rule, z_loss=options.z_loss, expert_choice=options.expert_choice, bias_rate=options.bias_rate)
        self.num_experts, self.ep_size, self.use_residual = num_experts, ep_size, use_residual
        self.num_local_experts, self.expert_group_name = num_experts // ep_size, f"ep_size_{ep_size}"
        experts = Experts(expert, self.num_local_experts, self.expert_group_name, grouped=options.grouped)
        if options.draw_apart:
            experts.draw(draw_seed())
        router = TopKGate(hidden_size, num_experts, rule, eval_capacity_factor)
        self.deepspeed_moe = MOELayer(router, experts, num_experts, ep_size)
        self.deepspeed_moe.how = replace(self.deepspeed_moe.how, split=not enable_expert_tensor_parallelism)
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Give the experts their ranks, all of which split the batch, so that the layer runs without an engine. Collective over the world.

        `place_experts`, which an engine calls, names the parameters, too, and says which gradients are summed where.
        """
        self.deepspeed_moe.places = make_places(self.ep_size, data_first=use_data_before_expert_parallel_)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output [..., hidden_size], the balance loss, and the choices of each expert (int64 [E]).

        The loss is a scalar with gradient.
        """
        layer = self.deepspeed_moe
        if not self.use_residual:
            out = layer(hidden_states, used_token)
        else:
            compute = WithShared(layer.experts, lambda: _first(self.mlp(hidden_states)))
            out = layer(hidden_states, used_token, compute)
            mix = torch.softmax(self.coefficient(hidden_states), -1)
            out = out * mix[..., 0:1] + compute.shared_output() * mix[..., 1:]
        return out, cast(Tensor, layer.l_aux), cast(Tensor, layer.exp_counts)


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
