"""Sections of training features that live in the engine: profiler, layer drop, elastic batches. Models only; no torch."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field, model_validator

from ds_config import NoEffect, StrictModel

__all__ = ["ElasticityConfig", "FlopsProfilerConfig", "HybridEngineConfig", "LayerDropConfig"]

Positive = Annotated[int, Field(gt=0)]


class FlopsProfilerConfig(StrictModel):
    """`flops_profiler`: operations of one step's forward, by module."""

    enabled: bool = Field(default=False, description="Count the operations of one step's first forward.")
    recompute_fwd_factor: float = Field(
        default=0.0, ge=0, description="Forwards computed again in backward, as a share of one (1 with checkpointing)."
    )
    profile_step: Positive = Field(default=1, description="Which step; the first is 1.")
    module_depth: int = Field(default=-1, ge=-1, description="Deepest level that is told of; -1 is all.")
    top_modules: Positive = Field(default=1, description="How many modules are named at each level.")
    detailed: bool = Field(default=True, description="Tell of every module, not only of the largest.")
    output_file: str | None = Field(default=None, description="Where to write it; null logs it on rank 0.")


class LayerDropConfig(StrictModel):
    """`progressive_layer_drop`: Zhang and He, arXiv:2010.13369. The model drops layers; the engine passes it how many to keep.

    The forward gets `progressive_layer_drop=True` and `pld_theta`, the share of layers to keep.
    """

    enabled: bool = Field(description="Pass the two arguments to the model's forward.")
    theta: float = Field(default=1.0, ge=0, le=1, description="What the share falls to.")
    gamma: float = Field(default=0.001, ge=0, description="How fast: (1 - theta) exp(-gamma step) + theta.")

    def keep(self, step: int) -> float:
        """Return the share of layers to keep in the step that follows `step` steps."""
        return (1.0 - self.theta) * math.exp(-self.gamma * step) + self.theta


class HybridEngineConfig(StrictModel):
    """`hybrid_engine`: the engine that trains has `generate`."""

    enabled: bool = Field(default=False, description="Make an engine that generates, too.")
    max_out_tokens: Positive = Field(default=512, description="Most tokens of a prompt and its answer together.")
    inference_tp_size: Positive = Field(default=1, description="Ranks that share a layer while generating; 1.")
    release_inference_cache: Annotated[bool, NoEffect("no cache is kept between two calls")] = False
    pin_parameters: Annotated[bool, NoEffect("the whole model is gathered once for each call")] = True
    tp_gather_partition_size: Annotated[int, NoEffect("the whole model is gathered once for each call")] = 8
    enable_cuda_graph: Annotated[bool, NoEffect("generation runs the model's own code")] = False


class ElasticityConfig(StrictModel):
    """`elasticity`: a train batch size that suits many numbers of ranks. It gives the three batch keys."""

    enabled: bool = Field(default=False, description="Let this section decide the batch keys.")
    max_train_batch_size: Positive = Field(default=2000, description="Largest train batch size.")
    micro_batch_sizes: Annotated[tuple[Positive, ...], Field(min_length=1)] = Field(
        default=(2, 4, 6), description="Microbatch sizes that fit a device."
    )
    min_gpus: Positive = Field(default=1, description="Fewest ranks.")
    max_gpus: Positive = Field(default=10_000, description="Most ranks.")
    model_parallel_size: Positive = Field(default=1, description="Ranks that share one copy of the model.")
    num_gpus_per_node: Positive = Field(default=1, description="Version 0.2 counts whole nodes of so many ranks.")
    min_time: Annotated[int, NoEffect("when a run gets another number of ranks is the choice of who starts it")] = 0
    prefer_larger_batch: bool = Field(default=True, description="Of equally good sizes the larger.")
    ignore_non_elastic_batch_info: bool = Field(
        default=False, description="Override batch keys instead of refusing them."
    )
    version: Annotated[float, Field(ge=0.1, le=0.2)] = Field(default=0.2, description="0.1 counts ranks, 0.2 nodes.")

    @model_validator(mode="before")
    @classmethod
    def _needs(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("enabled") is True:
            missing = [key for key in ("max_train_batch_size", "micro_batch_sizes") if key not in data]
            if missing:
                raise ValueError(f"elasticity is enabled without {' and '.join(missing)}")
        return data
