"""`deepspeed.module_inject.auto_ep` and its layers: blocks with experts found in a model and replaced, over `ds_moe`.

An engine cuts experts by itself (`expert_parallel` of the configuration, `ds_moe.apply_expert_parallel`), under the model's own names. This is for
programs that do it by hand, with upstream's: gate, down and up are w1, w2 and w3, [E, ...] of a rank's experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepspeed._ours.base.raising import raising, refused
from deepspeed._ours.parallel.autoep_config import (
    AutoEPConfig,
    MoELayerSpec,
    fill_autoep_config_from_hf,
    preset_name_for_hf_model_type,
    resolve_route_scale,
)
from deepspeed._ours.parallel.autoep_folding import FoldingGroupHandles, build_folding_spec
from deepspeed._ours.parallel.moe_gates import classify_fused_gate_up_layout
from ds_comm import Box, Mesh, ParamSharding, as_group, set_param_sharding
from ds_moe import ExpertGroups, RouterOptions, make_places, select_experts
from ds_moe.detect import MoEBlock, recognise
from ds_moe.dispatch import DispatchRows, exchange_of
from ds_moe.expert_groups import alone
from ds_moe.module_list_block import ListedBlock
from ds_moe.moe_layer import RoutingOptions, route_through
from ds_moe.packed_experts import PackedExperts
from ds_moe.router_output import RouterOutput, wide
from ds_ops.grouped import grouped_matmul

Weights = tuple[Tensor, Tensor, Tensor]


class TokenChoiceTopKRouter(nn.Module):
    """A linear gate and `ds_moe.select_experts`: (weights [T, k], experts [T, k], choices of each expert [E])."""

    def __init__(
        self, dim: int, num_experts: int, num_expert_groups: int | None, num_limited_groups: int | None, top_k: int, score_func: str,
        route_norm: bool, route_scale: float, gate_bias: bool, group_score_func: str = "top2_sum",
    ) -> None:  # fmt: skip
        super().__init__()
        self.gate, self.route_scale = nn.Linear(dim, num_experts, bias=gate_bias), route_scale
        self.rule = RouterOptions(
            top_k, "sigmoid" if score_func == "sigmoid" else "softmax", route_norm, route_scale, num_expert_groups or 1,
            num_limited_groups or 1, "max" if group_score_func == "max" else "top2", 1e-20,
        )  # fmt: skip
        self.rule.check(num_experts)
        self.e_score_correction_bias: Tensor | None = None

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Choose experts by scores and biases; weigh them by scores alone."""
        biases = [bias for bias in (expert_bias, self.e_score_correction_bias) if bias is not None]
        routed = select_experts(wide(self.gate(x)), self.rule, sum(biases[1:], biases[0]) if biases else None)
        return routed.weights, routed.experts, routed.counts.int()


class GroupedExperts(nn.Module):
    """Gated experts, w2 (silu(w1 x) * w3 x), by grouped products. Weights are uninitialized."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, use_grouped_mm: bool = True) -> None:
        super().__init__()
        del use_grouped_mm  # ds-ops chooses
        self.num_experts = num_experts
        self.w1, self.w3 = (nn.Parameter(torch.empty(num_experts, hidden_dim, dim)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Compute experts for rows [T, dim] that are sorted by expert."""
        return self.compute(x, DispatchRows(num_tokens_per_expert.cumsum(0)))

    def compute(self, x: Tensor, rows: DispatchRows) -> Tensor:
        """Compute experts for rows whose ends are known."""
        x = x.to(self.w1.dtype)
        gate, up = (grouped_matmul(x, weight, rows.ends, transpose=True) for weight in (self.w1, self.w3))
        return grouped_matmul(nn.functional.silu(gate) * up, self.w2, rows.ends, transpose=True)


# ---- what a block consists of


def _gathered(params: Sequence[Tensor]) -> Any:
    zero = [param for param in params if hasattr(param, "ds_id")]
    return import_module("deepspeed.moe.ep_repack").GatheredParameters(zero) if zero else nullcontext()


def _shape(param: Any) -> tuple[int, ...]:
    return tuple(getattr(param, "ds_shape", param.shape))


