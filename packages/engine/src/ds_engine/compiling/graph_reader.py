"""From a traced graph to what passes know of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ds_engine.compiling.graph import Grad, Graph, Node, SavedResult

__all__ = ["ParamLocation", "bytes_of", "is_view", "read"]


@dataclass(frozen=True, slots=True)
class ParamLocation:
    """Where a parameter is: number of its unit, and its number in the unit. `trained`: its gradient is summed by the unit."""

    unit: int
    member: int
    trained: bool


_aten = torch.ops.aten
_UNTOLD = (_aten._unsafe_view.default, _aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default)
"""Operations whose results are views, which their schemas do not say."""


def is_view(node: fx.Node) -> bool:
    """Whether a node's result is in the memory of one of its inputs."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__name__", "") == "getitem"
    returns = target._schema.returns
    aliases = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return aliases or target in _UNTOLD


def bytes_of(value: Any) -> int:
    """Return the bytes of a node's traced value; symbolic sizes count as their hints."""
    if isinstance(value, torch.Tensor):
        numel = 1
        for size in value.shape:
            numel *= _hint(size)
        return numel * value.element_size()
    return sum(map(bytes_of, value)) if isinstance(value, (tuple, list)) else 0


def _hint(size: int | torch.SymInt) -> int:
    if isinstance(size, torch.SymInt):
        hint = size.node.hint
        return 1 if hint is None else int(hint)
    return int(size)


def base_of(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory of a node's result, following views."""
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def read(
    graph: fx.Graph,
    params: Mapping[str, ParamLocation],
    *,
    backward: bool,
    saved: int | None,
    ours: Collection[str] = (),
) -> Graph:
    """Read from `graph` the facts that passes need.

    Args:
        params: Inputs that are parameters or views of them, by name of the node.
        saved: Of a forward graph, how many of its results are the caller's; the rest is saved for backward. None: no
        backward.
        ours: Of a backward graph, names of saved results in memory of the forward graph; the rest may be views of
        tensors that the
            caller has.
    """
    order = list(graph.nodes)
    inner = [node for node in order if node.op not in ("placeholder", "output")]
    number = {node: at for at, node in enumerate(inner)}
    bases = {node: base_of(node) for node in order}
    nodes = tuple(_node(node, bases, number, params) for node in inner)
    output = next(node for node in order if node.op == "output")
    results = _flat(output.args[0])
    inputs = [node for node in order if node.op == "placeholder" and node.name not in params]
    saved_inputs = [node for node in inputs if node.name in ours]
    grads: list[Grad] = []
    if backward:
        # Results of a backward graph are the gradients of the forward graph's inputs, in their order.
        for at, result in enumerate(results):
            place = params.get(f"primals_{at + 1}")
            if place is not None and place.trained and isinstance(result, fx.Node) and result in number:
                grads.append(Grad(place.unit, place.member, number[result]))
    saved_nodes = (
        saved_inputs if backward else [] if saved is None else [r for r in results[saved:] if isinstance(r, fx.Node)]
    )
    # Also what is kept twice, itself and a view of it: in the backward graph nothing says that these share memory.
    twice = [base for base, count in Counter(bases[node] for node in saved_nodes).items() if count > 1]
    shared_bases = {*twice, *(bases[r] for r in results[: saved or 0] if isinstance(r, fx.Node))}
    return Graph(
        nodes,
        backward,
        tuple(grads),
        tuple(
            _saved(node, bases, number, shared_bases)
            for node in saved_nodes
            if backward or _storable(node, bases, params)
        ),
        inputs_bytes=sum(bytes_of(node.meta.get("val")) for node in inputs),
    )


def _storable(node: fx.Node, bases: Mapping[fx.Node, fx.Node], params: Mapping[str, ParamLocation]) -> bool:
    """Whether a saved result is one: neither a parameter nor something of the caller's."""
    base = bases[node]
    return base.name not in params and base.op != "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)


def _node(
    node: fx.Node, bases: Mapping[fx.Node, fx.Node], number: Mapping[fx.Node, int], params: Mapping[str, ParamLocation]
) -> Node:
    sources = [bases[source] for source in node.all_input_nodes]
    view = is_view(node)
    units = tuple(dict.fromkeys(params[s.name].unit for s in sources if s.name in params))
    uses = tuple(dict.fromkeys(number[s] for s in sources if s in number))
    return Node(node.name, 0 if view else bytes_of(node.meta.get("val")), uses, units)


def _saved(
    node: fx.Node, bases: Mapping[fx.Node, fx.Node], number: Mapping[fx.Node, int], shared_bases: set[fx.Node]
) -> SavedResult:
    base = bases[node]
    uses = [number[user] for user in number if any(bases[s] is base for s in user.all_input_nodes)]
    produced = number.get(base, -1)
    owned = base is node and base not in shared_bases
    return SavedResult(
        node.name, bytes_of(node.meta.get("val")), produced, min(uses, default=-1), max(uses, default=-1), owned
    )


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [item for each in value for item in _flat(each)]
    return [value]
