"""The passes that cut: sums that are joined, attention that is wrapped, and what is refused with its name. One process, no ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from ds_config.errors import PlanError, UnsupportedError
from ds_engine import Shapes, load_config, make_plan
from ds_engine.compiling.graph_moves import MOVES
from ds_engine.compiling.graph_split import attention_of_the_whole, join_sums, wrap_attention
from ds_zero.layout.units import ModuleInfo, ParamInfo

LENGTH = 6


# ---- sums


def sums_of(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is MOVES.summed.default]


def gradients(groups: tuple[str, ...], *, used: bool = False) -> fx.Graph:
    """A backward: the gradient of one input is the sum of what the ranks of `groups` have of it."""
    graph = fx.Graph()
    found = [graph.placeholder(f"tangents_{at + 1}") for at in range(len(groups))]
    summed = [
        graph.call_function(MOVES.summed.default, (grad, group)) for grad, group in zip(found, groups, strict=True)
    ]
    total = summed[0]
    for each in summed[1:]:
        total = graph.call_function(torch.ops.aten.add.Tensor, (total, each))
    graph.output((total, *([summed[0]] if used else [])))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2, 3)
    return graph


def joined(graph: fx.Graph, *, backward: bool = True) -> int:
    join_sums(graph, 0, [], {}, None, {}, backward)
    graph.lint()
    return len(sums_of(graph))


def test_gradients_of_one_input_are_added_before_they_are_summed() -> None:
    graph = gradients(("a", "a", "a"))
    assert joined(graph) == 1
    (total,) = sums_of(graph)
    assert total.meta["val"].shape == (2, 3)
    assert [node.name for node in graph.nodes if node.op == "call_function"][-1] == total.name


def test_sums_are_found_among_other_gradients_of_the_input() -> None:
    graph = fx.Graph()
    first, second, other, more = (graph.placeholder(f"tangents_{at}") for at in range(4))
    total = graph.call_function(
        torch.ops.aten.add.Tensor, (other, graph.call_function(MOVES.summed.default, (first, "a")))
    )
    total = graph.call_function(
        torch.ops.aten.add.Tensor, (total, graph.call_function(MOVES.summed.default, (second, "a")))
    )
    total = graph.call_function(torch.ops.aten.add.Tensor, (total, more))
    graph.output((total,))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2, 3)
    assert joined(graph) == 1
    (sum_,) = sums_of(graph)
    assert {node.name for node in sum_.args[0].all_input_nodes} == {first.name, second.name}
    calls = [node for node in graph.nodes if node.target is torch.ops.aten.add.Tensor]
    assert len(calls) == 3
    assert {node.name for call in calls for node in call.all_input_nodes} >= {other.name, more.name, sum_.name}


def test_sums_stay_apart_where_they_are_of_other_ranks_or_used_elsewhere() -> None:
    assert joined(gradients(("a", "b"))) == 2
    assert joined(gradients(("a", "a"), used=True)) == 2
    assert joined(gradients(("a", "a")), backward=False) == 2


# ---- attention


class Captured:
    """A backend that keeps what was captured."""

    def __call__(self, gm: fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        self.gm, self.given = gm, [not isinstance(tensor, nn.Parameter) for tensor in inputs]
        return gm.forward


class Net(nn.Module):
    """One attention; `more` is done to what goes in and comes out."""

    def __init__(self, before: Callable[[Tensor], Tensor] = lambda x: x, **attention: Any) -> None:
        super().__init__()
        self.project, self.before, self.attention = nn.Linear(8, 24), before, {"is_causal": True, **attention}

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.project(self.before(x)).chunk(3, -1))
        out = functional.scaled_dot_product_attention(q, k, v, **self.attention)
        return out.transpose(1, 2).flatten(2)


def captured(model: nn.Module) -> tuple[fx.GraphModule, list[bool]]:
    torch._dynamo.reset()
    backend = Captured()
    torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(torch.randn(3, LENGTH, 8))
    return backend.gm, backend.given


def test_each_attention_becomes_one_over_whole_sequences() -> None:
    gm, given = captured(nn.Sequential(Net(), Net()))
    assert wrap_attention(gm, "ranks", LENGTH, given) == 2
    wrapped = [node for node in gm.graph.nodes if node.target is attention_of_the_whole]
    assert [node.kwargs["group_name"] for node in wrapped] == ["ranks", "ranks"]
    assert all(node.kwargs["is_causal"] for node in wrapped)


POSITIONS = nn.Embedding(LENGTH, 8)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Net(lambda x: x.cumsum(1)), "cumsum"),
        (Net(lambda x: x - x.mean(1, keepdim=True)), "mean"),
        (Net(lambda x: functional.pad(x, (0, 0, 0, 1))[:, 1:]), "pad"),
        (Net(lambda x: x + x[:, 2:3]), "takes a part of a sequence"),
        (Net(lambda x: (x @ x.transpose(1, 2)) @ x), "matmul"),
        (Net(lambda x: x + POSITIONS(torch.arange(x.shape[1]))), "counts positions from 0"),
        (Net(is_causal=False, attn_mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool)), "with a mask"),
    ],
    ids=["cumsum", "mean", "pad", "slice", "scores", "positions", "mask"],
)
def test_what_looks_past_a_part_is_refused_with_its_name(model: nn.Module, said: str) -> None:
    gm, given = captured(model)
    with pytest.raises(UnsupportedError, match=said) as caught:
        wrap_attention(gm, "ranks", LENGTH, given)
    assert caught.value.code == "compile-cuts"
    assert not [node for node in gm.graph.nodes if node.target is attention_of_the_whole]


def test_products_with_weights_and_reductions_of_features_stay() -> None:
    model = Net(lambda x: functional.layer_norm(x, (8,)) * x.softmax(-1) + x.mean(-1, keepdim=True) - x[..., 1:2])
    gm, given = captured(model)
    assert wrap_attention(gm, "ranks", LENGTH, given) == 1


# ---- the section


def planned(passes: list[str], **degrees: Any) -> Any:
    config = load_config(
        {
            "train_batch_size": 4,
            "zero_optimization": {"stage": 1},
            "compile": {"deepcompile": True, "passes": passes},
            **degrees,
        }
    )
    return make_plan(config, Shapes((ParamInfo("w", (8, 8), "float32", "", 0),), (ModuleInfo(""),)), 4)


def test_the_plan_says_which_passes_cut() -> None:
    plan = planned(["autosp"], sequence_parallel_size=2)
    assert plan.rows()["passes"] == "from step 0: reduce -> autosp; from engine.compile() on"
    assert plan.compiling.cuts == {"autosp"}


@pytest.mark.parametrize("name", ["autosp", "autotp"])
def test_a_pass_that_has_nothing_to_cut_over_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match=f"{name} has nothing to cut over") as caught:
        planned([name])
    assert caught.value.code == "compile-cuts"
