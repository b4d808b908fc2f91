"""Lines from reports: what each rank says, decided without any process."""

from __future__ import annotations

from dataclasses import replace

from ds_comm.watch.stamp_ring import Stamp
from ds_comm.watch.verdict import RankReport, differs, judge, judge_wait

WORLD = {"0": (0, 1, 2, 3)}
STAMP = Stamp("0", "world", 812, "all_reduce", "layers.7.mlp", "float32", (1024,), 1024, -1, 100.0, 100.0, 0.0, 1)


def report(rank: int, *stamps: Stamp, gone: str = "", frame: str = "") -> RankReport:
    return RankReport(rank, gone, frame or f"train.py:{rank} in step", 160.0, stamps)


def done(stamp: Stamp, mark: int | None = None) -> Stamp:
    return replace(stamp, mark=stamp.mark if mark is None else mark, waited_s=0.0, ended_s=110.0)


def test_a_rank_that_did_not_come_is_named_with_its_place() -> None:
    mine, late = report(0, STAMP), report(1, done(STAMP, 811), frame="data.py:9 in load")
    reports = {0: mine, 1: late, 2: report(2, STAMP), 3: report(3, STAMP)}
    finding = judge(mine, reports, WORLD)
    assert finding.code == "comm-hang"
    assert finding.line == (
        "rank 0 waits since 60.0 s for all_reduce[layers.7.mlp] #812 float32[1024] of group 'world' at train.py:0 in step; "
        "rank 1 did not come: it is at data.py:9 in load"
    )
    theirs = judge(late, reports, WORLD)
    assert theirs.line == (
        "rank 1 is at data.py:9 in load and did not come to all_reduce[layers.7.mlp] #812 float32[1024] of group 'world', "
        "for which rank 0 waits at train.py:0 in step; its last operation was all_reduce[layers.7.mlp] #811 float32[1024] "
        "of group 'world'"
    )


def test_a_rank_that_waits_elsewhere_says_for_what() -> None:
    elsewhere = replace(STAMP, key="1", group="tensor", mark=5, op="all_gather_single", unit="embed")
    mine, other = report(0, STAMP), report(1, done(STAMP, 811), elsewhere)
    finding = judge(mine, {0: mine, 1: other}, {"0": (0, 1)})
    assert (
        "rank 1 did not come: it waits for all_gather_single[embed] #5 float32[1024] of group 'tensor'" in finding.line
    )


def test_another_operation_at_the_same_place_is_a_mismatch() -> None:
    for other in (
        replace(STAMP, op="broadcast"),
        replace(STAMP, unit="layers.8.mlp"),
        replace(STAMP, dtype="bfloat16"),
        replace(STAMP, peer=1),
        replace(STAMP, shape=(512,), numel=512),
    ):
        assert differs(STAMP, other)
        finding = judge(report(0, STAMP), {0: report(0, STAMP), 1: report(1, other)}, {"0": (0, 1)})
        assert finding.code == "comm-mismatch"
        assert f"rank 1 came with {other} instead" in finding.line
    assert not differs(STAMP, done(STAMP))
    uneven = replace(STAMP, op="all_to_all")
    assert not differs(uneven, replace(uneven, numel=3, shape=(3,)))


def test_a_rank_whose_own_operation_differs_and_is_past_it_says_so() -> None:
    waits = report(0, STAMP)
    past = report(1, replace(done(STAMP), numel=5, shape=(5,)))
    finding = judge(past, {0: waits, 1: past}, {"0": (0, 1)})
    assert finding.code == "comm-mismatch"
    assert "rank 1 is at train.py:1 in step and came with all_reduce[layers.7.mlp] #812 float32[5]" in finding.line


def test_a_rank_that_has_ended_is_the_cause() -> None:
    mine = report(0, STAMP)
    gone = report(1, done(STAMP, 810), gone="ValueError: boom at model.py:3 in forward")
    finding = judge(mine, {0: mine, 1: gone}, {"0": (0, 1)})
    assert finding.code == "comm-peer-left"
    assert "rank 1 has ended (ValueError: boom at model.py:3 in forward), last in all_reduce" in finding.line


def test_a_rank_that_did_its_part_and_left_is_not() -> None:
    mine = report(0, STAMP)
    for other in (
        report(1, done(STAMP), gone="exited"),
        RankReport(1, "exited", "", 1.0, (), {"0": 812}),
        report(1, STAMP),
    ):
        assert judge_wait(STAMP, mine, {1: other}, [1]) is None
    finding = judge(mine, {0: mine, 1: report(1, STAMP)}, {"0": (0, 1)})
    assert finding.line.endswith("all its ranks came, but nothing moves")


def test_many_culprits_make_one_line() -> None:
    mine = report(0, STAMP)
    reports = {0: mine} | {rank: report(rank) for rank in range(1, 20)}
    finding = judge(mine, reports, {"0": tuple(range(24))})
    assert finding.line.count("did not come") == 3
    assert "and 17 more" in finding.line
    assert "\n" not in finding.line


def test_silent_ranks_are_listed() -> None:
    finding = judge(report(0, STAMP), {0: report(0, STAMP)}, {"0": (0, 3, 5)})
    assert finding.line.endswith("ranks 3, 5 gave no sign")


def test_a_message_waits_for_its_other_end_only() -> None:
    recv = replace(STAMP, mark=0, op="recv", unit="activations", peer=2)
    send = replace(recv, op="send", peer=0)
    mine = report(0, recv)
    others = {1: report(1), 3: report(3)}
    met = judge(mine, {0: mine, 2: report(2, send), **others}, WORLD)
    assert met.line.endswith("nothing moves")
    crossed = judge(mine, {0: mine, 2: report(2, replace(recv, peer=0)), **others}, WORLD)
    assert "rank 2 did not come: it waits for recv[activations]" in crossed.line
    assert "rank 1" not in crossed.line


def test_a_message_from_the_first_rank_waits_for_it_alone() -> None:
    mine = report(2, replace(STAMP, mark=0, op="recv", peer=0))
    found = judge(mine, {2: mine, **{rank: report(rank) for rank in (0, 1, 3)}}, WORLD)
    assert "rank 0 did not come" in found.line
    assert "rank 1" not in found.line


def test_a_rank_has_come_to_marks_of_a_group_not_of_its_neighbour() -> None:
    found = report(1, replace(STAMP, key="0", mark=900), replace(STAMP, key="1", mark=5))
    assert [found.head(key) for key in ("0", "1", "2")] == [900, 5, 0]
    assert replace(found, heads={"2": 7}).head("2") == 7


def test_a_bystander_says_where_it_is() -> None:
    mine, waiting = report(7, frame="train.py:3 in step"), report(0, STAMP)
    finding = judge(mine, {7: mine, 0: waiting}, {"9": (6, 7)})
    assert finding.line.startswith("rank 7 is at train.py:3 in step; rank 0 waits for all_reduce[layers.7.mlp]")
    assert judge(mine, {7: mine}, {}).line == "rank 7 is at train.py:3 in step"
