"""Backwards in two: the gradient of the input now, the gradients of weights later. By hooks on modules; nothing is patched.

In the forward every call of a module with parameters of its own leaves the *edge* where its output enters the graph. The input
gradient is `autograd.grad` to the stage's inputs and to all edges: autograd then skips what only weights need. What it finds at an
edge, and the graph between the edge and the call's parameters, is a *job*. Running the jobs later gives the weights' gradients; they
arrive through autograd's own accumulation, so hooks on parameters (ds-zero's, DDP's) fire as always.

Note "whose gradient a job may give". A job is right for a parameter if every path from the stage's output to it goes through that
one call. Autograd's graph says whether: a walk from the outputs that stops at edges must not reach the parameter, nor may a second
call lead to it. Parameters that fail (a tied weight that a function uses, a layer called twice) get their gradient by a job from
the stage's outputs instead, which computes some input gradients again: slower, never wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ds_pipe._torch import tree_leaves, tree_map

__all__ = ["Capture", "WeightGradJob", "WeightGradRecorder", "run_jobs", "split_backward"]


@dataclass(slots=True)
class WeightGradJob:
    """Weight gradients that are left: `grads` arrive at `edges`, and end where `leaves` accumulate theirs.

    Leaves are named by their places in the graph: a parameter that ZeRO has released may not be touched.
    """

    edges: list[GradientEdge]
    grads: list[Tensor]
    leaves: list[GradientEdge]


@dataclass(slots=True)
class Capture:
    """Of one forward.

    Attributes:
        calls: Of every call the edges of its outputs and the parameters it has.
        anchors: Leaves that an input gradient must reach for what happens on the way (segments that are computed again).
    """

    calls: list[tuple[list[GradientEdge], list[Tensor]]] = field(default_factory=list)
    anchors: list[Tensor] = field(default_factory=list)


class WeightGradRecorder:
    """Hooks on every module of `part` that has parameters of its own. Only forwards inside `into` are recorded."""

    def __init__(self, part: nn.Module) -> None:
        self._capture: Capture | None = None
        self._handles = [
            module.register_forward_hook(self._hook)
            for module in part.modules()
            if any(p.requires_grad for p in module.parameters(recurse=False))
        ]

    @contextmanager
    def into(self, capture: Capture | None) -> Iterator[None]:
        """Calls inside are recorded into `capture`; None records nothing."""
        before, self._capture = self._capture, capture
        try:
            yield
        finally:
            self._capture = before

    def anchor(self, leaf: Tensor) -> None:
        """Record `leaf` as an anchor of the forward that is being captured."""
        if self._capture is not None:
            self._capture.anchors.append(leaf)

    def _hook(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._capture is None or not torch.is_grad_enabled():
            return output
        params: list[Tensor] = [p for p in module.parameters(recurse=False) if p.requires_grad]
        tensors = _in_graph(output)
        if len(tensors) > 1 and params:
            # One may be computed from another (a router's scores from its logits), whose gradient then has both: from views each has its own.
            output = tree_map(lambda t: t.view_as(t) if isinstance(t, Tensor) and t.grad_fn is not None else t, output)
            tensors = _in_graph(output)
        if tensors and params:
            self._capture.calls.append(([get_gradient_edge(t) for t in tensors], params))
        return output

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


def _in_graph(output: Any) -> list[Tensor]:
    return [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.grad_fn is not None]


def split_backward(
    outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor], capture: Capture
) -> tuple[list[Tensor | None], list[WeightGradJob]]:
    """Compute the gradients of `inputs`, and return jobs that compute the weight gradients later.

    The graph stays until the jobs are freed.

    Args:
        outputs: Tensors with a graph.
        grads: Of them, same shapes.
        inputs: Leaves that require gradients.
        capture: Of the forward that produced `outputs`.
    """
    edges = [edge for of_call, _ in capture.calls for edge in of_call]
    wanted: list[Any] = [*inputs, *edges, *capture.anchors]
    gradients = torch.autograd.grad(outputs, wanted, grads, retain_graph=True, allow_unused=True) if wanted else ()
    at_edges = iter(gradients[len(inputs) :])
    single, rest = _owners(outputs, capture)
    jobs = []
    for number, (of_call, params) in enumerate(capture.calls):
        pairs = [(edge, grad) for edge, grad in zip(of_call, at_edges, strict=False) if grad is not None]
        targets = [GradientEdge(node, 0) for p in params if (node := single.get((id(p), number))) is not None]
        if pairs and targets:
            jobs.append(WeightGradJob([e for e, _ in pairs], [g for _, g in pairs], targets))
    if rest:
        jobs.append(WeightGradJob([get_gradient_edge(t) for t in outputs], list(grads), rest))
    return list(gradients[: len(inputs)]), jobs


def run_jobs(jobs: Sequence[WeightGradJob]) -> None:
    """Add the weight gradients. A parameter is reached by one job only."""
    for job in jobs:
        # Jobs of nested modules share parts of the graph.
        torch.autograd.backward(job.edges, job.grads, inputs=job.leaves, retain_graph=True)


def _owners(outputs: Sequence[Tensor], capture: Capture) -> tuple[dict[tuple[int, int], Node], list[GradientEdge]]:
    """Find the accumulation nodes of parameters that a single call reaches, by (id, call), and of all others.

    Cost: a look at every node of the graph, about 1 us each.
    """
    nodes = {edge.node: number for number, (of_call, _) in enumerate(capture.calls) for edge in of_call}
    single: dict[int, tuple[int, Node]] = {}
    rest: dict[int, tuple[Tensor, Node]] = {}
    for tensor, node in _reached([t.grad_fn for t in outputs if t.grad_fn is not None], nodes, True):
        rest[id(tensor)] = tensor, node
    for number, (of_call, params) in enumerate(capture.calls):
        known = {id(p) for p in params}
        for tensor, node in _reached([edge.node for edge in of_call], nodes, False):
            if id(tensor) in single or id(tensor) not in known:
                rest[id(tensor)] = tensor, node
            single[id(tensor)] = number, node
    exclusive = {(known, number): node for known, (number, node) in single.items() if known not in rest}
    return exclusive, [GradientEdge(node, 0) for tensor, node in rest.values() if isinstance(tensor, nn.Parameter)]


def _reached(starts: Sequence[Node], barriers: dict[Node, int], from_outputs: bool) -> list[tuple[Tensor, Node]]:
    """Leaves that a walk from `starts` reaches, not going through other barriers, and the nodes that accumulate into them."""
    visited: set[Node] = set()
    leaves: list[tuple[Tensor, Node]] = []
    todo = [node for node in starts if not (from_outputs and node in barriers)]
    first = set(starts)
    while todo:
        node = todo.pop()
        if node in visited or (node in barriers and node not in first):
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.append((variable, node))
        todo.extend(following for following, _ in node.next_functions if following is not None)
    return leaves