def _sources(experts: nn.Module, spec: MoELayerSpec) -> list[list[Any]]:
    """List the parameters of w1, w2 and w3 (if there is one), of each expert module or of the one with all."""
    names = [name for name in (spec.expert_w1_name, spec.expert_w2_name, spec.expert_w3_name) if name is not None]
    of = experts if spec.expert_storage == "module_list" else [experts]
    return [[getattr(found, "weight", found) for found in (getattr(one, name) for name in names)] for one in of]  # type: ignore[union-attr]


def repack_expert_weights(experts_source: nn.Module, spec: MoELayerSpec, ep_rank: int, ep_size: int) -> Weights:
    """Copy the weights of a rank's experts: w1 and w3 [E, F, n], w2 [E, n, F]. Collective where `zero.Init` has cut them."""
    each, sources = spec.num_experts // ep_size, _sources(experts_source, spec)
    first = ep_rank * each
    if spec.expert_storage == "module_list":
        kept: list[Any] = []
        for number, params in enumerate(sources):
            with _gathered(params):
                if first <= number < first + each:
                    kept.append([param.detach().clone() for param in params])
        w1, w2, w3 = (torch.stack(weights) for weights in zip(*kept, strict=True))
        return w1, w2, w3
    (params,) = sources
    with _gathered(params):
        parts = [param.detach()[first : first + each].clone() for param in params]
    if len(parts) == 3:
        return parts[0], parts[1], parts[2]
    layout = classify_fused_gate_up_layout(parts[0].shape, parts[1].shape)
    if layout is not None and layout.needs_transpose:
        parts = [part.transpose(1, 2).contiguous() for part in parts]
    gate, up = parts[0].chunk(2, 1)
    return gate.contiguous(), parts[1], up.contiguous()


class _AlsoCutBlocks(type):
    """`isinstance` knows blocks that an engine has cut under the model's own names (`dress_blocks`)."""

    def __instancecheck__(cls, instance: object) -> bool:
        return type.__instancecheck__(cls, instance) or "_dressed_block" in getattr(instance, "__dict__", ())


