"""Ranks that take different paths issue the same collectives in the same order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ds_zero.runtime.gather_order import GatherOrder, GatherOrders, ReduceOrder, Retention


def run(order, needs):
    order.begin()
    issued = [n for need in needs for n in order.need(need)]
    return issued + order.finish()


@given(st.integers(1, 9), st.data())
def test_gathers_do_not_depend_on_the_path(count, data):
    paths = [data.draw(st.lists(st.integers(0, count - 1), unique=True).map(sorted)) for _ in range(2)]
    ahead = [data.draw(st.integers(0, 40)) for _ in range(2)]
    orders = [GatherOrder(range(count), a, [10] * count) for a in ahead]
    assert run(orders[0], paths[0]) == run(orders[1], paths[1]) == list(range(count))


@given(st.integers(1, 9), st.data())
def test_a_path_out_of_order_still_issues_every_unit_once_in_order(count, data):
    path = data.draw(st.permutations(range(count)))
    order = GatherOrder(range(count), 0, [10] * count)
    issued = run(order, path)
    assert list(dict.fromkeys(issued)) == list(range(count))


@given(st.lists(st.integers(0, 5), min_size=1), st.integers(0, 60))
def test_a_recorded_sequence_with_repeats_is_followed_exactly(sequence, ahead):
    order = GatherOrder(sequence, ahead, [10] * 6)
    assert run(order, sequence) == sequence
    assert order.recorded == sequence


@given(st.integers(2, 9), st.integers(0, 100))
def test_what_is_gathered_early_stays_within_the_budget(count, ahead):
    order = GatherOrder(range(count), ahead, [10] * count)
    for unit in range(count):
        order.need(unit)
        assert 10 * len(order.waiting) <= ahead


def test_a_unit_needed_again_is_issued_on_the_spot():
    order = GatherOrder([0, 1], 0, [1, 1])
    assert [order.need(0), order.need(1), order.need(0)] == [[0], [1], [0]]
    assert order.finish() == []


@given(st.integers(1, 9), st.data())
def test_reductions_do_not_depend_on_when_units_are_ready(count, data):
    order = ReduceOrder(range(count))
    ready = data.draw(st.lists(st.integers(0, count - 1), unique=True))
    issued = [n for unit in ready for n in order.ready(unit)]
    assert all(order.was_issued(n) for n in issued)
    assert issued + order.finish() == list(range(count))
    order.begin()
    assert not order.was_issued(0)


def test_a_unit_is_awaited_until_its_turn_and_while_it_waits():
    order = GatherOrder([0, 1, 2, 0], 15, [10, 10, 10, 10])
    assert [order.awaits(unit) for unit in (0, 1, 2, 3)] == [True, True, True, False]
    assert order.need(0) == [0, 1]
    assert order.waiting == [1]
    assert order.awaits(0)  # it stands once more
    assert order.need(1) == [2]
    assert not order.awaits(1)
    assert order.awaits(2)  # issued, not needed yet
    assert order.need(2) == [0]
    assert not order.awaits(2)
    assert order.need(0) == []
    assert not order.awaits(0)
    assert order.recorded == [0, 1, 2, 0]
    order.begin()
    assert (order.awaits(0), order.recorded, order.waiting) == (True, [], [])


def test_nothing_is_issued_early_without_a_budget_and_no_more_than_it():
    assert GatherOrder([0, 1], 0, [0, 0]).need(0) == [0]
    assert GatherOrder([0, 1, 2], 20, [10, 10, 10]).need(0) == [0, 1, 2]
    assert GatherOrder([0, 1, 2], 19, [10, 10, 10]).need(0) == [0, 1]


def test_gathers_follow_what_was_seen_and_leave_out_what_is_dropped():
    order = GatherOrder([0, 1, 2, 3], 0, [1] * 4)
    order.adopt([2, 0, 2])
    assert order.sequence == (2, 0, 2, 1, 3)
    order.drop({0, 3})
    assert order.sequence == (2, 2, 1)
    assert not order.awaits(0)
    assert [order.run_ahead() for _ in range(4)] == [2, 2, 1, None]
    assert order.waiting == [2, 1]
    assert order.finish() == []


def test_a_reduction_waits_for_those_before_it():
    order = ReduceOrder([0, 1, 2, 3])
    assert [order.ready(unit) for unit in (1, 0, 3)] == [[], [0, 1], []]
    assert [order.was_issued(unit) for unit in (0, 1, 2, 3)] == [True, True, False, False]
    assert order.finish() == [2, 3]
    assert order.finish() == []
    assert order.ready(2) == []
    order.adopt([3, 1, 3])
    order.begin()
    assert order.sequence == (3, 1, 0, 2)
    assert [order.ready(unit) for unit in (3, 0, 1, 2)] == [[3], [], [1, 0], [2]]


def test_what_is_expected_is_issued_once_and_waits_to_be_needed() -> None:
    order = GatherOrder([0, 1, 2, 3], 0, [1] * 4)
    assert order.expect(1) == [0, 1]
    assert order.expect(0) == []  # under way
    assert order.need(1) == []
    assert order.need(3) == [2, 3]
    assert order.expect(2) == []  # has had its turn
    assert order.waiting == [0, 2]


def test_units_that_every_rank_has_take_no_turn() -> None:
    order = GatherOrder([0, 1, 2], 0, [1] * 3)
    order.skip = frozenset({1})
    assert order.sequence == (0, 1, 2)  # of the phase that runs
    order.begin()
    assert order.finish() == [0, 2]
    order.skip = frozenset()
    order.begin()
    assert order.finish() == [0, 1, 2]


def test_a_forward_of_several_modules_contains_the_orders_of_all():
    orders = GatherOrders([2, 1, 0], 0, [10] * 3)
    for name, sequence in {"": [0, 1, 2], "a": [0, 1], "b": [1, 2]}.items():
        orders.add(name, sequence)
    assert orders.forward(["a"]) is orders.forwards["a"]
    assert orders.forward(["b", "a"]).sequence == (1, 2, 0)
    orders.ahead = 15
    orders.skip(frozenset({1}))
    for order in orders:
        order.begin()
    assert [(order.ahead, order.sequence) for order in orders] == [(15, (0, 2)), (15, (0,)), (15, (2,)), (15, (2, 0))]


def test_forwards_are_known_when_each_unit_is_needed_once():
    orders = GatherOrders([1, 0], 0, [10] * 2)
    orders.add("", [0, 1])
    assert not orders.adopt({"backward": None, "forward ": None})
    assert not orders.adopt({"backward": [1, 0], "forward ": [1, 0, 1]})
    assert orders.adopt({"backward": None, "forward ": [1, 0]})
    assert orders.forwards[""].sequence == (1, 0)


def test_units_stay_until_the_phase_ends_or_the_update():
    stays = Retention()
    stays.share(0)
    stays.until_phase_ends.add(1)
    stays.persistent = frozenset({2})
    assert [stays.holds(unit) for unit in range(4)] == [True, True, True, False]
    assert [stays.outlasts_phase(unit) for unit in range(4)] == [True, False, True, False]
    assert stays.end_phase() == {1}
    assert stays.updated() == {0, 2}
    assert [stays.holds(unit) for unit in range(4)] == [False, False, True, False]
    assert stays.shared == {0}


def test_a_backward_retains_what_forwards_needed_several_times():
    stays = Retention()
    stays.forward_ended([0, 1, 0], has_graph=False)
    stays.begin_backward(keeps_graph=False)
    assert stays.end_phase() == {0}
    stays.end_backward()
    stays.forward_ended([1, 2], has_graph=True)
    stays.forward_ended([2], has_graph=True)
    stays.begin_backward(keeps_graph=True)
    assert stays.end_phase() == {0}  # one path on all ranks: each use in a forward of its own has its turn
    stays.paths_differ()
    stays.end_backward()  # whose graph is kept for another backward
    stays.begin_backward(keeps_graph=False)
    assert stays.end_phase() == {0, 2}
    stays.updated()
    stays.begin_backward(keeps_graph=False)
    assert stays.end_phase() == set()
