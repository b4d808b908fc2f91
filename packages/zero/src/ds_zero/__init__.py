"""One core for ZeRO 0, 1, 2 and 3, usable alone in a plain PyTorch loop."""

from ds_zero.access.gathered_access import (
    GatheredParameters,
    register_external_parameter,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
    unregister_external_parameter,
    unwrap_model_for_generation,
)
from ds_zero.access.nonfinite import Nonfinite, NonfiniteDetector
from ds_zero.access.sharded_init import Init, MiCS_Init, load_pretrained
from ds_zero.layout.dtypes_plan import LossScale, Precision, PrecisionRule
from ds_zero.layout.elements import UnitLayout, plan_layout
from ds_zero.layout.shard_options import NodeTopology, OffloadPolicy, OptimizerTraits, ShardOptions
from ds_zero.layout.units import STAGES, ShardingStrategy, UnitSizePolicy, UnitSpec, plan_units
from ds_zero.planning.unit_plan import (
    ParamStorage,
    ReduceStrategy,
    ShardGroupInfo,
    UnitBytes,
    UnitPlan,
    ZeroPlan,
    plan,
    plan_unit,
)
from ds_zero.policies.quantized_comm import QGZ, QWZ, ErrorFeedbackOptions, QuantizedComm
from ds_zero.policies.tiled_layers import TiledLinear
from ds_zero.runtime.attributes import ShardedGradient
from ds_zero.runtime.sharded_model import ShardedModel
from ds_zero.runtime.sharded_parameter import ShardedParameter
from ds_zero.update.sharded_optimizer import ShardedOptimizer, StepReport
from ds_zero.update.sharding_call import shard

__all__ = [
    "QGZ",
    "QWZ",
    "STAGES",
    "ErrorFeedbackOptions",
    "GatheredParameters",
    "Init",
    "LossScale",
    "MiCS_Init",
    "NodeTopology",
    "Nonfinite",
    "NonfiniteDetector",
    "OffloadPolicy",
    "OptimizerTraits",
    "ParamStorage",
    "Precision",
    "PrecisionRule",
    "QuantizedComm",
    "ReduceStrategy",
    "ShardGroupInfo",
    "ShardOptions",
    "ShardedGradient",
    "ShardedModel",
    "ShardedOptimizer",
    "ShardedParameter",
    "ShardingStrategy",
    "StepReport",
    "TiledLinear",
    "UnitBytes",
    "UnitLayout",
    "UnitPlan",
    "UnitSizePolicy",
    "UnitSpec",
    "ZeroPlan",
    "load_pretrained",
    "plan",
    "plan_layout",
    "plan_unit",
    "plan_units",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "shard",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]  # fmt: skip
