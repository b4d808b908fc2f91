"""Mixture of experts: routing, dispatch over ranks, experts; no token is dropped unless asked."""

from ds_moe.autoep import ExpertParallelModel, apply_expert_parallel
from ds_moe.experts import Experts
from ds_moe.expert_files import load_experts, full_state
from ds_moe.gates import GateRule, gate, top1gating, top2gating, topkgating
from ds_moe.moe_layer import MoE, MOELayer, TopKGate
from ds_moe.load import LayerLoad, expert_load, report_load
from ds_moe.lora import attach_lora
from ds_moe.balancing_losses import update_expert_bias, load_balancing_loss, z_loss
from ds_moe.noise import NoiseStream, gumbel, jitter
from ds_moe.expert_groups import ExpertGroups, make_places, place_ranks
from ds_moe.attach_experts import ExpertPlacement, place_experts
from ds_moe.router_replay import RoutingTrace, record_routing, replay_routing
from ds_moe.router_output import RouterOutput, capacity_of
from ds_moe.selection import RouterOptions, select_experts

__all__ = [
    "ExpertParallelModel",
    "Experts",
    "GateRule",
    "LayerLoad",
    "MOELayer",
    "MoE",
    "ExpertPlacement",
    "ExpertGroups",
    "RouterOutput",
    "RouterOptions",
    "NoiseStream",
    "RoutingTrace",
    "TopKGate",
    "attach_lora",
    "update_expert_bias",
    "load_balancing_loss",
    "capacity_of",
    "apply_expert_parallel",
    "expert_load",
    "gate",
    "gumbel",
    "jitter",
    "load_experts",
    "make_places",
    "place_experts",
    "place_ranks",
    "record_routing",
    "replay_routing",
    "report_load",
    "select_experts",
    "top1gating",
    "top2gating",
    "topkgating",
    "full_state",
    "z_loss",
]
