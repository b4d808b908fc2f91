"""Mixture of experts: routing, dispatch over ranks, experts; no token is dropped unless asked."""

from ds_moe.gates import GateRule, gate, top1gating, top2gating, topkgating
from ds_moe.losses import balance_bias, balance_loss, z_loss
from ds_moe.noise import Stream, gumbel, jitter
from ds_moe.routed import Routed, capacity_of
from ds_moe.selection import Selection, select

__all__ = [
    "GateRule",
    "Routed",
    "Selection",
    "Stream",
    "balance_bias",
    "balance_loss",
    "capacity_of",
    "gate",
    "gumbel",
    "jitter",
    "select",
    "top1gating",
    "top2gating",
    "topkgating",
    "z_loss",
]
