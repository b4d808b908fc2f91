"""Upstream's names of compile passes and their contracts, in terms of those of ds_engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed._ours.base.raising import not_supported
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
        raise not_supported(f"{upstream} was called with a graph", "Put it, or its name, into a schedule of compile().")

    refuse_call.__name__ = upstream
    return refuse_call


_GATHER, _EVICTED = frozenset({"z3_gather_release"}), frozenset({"opt_states_evicted"})
NAME_Z1, NAME_Z2, NAME_Z3 = "zero1_compile", "zero2_compile", "zero3_compile"
NAME_PREFETCH, NAME_SELECTIVE = "prefetch", "selective_gather"
NAME_PARAMS, NAME_STATES = "offload_parameters", "offload_adam_states"
NAME_SYNC, NAME_FOR_INIT = "offload_adam_states_sync", "offload_adam_states_for_init"
_APART = frozenset({NAME_PARAMS, NAME_Z1, NAME_Z2})

CONTRACT_Z1 = PassContract(conflicts_with=frozenset({NAME_Z3}))
CONTRACT_Z2 = PassContract(conflicts_with=frozenset({NAME_Z3, NAME_Z1}))
CONTRACT_Z3 = PassContract(provides=_GATHER)
CONTRACT_PREFETCH = PassContract(requires=_GATHER)
CONTRACT_SELECTIVE = PassContract(requires=_GATHER)
CONTRACT_PARAMS = PassContract(requires=_GATHER)
CONTRACT_STATES = PassContract(requires=_EVICTED, conflicts_with=_APART)
CONTRACT_SYNC = PassContract(conflicts_with=_APART | {NAME_STATES})
CONTRACT_FOR_INIT = PassContract(provides=_EVICTED, conflicts_with=_APART)

add_z1_reduce, add_z2_reduce = _stands_for("add_z1_reduce"), _stands_for("add_z2_reduce")
add_z3_gather_release, schedule_prefetch = _stands_for("add_z3_gather_release"), _stands_for("schedule_prefetch")
selective_gather, offload_parameter_fwd = _stands_for("selective_gather"), _stands_for("offload_parameter_fwd")
move_opt_states, move_opt_states_sync = _stands_for("move_opt_states"), _stands_for("move_opt_states_sync")
offload_adam_states_for_init = _stands_for("offload_adam_states_for_init")

BUILTIN: Mapping[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    NAME_Z1: (add_z1_reduce, ("reduce",)),
    NAME_Z2: (add_z2_reduce, ("reduce",)),
    NAME_Z3: (add_z3_gather_release, ("reduce", "gather")),
    NAME_PREFETCH: (schedule_prefetch, ("prefetch",)),
    NAME_SELECTIVE: (selective_gather, ("keep",)),
    NAME_PARAMS: (offload_parameter_fwd, ("offload_parameters",)),
    NAME_STATES: (move_opt_states, ("offload_opt_states",)),
    NAME_SYNC: (move_opt_states_sync, ("offload_opt_states_all",)),
    NAME_FOR_INIT: (offload_adam_states_for_init, ()),
}
"""Upstream's names and functions, and our passes. State is there after the first step only, so nothing prepares it for leaving."""


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
    raise not_supported(
        "a compile pass asked for inputs to run its graph with: graphs are measured while a step runs, and no inputs are kept",
        "Read times and bytes of each node from what the pass is given as profiling results.",
    )


_UPSTREAMS = 8  # arguments; ds_engine's passes take seven


def as_ours(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a pass of the caller into the form that ds_engine calls.

    Upstream's form is recognised by its eight arguments.
    """
    try:
        inspect.signature(function).bind(*range(_UPSTREAMS))
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


def _both(upstream: str, contract: PassContract) -> PassContract:
    """Extend a contract of upstream's pass by what our passes provide, which replace that pass."""
    ours = [OURS[name].contract.provides for name in BUILTIN[upstream][1]]
    return PassContract(contract.requires, contract.provides.union(*ours), contract.conflicts_with)


_CONTRACTS = {
    NAME_Z1: CONTRACT_Z1, NAME_Z2: CONTRACT_Z2, NAME_Z3: CONTRACT_Z3, NAME_PREFETCH: CONTRACT_PREFETCH, NAME_SELECTIVE: CONTRACT_SELECTIVE,
    NAME_PARAMS: CONTRACT_PARAMS, NAME_STATES: CONTRACT_STATES, NAME_SYNC: CONTRACT_SYNC, NAME_FOR_INIT: CONTRACT_FOR_INIT,
}  # fmt: skip
_KNOWN: Mapping[str, PassContract] = {
    # Of ours only what they provide, in both vocabularies: ds_engine checks the rest of them.
    **{
        name: PassContract(
            provides=one.contract.provides | (_GATHER if "gathers" in one.contract.provides else frozenset())
        )
        for name, one in OURS.items()
    },
    **{name: _both(name, contract) for name, contract in _CONTRACTS.items()},
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
