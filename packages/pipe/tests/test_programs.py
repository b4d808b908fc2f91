"""Programs are right for every size: proven on paper, by the thousand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_config.errors import PlanError
from ds_pipe import Action, ActionKind, Program, accumulation, add_comms, gpipe, mark_reduce, one_f_one_b, verify

sizes = st.tuples(st.integers(1, 8), st.integers(1, 16))
actions = st.builds(
    lambda op, stage, micro, reduce: Action(op, stage, micro, reduce and op is ActionKind.BACKWARD),
    st.sampled_from(ActionKind),
    st.integers(0, 200),
    st.integers(0, 10_000),
    st.booleans(),
)


@given(actions)
def test_text_of_an_action_round_trips(action: Action) -> None:
    assert Action.parse(str(action)) == action


@given(st.lists(st.lists(actions, min_size=1, max_size=6).map(tuple), min_size=1, max_size=4).map(tuple))
def test_text_of_a_program_round_trips(ranks: tuple[tuple[Action, ...], ...]) -> None:
    program = Program(ranks)
    assert Program.parse(str(program)) == program


def test_text_is_what_the_docs_say() -> None:
    assert str(Action(ActionKind.FORWARD, 0, 3)) == "0F3"
    assert str(Action(ActionKind.BACKWARD, 0, 3, reduce=True)) == "0B3*"
    assert str(Action(ActionKind.SEND_F, 1, 3)) == "1SEND_F3"
    assert str(mark_reduce(accumulation(2), every_backward=True)) == "0F0 0B0* 0F1 0B1*"
    assert str(mark_reduce(accumulation(2), every_backward=False)) == "0F0 0B0 0F1 0B1*"


@pytest.mark.parametrize("text", ["", "F3", "0F", "0X3", "0F3*", "-1F0", "0F-1", "0F3 0B3", "0send_f3"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        Action.parse(text)
    assert caught.value.code == "program-text"


@given(sizes, st.sampled_from([gpipe, one_f_one_b]), st.booleans())
def test_bubble_and_memory_equal_theory(size: tuple[int, int], make: object, every: bool) -> None:
    stages, micro = size
    program = add_comms(mark_reduce(make(stages, micro), every))  # type: ignore[operator]
    report = verify(program)
    assert abs(report.bubble - (stages - 1) / (micro + stages - 1)) < 1e-9
    assert report.sends == 2 * (stages - 1) * micro
    assert report.reductions == ((micro if every else 1),) * stages
    expected = tuple(min(stages - s, micro) for s in range(stages)) if make is one_f_one_b else (micro,) * stages
    assert report.peak_activations == expected


@given(st.integers(1, 64))
def test_accumulation_is_the_one_stage_program(micro: int) -> None:
    program = accumulation(micro)
    assert program.stages == 1
    assert program.microbatches == micro
    assert add_comms(program) == program
    report = verify(mark_reduce(program, every_backward=False))
    assert (report.bubble, report.peak_activations, report.sends) == (0.0, (1,), 0)


@given(sizes, st.booleans())
def test_marking_is_idempotent_and_commutes_with_transfers(size: tuple[int, int], every: bool) -> None:
    program = one_f_one_b(*size)
    once = mark_reduce(program, every)
    assert mark_reduce(mark_reduce(once, not every), every) == once
    assert add_comms(once) == mark_reduce(add_comms(program), every)
    marks = [action.reduce for action in once.backwards(0)]
    assert marks[-1]
    assert all(marks) if every else sum(marks) == 1


@pytest.mark.parametrize(("stages", "micro"), [(0, 1), (1, 0), (-1, 3), (2, -2)])
def test_empty_programs_are_refused(stages: int, micro: int) -> None:
    for make in (gpipe, one_f_one_b):
        with pytest.raises(PlanError) as caught:
            make(stages, micro)
        assert caught.value.code == "program-size"
        assert str(stages) in caught.value.message


def test_neighbours_on_one_rank_need_no_transfer() -> None:
    both = Program.parse("0F0 1F0 1B0 0B0")
    assert add_comms(both) == both
    assert verify(both).peak_activations == (2,)
