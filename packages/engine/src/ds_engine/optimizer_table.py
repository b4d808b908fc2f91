"""From an optimizer section to a torch optimizer: one table, one lookup in torch, one check of the arguments."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

import ds_ops
from ds_comm import Group
from ds_comm.optim import onebit
from ds_config import nearest
from ds_config.errors import ConfigError, UnsupportedError
from ds_engine.config_sections import (
    AdagradSection,
    AdamSection,
    AdamWSection,
    LambSection,
    LionSection,
    MuonSection,
    OneBitAdamSection,
    OneBitLambSection,
    OptimizerSection,
    SchedulerSection,
    TorchOptimizerSection,
    TorchSchedulerSection,
    ZeroOneAdamSection,
)

__all__ = [
    "FROM_MUP",
    "apart",
    "check_optimizer",
    "check_scheduler",
    "make_optimizer",
    "make_torch_scheduler",
    "reduces_itself",
    "state_tensors",
]

FROM_MUP: Mapping[str, str] = {"muadam": "MuAdam", "muadamw": "MuAdamW", "musgd": "MuSGD"}
"""Optimizer types that are functions of the package mup (Yang et al., arXiv:2203.03466), where it is installed."""


Made = tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]


def _adam(section: AdamSection | AdamWSection, states: dict[str, Any]) -> Made:
    p = section.params
    decoupled = p.adam_w_mode or isinstance(section, AdamWSection)
    values = {"lr": p.lr, "betas": p.betas, "eps": p.eps, "weight_decay": p.weight_decay, "maximize": p.maximize}
    if p.amsgrad or p.torch_adam:
        torchs = {"amsgrad": p.amsgrad} | ({"fused": True} if p.fused else {})  # False would forbid foreach, too
        if p.torch_adam and "weight_decay" not in p.model_fields_set:
            del values["weight_decay"]  # its default is torch's then: 0.01 of AdamW
        return (torch.optim.AdamW if decoupled else torch.optim.Adam), values | torchs
    kind = ds_ops.optim.AdamW if decoupled else ds_ops.optim.Adam
    return kind, values | states | {"bias_correction": p.bias_correction}


def _adagrad(section: AdagradSection, states: dict[str, Any]) -> Made:
    names = ("lr", "eps", "weight_decay", "lr_decay", "initial_accumulator_value", "maximize")
    return ds_ops.optim.Adagrad, {name: getattr(section.params, name) for name in names} | states


def _lion(section: LionSection, states: dict[str, Any]) -> Made:
    p = section.params
    return ds_ops.optim.Lion, {"lr": p.lr, "betas": p.betas, "weight_decay": p.weight_decay} | states


def _lamb(section: LambSection, states: dict[str, Any]) -> Made:
    names = ("lr", "betas", "eps", "weight_decay", "bias_correction", "max_coeff", "min_coeff", "eps_inside_sqrt")
    return ds_ops.optim.Lamb, {name: getattr(section.params, name) for name in names} | states


def _muon(section: MuonSection, states: dict[str, Any]) -> Made:
    p = section.params
    rates = {"lr": _first(p.muon_lr, p.lr, 2e-2), "adam_lr": _first(p.adam_lr, p.lr, 3e-4)}
    rest = {"adam_betas": p.betas, "adam_eps": p.eps, "adam_decoupled": p.adam_w_mode, "ns_method": p.ns_method}
    rest["clip_directions"] = p.clip_directions
    return ds_ops.optim.Muon, rates | rest | states | {"momentum": p.momentum, "weight_decay": p.weight_decay}


_ONEBIT: Mapping[type, type[torch.optim.Optimizer]] = {
    OneBitAdamSection: onebit.OnebitAdam,
    ZeroOneAdamSection: onebit.ZeroOneAdam,
    OneBitLambSection: onebit.OnebitLamb,
}


def _onebit(section: OneBitAdamSection | ZeroOneAdamSection | OneBitLambSection, states: dict[str, Any]) -> Made:
    del states  # always fp32
    return _ONEBIT[type(section)], section.params.model_dump()


def _torch(section: TorchOptimizerSection, states: dict[str, Any]) -> Made:
    del states
    check_optimizer(section)
    name = FROM_MUP.get(section.type.lower())
    optimizer_class = (
        _classes(torch.optim, torch.optim.Optimizer)[section.type.lower()] if name is None else _of_mup(name)
    )
    return optimizer_class, {key: _tupled(value) for key, value in section.params.items()}


def _of_mup(name: str) -> Callable[..., torch.optim.Optimizer]:
    optimizer_class: Callable[..., torch.optim.Optimizer] = getattr(importlib.import_module("mup"), name)
    return optimizer_class


_TABLE: Mapping[type, Callable[[Any, dict[str, Any]], Made]] = {
    AdamSection: _adam,
    AdamWSection: _adam,
    AdagradSection: _adagrad,
    LionSection: _lion,
    LambSection: _lamb,
    MuonSection: _muon,
    **dict.fromkeys(_ONEBIT, _onebit),
    TorchOptimizerSection: _torch,
}


def make_optimizer(
    section: OptimizerSection,
    params: Sequence[Any],
    model: nn.Module,
    states: torch.dtype | None = None,
    group: Group | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer that `section` describes.

    Args:
        params: Parameters of `model`, or groups of them with values of their own.
        model: Source of their names; Muon treats embeddings and heads differently.
        states: Dtype of the optimizer state; None for fp32. Optimizers of torch use the dtype of what they update.
        group: Ranks over which an optimizer averages that reduces gradients itself; None for all.
    Raises:
        ConfigError: the type or a parameter is unknown ("optimizer-type", "optimizer-params").
        UnsupportedError: the type belongs to the package mup, which is not installed ("optimizer-unbuilt").
    """
    kind, arguments = _TABLE[type(section)](section, {} if states is None else {"state_dtype": states})
    if isinstance(section, MuonSection):
        params = _muon_groups(params, {id(p): name for name, p in model.named_parameters()})
        params = _by_heads(params, muon_heads(model)) if section.params.per_head_muon else params
    if reduces_itself(section):
        arguments["group"] = group
    # A pipeline stage may have nothing to train; torch takes a group without parameters, and no list without groups.
    return kind(params or [{"params": []}], **arguments)


