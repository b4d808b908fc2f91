"""One core for ZeRO 0, 1, 2 and 3, usable alone in a plain PyTorch loop."""

from ds_zero.api import shard
from ds_zero.layout import UnitLayout, plan_layout
from ds_zero.optimizer import ShardedOptimizer, StepReport
from ds_zero.precision import LossScale, Precision
from ds_zero.released import Released
from ds_zero.residency import STAGES, Residency
from ds_zero.sharding import Sharding, ShardOptions
from ds_zero.units import UnitPolicy, UnitSpec, plan_units

__all__ = [
    "STAGES",
    "LossScale",
    "Precision",
    "Released",
    "Residency",
    "ShardOptions",
    "ShardedOptimizer",
    "Sharding",
    "StepReport",
    "UnitLayout",
    "UnitPolicy",
    "UnitSpec",
    "plan_layout",
    "plan_units",
    "shard",
]
