"""How uneven ranks wait for each other, without clocks: times are what a test says."""

from __future__ import annotations

import threading

import pytest

from ds_comm.rehearsal.peer_skew import PeerSkew


class Loop:
    """A training loop on a clock of its own: operations after given seconds of computing, each waited for right away or not at all."""

    def __init__(self, skew: PeerSkew) -> None:
        self.skew, self.now_s = skew, 0.0

    def step(self, computing: list[float], *, waits: bool = True) -> list[float]:
        """How late the others come to each operation of a step."""
        late = []
        for place, seconds in enumerate(computing):
            self.now_s += seconds
            late.append(self.skew.issue((f"op{place}", 8), self.now_s))
            if waits:
                began_s, self.now_s = self.now_s, self.now_s + late[-1] + 1.0
                self.skew.wait(began_s, self.now_s, self.now_s)
        self.skew.end_step()
        return late

    def learn(self, *steps: list[float], waits: bool = True) -> None:
        for computing in ([9.0] * len(steps[0]), [7.0] * len(steps[0]), *steps):  # two steps of warming up
            self.step(computing, waits=waits)


def test_even_steps_wait_for_nobody():
    loop = Loop(PeerSkew(7))
    loop.learn(*[[1.0, 2.0]] * 5)
    assert loop.step([1.0, 2.0]) == pytest.approx([0.0, 0.0])


def test_a_quick_step_waits_for_those_that_take_as_long_as_this_rank_did():
    loop = Loop(PeerSkew(1))
    loop.learn([1.0, 2.0])  # one step to draw from
    assert loop.step([0.5, 1.5]) == pytest.approx([0.5, 0.5])


def test_a_slow_step_waits_for_nobody():
    loop = Loop(PeerSkew(1))
    loop.learn([1.0, 2.0])
    assert loop.step([1.5, 2.5]) == pytest.approx([0.0, 0.0])


def test_without_waiting_the_distance_grows():
    loop = Loop(PeerSkew(1))
    loop.learn([1.0, 2.0], waits=False)
    assert loop.step([0.5, 1.5], waits=False) == pytest.approx([0.5, 1.0])


def test_who_waits_meets_the_others_where_the_operation_ended():
    skew = PeerSkew(1)
    loop = Loop(skew)
    loop.learn([1.0, 2.0])
    began_s = loop.now_s + 0.2
    assert skew.issue(("op0", 8), began_s) == pytest.approx(0.8)
    skew.wait(
        began_s + 0.1, began_s + 0.1, began_s - 5.0
    )  # was complete long ago: nobody waited, the other is still behind
    assert skew.issue(("op1", 8), began_s + 2.0) == pytest.approx(0.8)
    skew.wait(began_s + 2.0, began_s + 4.0, began_s + 4.0)  # both waited
    assert skew.issue(("op2", 8), began_s + 5.0) == pytest.approx(0.0)


def test_more_ranks_wait_for_a_later_one():
    computing = [[1.0 + step / 10] for step in range(10)]

    def mean_wait(peers: int) -> float:
        loop = Loop(PeerSkew(peers))
        loop.learn(*computing)
        late = [loop.step(computing[turn % 10])[0] for turn in range(60)]
        return sum(late) / len(late)

    assert 0.1 < mean_wait(1) < 0.25  # of two draws from ten steps: 0.165
    assert mean_wait(1) < mean_wait(7) < mean_wait(1023) <= 0.9


def test_pauses_that_all_make_are_not_waited_for():
    loop = Loop(PeerSkew(3))
    loop.learn(*[[1.0, 2.0]] * 3)
    loop.step([60.0, 2.0])  # a checkpoint is written
    assert [loop.step([1.0, 2.0]) for _ in range(8)] == [pytest.approx([0.0, 0.0])] * 8


def test_other_operations_than_before_say_nothing():
    loop = Loop(PeerSkew(1))
    loop.learn([1.0, 2.0])
    assert loop.skew.issue(("another", 8), loop.now_s + 0.1) == pytest.approx(0.0)


def test_operations_of_other_threads_are_on_time():
    loop = Loop(PeerSkew(1))
    loop.learn([1.0, 2.0])
    late: list[float] = []
    thread = threading.Thread(target=lambda: late.append(loop.skew.issue(("op0", 8), loop.now_s)))
    thread.start()
    thread.join()
    assert late == [0.0]
    assert loop.step([0.5, 1.5]) == pytest.approx([0.5, 0.5])


def test_one_rank_alone():
    loop = Loop(PeerSkew(0))
    loop.learn([1.0])
    assert loop.step([0.5]) == [0.0]