def reduces_itself(section: OptimizerSection | None) -> bool:
    """Whether an optimizer takes each rank's own gradients and averages what it makes of them."""
    return type(section) in _ONEBIT


_STATE_TENSORS: Mapping[type, int] = {
    AdagradSection: 1, LionSection: 1, MuonSection: 1, OneBitAdamSection: 3, OneBitLambSection: 4, ZeroOneAdamSection: 5,
}  # fmt: skip


def apart(section: OptimizerSection | None) -> bool:
    """Whether it is an optimizer of ds-ops that treats elements apart; one of the caller's is asked when it is there."""
    if section is None or isinstance(section, TorchOptimizerSection):
        return section is None
    kind, _ = _TABLE[type(section)](section, {})
    return isinstance(kind, type) and issubclass(kind, ds_ops.optim.OpsOptimizer) and kind.elementwise


def state_tensors(section: OptimizerSection | None) -> int:
    """Return how many tensors of a parameter's size an optimizer stores; 2 for an unknown optimizer, as Adam's.

    Of the 1-bit optimizers: with the error feedback of the ranks' signs; that of their mean is 1/N of a tensor more.
    """
    if isinstance(section, TorchOptimizerSection) and section.type.lower() in ("sgd", "musgd"):
        return 1 if section.params.get("momentum") else 0
    return _STATE_TENSORS.get(type(section), 2)


