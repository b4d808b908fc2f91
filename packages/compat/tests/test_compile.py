"""Contracts of compile passes under upstream's names."""

from __future__ import annotations

import pytest
import torch

from ds_config.errors import UnsupportedError


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
    from deepspeed._ours.training_engine.compile_passes import translated_schedule
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
    assert translated_schedule([(0, [mine, "other"])], {"named": mine}) == [(0, ["named", "other"])]


def test_a_batch_is_given_whole_to_the_pass_that_cuts_it() -> None:
    from deepspeed.compile.passes.sp_compile import prepare_autosp_inputs

    ids, mask = torch.ones(2, 8, dtype=torch.long), torch.ones(2, 8)
    assert prepare_autosp_inputs(ids, ids, attention_mask=mask) == (ids, ids, None, mask)
    with pytest.raises(ValueError, match="label_id is None"):
        prepare_autosp_inputs(ids, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"position_id has the shape \(8,\)"):
        prepare_autosp_inputs(ids, ids, torch.arange(8))
    with pytest.raises(UnsupportedError, match="seq_dim=0"):
        prepare_autosp_inputs(ids, ids, seq_dim=0)


def test_what_a_schedule_breaks_is_told_in_upstreams_words() -> None:
    from deepspeed._ours.training_engine.compile_passes import check_passes
    from deepspeed.compile.passes import contract, offload_adam_states, prefetch, zero3_compile, zero_1_and_2_compile

    from ds_engine.compiling import BUILTIN

    z3, states = zero3_compile.NAME, offload_adam_states
    for passes, said in (
        ([prefetch.schedule_prefetch, z3], "prefetch requires z3_gather_release"),
        ([z3, zero_1_and_2_compile.NAME_Z1], "zero1_compile conflicts with zero3_compile"),
        ([z3, states.NAME], "offload_adam_states requires opt_states_evicted"),
    ):
        with pytest.raises(contract.PassContractError, match=said) as caught:
            check_passes([(0, passes)], {})
        assert caught.value.code == "compile-contract"
    # Ours provide what upstream's require, and the other way round.
    check_passes(
        [(0, ["reduce", "gather", prefetch.NAME]), (1, [z3, "keep"]), (2, [BUILTIN["gather"], prefetch.NAME])], {}
    )
    check_passes([(0, [states.NAME_FOR_INIT, z3, states.move_opt_states])], {})

    def mine() -> None: ...

    contract.register_pass_contract("mine", contract.PassContract(requires=frozenset({"z3_gather_release"})))
    try:
        check_passes([(0, [z3, mine])], {"mine": mine})
        with pytest.raises(contract.PassContractError, match="mine requires"):
            check_passes([(0, [mine])], {"mine": mine})
    finally:
        contract.register_pass_contract("mine", None)
