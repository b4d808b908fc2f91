"""Which updates begin before their step, and which of them hold: the rules, without a tensor."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ds_config.errors import PlanError
from ds_zero import OffloadPolicy, ShardOptions, plan
from ds_zero.layout.units import ModuleInfo, ParamInfo, UnitSizePolicy
from ds_zero.update.overlap_plan import Outlook, OverlapLedger, OverlapState, Terms

TERMS = Terms(0.5, False, (("lr", 0.1), ("betas", (0.9, 0.99))), 3)


def calm(backwards: int = 1) -> Outlook:
    outlook = Outlook()
    outlook.stepped(backwards, 1.0, altered=False)
    return outlook


def test_nothing_is_expected_of_the_first_step() -> None:
    assert not any(Outlook().last(backward) for backward in range(4))


def test_a_step_is_expected_to_be_like_the_last() -> None:
    outlook = calm(3)
    assert [outlook.last(backward) for backward in (1, 2, 3, 4)] == [False, False, True, False]
    outlook.stepped(1, 1.0, altered=False)
    assert [outlook.last(backward) for backward in (1, 2, 3)] == [True, False, False]


def test_after_a_step_that_was_clipped_or_skipped_nothing_is_early() -> None:
    outlook = calm()
    outlook.stepped(1, 1.0, altered=True)
    assert not outlook.last(1)
    outlook.stepped(1, 1.0, altered=False)
    assert outlook.last(1)


def test_divisors_that_differ_from_step_to_step_cannot_be_expected() -> None:
    outlook, expected = Outlook(), []
    for divisor in (7.0, 7.0, 9.0, 8.0, 8.0):
        outlook.stepped(1, divisor, altered=False)
        expected.append(outlook.last(1))
    assert expected == [True, True, False, False, True]
    assert outlook.divisor == 8.0


def test_an_update_holds_on_the_very_terms_it_was_made_on() -> None:
    others = [
        Terms(0.25, False, TERMS.settings, 3),
        Terms(0.5, True, TERMS.settings, 3),
        Terms(0.5, False, (("lr", 0.2), ("betas", (0.9, 0.99))), 3),
        Terms(0.5, False, TERMS.settings, 4),
    ]
    ledger = OverlapLedger([4])
    early(ledger, 4)
    assert not any(ledger.holds(4, terms) for terms in others)
    assert ledger.state(4) is OverlapState.EARLY
    assert ledger.holds(4, TERMS)
    assert (ledger.state(4), ledger.retained, ledger.undone) == (OverlapState.PLAIN, 1, 0)


def early(ledger: OverlapLedger, unit: int, terms: Terms | None = TERMS) -> None:
    ledger.line_up(unit)
    assert ledger.begin(unit)
    ledger.end(unit, terms)


def test_a_sum_is_ready_once_in_the_backward_that_collected_it() -> None:
    ledger, outlook = OverlapLedger([0]), calm(2)
    ledger.collect(0, 1)
    assert not ledger.ready(0, 1, outlook)  # another backward is expected
    assert not ledger.ready(0, 2, outlook)  # a sum of the first one that ends late
    ledger.collect(0, 2)
    assert ledger.ready(0, 2, outlook)
    early(ledger, 0)
    assert not ledger.ready(0, 2, outlook)


def test_what_is_in_line_can_be_called_off_and_what_is_written_cannot() -> None:
    ledger = OverlapLedger([0, 1])
    ledger.line_up(0)
    assert ledger.call_off(0)
    assert not ledger.call_off(0)
    assert not ledger.begin(0)
    ledger.line_up(1)
    assert ledger.begin(1)
    assert ledger.writing
    assert not ledger.call_off(1)
    ledger.end(1, TERMS)
    assert not ledger.writing
    assert ledger.busy == [1]


def test_a_failed_update_never_holds() -> None:
    ledger = OverlapLedger([0])
    early(ledger, 0, None)
    assert ledger.state(0) is OverlapState.BROKEN
    assert not ledger.holds(0, TERMS)
    ledger.undo(0)
    assert (ledger.state(0), ledger.retained, ledger.undone) == (OverlapState.PLAIN, 0, 1)


def test_verbs_check_where_they_start() -> None:
    ledger = OverlapLedger([0])
    for wrong in (lambda: ledger.end(0, TERMS), lambda: ledger.undo(0)):
        with pytest.raises(RuntimeError, match="unit 0 is PLAIN"):
            wrong()
    early(ledger, 0)
    for wrong in (lambda: ledger.line_up(0), lambda: ledger.collect(0, 1)):
        with pytest.raises(RuntimeError, match="unit 0 is EARLY"):
            wrong()


@pytest.mark.parametrize("seed", range(20))
def test_drawn_histories_lose_no_update_and_count_each_once(seed: int) -> None:
    """Against the plainest model there is: of each unit, how many updates its state has, and how many it should have."""
    chance, units = random.Random(seed), range(4)
    ledger, outlook = OverlapLedger(units), calm()
    state, steps, written = dict.fromkeys(units, 0), 0, 0

    def take_back(unit: int) -> None:
        if ledger.call_off(unit) or ledger.state(unit) is OverlapState.PLAIN:
            return
        if ledger.state(unit) is OverlapState.WRITING:
            thread(unit)
        if ledger.state(unit) is OverlapState.EARLY:
            state[unit] -= 1
        ledger.undo(unit)

    def thread(unit: int) -> None:
        nonlocal written
        if ledger.state(unit) is OverlapState.WAITING:
            assert ledger.begin(unit)
        elif ledger.state(unit) is OverlapState.WRITING:
            broken = chance.random() < 0.1
            state[unit] += not broken
            written += 1
            ledger.end(unit, None if broken else TERMS)

    for _ in range(300):
        unit, act = chance.choice(units), chance.random()
        if act < 0.3:
            take_back(unit)
            ledger.collect(unit, 1)
        elif act < 0.5 and ledger.ready(unit, 1, outlook):
            ledger.line_up(unit)
        elif act < 0.8:
            thread(unit)
        elif act < 0.9:
            take_back(unit)  # somebody looks at the state
            assert state[unit] == steps
        else:
            terms = TERMS if chance.random() < 0.6 else Terms(0.1, False, (), 0)
            steps += 1
            for each in units:
                ledger.call_off(each)
                if ledger.state(each) is OverlapState.WRITING:
                    thread(each)
                if ledger.state(each) is OverlapState.EARLY and ledger.holds(each, terms):
                    continue
                take_back(each)
                state[each] += 1
            assert set(state.values()) == {steps}
            assert not ledger.busy
    for unit in units:
        take_back(unit)
    assert ledger.retained + ledger.undone == written
    assert ledger.retained > 0


# ---- what is asked for, and what is planned


@pytest.mark.parametrize(
    "wrong", [{"overlap_ratio": 1.5}, {"overlap_ratio": -0.1}, {"device": "file", "folder": "x", "overlap_ratio": 0.5}]
)
def test_early_updates_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(PlanError, match=r"overlap_ratio (=|is) ") as caught:
        OffloadPolicy(**wrong)  # type: ignore[arg-type]
    assert caught.value.code == ("offload-placement" if "device" in wrong else "config-option")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_plan_counts_what_is_kept_to_take_updates_back(stage: int) -> None:
    params = [ParamInfo(f"{m}.{i}", (16, 16), "float32", m, 0, states=2) for m in ("a", "b") for i in range(3)]
    options = ShardOptions(stage=stage, precision="bf16", policy=UnitSizePolicy(max_numel=768, persist_numel=0))

    def found(place: OffloadPolicy) -> object:
        return plan(
            params, 2, replace(options, offload_optimizer=place), modules=[ModuleInfo(m) for m in ("", "a", "b")]
        )

    late, early = found(OffloadPolicy()), found(OffloadPolicy(overlap_ratio=0.8))
    state = 6 * 256 * 12 // (1 if stage == 0 else 2)
    passing = (
        0 if stage == 0 else 2 * 768 + 3 * 2 * 384
    )  # gradients in bf16, and new weights of three units on their way
    assert (late.early, late.undo, late.host) == (0, 0, state + passing)  # type: ignore[attr-defined]
    assert (early.early, early.undo, early.host) == (2, state, 2 * state + passing)  # type: ignore[attr-defined]
    assert early.persistent_bytes == late.persistent_bytes  # type: ignore[attr-defined]
    assert "2 units are updated while backward goes on" in str(early)
    assert "while backward goes on" not in str(late)
    half = found(OffloadPolicy(overlap_ratio=0.8, ratio=0.5))
    assert (half.early, half.undo) == (1, state // 2)  # type: ignore[attr-defined]