class AutoEPMoELayer(nn.Module, metaclass=_AlsoCutBlocks):
    """A block with a rank's experts: `router`, `experts` (w1, w2, w3) and what all tokens see. Blocks of an engine are some, too.

    Args:
        source_module: The block that it replaces; its router and shared experts stay, its experts are copied.
    """

    _is_autoep_layer = True
    ep_group: Any = None
    tp_group: Any = None
    folding_group_handles: FoldingGroupHandles | None = None

    def __init__(
        self, spec: MoELayerSpec, source_module: nn.Module, ep_size: int, ep_rank: int, config: AutoEPConfig
    ) -> None:
        super().__init__()
        if config.load_balance_coeff is not None:
            raise refused("expert-bias", spec.moe_module_name)
        self.spec, self.num_experts, self.top_k = spec, spec.num_experts, spec.top_k
        self.ep_size, self.ep_rank, self.ep_group_name = ep_size, ep_rank, f"ep_size_{ep_size}"
        self.num_local_experts = spec.num_experts // ep_size
        self.score_apply = resolve_score_apply_mode(spec, config.score_apply)
        self.places: ExpertGroups | None = alone() if ep_size == 1 else None
        self.router = TokenChoiceTopKRouter(
            spec.hidden_size, spec.num_experts, spec.num_expert_groups, spec.num_limited_groups, spec.top_k, spec.score_func,
            spec.route_norm, spec.route_scale, spec.gate_bias, spec.group_score_func,
        )  # fmt: skip
        gate: Any = getattr(source_module, spec.router_name)
        for name in ("weight", "bias") if spec.gate_bias else ("weight",):
            setattr(self.router.gate, name, _copy(getattr(gate, name)))
        bias = getattr(gate, "e_score_correction_bias", None)
        if bias is not None:
            del self.router.e_score_correction_bias
            copied = _copy(bias)
            if isinstance(bias, nn.Parameter):
                self.router.e_score_correction_bias = copied
            else:
                self.router.register_buffer("e_score_correction_bias", copied.detach())
        source = getattr(source_module, spec.experts_name)
        trained = _trained(source, spec)
        self.experts = GroupedExperts(spec.hidden_size, spec.ffn_hidden_size, self.num_local_experts)
        weights = repack_expert_weights(source, spec, ep_rank, ep_size)
        for name, weight, train in zip(("w1", "w2", "w3"), weights, trained, strict=True):
            setattr(self.experts, name, nn.Parameter(weight, requires_grad=train))
        for name, param in self.named_parameters():
            own = name.startswith("experts.")
            vars(param).update({"ds_zero_placement_family": "autoep_expert" if own else "replicated"})
            if own:
                vars(param).update(
                    allreduce=False, group_name=self.ep_group_name, ds_zero_partition_group_name=self.ep_group_name
                )
        self.shared_experts = getattr(source_module, spec.shared_experts_name) if spec.has_shared_experts else None
        gate_name = spec.shared_experts_gate_name
        self.shared_experts_gate = getattr(source_module, gate_name) if gate_name else None

    def set_deepspeed_parallelism(
        self, use_data_before_expert_parallel_: bool = False, folding_group_handles: FoldingGroupHandles | None = None
    ) -> None:
        """Say which ranks share the experts. Collective over the world; without this the first forward makes groups of neighbours.

        Args:
            use_data_before_expert_parallel_: Ranks with the same experts are neighbours.
            folding_group_handles: Groups of expert parallelism beside tensor parallelism, whose ranks take a part of their tokens each.
        """
        if folding_group_handles is None:
            self.places = make_places(self.ep_size, data_first=use_data_before_expert_parallel_)
            self.ep_group = self.places.expert.pg
            return
        self.folding_group_handles = handles = folding_group_handles
        self.ep_group_name, self.ep_group, self.tp_group = handles.ep_group_name, handles.ep_group, handles.tp_group
        self.ep_rank = import_module("deepspeed.module_inject.auto_ep_layer").dist.get_rank(group=handles.ep_group)
        self.places = None

    def _places(self) -> ExpertGroups:
        handles = self.folding_group_handles
        if handles is None:
            return make_places(self.ep_size)
        copies = as_group(handles.edp_group)
        return ExpertGroups(as_group(handles.ep_group), copies, copies, as_group(handles.tp_group))

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Route tokens to their experts, and return their combined outputs: [..., n] to [..., n]. Collective over the ranks that share experts."""
        if self.places is None:
            self.places = self._places()
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, experts, counts = self.router(x)
        routed = RouterOutput(experts, weights, counts.long(), weights.new_zeros(()), weights.detach())
        how = RoutingOptions(weigh_first=self.score_apply == "pre")
        out = route_through(x, routed, self.experts.compute, self.places, how).to(x.dtype)
        if self.shared_experts is not None:
            shared = self.shared_experts(x)
            out = out + (
                shared if self.shared_experts_gate is None else torch.sigmoid(self.shared_experts_gate(x)) * shared
            )
        out = out.reshape(hidden_states.shape)
        return (out, self.router.gate(x)) if self.spec.return_router_logits else out


def _copy(param: Tensor) -> nn.Parameter:
    with _gathered([param]):
        return nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)


def _trained(experts: nn.Module, spec: MoELayerSpec) -> tuple[bool, bool, bool]:
    """Whether w1, w2 and w3 are trained.

    Raises:
        PlanError: some experts differ from others ("moe-model"); a ValueError, too.
    """
    flags = []
    for of in zip(*_sources(experts, spec), strict=True):
        if len({param.requires_grad for param in of}) > 1:
            raise refused("mixed-experts", spec.moe_module_name, "requires_grad flags")
        if len({(param.dtype, param.device) for param in of}) > 1:
            raise refused("mixed-experts", spec.moe_module_name, "dtype/device")
        flags.append(of[0].requires_grad)
    return flags[0], flags[1], flags[-1] if len(flags) == 3 else flags[0]


# ---- in a model


class AutoEP:
    """Finds the blocks with experts of a model, and replaces them."""

    def __init__(self, model: nn.Module, config: AutoEPConfig) -> None:
        self.model, self.config, self.model_config = model, config, getattr(model, "config", None)
        fill_autoep_config_from_hf(config, self.model_config)

    @raising(ValueError)
    def ep_parser(self) -> list[MoELayerSpec]:
        """Find the blocks (`ds_moe.detect.recognise`); none is a list without elements where nothing says that there are some.

        Raises:
            PlanError: a block cannot be replaced, or none is found where one must be ("moe-model", "moe-router"); a ValueError, too.
        """
        # What was filled in is the model's own, which the family's rule reads by itself.
        section = self.config.section("num_expert_groups", "num_limited_groups", "route_scale")
        required = (section.preset_model or section.moe_layer_pattern) is not None
        return [self._spec(block) for block in recognise(self.model, section, required=required)]

    def _spec(self, block: MoEBlock) -> MoELayerSpec:
        name = block.name if block.parts is not None else block.name.rpartition(".")[0]
        experts_name = block.name.rpartition(".")[2] if block.parts is None else block.parts.experts
        router_name = block.router.rpartition(".")[2]
        module, rule, family = self.model.get_submodule(name), block.rule, block.family
        if rule is None:
            raise refused("preset", None, sorted(preset for preset in (self.config.preset_model,) if preset))
        experts: Any = getattr(module, experts_name)
        listed = isinstance(experts, nn.ModuleList)
        words = [file.partition(".")[0] for file in family.files] if family is not None else []
        w1, w3, w2 = words if listed and words else ("gate_up_proj", None, "down_proj")
        down = getattr(experts[0] if listed else experts, w2)
        hidden, ffn = _shape(getattr(down, "weight", down))[-2:]
        router, grouped, parts = getattr(module, router_name), rule.groups > 1, block.parts
        preset = None if family is None else preset_name_for_hf_model_type(family.name)
        return MoELayerSpec(
            name, preset or (family.name if family is not None else "custom"), router_name, experts_name,
            "module_list" if listed else "fused_3d", w1, w2, w3, block.experts, rule.k, hidden, ffn, rule.score,
            "pre" if self.config.score_apply == "pre" else "post", rule.normalize, getattr(router, "bias", None) is not None,
            False, "none", None, None, bool(parts and parts.shared), (parts and parts.shared) or "",
            (parts and parts.shared_gate) or "", resolve_route_scale(self.config, self.model_config) if rule.scale != 1.0 else 1.0,
            rule.groups if grouped else None, rule.limited_groups if grouped else None,
            "max" if rule.group_score == "max" else "top2_sum",
        )  # fmt: skip

    def replace_moe_layer(self, spec: MoELayerSpec, ep_size: int, ep_rank: int) -> None:
        """Replace one block by an `AutoEPMoELayer`."""
        parent, _, child = spec.moe_module_name.rpartition(".")
        owner = self.model.get_submodule(parent)
        setattr(owner, child, AutoEPMoELayer(spec, getattr(owner, child), ep_size, ep_rank, self.config))

    def replace_moe_layers(self, specs: Sequence[MoELayerSpec], ep_size: int, ep_rank: int) -> None:
        """Replace several blocks."""
        for spec in specs:
            self.replace_moe_layer(spec, ep_size, ep_rank)


def settle_blocks(model: nn.Module, tensor: int) -> None:
    """Tell an engine which ranks hold the experts of the layers that a program made. Collective over the world for those that were not told.

    Args:
        tensor: Tensor-parallel ranks.

    Raises:
        PlanError: a layer does not know its groups beside tensor parallelism ("compat-call-order"); a ValueError, too.
    """
    for name, layer in model.named_modules():
        if not type.__instancecheck__(AutoEPMoELayer, layer):
            continue
        made: Any = layer
        if tensor > 1 and made.folding_group_handles is None:
            raise refused("unfolded-experts", name, tensor)
        if made.places is None:
            made.places = made._places()
        places, local = made.places, made.num_local_experts
        family = places.family if places.holders.size * places.expert.size > 1 else None
        for key, param in made.experts.named_parameters():
            shape = tuple(_shape(param))
            box = Box((places.expert.rank * local, *[0] * (len(shape) - 1)), shape)
            whole = (made.num_experts, *shape[1:])
            set_param_sharding(param, ParamSharding(family, f"{name}.experts.{key}".lstrip("."), whole, box))


def dress_blocks(model: nn.Module, mesh: Mesh) -> None:
    """Give the blocks that an engine has cut the attributes of `AutoEPMoELayer`, but for names of weights: these are the model's own."""
    modules = dict(model.named_modules())
    for name, layer in modules.items():
        places = getattr(layer, "places", None)
        if not isinstance(layer, PackedExperts | ListedBlock) or places is None:
            continue
        block = layer if isinstance(layer, ListedBlock) else modules[name.rpartition(".")[0]]
        parts, children = getattr(block, "parts", None), dict(block.named_children())
        router = children.get(parts.router) if parts is not None else children.get("gate", children.get("router"))
        size = places.expert.size
        given = {
            "_is_autoep_layer": True, "router": router, "num_experts": layer.num_experts, "num_local_experts": layer.num_experts // size,
            "ep_size": size, "ep_rank": places.expert.rank, "ep_group_name": f"ep_size_{size}", "ep_group": places.expert.pg,
            "tp_group": places.tensor.pg, "folding_group_handles": _handles(places, mesh),
        }  # fmt: skip
        given = {key: value for key, value in given.items() if key not in children and not hasattr(block, key)}
        vars(block).update(given, _dressed_block=tuple(given))


