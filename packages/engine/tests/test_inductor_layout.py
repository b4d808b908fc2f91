"""Graphs of ours pass what inductor does for devices only, without one."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import fx
from torch._inductor.graph import get_user_visible_output_strides, mark_nodes_dislike_padding

from ds_engine.compiling.rewriting import _Editor
from ds_engine.compiling.session import CompileSettings


def backward_graph() -> tuple[fx.Graph, fx.Node, list[fx.Node]]:
    """Build a graph with the results of a backward: two gradients of parameters and one of an input."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("param", "grad_out")]
    results = [graph.call_function(torch.ops.aten.mul.Tensor, (inputs[1], number)) for number in (2, 3, 4)]
    for node in (*inputs, *results):
        node.meta["val"] = torch.empty(4, 4, device="meta")
    output = graph.output(tuple(results))
    output.meta["user_visible_output_idxs"] = [0, 1, 2]
    output.meta["original_output_strides"] = [(4, 1)] * 3
    return graph, output, results


def test_gradients_that_were_handed_over_are_no_visible_outputs() -> None:
    """On CUDA compilation ended: AttributeError: 'NoneType' object has no attribute 'target'."""
    graph, output, results = backward_graph()
    with graph.inserting_before(output):
        _Editor(graph, output, 0).arrived([(0, 0, results[0]), (0, 1, results[1])], [next(iter(graph.nodes))])
    assert output.args[0] == (None, None, results[2])
    visible = get_user_visible_output_strides(graph)
    assert visible == {results[2]: (4, 1)}
    with torch._inductor.config.patch(comprehensive_padding=True):
        mark_nodes_dislike_padding(graph, visible)


@pytest.mark.parametrize("asked", [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}, {}])
def test_a_run_that_asks_for_cuda_graphs_is_told_that_none_is_recorded(
    asked: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ds_engine"):
        settings = CompileSettings("inductor", asked)
    assert "triton.cudagraphs" not in settings.patches
    assert ("CUDA graphs" in caplog.text) is bool(asked)
