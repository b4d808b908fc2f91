"""Contracts of compile passes under upstream's names."""

from __future__ import annotations

import pytest


def test_contracts_are_checked_by_step_and_both_ways() -> None:
    from deepspeed.compile.passes import contract

    contract.register_pass_contract(
        "a", contract.PassContract(provides=frozenset({"done"}), conflicts_with=frozenset({"c"}))
    )
    contract.register_pass_contract("b", contract.PassContract(requires=frozenset({"done"})))
    try:
        contract.validate_schedule([(0, ["a", "b"]), (3, ["a", "unknown", "b"])])
        with pytest.raises(contract.PassContractError, match="step 3: b requires done"):
            contract.validate_schedule([(0, ["a"]), (3, ["b"])])
        for passes in (["a", "c"], ["c", "a"]):
            with pytest.raises(ValueError, match="a conflicts with c"):
                contract.validate_schedule([(0, passes)])
    finally:
        for name in ("a", "b"):
            contract.register_pass_contract(name, None)
    assert contract.get_pass_contract("a") is None


def test_schedules_of_upstream_name_our_passes() -> None:
    from deepspeed._ours.compile_passes import translated_schedule
    from deepspeed.compile.passes import (
        offload_adam_states,
        offload_parameters,
        prefetch,
        selective_gather,
        zero3_compile,
    )

    def mine() -> None: ...

    asked = [
        (0, [zero3_compile.NAME]),
        (5, [zero3_compile.add_z3_gather_release, prefetch.NAME, selective_gather.selective_gather, mine]),
    ]
    assert translated_schedule(asked) == [
        (0, ["reduce", "gather"]),
        (5, ["reduce", "gather", "prefetch", "keep", mine]),
    ]
    elsewhere = [
        (0, [zero3_compile.NAME, offload_parameters.NAME]),
        (1, [offload_adam_states.NAME_FOR_INIT, zero3_compile.NAME, offload_adam_states.move_opt_states]),
    ]
    assert translated_schedule(elsewhere) == [
        (0, ["reduce", "gather", "offload_parameters"]),
        (1, ["reduce", "gather", "offload_opt_states"]),
    ]