def _handles(places: ExpertGroups, mesh: Mesh) -> FoldingGroupHandles | None:
    """Return the groups of experts beside tensor parallelism; None without that."""
    if places.tensor.size == 1:
        return None
    tensor, batch, expert, copies = places.tensor, mesh["gradient"], places.expert, places.data
    spec = build_folding_spec(
        world_size=mesh["world"].size, pp_size=mesh["pipe"].size, tp_size=tensor.size, ep_size=expert.size
    )
    return FoldingGroupHandles(
        spec, tensor.pg, batch.pg, expert.pg, copies.pg, f"ep_size_{expert.size}", tensor.ranks, batch.ranks, expert.ranks, copies.ranks
    )  # fmt: skip


def undress_blocks(model: nn.Module) -> None:
    """Take the attributes back."""
    for module in model.modules():
        for key in vars(module).pop("_dressed_block", ()):
            vars(module).pop(key, None)


# ---- one step of a layer


class SplitPlan(NamedTuple):
    """Rows for each rank, rows from each, and of these how many are for each of this rank's experts [ranks, E]."""

    input_splits: list[int]
    output_splits: list[int]
    local_counts_by_source: Tensor

    @property
    def local_counts(self) -> Tensor:
        """Rows for each of this rank's experts."""
        return self.local_counts_by_source.sum(0).to(self.local_counts_by_source.dtype)