def _muon_groups(params: Sequence[Any], names: Mapping[int, str]) -> list[dict[str, Any]]:
    groups = [group if isinstance(group, dict) else {"params": [group]} for group in params]
    if not any(isinstance(group, dict) for group in params):
        groups = [{"params": list(params)}]
    split_groups = []
    for group in groups:
        if "use_muon" in group:
            split_groups.append({**group, "params": list(group["params"])})
            continue
        # Both, also without parameters: every pipeline stage has as many groups.
        whole = [p for p in group["params"] if _for_muon(names.get(id(p), ""), p)]
        for param in whole:
            if param.ndim not in (2, 4) and not (hasattr(param, "muon_matrices") or "muon_matrices" in group):
                param.muon_matrices = "stack"  # as DeepSpeed's: those of the last two dims, one by one
        chosen = {id(p) for p in whole}
        rest = [p for p in group["params"] if id(p) not in chosen]
        split_groups += [{**group, "params": part, "use_muon": use} for part, use in ((whole, True), (rest, False))]
    return split_groups


def _by_heads(groups: Sequence[dict[str, Any]], heads: Mapping[int, int]) -> list[dict[str, Any]]:
    """Split groups of matrices by the number of heads of their projections: 0 for the rest."""
    split = []
    for group in groups:
        counts = {id(p): heads.get(id(p), 0) for p in group["params"]}
        for count in sorted(set(counts.values()) or {0}):
            members = [p for p in group["params"] if counts[id(p)] == count]
            split.append({**group, "params": members, **({"heads": count} if count else {})})
    return split


