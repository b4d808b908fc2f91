"""Tensor parallelism: layers of a model cut over ranks. Decide (`make_tensor_plan`), then do (`cut_model`)."""

from ds_parallel.heads import HeadCounts
from ds_parallel.tensor.apply import CutModel, cut_model, cut_of, whole_params
from ds_parallel.tensor.dim_shards import Cut, Part, Unit
from ds_parallel.tensor.module_info import ModelFacts, facts_of
from ds_parallel.tensor.parallel_layers import kind_of
from ds_parallel.tensor.parallel_losses import causal_loss, vocabulary_cross_entropy
from ds_parallel.tensor.tp_plan import Decision, TensorOptions, TensorPlan, make_tensor_plan
from ds_parallel.tensor.layer_rules import Kind, Rule
from ds_parallel.tensor.sharded_loading import load_parts

__all__ = [
    "Cut",
    "CutModel",
    "Decision",
    "HeadCounts",
    "Kind",
    "ModelFacts",
    "Part",
    "Rule",
    "TensorOptions",
    "TensorPlan",
    "Unit",
    "causal_loss",
    "cut_model",
    "cut_of",
    "facts_of",
    "kind_of",
    "load_parts",
    "make_tensor_plan",
    "vocabulary_cross_entropy",
    "whole_params",
]
