"""Every schedule is one that runs, within its memory, and takes what theory says."""

import argparse
import json
import math
import random
from pathlib import Path

import pytest

from ds_config.errors import PlanError
from ds_pipe import (
    SCHEDULES,
    ActionKind,
    Costs,
    Program,
    ScheduleError,
    add_comms,
    add_gathers,
    add_reduces,
    inference,
    interleaved,
    list_scheduled,
    looped,
    make_program,
    mark_reduce,
    simulate,
    vee,
    verify,
    zb_h1,
    zb_h2,
    zbv,
)
from ds_pipe import cli as pipe_cli

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 5, 8, 16)]


def checked(program: Program, **asked: object) -> object:
    return verify(add_comms(mark_reduce(program, every_backward=False)), **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SCHEDULES)
def test_named_schedules_run_at_every_size(name: str) -> None:
    for p, m in SIZES:
        program = make_program(name, p, m)
        report = checked(program)
        assert len(program.ranks) == p
        assert program.microbatches == m
        assert report.reductions == (1,) * program.stages
        work = sum(1 for a in program.ranks[0] if a.op.computes)
        assert work == len(program.ranks[0])
        timed = simulate(program, Costs.even(program.stages))
        assert timed.span == report.span
        assert timed.period <= report.span + 1e-9


@pytest.mark.parametrize("virtual", [2, 3, 4])
def test_interleaving_divides_the_bubble(virtual: int) -> None:
    for p, m in ((2, 4), (4, 8), (8, 16), (3, 9)):
        report = checked(interleaved(p, m, virtual))
        assert report.bubble <= (p - 1) / virtual / (m + (p - 1) / virtual) + 1e-9
        for r, peak in enumerate(report.peak_activations):
            assert peak <= 2 * (p - r - 1) + (virtual - 1) * p + 1


def test_split_backwards_hold_no_more_than_they_may() -> None:
    for p, m in SIZES:
        h1, h2, v = checked(zb_h1(p, m)), checked(zb_h2(p, m)), checked(zbv(p, m, cap=2 * p))
        assert max(h1.peak_activations) <= p  # as 1F1B's first rank
        assert max(h2.peak_activations) <= 2 * p - 1
        assert max(v.peak_activations) <= 2 * p  # of half stages: as 1F1B's first rank
        one = checked(make_program("1f1b", p, m))
        assert h1.span <= one.span
        assert v.period <= 2 * one.period + 1e-9  # two stages a rank, each counted as one


def test_at_four_ranks_and_eight_microbatches() -> None:
    def share(name: str) -> float:
        program = make_program(name, 4, 8)
        return 3 * 8 * program.stages / 4 / checked(program).period

    assert share("1f1b") == pytest.approx(8 / 11)
    assert share("zb-h1") > 0.82
    assert share("zb-h2") == pytest.approx(1.0)
    assert share("zbv") == pytest.approx(1.0)
    assert share("dualpipe-v") > 0.95


