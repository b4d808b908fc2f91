"""Upstream's names of compile passes and their contracts, in terms of those of ds_engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from deepspeed._ours.base.raising import not_supported, refused, wrong_argument
from ds_config.errors import PlanError
from ds_engine.compiling.schedule_passes import BUILTIN as OURS
from ds_engine.compiling.schedule_passes import Contract, Pass, PassEntry, check_schedule, named


@dataclass(frozen=True)
class PassContract:
    """What a pass requires and provides (capabilities), and the names of passes that cannot be in the same list."""

    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    conflicts_with: frozenset[str] = frozenset()

    def ours(self) -> Contract:
        """Convert the contract to ds_engine's `Contract` for its check."""
        return Contract(self.requires, self.provides, self.conflicts_with)


class PassContractError(PlanError, ValueError):
    """A schedule breaks a contract."""


_pass_contracts: dict[str, PassContract] = {}


def register_pass_contract(name: str, contract: PassContract | None) -> None:
    """Set the contract of a name; None takes it away."""
    if contract is None:
        _pass_contracts.pop(name, None)
    else:
        _pass_contracts[name] = contract


def get_pass_contract(name: str) -> PassContract | None:
    """Return the contract registered under a name; None without a contract."""
    return _pass_contracts.get(name)


def validate_schedule(
    schedule: Sequence[tuple[int, Sequence[Any]]], name_registry: Mapping[str, Any] | None = None
) -> None:
    """Raise PassContractError if the passes of a step do not go together."""
    _check(schedule, name_registry or {}, _pass_contracts)


def _check(
    schedule: Sequence[tuple[int, Sequence[Any]]], functions: Mapping[str, Any], contracts: Mapping[str, PassContract]
) -> None:
    names = {n for _, passes in schedule for n in passes if isinstance(n, str)} | functions.keys()
    known = {
        name: Pass(name, "", contracts.get(name, PassContract()).ours(), edit=functions.get(name)) for name in names
    }
    try:
        check_schedule([PassEntry(step, tuple(named(one, known) for one in passes)) for step, passes in schedule])
    except PlanError as error:
        raise PassContractError(error.message, code=error.code, fix=error.fix) from error


