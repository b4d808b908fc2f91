"""The section `expert_parallel`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ds_config import NoEffect, StrictModel, Unsupported

__all__ = ["ExpertParallelConfig"]

Positive = Annotated[int, Field(gt=0)]
Attribute = Annotated[str, Field(min_length=1, pattern=r"^[^.]+$")]
_CHECKED = "It is checked against a family's own router, and says what the router of a user's pattern does."

_FOUND = "leave it out: packed experts say what their weights are, and experts of a list are called as they are"


class ExpertParallelConfig(StrictModel):
    """`expert_parallel`: experts of a model that was written for one rank, cut over ranks."""

    enabled: bool = Field(default=False, description="Whether to cut experts over ranks.")
    autoep_size: Positive = Field(default=1, description="Ranks that share one copy of all experts.")
    expert_tensor_parallel_size: Positive = Field(default=1, description="Parts of each expert.")
    validate_folding_routing: bool = Field(
        default=False, description="Compare the routing of the ranks of a tensor-parallel group in every forward."
    )
    preset_model: str | None = Field(default=None, description="The family by name; otherwise it is recognised.")
    moe_layer_pattern: str | None = Field(default=None, description="Regular expression: names of the MoE blocks.")
    expert_pattern: Attribute | None = Field(default=None, description="The experts' name in a block.")
    router_pattern: Attribute | None = Field(default=None, description="The router's name in a block.")
    use_grouped_mm: Annotated[bool, NoEffect("ds_ops.grouped_matmul chooses by device and dtype")] = True
    disable_triton_grouped_mm: Annotated[bool, NoEffect("there are no Triton kernels")] = False
    route_norm: bool | None = Field(default=None, description=f"Divide weights by their sum. {_CHECKED}")
    route_scale: float = Field(default=1.0, description=f"Weights times this. {_CHECKED}")
    score_apply: Literal["auto", "pre", "post"] = Field(
        default="auto", description='Weigh what goes into experts ("pre") or what comes out of them.'
    )
    combine_impl: Annotated[
        Literal["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"],
        NoEffect("there is one combine: a weighted sum in fp32"),
    ] = "auto"
    row_weighting_impl: Annotated[Literal["auto", "eager", "fused"], NoEffect("there is one combine")] = "auto"
    gate_up_impl: Annotated[
        Literal["separate", "fused"], NoEffect("packed weights are multiplied as they are stored")
    ] = "separate"
    async_split_plan: Annotated[bool, NoEffect("counts are read while shared experts compute")] = False
    comm_backend: Annotated[Literal["comm", "deepep"], NoEffect("ds_comm chooses by device and group")] = "comm"
    comm_num_sm: Annotated[Positive, NoEffect("there is no DeepEP")] = 12
    comm_qp_margin: Annotated[int, Field(ge=0), NoEffect("there is no DeepEP")] = 4
    comm_max_tokens_per_rank: Annotated[int, Field(ge=0), NoEffect("buffers are as long as the tokens that come")] = 0
    expert_activation: Annotated[str | None, NoEffect("experts compute with the activation of their own module")] = None
    num_expert_groups: Positive | None = Field(default=None, description=f"Groups of experts. {_CHECKED}")
    num_limited_groups: Positive | None = Field(
        default=None, description=f"How many of those a token may go to. {_CHECKED}"
    )
    score_func: Literal["auto", "softmax", "sigmoid"] = Field(
        default="auto", description=f"What logits become. {_CHECKED}"
    )
    top_k: Positive | Literal["auto"] = Field(default="auto", description=f"Experts a token. {_CHECKED}")
    load_balance_coeff: Annotated[
        Any,
        Unsupported(
            "null, or omit the key: a model's own auxiliary loss stays as it is; an expert_bias that training moves is not supported by this key but by ds_moe.update_expert_bias"
        ),
    ] = None
    routed_scaling_factor: float | Literal["auto"] = Field(
        default="auto", description=f"Another name of route_scale. {_CHECKED}"
    )
    expert_w1: Annotated[Attribute | None, Unsupported(_FOUND)] = None
    expert_w2: Annotated[Attribute | None, Unsupported(_FOUND)] = None
    expert_w3: Annotated[Attribute | None, Unsupported(_FOUND)] = None
    num_experts_attr: Attribute | None = Field(default=None, description="In the model's config: number of experts.")
    top_k_attr: Attribute | None = Field(default=None, description="In the model's config: experts a token.")
    has_shared_experts: bool | None = Field(default=None, description="Whether a block has experts for all tokens.")
    shared_experts_pattern: Attribute | None = Field(default=None, description="Their name in a block.")
    shared_experts_gate_pattern: Attribute | None = Field(
        default=None, description="The name of their gate in a block."
    )

    @model_validator(mode="after")
    def _grouped(self) -> Self:
        groups, limited = self.num_expert_groups, self.num_limited_groups
        if (groups is None) != (limited is None):
            raise ValueError("num_expert_groups and num_limited_groups say something only together")
        if groups is not None and limited is not None and limited > groups:
            raise ValueError(f"num_limited_groups = {limited} is more than num_expert_groups = {groups}")
        return self