def compute_split_plan(
    selected_experts: Tensor, num_experts: int, ep_size: int, num_local_experts: int, ep_group: Any,
    num_tokens_per_expert: Tensor | None = None,
) -> SplitPlan:  # fmt: skip
    """Plan the all-to-all of rows from the experts chosen [T, k] (`ds_moe.dispatch.exchange_of`). Collective: counts are sent."""
    counts = num_tokens_per_expert
    if counts is None:
        counts = torch.bincount(selected_experts.reshape(-1), minlength=num_experts).int()
    received = counts
    if ep_size > 1:
        received = torch.empty_like(counts)
        import_module("deepspeed.comm").all_to_all_single(received, counts.contiguous(), group=ep_group)
    received = received.view(ep_size, num_local_experts)
    plan = exchange_of(counts.tolist(), received.tolist())
    return SplitPlan(list(plan.send), list(plan.receive), received)


def compute_split_plan_from_expert_indices(
    expert_indices: Tensor, num_experts: int, ep_size: int, num_local_experts: int, ep_group: Any
) -> SplitPlan:
    """`compute_split_plan` for a list of choices."""
    return compute_split_plan(expert_indices, num_experts, ep_size, num_local_experts, ep_group)


def resolve_score_apply_mode(spec: MoELayerSpec, config_override: str) -> str:
    """Return "pre" or "post": what the section says, else the block's own."""
    return spec.score_apply if config_override == "auto" else config_override


def apply_scores_before_experts_if_enabled(routed_input: Tensor, top_scores: Tensor, score_apply: str) -> Tensor:
    """Multiply rows by their weights, in fp32, if that comes before the experts ("pre")."""
    if score_apply != "pre":
        return routed_input
    return (routed_input.float() * top_scores.reshape(-1, 1)).to(routed_input.dtype)


def combine_from_routed(
    expert_output: Tensor, top_scores: Tensor, token_indices_sorted: Tensor, top_k: int, score_apply: str, combine_impl: str,
    shape: tuple[int, int, int],
) -> Tensor:  # fmt: skip
    """Sum the outputs of each token's experts in fp32, weighted unless their inputs were: rows sorted by expert to [..., n]."""
    del combine_impl  # there is one combine
    rows = torch.empty_like(expert_output).index_copy(0, token_indices_sorted, expert_output).float()
    rows = rows.view(-1, top_k, shape[-1])
    if score_apply != "pre":
        rows = rows * top_scores.reshape(-1, top_k, 1)
    return rows.sum(1).to(expert_output.dtype).view(shape)
