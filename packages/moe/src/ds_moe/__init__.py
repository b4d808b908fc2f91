"""Mixture of experts: routing, dispatch over ranks, experts; without a capacity no token is dropped."""

from ds_moe.attach_experts import ExpertPlacement, place_experts
from ds_moe.autoep import ExpertParallelModel, apply_expert_parallel
from ds_moe.balancing_losses import load_balancing_loss, update_expert_bias, z_loss
from ds_moe.expert_balancing import balance_experts
from ds_moe.expert_choice import choose_tokens
from ds_moe.expert_files import full_state, load_experts
from ds_moe.expert_gradients import clip_grad_norm_, reduce_gradients
from ds_moe.expert_groups import ExpertGroups, make_places, place_ranks
from ds_moe.experts import Experts
from ds_moe.gates import GateRule, gate, top1gating, top2gating, topkgating
from ds_moe.load import LayerLoad, expert_load, report_load
from ds_moe.lora import attach_lora
from ds_moe.moe_layer import MoE, MOELayer, TopKGate
from ds_moe.moe_options import MoEOptions
from ds_moe.noise import NoiseStream, gumbel, jitter
from ds_moe.router_output import RouterOutput, capacity_of
from ds_moe.router_replay import RoutingTrace, record_routing, replay_routing
from ds_moe.selection import RouterOptions, select_experts

__all__ = [
    "ExpertGroups",
    "ExpertParallelModel",
    "ExpertPlacement",
    "Experts",
    "GateRule",
    "LayerLoad",
    "MOELayer",
    "MoE",
    "MoEOptions",
    "NoiseStream",
    "RouterOptions",
    "RouterOutput",
    "RoutingTrace",
    "TopKGate",
    "apply_expert_parallel",
    "attach_lora",
    "balance_experts",
    "capacity_of",
    "choose_tokens",
    "clip_grad_norm_",
    "expert_load",
    "full_state",
    "gate",
    "gumbel",
    "jitter",
    "load_balancing_loss",
    "load_experts",
    "make_places",
    "place_experts",
    "place_ranks",
    "record_routing",
    "reduce_gradients",
    "replay_routing",
    "report_load",
    "select_experts",
    "top1gating",
    "top2gating",
    "topkgating",
    "update_expert_bias",
    "z_loss",
]
