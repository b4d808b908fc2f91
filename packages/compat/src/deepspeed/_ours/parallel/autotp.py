"""`deepspeed.module_inject.auto_tp` and its like: rules of `partition_config` as objects, and who applies them to a model.

The engine does all of this from the `tensor_parallel` section; these are for programs that hold the pieces themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed._ours.base.raising import refused
from deepspeed._ours.communication import group_getters
from deepspeed._ours.parallel.tp_layers import dress
from deepspeed._ours.parallel.tp_shards import get_shard_size, get_shard_size_list
from ds_comm import as_group, world_group
from ds_parallel.config import TensorParallelConfig
from ds_parallel.tensor import ShardKind, TensorOptions, facts_of, make_tensor_plan, parallelize_model
from ds_parallel.tensor.layer_rules import PLAN_STYLES


class PartitionType(StrEnum):
    """What becomes of a layer."""

    COLUMN = "column"
    ROW = "row"
    SKIP = "skip"


@dataclass
class TPLayerSpec:
    """One rule; see `tensor_parallel.partition_config.layer_specs`.

    Raises:
        ValueError: a shape whose list of part sizes does not stand at partition_dim.
    """

    patterns: Sequence[str]
    partition_type: PartitionType = PartitionType.COLUMN
    shape: tuple[int | tuple[int, ...], ...] | None = None
    partition_dim: int | None = None
    model_types: Sequence[str] | None = None
    gather_output: bool = False
    grad_allreduce: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.partition_type, str):
            self.partition_type = PartitionType(self.partition_type.lower())
        if self.shape is None:
            return
        self.shape = tuple(tuple(entry) if isinstance(entry, Sequence) else entry for entry in self.shape)
        nested = [at for at, entry in enumerate(self.shape) if isinstance(entry, tuple)]
        if nested and nested != [self.get_partition_dim()]:
            raise refused("spec-shape", list(self.shape), self.get_partition_dim())

    def get_partition_dim(self) -> int:
        """Return the dim that is sharded, or that holds the fused parts."""
        if self.partition_dim is not None:
            return self.partition_dim
        return 1 if self.partition_type is PartitionType.ROW else 0

    def matches(self, param_name: str, model_type: str | None = None) -> bool:
        """Whether the rule is about a parameter of a model of this type."""
        wanted = None if self.model_types is None else [kind.lower() for kind in self.model_types]
        if wanted is not None and (model_type or "").lower() not in wanted:
            return False
        return any(re.match(pattern, param_name) for pattern in self.patterns)


@dataclass
class AutoTPConfig:
    """`tensor_parallel.partition_config`: rules in order."""

    tp_size: int = 1
    layer_specs: list[TPLayerSpec] = field(default_factory=list)
    embedding_partition_dim: int = 1
    lm_head_patterns: list[str] = field(default_factory=lambda: ["lm_head", "embed_out"])
    use_default_specs: bool = True
    strict_mode: bool = False

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> AutoTPConfig:
        """Build the object from a section of a configuration."""
        fields = dict(config_dict)
        fields["layer_specs"] = [
            spec if isinstance(spec, TPLayerSpec) else TPLayerSpec(**spec) for spec in fields.get("layer_specs", ())
        ]
        return cls(**fields)

    def find_matching_spec(self, param_name: str, model_type: str | None = None) -> TPLayerSpec | None:
        """Return the first rule that matches a parameter; None without a match."""
        return next((spec for spec in self.layer_specs if spec.matches(param_name, model_type)), None)


def merge_autotp_configs(base: AutoTPConfig, override: AutoTPConfig) -> AutoTPConfig:
    """Merge two configurations: `override`, with the rules of `base` after its own rules."""
    return AutoTPConfig(
        tp_size=override.tp_size if override.tp_size > 1 else base.tp_size,
        layer_specs=[*override.layer_specs, *base.layer_specs],
        embedding_partition_dim=override.embedding_partition_dim,
        lm_head_patterns=list(dict.fromkeys([*override.lm_head_patterns, *base.lm_head_patterns])),
        use_default_specs=override.use_default_specs,
        strict_mode=override.strict_mode or base.strict_mode,
    )


# ---- a model's own plan


SUPPORTED_STYLES = frozenset(
    style
    for style, (kind, flags) in PLAN_STYLES.items()
    if kind.value in set(PartitionType) and "split_input" not in flags
)
"""Of ds-parallel's styles those that a rule of `partition_config` can say."""


