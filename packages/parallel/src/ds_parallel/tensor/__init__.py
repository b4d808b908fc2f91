"""Tensor parallelism: layers of a model cut over ranks. Decide (`make_tensor_plan`), then do (`parallelize_model`)."""

from ds_parallel.heads import HeadCounts
from ds_parallel.tensor.apply import TensorParallelModel, parallelize_model, tensor_parallel_of, unsharded_params
from ds_parallel.tensor.dim_shards import DimShards, HeadUnit, ShardPart
from ds_parallel.tensor.layer_rules import LayerRule, ShardKind
from ds_parallel.tensor.module_info import ModelFacts, facts_of
from ds_parallel.tensor.parallel_layers import kind_of
from ds_parallel.tensor.parallel_losses import causal_loss, vocab_parallel_cross_entropy
from ds_parallel.tensor.sharded_loading import load_sharded_weights
from ds_parallel.tensor.tensor_gradients import clip_grad_norm_, reduce_gradients
from ds_parallel.tensor.tp_plan import Decision, TensorOptions, TensorPlan, make_tensor_plan

__all__ = [
    "Decision",
    "DimShards",
    "HeadCounts",
    "HeadUnit",
    "LayerRule",
    "ModelFacts",
    "ShardKind",
    "ShardPart",
    "TensorOptions",
    "TensorParallelModel",
    "TensorPlan",
    "causal_loss",
    "clip_grad_norm_",
    "facts_of",
    "kind_of",
    "load_sharded_weights",
    "make_tensor_plan",
    "parallelize_model",
    "reduce_gradients",
    "tensor_parallel_of",
    "unsharded_params",
    "vocab_parallel_cross_entropy",
]