def _stands_for(upstream: str) -> Callable[..., Any]:
    def refuse_call(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise refused("pass-called", upstream)

    refuse_call.__name__ = upstream
    return refuse_call


_GATHER, _EVICTED = frozenset({"z3_gather_release"}), frozenset({"opt_states_evicted"})
_APART = frozenset({"offload_parameters", "zero1_compile", "zero2_compile"})
_UPSTREAMS: Mapping[str, tuple[str, tuple[str, ...], PassContract]] = {
    "zero1_compile": ("add_z1_reduce", ("reduce",), PassContract(conflicts_with=frozenset({"zero3_compile"}))),
    "zero2_compile": (
        "add_z2_reduce", ("reduce",), PassContract(conflicts_with=frozenset({"zero3_compile", "zero1_compile"})),
    ),
    "zero3_compile": ("add_z3_gather_release", ("reduce", "gather"), PassContract(provides=_GATHER)),
    "prefetch": ("schedule_prefetch", ("prefetch",), PassContract(requires=_GATHER)),
    "selective_gather": ("selective_gather", ("keep",), PassContract(requires=_GATHER)),
    "offload_parameters": ("offload_parameter_fwd", ("offload_parameters",), PassContract(requires=_GATHER)),
    "offload_adam_states": (
        "move_opt_states", ("offload_opt_states",), PassContract(requires=_EVICTED, conflicts_with=_APART),
    ),
    "offload_adam_states_sync": (
        "move_opt_states_sync", ("offload_opt_states_all",),
        PassContract(conflicts_with=_APART | {"offload_adam_states"}),
    ),
    # State is there after the first step only, so nothing prepares it for leaving.
    "offload_adam_states_for_init": (
        "offload_adam_states_for_init", (), PassContract(provides=_EVICTED, conflicts_with=_APART),
    ),
}  # fmt: skip
"""Upstream's passes by name: the function, our passes that replace it, the contract."""
BUILTIN: Mapping[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    name: (_stands_for(function), ours) for name, (function, ours, _) in _UPSTREAMS.items()
}
globals().update({function.__name__: function for function, _ in BUILTIN.values()})
globals().update({f"CONTRACT_{name}": contract for name, (*_, contract) in _UPSTREAMS.items()})


class _Given:
    """A pass of the caller in upstream's form, called as ds_engine calls one.

    Args:
        function: Of a graph module, its number, the order of graphs, what is known of them, a maker of inputs, the memory budget,
            parameters, and whether it is a backward graph. Edits the module, or returns another.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.__name__ = function, getattr(function, "__name__", repr(function))

    def __call__(
        self, graph: Any, number: int, order: Any, measured: Any, budget: int | None, params: Any, backward: bool
    ) -> Any:
        result = self.function(graph.owning_module, number, order, measured, _no_inputs, budget, params, backward)
        return getattr(result, "graph", result)


def _no_inputs() -> Any:
    raise refused("pass-inputs")


_ARGUMENTS = 8  # of upstream's passes; ds_engine's take seven


def as_ours(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a pass of the caller into the form that ds_engine calls.

    Upstream's form is recognised by its eight arguments.
    """
    try:
        inspect.signature(function).bind(*range(_ARGUMENTS))
    except (TypeError, ValueError):
        return function
    return _Given(function)


def functions_of(passes: Mapping[str, Pass]) -> dict[str, Callable[..., Any]]:
    """Return the functions that the caller has registered, by name."""
    edits = {name: one.edit for name, one in passes.items() if one.edit is not None}
    return {name: edit.function if isinstance(edit, _Given) else edit for name, edit in edits.items()}


def translated_schedule(
    schedule: Sequence[tuple[int, Sequence[Any]]], functions: Mapping[str, Callable[..., Any]] | None = None
) -> list[tuple[int, list[Any]]]:
    """Replace upstream's passes in a schedule by ours, and functions by their registered names."""

    def ours(one: Any) -> Sequence[Any]:
        for name, (function, names) in BUILTIN.items():
            if one in (name, function):
                return names
        if isinstance(one, Pass) or not callable(one):
            return (one,)
        return [name for name, function in (functions or {}).items() if function is one] or [as_ours(one)]

    return [(step, [name for one in passes for name in ours(one)]) for step, passes in schedule]


def _both(replaced_by: Sequence[str], contract: PassContract) -> PassContract:
    """Extend a contract of upstream's pass by what our passes provide, which replace that pass."""
    provided = [OURS[name].contract.provides for name in replaced_by]
    return PassContract(contract.requires, contract.provides.union(*provided), contract.conflicts_with)


_KNOWN: Mapping[str, PassContract] = {
    # Of ours only what they provide, in both vocabularies: ds_engine checks the rest of them.
    **{
        name: PassContract(
            provides=one.contract.provides | (_GATHER if "gathers" in one.contract.provides else frozenset())
        )
        for name, one in OURS.items()
    },
    **{name: _both(ours, contract) for name, (_, ours, contract) in _UPSTREAMS.items()},
}


def check_passes(schedule: Sequence[tuple[int, Sequence[Any]]], functions: Mapping[str, Any]) -> None:
    """Raise PassContractError if a schedule breaks a contract of upstream's passes, or of the caller's, which speak of upstream's.

    Args:
        functions: The caller's passes by name.
    """
    known = {name: function for name, (function, _) in BUILTIN.items()}
    named_schedule = [
        (step, [one.name if isinstance(one, Pass) and one.name in OURS else one for one in passes])
        for step, passes in schedule
    ]
    _check(named_schedule, {**known, **functions}, {**_KNOWN, **_pass_contracts})


def prepare_autosp_inputs(
    input_id: Tensor,
    label_id: Tensor,
    position_id: Tensor | None = None,
    attention_mask: Tensor | None = None,
    seq_dim: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Check the whole batch [batch, sequence] of a run with the pass `autosp`, and return it: the compiled run cuts it over ranks by itself.

    Raises:
        ConfigError: also a ValueError: ids or labels are missing, or a tensor has no such dim.
        UnsupportedError: sequences do not lie along dim 1.
    """
    named = {"input_id": input_id, "label_id": label_id, "position_id": position_id, "attention_mask": attention_mask}
    for name, value in named.items():
        if value is None and name in ("input_id", "label_id"):
            raise wrong_argument(f"{name} is None", "Give the whole batch.", ValueError)
        if value is not None and not 0 <= seq_dim < value.ndim:
            what = f"seq_dim = {seq_dim}, and {name} has the shape {tuple(value.shape)}"
            raise wrong_argument(what, "Name the dim along which sequences lie.", ValueError)
    if seq_dim != 1:
        raise not_supported(
            f"prepare_autosp_inputs(seq_dim={seq_dim})", "Give tensors [batch, sequence], and seq_dim 1."
        )
    return input_id, label_id, position_id, attention_mask