class TPPlanConverter:
    """A transformers model's own plan as rules."""

    @staticmethod
    def convert(hf_tp_plan: Mapping[str, str]) -> list[TPLayerSpec] | None:
        """Convert each entry of a Hugging Face plan into a rule; None for an empty plan.

        Raises:
            ValueError: an unknown style. Half a plan could shard only the first of two layers that belong together.
        """
        unknown = sorted({style for style in hf_tp_plan.values() if style.lower() not in SUPPORTED_STYLES})
        if unknown:
            raise refused("plan-style", unknown, sorted(SUPPORTED_STYLES))
        rules = []
        for name, style in hf_tp_plan.items():
            kind, flags = PLAN_STYLES[style.lower()]
            pattern = TPPlanConverter._wildcard_to_regex(name.removesuffix(".weight")) + r"\.weight$"
            rule = TPLayerSpec([pattern], PartitionType(kind.value))
            rule.gather_output, rule.grad_allreduce = "gather_output" in flags, "sum_gradient" in flags
            rules.append(rule)
        return rules or None

    @staticmethod
    def _wildcard_to_regex(pattern: str) -> str:
        return ".*" + re.escape(pattern).replace(r"\*", ".*")


def _get_hf_tp_plan(model: Any) -> dict[str, str] | None:
    """Merge the tensor-parallel plans of a model's configuration, its class and the instance.

    Entries that repeat a key of the configuration's plan below a prefix are dropped.
    """
    merged = dict(getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {})
    base = tuple(merged)
    for plan in (getattr(type(model), "_tp_plan", None), getattr(model, "_tp_plan", None)):
        for name, style in (plan if isinstance(plan, Mapping) else {}).items():
            if not any(name == key or name.endswith(f".{key}") for key in base):
                merged[name] = style
    return merged or None


def get_tensor_parallel_config(ds_config: Mapping[str, Any]) -> TensorParallelConfig:
    """Return the validated section `tensor_parallel` of a configuration."""
    return TensorParallelConfig.model_validate(ds_config.get("tensor_parallel") or {})


# ---- who applies rules


class AutoTP:
    """Cuts a model's layers over the ranks of a group.

    Args:
        module: The model, or a part of it.
        partition_config: Rules; None: what ds-parallel finds out about the model.
    """

    def __init__(
        self, module: nn.Module, all_reduce_linears: Iterable[str] = (), prefix: str = "", state_dict: Any = None,
        linear_layer_setting: Any = None, orig_layer_impl: Any = None, keep_module_on_host: bool = False,
        partition_config: AutoTPConfig | None = None,
    ) -> None:  # fmt: skip
        del state_dict, linear_layer_setting, keep_module_on_host  # weights are where the model has them
        self.module, self.prefix, self.orig_layer_impl = module, prefix, orig_layer_impl
        self.all_reduce_linears, self.partition_config = list(all_reduce_linears), partition_config
        self.mp_size, self.mp_group = 1, None

    def set_tensor_parallel_config(self, mp_size: int, mp_group: Any) -> None:
        """Set the tensor-parallel degree and torch's process group; None is this rank only."""
        self.mp_size, self.mp_group = mp_size, mp_group

    def update_linear_policies(self) -> None:
        """Do nothing: every rule names the class that replaces its layers."""

    @staticmethod
    def tp_parser(model: nn.Module) -> list[tuple[type[nn.Module], list[str]]]:
        """List, for each class of blocks, the names of its layers whose outputs are all-reduced (row layers)."""
        modules = dict(model.named_modules())
        row_layers: dict[type[nn.Module], list[str]] = {}
        for decision in make_tensor_plan(facts_of(model), TensorOptions(degree=2)).cut:
            if decision.kind is not ShardKind.ROW:
                continue
            *parts, _ = decision.name.split(".")
            at = max((i for i, part in enumerate(parts) if part.isdigit()), default=-1)
            names = row_layers.setdefault(type(modules[".".join(parts[: at + 1])]), [])
            name = ".".join(decision.name.split(".")[at + 1 :])
            if name not in names:
                names.append(name)
        return list(row_layers.items())

    def _replace_module(self, r_module: nn.Module, prev_name: str = "", prev_class_name: str = "") -> nn.Module:
        """Cut the layers below `r_module`, in place; it is returned."""
        del prev_name, prev_class_name
        group = as_group(self.mp_group) if self.mp_group is not None else world_group()
        rules, options = self.partition_config, TensorOptions(degree=group.size)
        if rules is not None:
            specs = tuple(rules.layer_specs)
            options = replace(options, specs=specs, defaults=False, strict=rules.strict_mode)  # type: ignore[arg-type]  # a list of patterns
        parallelize_model(r_module, make_tensor_plan(facts_of(r_module), options), group)
        dress(r_module)
        return r_module

    def update_mp_params(self, child: nn.Module, name: str | None = None) -> None:
        """Let the numbers of heads and sizes that a module keeps be this rank's."""
        for key in _SIZES:
            value = getattr(child, key, None)
            if isinstance(value, int) and not isinstance(value, bool):
                setattr(child, key, get_shard_size(value, self.mp_size, name, mp_group=self.mp_group))


_SIZES = (
    "n_heads", "inner_dim", "num_heads", "num_kv", "num_kv_heads", "num_attention_heads", "num_attn_heads",
    "all_head_size", "embed_dim", "hidden_size", "num_key_value_heads",
)  # fmt: skip


