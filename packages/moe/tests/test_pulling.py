"""Pulls as numbers: every row of every rank is taken in once, by its expert's rank, and its result comes home to its place."""

from hypothesis import given
from hypothesis import strategies as st

from ds_moe.pulling import _spread, pulls_of


@given(st.data())
def test_rows_go_to_their_experts_and_home(data):
    ranks = data.draw(st.integers(1, 4))
    local = data.draw(st.integers(1, 3))
    counts = [[data.draw(st.integers(0, 3)) for _ in range(ranks * local)] for _ in range(ranks)]
    rows = [[(r, e, i) for e in range(ranks * local) for i in range(row[e])] for r, row in enumerate(counts)]
    plans = [pulls_of(counts, rank) for rank in range(ranks)]
    held = []
    for rank, plan in enumerate(plans):
        mine = {here + i: rows[source][there + i] for source, there, here, n in plan.inward for i in range(n)}
        assert sorted(mine) == list(range(plan.bounds[-1]))
        source, at = (x.tolist() for x in _spread(plan.inward))
        assert [rows[s][a] for s, a in zip(source, at, strict=True)] == [mine[i] for i in range(len(mine))]
        experts = [mine[i][1] for i in range(len(mine))]
        ends = [sum(e <= rank * local + x for e in experts) for x in range(local)]
        assert experts == sorted(experts)
        assert tuple(ends) == plan.bounds
        held.append([mine[i] for i in range(len(mine))])
    for rank, plan in enumerate(plans):
        home = {here + i: held[holder][there + i] for holder, there, here, n in plan.homeward for i in range(n)}
        assert [home[i] for i in range(plan.sent)] == rows[rank]
