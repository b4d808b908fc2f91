"""Mixture of experts: routing, dispatch over ranks, experts; no token is dropped unless asked."""

from ds_moe.autoep import Cut, cut_experts
from ds_moe.experts import Experts
from ds_moe.expert_files import load_experts, whole_state
from ds_moe.gates import GateRule, gate, top1gating, top2gating, topkgating
from ds_moe.moe_layer import MoE, MOELayer, TopKGate
from ds_moe.load import LayerLoad, expert_load, report_load
from ds_moe.lora import attach_lora
from ds_moe.balancing_losses import balance_bias, balance_loss, z_loss
from ds_moe.noise import Stream, gumbel, jitter
from ds_moe.expert_groups import Places, make_places, place_ranks
from ds_moe.attach_experts import Placed, place
from ds_moe.router_replay import Tape, record, replay
from ds_moe.router_output import Routed, capacity_of
from ds_moe.selection import Selection, select

__all__ = [
    "Cut",
    "Experts",
    "GateRule",
    "LayerLoad",
    "MOELayer",
    "MoE",
    "Placed",
    "Places",
    "Routed",
    "Selection",
    "Stream",
    "Tape",
    "TopKGate",
    "attach_lora",
    "balance_bias",
    "balance_loss",
    "capacity_of",
    "cut_experts",
    "expert_load",
    "gate",
    "gumbel",
    "jitter",
    "load_experts",
    "make_places",
    "place",
    "place_ranks",
    "record",
    "replay",
    "report_load",
    "select",
    "top1gating",
    "top2gating",
    "topkgating",
    "whole_state",
    "z_loss",
]
