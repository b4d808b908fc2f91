"""`deepspeed.module_inject.auto_ep_config`: the section `expert_parallel` as upstream's functions read it, over `ds_moe.config`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, make_dataclass
from importlib import metadata
from typing import Any

from deepspeed._ours.base.forwarding import answers
from deepspeed._ours.base.raising import refused
from deepspeed._ours.parallel.autoep_folding import build_folding_spec
from ds_moe.config import ExpertParallelConfig
from ds_moe.moe_families import FAMILIES, PRESETS, MoEFamily

PRESET_MODELS: Mapping[str, MoEFamily] = {
    name: FAMILIES[PRESETS.get(name, name)]
    for name in ("mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3")
}
_COVERED = {"qwen2_moe": "qwen3_moe"} | {model_type: name for name, model_type in PRESETS.items()}


class AutoEPConfig(
    make_dataclass(  # type: ignore[misc]
        "_Keys",
        [(key, Any, field(default=entry.default)) for key, entry in ExpertParallelConfig.model_fields.items()],
    )
):
    """The section with all keys of `ds_moe.config.ExpertParallelConfig`; nothing is checked before `validate_autoep_config`."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        self._load_balance_coeff_explicit = "load_balance_coeff" in keys

    def section(self, *but: str) -> ExpertParallelConfig:
        """Return the checked section, without some keys.

        Raises:
            ValueError: a value cannot be.
        """
        return ExpertParallelConfig(**{key: value for key, value in asdict(self).items() if key not in but})


def parse_autoep_config(param_dict: Mapping[str, Any]) -> AutoEPConfig:
    """Read the section. Other keys are left to the strict configuration.

    Raises:
        ConfigError: `load_balance_coeff` has a value ("compat-argument"); a ValueError, too.
    """
    config = AutoEPConfig(**{key: param_dict[key] for key in ExpertParallelConfig.model_fields if key in param_dict})
    _check_coefficient(config)
    return config


def _check_coefficient(config: AutoEPConfig) -> None:
    if config.load_balance_coeff is not None:
        raise refused("balance-coefficient", config.load_balance_coeff)


def validate_autoep_config(
    config: AutoEPConfig,
    world_size: int,
    pp_size: int,
    tp_size: int,
    sp_size: int,
    *,
    zero_stage: int = 0,
    deepcompile_enabled: bool = False,
    tp_preset_model: str | None = None,
    use_data_before_expert_parallel: bool = False,
    mpu: Any = None,
    zero_offload_optimizer: bool = False,
    zero_offload_param: bool = False,
) -> None:
    """Check the section for a number of ranks by upstream's rules, which refuse more beside tensor parallelism than an engine here does.

    Raises:
        ValueError: a value or a degree cannot be, or upstream does not have them together.
    """
    _check_coefficient(config)
    if not isinstance(config.validate_folding_routing, bool):
        raise refused("folding-routing", config.validate_folding_routing)
    if not config.enabled:
        return
    if config.expert_tensor_parallel_size != 1:
        raise refused("expert-tensor", config.expert_tensor_parallel_size)
    folding = build_folding_spec(
        world_size=world_size, pp_size=pp_size, tp_size=max(tp_size, 1), ep_size=config.autoep_size
    )
    degrees = (tp_size, pp_size)
    if mpu is not None:
        degrees = (mpu.get_tensor_model_parallel_world_size(), mpu.get_pipeline_model_parallel_world_size())
    presets = {preset for preset in (config.preset_model, tp_preset_model) if preset is not None}
    beside = (
        ("pp_size=1 only", f"pp_size={pp_size}", pp_size > 1),
        ("sp_size=1: tensor and sequence parallelism are mutually exclusive", f"sp_size={sp_size}", sp_size > 1),
        ("autoep_size > 1", f"autoep_size={config.autoep_size}", config.autoep_size == 1),
        ("presets that must match", f"{sorted(presets)}", len(presets) > 1),
        ("a ZeRO stage below 3: ZeRO stage 3 is a separate ZeRO-3 composition lane", f"stage {zero_stage}", zero_stage > 2),
        ("the mpu tensor/model parallel world size of the section", f"{degrees} of mpu", degrees != (tp_size, pp_size)),
        ("no use_data_before_expert_parallel_", "true", use_data_before_expert_parallel),
        ("no offload", "offload_optimizer or offload_param", zero_offload_optimizer or zero_offload_param),
        ("no DeepCompile: it does not work with AutoEP+AutoTP folding", "compile.deepcompile", deepcompile_enabled),
    )  # fmt: skip
    for needs, has, wrong in beside if folding.tp_size > 1 else ():
        if wrong:
            raise refused("folding-rule", needs, has)
    config.section()
    if config.preset_model not in {None, *FAMILIES, *PRESETS}:
        raise refused("preset", config.preset_model, sorted({*FAMILIES, *PRESETS}))


