"""Passes over graphs: contracts, schedules, and what each one decides. No compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_config.errors import PlanError, UnsupportedError
from ds_engine import Shapes, load_config, make_plan
from ds_engine.compiling import (
    BUILTIN,
    Contract,
    Graph,
    GraphVerb,
    Node,
    Pass,
    PassEntry,
    PassInputs,
    check_schedule,
    default_schedule,
    resolve,
)
from ds_engine.compiling.graph import Grad, SavedResult
from ds_engine.compiling.graph_reader import ParamLocation, read
from ds_engine.compiling.ops import OPS
from ds_engine.compiling.pass_choice import choose_kept, free, insert, keep, prefetch, reduce, store, store_all
from ds_engine.compiling.rewriting import put_ends_last, rewrite
from ds_zero.layout.units import ModuleInfo, ParamInfo


def passes(*names: str) -> PassEntry:
    return PassEntry(0, tuple(BUILTIN[name] for name in names))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("frees", [False, True])
@pytest.mark.parametrize("offloads", [False, True])
def test_schedules_of_every_stage_keep_their_contracts(stage: int, frees: bool, offloads: bool) -> None:
    entries = default_schedule(stage, frees=frees and not offloads, offloads=offloads)
    check_schedule(entries)
    assert all(entry.has("gather") == (stage == 3) for entry in entries)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("prefetch",), "requires gathers"),
        (("prefetch", "gather"), "requires gathers"),  # a provider after it does not count
        (("reduce", "gather", "offload_activation", "free_activation"), "conflicts with free_activation"),
        (("gather", "gather"), "in it twice"),
    ],
)
def test_broken_contracts_are_named(names: tuple[str, ...], said: str) -> None:
    with pytest.raises(PlanError, match=said) as caught:
        check_schedule([passes(*names)])
    assert caught.value.code == "compile-contract"


def test_each_step_of_a_schedule_names_all_of_its_passes() -> None:
    with pytest.raises(PlanError, match="step 5: prefetch requires gathers"):
        resolve([(0, ["gather"]), (5, ["prefetch"])], BUILTIN)
    with pytest.raises(PlanError, match="steps") as caught:
        resolve([(5, ["gather"]), (5, ["gather"])], BUILTIN)
    assert caught.value.code == "compile-schedule"


def test_passes_are_found_by_name_and_by_function() -> None:
    def mine() -> None: ...

    known = {**BUILTIN, "mine": Pass("mine", "", Contract(requires=frozenset({"gathers"})), edit=mine)}
    assert [p.name for p in resolve([(0, ["gather", mine])], known)[0].passes] == ["gather", "mine"]
    with pytest.raises(PlanError, match="mine requires"):
        resolve([(0, [mine])], known)
    with pytest.raises(PlanError, match="multiple names"):
        resolve([(0, [mine])], {**known, "again": known["mine"]})
    with pytest.raises(PlanError, match="there is no pass 'other'"):
        resolve([(0, ["other"])], known)


# ---- what passes decide


@st.composite
def graphs(draw: st.DrawFn, backward: bool = False) -> tuple[Graph, PassInputs]:
    count, units = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    nodes = []
    for at in range(count):
        uses = draw(st.sets(st.integers(0, at - 1), max_size=3)) if at else set()
        reads = draw(st.sets(st.integers(0, units - 1), max_size=2))
        nodes.append(Node(f"n{at}", draw(st.integers(0, 50)), tuple(uses), tuple(reads), draw(st.floats(0, 1))))
    grads = tuple(Grad(u, 0, draw(st.integers(0, count - 1))) for u in range(units)) if backward else ()
    gathered = {u: draw(st.integers(1, 40)) for u in draw(st.sets(st.integers(0, units - 1)))}
    seconds = {u: draw(st.floats(0, 2)) for u in gathered}
    budget = draw(st.none() | st.integers(0, 400))
    return Graph(tuple(nodes), backward, grads), PassInputs(gathered, seconds, budget, both=frozenset(gathered))


def held(graph: Graph) -> list[set[int]]:
    """Released units that are there while each node runs."""
    here: set[int] = set()
    found = []
    for at in range(graph.end):
        for action in graph.actions:
            if action.at == at and action.verb is GraphVerb.NEED:
                here.add(action.unit)
            elif action.at == at and action.verb is GraphVerb.SPARE:
                here.discard(action.unit)
        found.append(set(here))
    return found


@given(graphs())
def test_units_are_there_exactly_from_their_first_to_their_last_use(case: tuple[Graph, PassInputs]) -> None:
    graph, known = case
    made = insert(graph, known)
    for unit in known.gathered:
        uses = graph.uses_of(unit)
        there = [at for at, units in enumerate(held(made)) if unit in units]
        assert there == (list(range(uses[0], uses[-1] + 1)) if uses else [])


@given(graphs(backward=True))
def test_gradients_of_a_unit_are_handed_over_once_behind_the_last(case: tuple[Graph, PassInputs]) -> None:
    graph, known = case
    made = reduce(graph, known)
    assert sorted(a.unit for a in made.actions) == sorted({g.unit for g in graph.grads})
    for action in made.actions:
        assert action.at == 1 + max(g.at for g in graph.grads if g.unit == action.unit)


@given(graphs())
def test_prefetches_come_in_the_order_of_needs_and_keep_to_the_budget(case: tuple[Graph, PassInputs]) -> None:
    graph, known = case
    base = insert(graph, known)
    made = prefetch(base, known)
    needs = [a for a in made.actions if a.verb is GraphVerb.NEED]
    early = [a for a in made.actions if a.verb is GraphVerb.EXPECT]
    order = [a.unit for a in needs]
    assert [order.index(a.unit) for a in early] == sorted(order.index(a.unit) for a in early)
    assert all(a.at < next(n.at for n in needs if n.unit == a.unit) for a in early)
    if known.budget is not None:
        bytes_of = known.gathered.__getitem__
        allowed = int(known.budget * 0.9)
        rows = zip(graph.live(), base.resident(bytes_of), made.resident(bytes_of), strict=True)
        for live, before, after in rows:
            assert after == before or live + after <= allowed


@given(graphs(), graphs(backward=True))
def test_kept_units_are_gathered_once_and_fit(one: tuple[Graph, PassInputs], other: tuple[Graph, PassInputs]) -> None:
    known = one[1]
    kept = choose_kept(known)
    if known.budget is not None:
        assert sum(known.gathered[u] for u in kept) <= max(0, int(known.budget * 0.9))
    known = PassInputs(known.gathered, known.seconds, known.budget, both=known.both, saved=kept)
    forward, backward = (keep(insert(graph, known), known) for graph in (one[0], other[0]))
    assert not [a for a in (*forward.actions, *backward.actions) if a.verb is GraphVerb.SPARE and a.unit in kept]
    assert not [a for a in backward.actions if a.verb is GraphVerb.NEED and a.unit in kept]
    assert [a for a in forward.actions if a.verb is GraphVerb.NEED] == [
        a for a in insert(one[0], known).actions if a.verb is GraphVerb.NEED
    ]


def test_the_costliest_gathers_a_byte_are_kept_first() -> None:
    known = PassInputs({0: 100, 1: 10, 2: 50}, {0: 1.0, 1: 1.0, 2: 1.0}, 100, both=frozenset({0, 1, 2}), peak=20)
    assert choose_kept(known) == {1, 2}  # 0.9 x 100 - 20 = 70 bytes
    assert choose_kept(PassInputs(known.gathered, known.seconds, None, both=known.both)) == {0, 1, 2}


def test_saved_results_are_freed_or_put_away_by_size_and_by_need() -> None:
    saved = (
        SavedResult("a", 100, 0, 0, 1),
        SavedResult("b", 10, 1, 1, 2),
        SavedResult("c", 80, 2, 2, 2),
        SavedResult("d", 90, 2, 2, 2, owned=False),
    )
    nodes = tuple(Node(f"n{at}") for at in range(3))
    forward, backward = Graph(nodes, saved=saved), Graph(nodes, backward=True, saved=saved)
    known = PassInputs(least=50, budget=1000, peak=950)
    assert [str(a) for a in free(backward, known).actions] == ["free a", "free c"]
    assert free(forward, known).actions == ()
    assert [(str(a), a.at) for a in store_all(forward, known).actions] == [("offload a", 2), ("offload c", 3)]
    assert [(str(a), a.at) for a in store_all(backward, known).actions] == [("reload a", 0), ("reload c", 2)]
    assert [str(a) for a in store(forward, known).actions] == ["offload a"]  # 950 is 50 more than 0.9 x 1000
    assert store(forward, PassInputs(least=50, budget=2000, peak=950)).actions == ()


# ---- the section


def planned(stage: int, **section: Any) -> Any:
    config = load_config({"train_batch_size": 2, "zero_optimization": {"stage": stage}, "compile": section})
    params = (ParamInfo("w", (8, 8), "float32", "", 0),)
    return make_plan(config, Shapes(params, (ModuleInfo(""),)), 1)


def test_the_plan_prints_its_passes() -> None:
    assert "passes" not in planned(3).rows()
    assert planned(3, deepcompile=True).rows()["passes"] == (
        "from step 0: reduce -> gather; from step 5: reduce -> gather -> prefetch -> keep; from engine.compile() on"
    )
    assert planned(1, deepcompile=True, free_activation=True).rows()["passes"] == (
        "from step 0: reduce -> free_activation; from engine.compile() on"
    )


@pytest.mark.parametrize(
    ("stage", "section", "kind", "code"),
    [
        (3, {"passes": ["z1"]}, PlanError, "compile-pass"),
        (2, {"passes": ["z3"]}, PlanError, "compile-pass"),
        (1, {"passes": ["autosp"]}, PlanError, "compile-cuts"),
        (1, {"passes": ["autotp"]}, PlanError, "compile-cuts"),
        (3, {"free_activation": True, "offload_activation": True}, PlanError, "compile-contract"),
        (3, {"symmetric_memory": True}, UnsupportedError, "config-unbuilt"),
        (3, {"offload_opt_states": True, "offload_parameters": True}, PlanError, "compile-contract"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    stage: int, section: dict[str, Any], kind: type[Exception], code: str
) -> None:
    with pytest.raises(kind) as caught:
        planned(stage, deepcompile=True, **section)
    assert caught.value.code == code  # type: ignore[attr-defined]


def test_views_of_what_the_caller_has_are_nobodys_to_free() -> None:
    graph = fx.Graph()
    batch, param = graph.placeholder("primals_1"), graph.placeholder("primals_2")
    made = graph.call_function(torch.ops.aten.mul.Tensor, (batch, param))
    alone = graph.call_function(torch.ops.aten.add.Tensor, (made, batch))
    of_given = graph.call_function(torch.ops.aten.view.default, (batch, [4]))
    of_made = graph.call_function(torch.ops.aten.view.default, (made, [4]))
    result = graph.call_function(torch.ops.aten.sum.default, (alone,))
    graph.output((result, made, alone, of_given, of_made))
    for node in graph.nodes:
        if node.op != "output":
            node.meta["val"] = torch.empty(2, 2)
    read_forward = read(graph, {"primals_2": ParamLocation(0, 0, True)}, backward=False, saved=1)
    assert {one.name: one.owned for one in read_forward.saved} == {
        "mul_tensor": False,
        "add_tensor": True,
        "view_default_1": False,
    }


@pytest.mark.parametrize(
    ("view", "args"),
    [
        (torch.ops.aten._unsafe_view.default, ([4],)),  # its schema does not say that it is one
        (torch.ops.aten.as_strided.default, ([4], [1])),
        (torch.ops.aten.view.default, ([4],)),
    ],
)
def test_what_reads_a_view_of_a_saved_result_comes_before_its_end(view: Any, args: tuple[Any, ...]) -> None:
    graph = fx.Graph()
    kept = graph.placeholder("mul_tensor")
    of_kept = graph.call_function(view, (kept, *args))
    graph.output((graph.call_function(torch.ops.aten.sin.default, (of_kept,)),))
    for node in graph.nodes:
        if node.op != "output":
            node.meta["val"] = torch.empty(2, 2)
    facts = read(graph, {}, backward=True, saved=None, ours={"mul_tensor"})
    assert [(action.verb, action.at) for action in free(facts, PassInputs()).actions] == [(GraphVerb.FREE, 2)]


def test_graphs_of_a_device_move_saved_results_to_the_host_and_back() -> None:
    """With fake tensors: no device is there, and what each node says of its result is what one with a device would have."""
    forward, backward = fx.Graph(), fx.Graph()
    with FakeTensorMode():
        on_device = torch.empty(8, 4, device="cuda")
    for graph, name in ((forward, "primals_1"), (backward, "mul_tensor")):
        graph.placeholder(name).meta["val"] = on_device
    (x,), (kept,) = forward.nodes, backward.nodes
    made = forward.call_function(torch.ops.aten.mul.Tensor, (x, x))
    out = forward.call_function(torch.ops.aten.sin.default, (made,))
    forward.output((out, made))
    grad = backward.call_function(torch.ops.aten.cos.default, (kept,))
    backward.output((grad,))
    made.meta["val"] = out.meta["val"] = grad.meta["val"] = on_device
    facts = read(forward, {}, backward=False, saved=1)
    ours = frozenset(one.name for one in facts.saved if one.owned)
    behind = read(backward, {}, backward=True, saved=None, ours=ours)
    known = PassInputs(least=1)
    stored = rewrite(fx.GraphModule({}, forward), store_all(facts, known), {}, 0)
    fetched = rewrite(fx.GraphModule({}, backward), store_all(behind, known), {}, 0)
    results = next(node for node in stored.graph.nodes if node.op == "output").args[0]
    assert [node.meta["val"].device.type for node in results] == ["cuda", "cpu"]
    devices = {str(node.target): node.meta["val"].device.type for node in fetched.graph.nodes if node.op != "output"}
    assert devices == {"mul_tensor": "cpu", str(OPS.fetch.default): "cuda", "aten.cos.default": "cuda"}


def test_ends_of_uses_go_behind_readers_that_a_compiler_moved() -> None:
    graph = fx.Graph()
    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    turned = graph.call_function(torch.ops.aten.t.default, (weight,))
    graph.call_function(OPS.need.default, ([weight], 0, 0))
    product = graph.call_function(torch.ops.aten.mm.default, (x, turned))
    spare = graph.call_function(OPS.spare.default, ([weight], 0, 0))
    fused = graph.call_function(torch.ops.aten.addmm.default, (product, x, turned))
    graph.call_function(OPS.need.default, ([weight], 0, 0))
    again = graph.call_function(torch.ops.aten.mm.default, (fused, turned))
    last = graph.call_function(OPS.spare.default, ([weight], 0, 0))
    arrived = graph.call_function(OPS.arrived.default, ([again], [weight], 0, [0], [0]))
    late = graph.call_function(torch.ops.aten.addmm.default, (x, x, turned))
    graph.output((again, weight))
    put_ends_last(graph)
    order = list(graph.nodes)
    assert order.index(spare) == order.index(fused) + 1
    assert order.index(again) < order.index(late) < min(order.index(last), order.index(arrived))
    put_ends_last(graph)
    assert list(graph.nodes) == order


def test_a_unit_is_given_back_behind_reads_that_come_after_its_last_gradient() -> None:
    """As in the attention of a Llama, where the gradient of what went in comes after those of the weights, and reads them."""
    graph = fx.Graph()
    weight, x, grad = (graph.placeholder(name) for name in ("primals_1", "x", "grad"))
    again = graph.call_function(torch.ops.aten.mm.default, (x, weight))
    by_weight = graph.call_function(torch.ops.aten.mm.default, (grad, again))
    turned = graph.call_function(torch.ops.aten.t.default, (weight,))
    by_x = graph.call_function(torch.ops.aten.mm.default, (grad, turned))
    graph.output((by_weight, by_x))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4, 4)
    place = {"primals_1": ParamLocation(0, 0, trained=True)}
    facts = read(graph, place, backward=True, saved=None)
    known = PassInputs(least=1, gathered={0: 64})
    module = rewrite(fx.GraphModule({}, graph), reduce(insert(facts, known), known), place, 0)
    names = [node.name for node in module.graph.nodes]
    by_x_at = names.index(by_x.name)
    assert names.index("need_default") < by_x_at
    assert min(names.index("arrived_default"), names.index("spare_default")) > by_x_at
