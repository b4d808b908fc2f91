"""Passes about optimizer state, parameters and small reductions: what each one decides, and the graphs that come out. No compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_config.errors import DsError, PlanError
from ds_engine import Shapes, load_config, make_plan
from ds_engine.compiling import (
    BUILTIN,
    Graph,
    GraphAction,
    GraphVerb,
    Node,
    PassInputs,
    check_schedule,
    default_schedule,
    resolve,
)
from ds_engine.compiling.graph import Grad
from ds_engine.compiling.graph_reader import ParamLocation, read
from ds_engine.compiling.pass_choice import bucket, insert, load, park, park_all, prefetch, reduce
from ds_engine.compiling.rewriting import rewrite
from ds_zero.layout.units import ModuleInfo, ParamInfo


def chain(count: int, units: int, *, backward: bool = False, nbytes: int = 10) -> Graph:
    """Nodes that each use the one before and read one unit after the other; in backward the other way round, with their gradients."""
    reads = [at * units // count for at in range(count)]
    if backward:
        reads.reverse()
    nodes = tuple(Node(f"n{at}", nbytes, (at - 1,) if at else (), (reads[at],), 1.0) for at in range(count))
    grads = (
        tuple(Grad(unit, 0, max(at for at, of in enumerate(reads) if of == unit)) for unit in range(units))
        if backward
        else ()
    )
    return Graph(nodes, backward, grads)


def told(graph: Graph, *verbs: GraphVerb) -> list[tuple[str, int]]:
    return [(str(action), action.at) for action in graph.actions if action.verb in verbs]


# ---- small reductions


def test_gradients_of_a_bucket_are_handed_over_together_behind_the_last() -> None:
    graph = reduce(chain(6, 3, backward=True), PassInputs())
    assert told(graph, GraphVerb.ARRIVED) == [("reduce 2", 2), ("reduce 1", 4), ("reduce 0", 6)]
    joined = bucket(graph, PassInputs(buckets=((2, 1),)))
    assert told(joined, GraphVerb.ARRIVED) == [("reduce 2 + 1", 4), ("reduce 0", 6)]
    assert joined.lines(lambda unit: f"w{unit}")[0] == "reduce w2 + w1 before n4"
    assert bucket(graph, PassInputs(buckets=((7, 8),))) == graph
    alone = reduce(Graph(graph.nodes, True, graph.grads[:1]), PassInputs())
    assert bucket(alone, PassInputs(buckets=((2, 1), (0, 4)))) == alone  # the others are in another graph


def test_one_operation_hands_several_units_over() -> None:
    graph = fx.Graph()
    x = graph.placeholder("tangents_1")
    first = graph.call_function(torch.ops.aten.mul.Tensor, (x, x))
    second = graph.call_function(torch.ops.aten.add.Tensor, (x, 1.0))
    graph.output((first, second))
    for node in (x, first, second):
        node.meta["val"] = torch.empty(2, 2)
    params = {"primals_1": ParamLocation(4, 1, True), "primals_2": ParamLocation(3, 0, True)}
    facts = read(graph, params, backward=True, saved=None)
    made = rewrite(
        fx.GraphModule({}, graph), bucket(reduce(facts, PassInputs()), PassInputs(buckets=((4, 3),))), params, 7
    )
    calls = [node for node in made.graph.nodes if "arrived" in str(node.target)]
    assert len(calls) == 1
    grads, params, key, units, members = calls[0].args
    assert (key, units, members) == (7, [4, 3], [1, 0])
    assert [node.name for node in grads] == ["mul_tensor", "add_tensor"]
    assert params == []


# ---- optimizer state


@st.composite
def measured(draw: st.DrawFn) -> tuple[Graph, Graph, PassInputs]:
    units = draw(st.integers(1, 4))
    count = units * draw(st.integers(1, 3))
    nbytes = draw(st.integers(0, 20))
    states = {unit: draw(st.integers(1, 60)) for unit in range(units)}
    floor = sum(states.values()) + draw(st.integers(0, 50))
    forward, backward = chain(count, units, nbytes=nbytes), chain(count, units, backward=True, nbytes=nbytes)
    peak = max(max(forward.live()), max(backward.live()))
    return forward, backward, PassInputs(budget=draw(st.integers(0, 500)), floor=floor, peak=peak, states=states)


@given(measured())
def test_only_as_much_state_leaves_as_the_budget_asks_for(case: tuple[Graph, Graph, PassInputs]) -> None:
    forward, backward, known = case
    gone = [a.unit for a in park(forward, known).actions]
    back = list(park(backward, known).actions)
    assert {a.unit for a in back} <= set(gone)
    assert all(a.verb is GraphVerb.UNPARK for a in back)
    assert known.budget is not None
    over = known.floor + known.peak - int(known.budget * 0.9)
    left = over - sum(known.states[unit] for unit in gone)
    assert (not gone) == (over <= 0)
    assert left <= 0 or len(gone) == len(known.states)
    if gone:
        assert over - sum(known.states[unit] for unit in gone[:-1]) > 0  # one less would not do


@given(measured())
def test_state_comes_back_only_where_memory_lasts_to_the_end(case: tuple[Graph, Graph, PassInputs]) -> None:
    forward, backward, known = case
    gone = {a.unit for a in park(forward, known).actions}
    away = {at: set(gone) for at in range(backward.end)}
    for action in park(backward, known).actions:
        for at in range(action.at, backward.end):
            away[at].discard(action.unit)
    assert known.budget is not None
    room = int(known.budget * 0.9)
    for at, live in enumerate(backward.live()):
        here = known.floor - sum(known.states[unit] for unit in away[at])
        most = known.floor - sum(known.states[unit] for unit in gone)
        assert here == most or here + live <= room


def test_without_a_budget_all_state_leaves_at_once_and_comes_back_at_the_end() -> None:
    known = PassInputs(states={0: 10, 1: 20})
    forward, backward = chain(4, 2), chain(4, 2, backward=True)
    assert told(park(forward, known), GraphVerb.PARK) == [("offload state of 0", 0), ("offload state of 1", 0)]
    assert told(park_all(backward, known), GraphVerb.UNPARK) == [("reload state of 1", 4), ("reload state of 0", 4)]
    assert (
        told(park_all(Graph(backward.nodes, True), known), GraphVerb.UNPARK) == []
    )  # its gradients are made elsewhere


# ---- parameters


def test_what_is_sent_is_loaded_while_the_unit_before_is_used() -> None:
    known = PassInputs(gathered={0: 8, 1: 8, 2: 8}, resting={0: 4, 1: 4, 2: 4})
    made = load(insert(chain(6, 3), known), known)
    assert told(made, GraphVerb.LOAD, GraphVerb.NEED) == [
        ("load 0", 0), ("load 1", 0), ("gather 0", 0), ("load 2", 2), ("gather 1", 2), ("gather 2", 4),
    ]  # fmt: skip
    tight = PassInputs(gathered=known.gathered, resting=known.resting, budget=1)
    assert told(load(insert(chain(6, 3), tight), tight), GraphVerb.LOAD) == [
        ("load 0", 0),
        ("load 1", 2),
        ("load 2", 4),
    ]


@given(st.integers(1, 4), st.integers(1, 3), st.none() | st.integers(0, 200), st.booleans())
def test_every_gather_of_a_resting_unit_is_loaded_once_and_before_it_begins(
    units: int, each: int, budget: int | None, early: bool
) -> None:
    known = PassInputs(
        dict.fromkeys(range(units), 8), dict.fromkeys(range(units), 1.5), budget, resting=dict.fromkeys(range(units), 4)
    )
    graph = insert(chain(units * each, units), known)
    graph = load(prefetch(graph, known) if early else graph, known)
    loads = [a.unit for a in graph.actions if a.verb is GraphVerb.LOAD]
    assert sorted(loads) == list(range(units))
    for unit in range(units):
        order = [a.verb for a in graph.actions if a.unit == unit and a.verb is not GraphVerb.SPARE]
        assert order[0] is GraphVerb.LOAD
        assert order[-1] is GraphVerb.NEED


# ---- graphs of a device


def test_graphs_of_a_device_have_the_moves_as_operations() -> None:
    """With fake tensors: no device is there; what the operations are given is what one with a device would give them."""
    graph = fx.Graph()
    with FakeTensorMode():
        value = torch.empty(8, 4, device="cuda")
    param, x = graph.placeholder("primals_1"), graph.placeholder("primals_2")
    made = graph.call_function(torch.ops.aten.mul.Tensor, (param, x))
    out = graph.call_function(torch.ops.aten.sin.default, (made,))
    graph.output((out,))
    for node in (param, x, made, out):
        node.meta["val"] = value
    params = {"primals_1": ParamLocation(0, 0, True)}
    facts = read(graph, params, backward=False, saved=None)
    known = PassInputs(gathered={0: 128}, resting={0: 64}, states={0: 256, 5: 64})
    decided = park_all(load(insert(facts, known), known), known)
    again = rewrite(fx.GraphModule({}, graph), decided, params, 3)
    calls = [
        (str(n.target).split(".")[1], [a.name for a in n.args[0]], n.args[1:])
        for n in again.graph.nodes
        if "ds_compile" in str(n.target)
    ]
    assert calls == [
        ("park", ["primals_1"], (3, 0)),
        ("park", ["primals_1"], (3, 5)),  # a unit of another graph: some input keeps its place
        ("load", ["primals_1"], (3, 0)),
        ("need", ["primals_1"], (3, 0)),
        ("spare", ["primals_1"], (3, 0)),
    ]


# ---- schedules and the section


@pytest.mark.parametrize("stage", range(4))
def test_schedules_with_state_and_parameters_elsewhere_keep_their_contracts(stage: int) -> None:
    states = default_schedule(stage, states=True)
    check_schedule(states)
    assert states[0].has("offload_opt_states_all")
    assert states[-1].has("offload_opt_states")
    params = default_schedule(3, params=True)
    check_schedule(params)
    assert [p.name for p in params[-1].passes] == ["reduce", "gather", "prefetch", "offload_parameters"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["bucket"], "bucket requires reduces"),
        (["reduce", "offload_parameters"], "offload_parameters requires gathers"),
        (
            ["reduce", "offload_opt_states", "offload_activation"],
            "offload_opt_states conflicts with offload_activation",
        ),
        (["reduce", "gather", "offload_parameters", "offload_opt_states_all"], "offload_parameters conflicts with"),
    ],
)
def test_what_moves_to_the_host_for_one_budget_is_one_kind(names: list[str], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        resolve([(0, names)], BUILTIN)


def planned(stage: int, compiled: dict[str, Any], **zero: Any) -> Any:
    config = load_config(
        {
            "train_batch_size": 2,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
            "compile": {"deepcompile": True, **compiled},
        }
    )
    return make_plan(config, Shapes((ParamInfo("w", (8, 8), "float32", "", 0),), (ModuleInfo(""),)), 2)


def test_the_plan_puts_parameters_on_the_host_and_says_which_passes_run() -> None:
    plan = planned(3, {"offload_parameters": True})
    assert plan.zero.host > 0
    assert "reduce -> gather -> prefetch -> offload_parameters" in plan.rows()["passes"]
    plan = planned(1, {"offload_opt_states": True})
    assert plan.zero.host == 0  # state is there while graphs run only
    assert plan.rows()["passes"].startswith(
        "from step 0: reduce -> offload_opt_states_all; from step 5: reduce -> offload_opt_states"
    )
    assert planned(1, {}, reduce_bucket_size=100).compiling.bucket == 100


@pytest.mark.parametrize(
    ("stage", "compiled", "zero"),
    [
        (2, {"offload_opt_states": True}, {"offload_optimizer": {"device": "cpu"}}),
        (2, {"offload_parameters": True}, {}),
        (3, {"offload_parameters": True}, {"offload_param": {"device": "nvme", "nvme_path": "/tmp"}}),
    ],
)
def test_state_that_is_elsewhere_already_is_refused(stage: int, compiled: dict[str, Any], zero: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as caught:
        planned(stage, compiled, **zero)
    assert caught.value.code == "compile-offload"
    with pytest.raises(DsError) as caught_too:
        planned(3, {"offload_parameters": True, "offload_opt_states": True})
    assert caught_too.value.code == "compile-contract"


def test_actions_say_what_they_do() -> None:
    assert str(GraphAction(GraphVerb.UNPARK, 0, 3)) == "reload state of 3"
    assert str(GraphAction(GraphVerb.STORE, 0, name="mul")) == "offload mul"
