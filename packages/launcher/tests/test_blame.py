"""Who failed first, and what is shown of it."""

from __future__ import annotations

import pytest

from ds_launcher.failures import Ending, closing_lines, exit_status, explain, failed_at, first_failure, starts_traceback


def test_the_traceback_comes_before_the_exit() -> None:
    # Rank 1 raised at 10.0 and took 0.4 s to tear down; rank 0 lost its peer at 10.1 and was faster to end.
    raised = Ending(1, 1, ended_s=10.4, traceback_s=10.0)
    lost_peer = Ending(0, 1, ended_s=10.2, traceback_s=10.1)
    assert first_failure([lost_peer, raised]) == raised


def test_a_killed_rank_is_blamed_for_the_errors_it_causes() -> None:
    killed = Ending(2, -9, ended_s=5.0)
    others = [Ending(0, 1, 5.3, 5.2), Ending(1, 1, 5.2, 5.1)]
    assert first_failure([*others, killed]) == killed


def test_an_old_traceback_was_handled_and_says_nothing() -> None:
    logged_long_ago = Ending(0, 1, ended_s=100.5, traceback_s=3.0)
    culprit = Ending(1, 1, ended_s=100.3, traceback_s=100.2)
    assert first_failure([logged_long_ago, culprit]) == culprit
    assert failed_at(logged_long_ago) == 100.5


def test_a_traceback_does_not_antedate_a_signal() -> None:
    assert failed_at(Ending(0, -11, ended_s=4.0, traceback_s=3.0)) == 4.0


def test_those_we_stopped_and_those_that_ended_well_did_not_fail() -> None:
    assert first_failure([Ending(0, 0, 1.0), Ending(1, -15, 2.0, stop_requested=True)]) is None
    assert first_failure([]) is None


@pytest.mark.parametrize(("code", "status"), [(0, 0), (3, 3), (-9, 137), (-15, 143)])
def test_exit_status_as_shells_have_it(code: int, status: int) -> None:
    assert exit_status(code) == status


def test_explanations_name_the_signal() -> None:
    assert explain(3) == "exit code 3"
    assert explain(-9).startswith("SIGKILL: ")
    assert explain(-15) == "SIGTERM"
    assert explain(-64) in ("signal 64", "SIGRTMAX")


SIMPLE = [
    b"Traceback (most recent call last):",
    b'  File "a.py", line 1, in <module>',
    b"ValueError: boom",
    b"second line",
]


def test_the_traceback_is_cut_out_of_what_surrounds_it() -> None:
    tail = [
        b"loading",
        b"warning: x",
        *SIMPLE,
        b"[W1121 11:35:57.086 ProcessGroup.cpp:1] Warning: not destroyed",
        b"more",
    ]
    assert closing_lines(tail) == SIMPLE


def test_torchs_own_rank_mark_is_understood() -> None:
    marked = [b"[rank1]: " + line for line in SIMPLE]
    assert starts_traceback(marked[0])
    assert closing_lines([b"x", *marked, b"[rank1]:[W1121 11:35:57 a.cpp:1] Warning"]) == marked


def test_a_chained_traceback_stays_whole_and_an_earlier_one_stays_out() -> None:
    handled = [SIMPLE[0], b"  File", b"KeyError: 'handled'", b"going on"]
    chain = [
        SIMPLE[0],
        b"  File",
        b"KeyError: 1",
        b"",
        b"During handling of the above exception, another exception occurred:",
        b"",
        *SIMPLE,
    ]
    assert closing_lines([*handled, *chain]) == chain


def test_without_a_traceback_the_last_lines_are_shown() -> None:
    tail = [f"line {i}".encode() for i in range(50)]
    assert closing_lines(tail) == tail[-20:]
    assert closing_lines([]) == []