# ---- ALiBi of models whose heads are cut: what is made for all heads, of which a rank takes its own


def get_head_shard_sizes(num_heads: int, num_kv_heads: int | None = None) -> list[int]:
    """Return the number of attention heads of each tensor-parallel rank."""
    return get_shard_size_list(num_heads, _ranks()[1], num_kv_heads=num_kv_heads)


def _ranks() -> tuple[int, int]:
    size = group_getters.get_model_parallel_world_size()
    if size > 1:
        return group_getters.get_model_parallel_rank(), size
    return world_group().rank, world_group().size


def _mine(heads: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    rank = _ranks()[0]
    return heads.narrow(dim, sum(sizes[:rank]), sizes[rank])


def install_head_sharded_helper(
    module: nn.Module, name: str, helper: Callable[..., Any], num_heads: int | None = None, num_kv_heads: int | None =
    None,
) -> None:  # fmt: skip
    """Let method `name` of this one module be `helper`; what it was is `<name>_orig`.

    Args:
        num_heads: Of the whole model; None: what the method is called with.
    """
    frozen = None if num_heads is None else get_head_shard_sizes(num_heads, num_kv_heads)
    vars(module).update({f"{name}_orig": getattr(module, name), f"_{name}_heads": (num_heads, frozen)})
    vars(module)[name] = partial(helper, module)


def _shares(module: nn.Module, name: str, local_heads: int) -> tuple[int, list[int]]:
    total, frozen = vars(module)[f"_{name}_heads"]
    return (total, frozen) if total is not None else (local_heads, get_head_shard_sizes(local_heads))


def build_mpt_alibi_tensor(module: nn.Module, num_heads: int, *args: Any, **options: Any) -> Tensor:
    """Build MPT's ALiBi tensor [heads, 1, length] for this rank's heads."""
    total, sizes = _shares(module, "build_mpt_alibi_tensor", num_heads)
    return _mine(vars(module)["build_mpt_alibi_tensor_orig"](total, *args, **options), 0, sizes)


def get_alibi_mask(module: nn.Module, tensor: Any, *args: Any, **options: Any) -> Tensor:
    """Build the ALiBi mask [heads, length, length] for this rank's heads."""
    local = int(module.n_head)  # type: ignore[arg-type]
    total, sizes = _shares(module, "get_alibi_mask", local)
    module.n_head = total  # type: ignore[assignment]
    try:
        whole = vars(module)["get_alibi_mask_orig"](tensor, *args, **options)
    finally:
        module.n_head = local  # type: ignore[assignment]
    return _mine(whole, 0, sizes)


def build_bloom_alibi_tensor(
    attention_mask: Tensor, num_heads: int, dtype: torch.dtype, head_shard_sizes: Sequence[int] | None = None,
    total_num_heads: int | None = None,
) -> Tensor:  # fmt: skip
    """Build BLOOM's ALiBi tensor [batch * heads, 1, length] for this rank's heads: slope times position.

    The slopes are those of Press et al., arXiv:2108.12409, section 3.

    Args:
        attention_mask: [batch, length], 1 where a token counts.
    """
    total = num_heads if total_num_heads is None else total_num_heads
    power = 2 ** math.floor(math.log2(total))
    slopes = [2 ** (-8 * (at + 1) / power) for at in range(power)]
    slopes += [2 ** (-4 * (2 * at + 1) / power) for at in range(total - power)]
    positions = ((attention_mask.cumsum(-1) - 1) * attention_mask)[:, None, :]
    alibi = torch.tensor(slopes, device=attention_mask.device)[None, :, None] * positions
    sizes = get_head_shard_sizes(total) if head_shard_sizes is None else head_shard_sizes
    return _mine(alibi, 1, sizes).flatten(0, 1).unsqueeze(1).to(dtype)


_NAMES = (
    "HFBertLayerPolicy", "HFGPTNEOLayerPolicy", "GPTNEOXLayerPolicy", "HFGPTJLayerPolicy", "MegatronLayerPolicy", "HFGPT2LayerPolicy",
    "BLOOMLayerPolicy", "HFOPTLayerPolicy", "HFCLIPLayerPolicy", "HFDistilBertLayerPolicy", "LLAMALayerPolicy", "LLAMA2LayerPolicy",
    "InternLMLayerPolicy",
)  # fmt: skip


class _NamesNoLayer(type):
    def __iter__(cls) -> Iterator[str]:
        return iter(())


class DSPolicy(metaclass=_NamesNoLayer):
    """A value of `injection_policy`: the layers of the family are found by init_inference."""

    def __init__(self, *args: Any, **options: Any) -> None:
        del args, options
        raise refused("policy-made", type(self).__name__)


replace_policies = [_NamesNoLayer(name, (DSPolicy,), {"__doc__": DSPolicy.__doc__}) for name in _NAMES]
globals().update({policy.__name__: policy for policy in replace_policies})