def muon_heads(model: nn.Module) -> dict[int, int]:
    """Find the heads of attention's projections by their names, the model's configuration and their rows, by the id of the weight.

    Also of weights that tensor parallelism has cut, which have whole heads.

    Raises:
        ConfigError: there is none ("optimizer-heads").
    """
    config: Any = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    heads_of = {}
    for name, param in model.named_parameters():
        leaf = name.split(".")[-2].lower() if "." in name else name.lower()
        widths = {
            (heads, width)
            for starts, heads, width in _head_shapes(config)
            if heads and width and leaf.startswith(starts) and not leaf.startswith("query_key_value")
        }
        rows = param.shape[0] if param.ndim == 2 else 0
        counts = {rows // width for heads, width in widths if rows and rows % width == 0 and heads * width % rows == 0}
        if len(counts) == 1:
            heads_of[id(param)] = counts.pop()
    if not heads_of:
        raise ConfigError(
            "optimizer.params.per_head_muon = true, and no projection of query, key or value was recognized by its name and "
            f"the number and width of heads in the configuration of {type(model).__name__}",
            code="optimizer-heads",
            fix="Leave per_head_muon out, or give groups with use_muon=True and heads=<their number>.",
        )
    return heads_of


def _head_shapes(config: Any) -> list[tuple[tuple[str, ...], int | None, int | None]]:
    """Return (first letters of a layer's name, heads, rows of a head) of projections, also of latent attention's."""
    names = ("num_attention_heads", "n_head", "num_heads")
    heads = next((value for name in names if (value := getattr(config, name, None))), None)
    hidden = getattr(config, "hidden_size", None)
    width = getattr(config, "head_dim", None) or (hidden // heads if hidden and heads and hidden % heads == 0 else None)
    nope, rope, value = (getattr(config, f"{name}_head_dim", None) for name in ("qk_nope", "qk_rope", "v"))
    latent_query = nope + rope if nope and rope else None
    return [
        (("q_proj", "query", "wq"), heads, width),
        (("q_proj", "query", "wq", "q_b_proj"), heads, latent_query),
        (
            ("k_proj", "key", "wk", "v_proj", "value", "wv"),
            getattr(config, "num_key_value_heads", None) or heads,
            width,
        ),
        (("kv_b_proj",), heads, nope + value if nope and value else None),
    ]


def _for_muon(name: str, param: torch.Tensor) -> bool:
    lowered = name.lower()
    return param.ndim >= 2 and "embed" not in lowered and "lm_head" not in lowered


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def make_torch_scheduler(section: TorchSchedulerSection, optimizer: torch.optim.Optimizer) -> Any:
    """Build the torch.optim.lr_scheduler class that `section` names, on `optimizer`.

    Raises:
        ConfigError: the type or a parameter is unknown ("schedule-type", "schedule-params").
    """
    check_scheduler(section)
    kind = _classes(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)[section.type.lower()]
    return kind(optimizer, **section.params)


def check_optimizer(section: OptimizerSection) -> None:
    """Whether `section` names an optimizer that can be made, and only its parameters; builds nothing. Raises as above."""
    if not isinstance(section, TorchOptimizerSection):
        return
    if section.type.lower() in FROM_MUP:
        if importlib.util.find_spec("mup") is None:
            raise UnsupportedError(
                f"optimizer.type {section.type!r} is made by the package mup, which is not installed",
                code="optimizer-unbuilt",
                fix="Install it (`pip install mup`), and give the model its base shapes before initialize().",
            )
        return  # its functions pass on whatever they are given
    known = _classes(torch.optim, torch.optim.Optimizer)
    if section.type.lower() not in known:
        names = [*(kind.__name__ for kind in known.values()), *FROM_MUP.values()]
        raise _unknown("optimizer", section.type, names, "torch.optim")
    _check_arguments("optimizer", section.type, section.params, known[section.type.lower()])
    _try_values(section.type, section.params, known[section.type.lower()])


def _try_values(name: str, arguments: Mapping[str, Any], kind: Any) -> None:
    """Make an optimizer of torch's for one element, which refuses the values that it would refuse at the start."""
    try:
        kind(
            [torch.zeros(1, requires_grad=True, device="cpu")],
            **{key: _tupled(value) for key, value in arguments.items()},
        )
    except Exception as error:  # whatever torch's class makes of these values
        raise ConfigError(
            f"optimizer.params of {name}, {str(dict(arguments))[:200]}, are refused by torch: {type(error).__name__}: {error}",
            code="optimizer-params",
            fix="Correct the value; numbers have no quotation marks.",
        ) from error


def check_scheduler(section: SchedulerSection) -> None:
    """Check the type and parameters of a scheduler section against torch's classes."""
    if not isinstance(section, TorchSchedulerSection):
        return
    known = _classes(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    if section.type.lower() not in known:
        names = [kind.__name__ for kind in known.values()]
        raise _unknown("scheduler", section.type, names, "torch.optim.lr_scheduler")
    _check_arguments("scheduler", section.type, section.params, known[section.type.lower()])


def _classes(where: ModuleType, base: type) -> dict[str, Any]:
    """Return a module's classes derived from `base` by lower-case name: names are accepted in any case."""
    classes = [kind for kind in vars(where).values() if inspect.isclass(kind) and issubclass(kind, base)]
    return {kind.__name__.lower(): kind for kind in classes if kind is not base}


def _unknown(what: str, name: str, known: Iterable[str], where: str) -> ConfigError:
    close = nearest(name, known)
    return ConfigError(
        f"{what}.type {name!r} is neither built in nor a class of {where}",
        code="optimizer-type" if what == "optimizer" else "schedule-type",
        fix=f"Did you mean {close[0]!r}?" if close else f"Give a class name of {where}.",
    )


def _check_arguments(what: str, name: str, arguments: Mapping[str, Any], kind: type) -> None:
    names = list(inspect.signature(kind.__init__).parameters)[2:]  # type: ignore[misc]
    unknown = sorted(set(arguments) - set(names))
    if unknown:
        close = nearest(unknown[0], names)
        raise ConfigError(
            f"{what}.params of {name} has no {', '.join(map(repr, unknown))}; it has {', '.join(names)}",
            code="optimizer-params" if what == "optimizer" else "schedule-params",
            fix=f"Did you mean {close[0]!r}?" if close else "Remove what it does not have.",
        )


def _tupled(value: Any) -> Any:
    # JSON has no tuples; torch's optimizers want betas and etas as tuples.
    return tuple(value) if isinstance(value, list) else value