def draw(rng: random.Random) -> tuple[int, Costs, tuple[int, ...], tuple[float, ...]]:
    ranks, virtual = rng.randint(1, 8), 1
    place = rng.choice(["plain", "loop", "vee"])
    if place == "loop":
        virtual = rng.randint(1, 8 // ranks) if ranks <= 8 else 1
    rank_of = vee(ranks) if place == "vee" and ranks <= 4 else looped(ranks, ranks * virtual)
    stages = len(rank_of)
    times = [tuple(rng.choice([rng.uniform(0.1, 3), 1.0]) for _ in range(stages)) for _ in range(3)]
    memory = tuple(rng.choice([1.0, rng.uniform(0.2, 4)]) for _ in range(stages))
    costs = Costs(times[0], times[1], times[2], memory, rng.choice([0.0, 0.2]))
    least = [sum(memory[s] for s in range(stages) if rank_of[s] == r) for r in range(ranks)]
    caps = tuple(rng.choice([1.0, 1.5, rng.uniform(1, 4), math.inf]) * n for n in least)
    return rng.randint(1, 32), costs, rank_of, caps


def check_drawn(seed: int) -> None:
    microbatches, costs, rank_of, caps = draw(random.Random(seed))
    program = list_scheduled(microbatches, costs, rank_of, caps)
    report = checked(program, costs=costs, caps=caps)
    assert all(held <= cap * (1 + 1e-9) for held, cap in zip(report.peak_memory, caps, strict=True))
    busiest = max(
        microbatches
        * sum(
            costs.of(op, s)
            for s, r in enumerate(rank_of)
            if r == rank
            for op in (ActionKind.FORWARD, ActionKind.BACKWARD)
        )
        for rank in range(len(caps))
    )
    assert report.period >= busiest * (1 - 1e-9)


@pytest.mark.parametrize("seed", [*range(24), 1239])  # the last one: a wish is dropped while a message is on its way
def test_drawn_schedules_hold_their_caps(seed: int) -> None:
    check_drawn(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_two_thousand_drawn_schedules_hold_their_caps(block: int) -> None:
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        check_drawn(seed)


def test_measured_costs_beat_the_schedule_made_for_even_ones() -> None:
    costs = Costs((1.0, 1.0, 1.0, 2.0), (1.0, 1.0, 1.0, 2.0), (1.0, 1.0, 1.0, 1.0), (1.0,) * 4)
    ours = checked(list_scheduled(8, costs, range(4), 4.0), costs=costs)
    for name in ("1f1b", "zb-h1"):
        assert ours.period <= checked(make_program(name, 4, 8), costs=costs).period


def test_a_cap_that_one_microbatch_exceeds_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        list_scheduled(4, Costs.even(4), vee(2), cap=1.5)
    assert caught.value.code == "program-cap"
    assert "one microbatch in its stages is 2" in caught.value.message


def test_a_program_over_its_cap_is_refused() -> None:
    with pytest.raises(ScheduleError) as caught:
        checked(make_program("gpipe", 2, 4), caps=(4.0, 3.0))
    assert caught.value.code == "program-cap"
    assert "[1F3]" in caught.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0 0W0 0I0", "0W0 comes before 0I0"),
        ("0F0 0I0", "0I0 has no weight gradient"),
        ("0F0 0B0 0I0 0W0", "same backward"),
        ("0GATHER0 0F0 0RELEASE0 0B0", "0B0 uses stage 0, which is not gathered"),
        ("0GATHER0 0GATHER0 0F0 0B0", "gathers what is gathered"),
        ("0F0 0I0 0F1 0I1 0W0* 0W1", "stage 0 ends with gradients"),
        ("0F0 0I0 0F1 0I1 0W0 0REDUCE0 0W1", "stage 0 ends with gradients"),
    ],
)
def test_split_and_gathered_programs_are_checked(text: str, said: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        verify(Program.parse(text))
    assert said in caught.value.message


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv", "dualpipe-v"])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_gathers_surround_every_use(name: str, ahead: int) -> None:
    program = add_gathers(add_comms(mark_reduce(make_program(name, 4, 8), every_backward=True)), ahead)
    verify(program)
    for row in program.ranks:
        gathers = [a for a in row if a.op is ActionKind.GATHER]
        assert len(gathers) == len([a for a in row if a.op is ActionKind.RELEASE])
        if name == "1f1b":
            assert len(gathers) == 1


def test_reductions_may_be_actions_of_their_own() -> None:
    marked = mark_reduce(zb_h1(2, 3), every_backward=True)
    apart = add_reduces(add_comms(marked))
    assert verify(apart).reductions == (3, 3)
    assert not any(a.reduce for row in apart.ranks for a in row)


def test_inference_runs_forwards_only() -> None:
    for program in (inference(4, 6), inference(6, 5, looped(3, 6)), inference(4, 3, vee(2))):
        report = verify(add_comms(program))
        assert report.reductions == (0,) * program.stages


@pytest.mark.parametrize("rows", [[(1.0, 1.0)], [(1.0, -1.0, 1.0)], [(1.0, math.nan, 1.0)]])
def test_costs_that_say_nothing_are_refused(rows: list[tuple[float, ...]]) -> None:
    with pytest.raises(PlanError) as caught:
        Costs.measured(rows)
    assert caught.value.code == "program-costs"


def test_unknown_schedules_are_refused_with_the_known() -> None:
    with pytest.raises(PlanError) as caught:
        make_program("zb-h3", 2, 2)
    assert caught.value.code == "program-name"
    assert "zb-h2" in str(caught.value)


def test_the_commands_own_list_of_names_is_the_packages() -> None:
    assert (*SCHEDULES, "listed", "inference") == pipe_cli.NAMES


def test_the_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ran(*words: str) -> str:
        parser = argparse.ArgumentParser()
        pipe_cli.register(parser)
        status = pipe_cli.main(parser.parse_args(["show", "schedule", *words]))
        out = capsys.readouterr()
        return out.out if status == 0 else f"status {status}: {out.err}"

    assert "bubble 27.3%" in ran("--stages", "4", "--microbatches", "8", "--actions")
    listed_text = ran(
        "--stages", "2", "--microbatches", "4", "--name", "listed", "--costs", "1,1,1", "2,2,2", "--cap", "2"
    )
    assert "2 ranks, 2 stages" in listed_text
    told = json.loads(ran("--stages", "4", "--microbatches", "8", "--json", "--actions"))
    assert round(told["bubble"], 3) == 0.273
    assert [len(row) for row in told["ranks"]] == [16] * 4
    assert len(told["program"]) == 4
    assert "program-cap" in ran("--stages", "2", "--microbatches", "4", "--name", "listed", "--cap", "0.5")
    pytest.importorskip("matplotlib")
    picture = tmp_path / "zbv.png"
    assert "drawn" in ran("--stages", "4", "--microbatches", "8", "--name", "zbv", "--png", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