def validate_autoep_post_detection(config: AutoEPConfig, specs: Sequence[MoELayerSpec]) -> None:
    """Check that every layer's experts can be cut.

    Raises:
        PlanError: they cannot ("moe-places"); a ValueError, too.
    """
    for spec in specs:
        if spec.num_experts % config.autoep_size:
            how = "exceeds" if config.autoep_size > spec.num_experts else "does not divide"
            raise refused(
                "experts-of-layer", config.autoep_size, how, spec.num_experts, spec.moe_module_name, _divisors(spec.num_experts)
            )  # fmt: skip


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def fill_autoep_config_from_hf(config: AutoEPConfig, model_config: Any) -> None:
    """Take groups and the scale of weights from a model's configuration where the section does not say them."""
    for key, attribute in (("num_expert_groups", "n_group"), ("num_limited_groups", "topk_group")):
        if getattr(config, key) is None:
            setattr(config, key, getattr(model_config, attribute, None))
    scale = getattr(model_config, "routed_scaling_factor", None)
    if config.routed_scaling_factor == "auto" and scale is not None:
        config.route_scale = float(scale)


def resolve_route_scale(config: AutoEPConfig, model_config: Any) -> float:
    """Return what weights are multiplied by: of the section, else of the model's configuration.

    Raises:
        ConfigError: it is no finite number ("compat-argument"); a ValueError, too.
    """
    key, scale = "routed_scaling_factor", config.routed_scaling_factor
    if scale == "auto":
        scale = getattr(model_config, key, None)
    if scale is None:
        key, scale = "route_scale", config.route_scale
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise refused("route-scale", key, scale)
    return float(scale)


def preset_name_for_hf_model_type(model_type: str) -> str | None:
    """Return the name of the preset that a family has upstream."""
    name = _COVERED.get(model_type, model_type)
    return name if name in PRESET_MODELS else None


unsupported_preset_for_hf_model_type = answers(
    None, "Return None for every `model_type`: of one with several parts, the part for texts is read."
)


class AutoEPPresetAdapter:
    """What a family needs besides its row in `ds_moe.moe_families`: nothing."""

    def _installed_transformers_version(self) -> str:
        return metadata.version("transformers")


_ADAPTERS = {name: AutoEPPresetAdapter() for name in ("default", *PRESET_MODELS)}


def get_preset_adapter(adapter_name: str) -> AutoEPPresetAdapter:
    """Return the adapter of a preset.

    Raises:
        PlanError: there is no such preset ("moe-model"); a ValueError, too.
    """
    if adapter_name not in _ADAPTERS:
        raise refused("preset", adapter_name, sorted(_ADAPTERS))
    return _ADAPTERS[adapter_name]


_SPEC = (
    "moe_module_name model_family router_name experts_name expert_storage expert_w1_name expert_w2_name expert_w3_name num_experts top_k "
    "hidden_size ffn_hidden_size score_func score_apply route_norm gate_bias return_router_logits router_logits_capture_target "
    "router_logits_capture_index router_logits_capture_layer_name has_shared_experts shared_experts_name"
)
_SPEC_DEFAULTS: Mapping[str, Any] = {
    "shared_experts_gate_name": "", "route_scale": 1.0, "num_expert_groups": None, "num_limited_groups": None,
    "group_score_func": "top2_sum", "supports_expert_bias": True,
}  # fmt: skip


class MoELayerSpec(
    make_dataclass(  # type: ignore[misc]
        "_Spec",
        [
            *((key, Any) for key in _SPEC.split()),
            *((key, Any, field(default=value)) for key, value in _SPEC_DEFAULTS.items()),
        ],
    )
):
    """What one block with experts is; names are those of its parts.

    `expert_storage` is "fused_3d", weights [E, ...], or "module_list". `expert_w1_name`, `expert_w2_name` and `expert_w3_name` are gate, down and
    up; w3 None: w1 has gate and up.
    """
