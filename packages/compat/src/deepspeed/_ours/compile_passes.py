"""Upstream's names of compile passes and their contracts, in terms of those of ds_engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_config.errors import PlanError, UnsupportedError
from ds_engine.compiling.passes import Contract, Entry, Pass, check_schedule, named

__all__ = [
    "BUILTIN",
    "PassContract",
    "PassContractError",
    "get_pass_contract",
    "register_pass_contract",
    "translated_schedule",
    "validate_schedule",
]


@dataclass(frozen=True)
class PassContract:
    """What a pass requires and provides (capabilities), and the names of passes that cannot be in the same list."""

    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    conflicts_with: frozenset[str] = frozenset()

    def ours(self) -> Contract:
        """The same for ds_engine."""
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
    """The contract of a name, if it has one."""
    return _pass_contracts.get(name)


def validate_schedule(
    schedule: Sequence[tuple[int, Sequence[Any]]], name_registry: Mapping[str, Any] | None = None
) -> None:
    """Raise PassContractError if the passes of a step do not go together."""
    functions = dict(name_registry or {})
    names = {n for _, passes in schedule for n in passes if isinstance(n, str)} | functions.keys()
    known = {
        name: Pass(name, "", _pass_contracts.get(name, PassContract()).ours(), edit=functions.get(name))
        for name in names
    }
    try:
        check_schedule([Entry(step, tuple(named(one, known) for one in passes)) for step, passes in schedule])
    except PlanError as error:
        raise PassContractError(error.message, code=error.code, fix=error.fix) from error


def _stands_for(upstream: str) -> Callable[..., Any]:
    def given(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise UnsupportedError(
            f"{upstream} was called with a graph",
            code="compat-argument",
            fix="Put it, or its name, into a schedule of compile().",
        )

    given.__name__ = upstream
    return given


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


def translated_schedule(schedule: Sequence[tuple[int, Sequence[Any]]]) -> list[tuple[int, list[Any]]]:
    """A schedule with upstream's passes replaced by ours."""

    def ours(one: Any) -> Sequence[Any]:
        return next((names for name, (function, names) in BUILTIN.items() if one in (name, function)), (one,))

    return [(step, [name for one in passes for name in ours(one)]) for step, passes in schedule]
