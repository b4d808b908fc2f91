"""The verifier finds what is planted, and says where."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_config.errors import PlanError
from ds_pipe import ActionKind, Program, ScheduleError, accumulation, add_comms, mark_reduce, one_f_one_b, run, verify


def refused(text: str) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        verify(Program.parse(text))
    return caught.value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0B0 0F0", "0B0 comes before 0F0"),
        ("0F0 0B0 0B0", "0B0 comes twice"),
        ("0F0 0F1 0B0", "0F1 has no backward"),
        ("0F0 0B0 0F2 0B2", "stage 0 never runs the forward of microbatch 1"),
        ("0F0 0B0\n1F0 1B0", "0B0 comes before 0RECV_B0"),
        ("0SEND_F0 0F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0", "0SEND_F0 comes before 0F0"),
        ("0F0 0SEND_F0 0B0", "0SEND_F0 is received by no one"),
    ],
)
def test_order_errors_are_found(text: str, said: str) -> None:
    error = refused(text)
    assert error.code == "program-order"
    assert said in error.message


def test_deadlock_names_who_waits_for_what() -> None:
    error = refused("0F0 0RECV_B0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0")
    assert error.code == "program-deadlock"
    assert "rank 0 waits at 0RECV_B0 for 1SEND_B0" in error.message
    assert "rank 1 waits at 1RECV_F0 for 0SEND_F0" in error.message
    assert "[0RECV_B0]" in error.message


def test_first_stage_cannot_receive() -> None:
    assert refused("0RECV_F0 0F0 0B0").code == "program-deadlock"


def test_lost_gradients_are_found() -> None:
    error = refused("0F0 0B0* 0F1 0B1")
    assert error.code == "program-reduce"
    assert "[0B1]" in error.message


def test_a_stage_on_two_ranks_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        verify(Program.parse("0F0 0B0\n0F1 0B1"))
    assert "rank 0 and by rank 1" in caught.value.message


def test_the_failing_cell_of_a_long_program_is_shown_with_its_neighbours() -> None:
    words = str(one_f_one_b(1, 20)).split()
    words[21], words[20] = words[20], words[21]
    error = refused(" ".join(words))
    assert "[0B10]" in error.message
    assert "..." in error.message
    assert len(error.message.splitlines()[-1]) < 120


@given(st.integers(2, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_a_shuffled_program_is_verified_or_refused_never_both(stages: int, micro: int, rng: random.Random) -> None:
    program = add_comms(mark_reduce(one_f_one_b(stages, micro), every_backward=True))
    rows = [list(actions) for actions in program.ranks]
    victim = rng.randrange(stages)
    rng.shuffle(rows[victim])
    shuffled = Program(tuple(map(tuple, rows)))
    try:
        report = verify(shuffled)
    except ScheduleError as error:
        assert error.code in {"program-order", "program-deadlock"}  # noqa: PT017
    else:
        # What passes must respect the partial order that the runner will rely on.
        order = [str(action) for action in shuffled.ranks[victim]]
        for m in range(micro):
            assert order.index(f"{victim}F{m}") < order.index(f"{victim}B{m}*")
        assert report.peak_activations[victim] <= micro
        assert report.reductions == (micro,) * stages


def test_forward_only_programs_are_evaluation() -> None:
    report = verify(Program.parse("0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F0 1F0 1RECV_F1 1F1"))
    assert report.sends == 2
    assert report.peak_activations == (2, 2)


def test_runner_calls_handlers_in_order() -> None:
    seen: list[str] = []
    program = mark_reduce(one_f_one_b(1, 3), every_backward=False)
    run(
        program.ranks[0],
        {ActionKind.FORWARD: lambda a: seen.append(str(a)), ActionKind.BACKWARD: lambda a: seen.append(str(a).lower())},
    )
    assert seen == ["0F0", "0b0", "0F1", "0b1", "0F2", "0b2*"]


def test_runner_refuses_before_it_runs() -> None:
    seen: list[str] = []
    program = add_comms(one_f_one_b(2, 1))
    with pytest.raises(PlanError) as caught:
        run(program.ranks[0], {ActionKind.FORWARD: lambda a: seen.append(str(a))})
    assert caught.value.code == "program-handler"
    assert "BACKWARD, RECV_B, SEND_F" in caught.value.message
    assert seen == []


def test_a_long_accumulation_costs_no_more_than_its_microbatches() -> None:
    reads = []

    class Counted(Program):
        @property
        def stages(self) -> int:
            reads.append(1)
            return Program.stages.fget(self)

    for microbatches in (10, 200):
        reads.clear()
        assert verify(Counted(accumulation(microbatches).ranks)).sends == 0
        assert len(reads) < 10


def test_a_batch_size_with_too_many_digits_is_refused() -> None:
    with pytest.raises(PlanError, match="takes at most 1048576") as caught:
        accumulation(2**62)
    assert caught.value.code == "program-size"
