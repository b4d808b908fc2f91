"""From decided actions to a graph that does them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from ds_engine.compiling.graph import Graph, GraphAction, GraphVerb
from ds_engine.compiling.graph_reader import ParamLocation, base_of, is_view
from ds_engine.compiling.ops import OPS

__all__ = ["put_ends_last", "rewrite"]

_UNIT_VERBS = {
    GraphVerb.EXPECT: "expect",
    GraphVerb.NEED: "need",
    GraphVerb.SPARE: "spare",
    GraphVerb.LOAD: "load",
    GraphVerb.PARK: "park",
    GraphVerb.UNPARK: "unpark",
}


def rewrite(gm: fx.GraphModule, graph: Graph, params: Mapping[str, ParamLocation], key: int) -> fx.GraphModule:
    """Put the actions of `graph` into `gm`, which it was read from. Returns a module of its own; `gm` stays as it was."""
    module = fx.GraphModule(gm, _copied(gm.graph))
    by_name = {node.name: node for node in module.graph.nodes}
    output = next(node for node in module.graph.nodes if node.op == "output")
    at = [by_name[node.name] for node in graph.nodes] + [output]
    inputs: dict[int, list[fx.Node]] = {}
    for name, place in params.items():
        if name in by_name and by_name[name].op == "placeholder":
            inputs.setdefault(place.unit, []).append(by_name[name])
    editor = _Editor(module.graph, output, key)
    anchors = [node for node in module.graph.nodes if node.op == "placeholder" and _is_tensor(node)][:1]
    for action in graph.actions:
        with module.graph.inserting_before(at[action.at]):
            if action.verb in _UNIT_VERBS:
                editor.unit(action, inputs.get(action.unit, anchors))
            elif action.verb is GraphVerb.ARRIVED:
                grads = [(g.unit, g.member, at[g.at]) for u in action.units for g in graph.grads if g.unit == u]
                editor.arrived(grads, [param for u in action.units for param in inputs.get(u, ())])
            elif action.verb is GraphVerb.FREE:
                module.graph.call_function(OPS.free.default, ([by_name[action.name]],))
            elif action.verb is GraphVerb.STORE:
                editor.store(by_name[action.name])
            else:
                editor.fetch(by_name[action.name])
    put_ends_last(module.graph)
    module.graph.lint()
    module.recompile()
    return module


def _copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    table: dict[fx.Node, fx.Node] = {}
    output = copy.graph_copy(graph, table)
    new_output = copy.output(output)
    old = next(node for node in graph.nodes if node.op == "output")
    new_output.meta = dict(old.meta)
    for before, after in table.items():
        after.meta = dict(before.meta)
        if after.name != before.name:
            after.name = before.name
    return copy


_VISIBLE = "user_visible_output_idxs"
"""What torch writes down of an output: the numbers of the results whose strides the caller sees."""


class _Editor:
    def __init__(self, graph: fx.Graph, output: fx.Node, key: int) -> None:
        self.graph, self.output, self.key = graph, output, key

    def unit(self, action: GraphAction, params: list[fx.Node]) -> None:
        op = getattr(OPS, _UNIT_VERBS[action.verb]).default
        self.graph.call_function(op, (params, self.key, action.unit))

    def arrived(self, grads: list[tuple[int, int, fx.Node]], params: list[fx.Node]) -> None:
        """Insert the reduction of gradients: (unit, member, node) each, with their units' parameters.

        The parameters may be released afterwards.

        A gradient that shares memory with a tensor that is used otherwise is copied first.
        """
        grad_nodes = [node for _, _, node in grads]
        handed, bases = [], set()
        for node in grad_nodes:
            base = base_of(node)
            others = {user for user in base.users if user.op != "output" and base_of(user) is not base}
            shared = (
                base in bases
                or base.op == "placeholder"
                or bool(others and not _all_before(others, self.graph, grad_nodes))
            )
            bases.add(base)
            handed.append(self._copy(node) if shared or _scattered(node) else node)
        units, members = [unit for unit, _, _ in grads], [member for _, member, _ in grads]
        self.graph.call_function(OPS.arrived.default, (handed, params, self.key, units, members))
        gone = set(grad_nodes)
        results = self.output.args[0]
        remaining = [None if isinstance(r, fx.Node) and r in gone else r for r in results]  # type: ignore[union-attr]
        self.output.args = (tuple(remaining) if isinstance(results, tuple) else remaining,)
        if _VISIBLE in self.output.meta:  # inductor's layout for devices looks at each of these as at a node
            shown = self.output.meta[_VISIBLE]
            self.output.meta[_VISIBLE] = [i for i in shown if isinstance(remaining[i], fx.Node)]

    def _copy(self, node: fx.Node) -> fx.Node:
        clone = self.graph.call_function(
            torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
        )
        clone.meta = dict(node.meta)
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            clone.meta["val"] = value.new_empty(value.shape)
        return clone

    def store(self, node: fx.Node) -> None:
        """Replace a result saved for backward by its copy in host memory."""
        host_copy = self.graph.call_function(OPS.store.default, (node, self.key))
        host_copy.meta = {"val": _like(node.meta["val"], torch.device("cpu"))}
        self.output.args = (fx.map_arg(self.output.args[0], lambda n: host_copy if n is node else n),)

    def fetch(self, node: fx.Node) -> None:
        """Copy a backward input from host memory to the device, and use the copy in its place."""
        value = node.meta["val"]
        device = value.device
        device_copy = self.graph.call_function(OPS.fetch.default, (node, device))
        device_copy.meta = {"val": value}
        node.meta = {**node.meta, "val": _like(value, torch.device("cpu"))}
        node.replace_all_uses_with(device_copy, delete_user_cb=lambda user: user is not device_copy)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _like(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    return value if device == value.device else torch.empty_like(value, device=device)


def _scattered(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.is_contiguous()


def _all_before(users: set[fx.Node], graph: fx.Graph, grad_nodes: list[fx.Node]) -> bool:
    """Whether all of `users` run before the last of the gradients: nobody looks at them after they were handed over."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    return max(order[user] for user in users) <= max(order[node] for node in grad_nodes)


_ENDS = (OPS.spare.default, OPS.free.default, OPS.arrived.default)
"""After these the memory of their tensors is not what it was."""


def put_ends_last(graph: fx.Graph) -> None:
    """Put every end of a use behind the last reader, where one comes behind it.

    A weight may be read after the last gradient of its unit, for the gradient of what goes into its layer. And inductor puts a product and the addition of its result together where the addition was, though the product's weight is released
    before. A reader behind the next `need` of the same tensor belongs to that one.
    Cost: one pass over the graph, and for each end the readers of its tensors.
    """
    place = {node: at for at, node in enumerate(graph.nodes)}
    readers: dict[fx.Node, list[fx.Node]] = {}
    needs: dict[fx.Node, list[int]] = {}
    for node, at in place.items():
        for base in {base_of(one) for one in node.all_input_nodes}:
            if node.target is OPS.need.default:
                needs.setdefault(base, []).append(at)
            elif node.op != "output" and not is_view(node) and node.target not in _ENDS:
                readers.setdefault(base, []).append(node)
    for node, at in place.items():
        if node.op != "call_function" or node.target not in _ENDS:
            continue
        late = []
        for base in {base_of(one) for one in node.all_input_nodes}:
            until = min((need for need in needs.get(base, ()) if need > at), default=len(place))
            late += [one for one in readers.get(base, ()) if at < place[one] < until]
        if late:
            max(late, key=place.__getitem__).append(node)
