"""Rules from a model's own structure, for models without a description: which linear layer feeds which, by a trace of each block.

The last source of rules, and never a guess. A module with linear layers is traced with torch.fx; what does not trace gives no rule.

*Feed-forward*: a layer that is given nothing but elementwise functions of other linear layers' outputs is a row layer, and those are
column layers: each element of what lies between belongs to one feature, so features can be cut anywhere.

*Attention*: in a module that says how many heads it has and how wide they are, layers that read the module's input and whose outputs are
heads (queries, or keys and values) are column layers, cut by whole heads; the one layer that reads what was made of them, as
wide as all query heads, is the row layer. It must be all the module does: one output, one attention. A module with another number of its own that
equals a head count gives no rule: that number would stay uncut.

Everything else stays whole: fused weights (how their parts lie is not in a trace), layers that are called twice, embeddings, heads.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from ds_accel import preserve_random_streams
from ds_parallel.tensor.layer_rules import LayerRule, ShardKind
from ds_parallel.tensor.model_copy import copy_model

__all__ = ["rules_of_structure"]

_LAYERS = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Dropout, nn.Identity, nn.ELU, nn.LeakyReLU, nn.ReLU6, nn.Hardswish, nn.Mish,
    nn.Softplus,
)  # fmt: skip
_FUNCTIONS = {
    operator.mul, torch.mul, operator.add, torch.add, operator.pow, operator.neg, operator.sub, torch.relu, torch.tanh, torch.sigmoid,
    torch.square, functional.relu, functional.gelu, functional.silu, functional.tanh, functional.sigmoid, functional.dropout,
    functional.elu, functional.leaky_relu, functional.hardswish, functional.mish, functional.softplus,
}  # fmt: skip
_METHODS = {"mul", "add", "relu", "tanh", "sigmoid", "square", "pow", "contiguous", "float", "neg"}


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, nn.Sequential)


def rules_of_structure(
    model: nn.Module, heads: Mapping[str, tuple[int, int, int]], known: frozenset[str]
) -> list[LayerRule]:
    """Build a rule for every layer that a symbolic trace shows can be sharded.

    Args:
        heads: Of attention modules by name: query heads, key-value heads, elements of a head.
        known: Names of attributes of such modules that sharding changes, or that are of a single head.
    A trace runs the module's code, so it is that of a copy: counters, buffers and random streams stay as they are.

    Cost: a symbolic trace of each module that has linear layers; the memory of a copy of all buffers meanwhile.
    """
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    with preserve_random_streams(device for device in devices if device.type != "cpu"):
        return _rules(copy_model(model), heads, known)


def _rules(model: nn.Module, heads: Mapping[str, tuple[int, int, int]], known: frozenset[str]) -> list[LayerRule]:
    rules: dict[str, LayerRule] = {}
    twice: set[str] = set()
    for name, module in model.named_modules():
        linears = dict(_linears(module))
        if len(linears) < 2 or (isinstance(module, nn.Sequential) and _inside_traced(model, name)):
            continue
        try:
            graph = _Tracer().trace(module)
        except Exception:
            continue
        decided = (
            _attention(graph, linears, module, heads[name], known)
            if name in heads
            else _feed_forward(graph, linears, dict(module.named_modules()))
        )
        for key, kind, reason in decided:
            full = f"{name}.{key}".lstrip(".")
            twice |= {full} if full in rules and rules[full].kind is not kind else set()
            rules[full] = LayerRule(re.escape(full), kind, f"structure: {reason}")
    return [rule for full, rule in rules.items() if full not in twice]


def _linears(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers of the module and of Sequentials in the module."""
    for key, child in module.named_children():
        if isinstance(child, nn.Linear):
            yield key, child
        elif isinstance(child, nn.Sequential):
            yield from ((f"{key}.{inner}", layer) for inner, layer in _linears(child))


def _inside_traced(model: nn.Module, name: str) -> bool:
    """Whether the module above is traced through this Sequential."""
    above = model.get_submodule(name.rpartition(".")[0]) if name else None
    return above is not None and not isinstance(above, nn.ModuleList | nn.ModuleDict) and len(list(_linears(above))) > 1


def _calls(graph: fx.Graph, linears: Mapping[str, nn.Linear]) -> dict[fx.Node, str]:
    """Map each node that calls a linear layer to the layer's name, for layers that are called once."""
    nodes = [node for node in graph.nodes if node.op == "call_module" and node.target in linears]
    counts = [node.target for node in nodes]
    return {node: str(node.target) for node in nodes if counts.count(node.target) == 1 and len(node.args) == 1}


def _elementwise(node: fx.Node, module: nn.Module | None) -> bool:
    if node.op == "call_function":
        return node.target in _FUNCTIONS
    if node.op == "call_method":
        return node.target in _METHODS
    activation = module is not None and (isinstance(module, _LAYERS) or type(module).__name__.endswith("Activation"))
    return node.op == "call_module" and activation and not list(module.parameters())  # type: ignore[union-attr]


def _feed_forward(
    graph: fx.Graph, linears: Mapping[str, nn.Linear], modules: Mapping[str, nn.Module]
) -> Iterator[tuple[str, ShardKind, str]]:
    calls = _calls(graph, linears)
    rows: dict[fx.Node, set[fx.Node]] = {}
    for node in calls:
        sources = _sources(node, calls, modules)
        if sources and all(linears[calls[s]].out_features == linears[calls[node]].in_features for s in sources):
            rows[node] = sources
    # A column layer's output may go nowhere but, elementwise, into row layers; a row layer's own output is whole.
    columns = {source for sources in rows.values() for source in sources}
    for source in list(columns):
        ends = _ends(source, calls, modules)
        if ends is None or not ends <= set(rows) or source in rows:
            columns.discard(source)
    for row, sources in rows.items():
        if row in columns or not sources <= columns:
            continue
        others = [s for s in columns if row in (_ends(s, calls, modules) or ())]
        if set(others) != sources:
            continue
        yield calls[row], ShardKind.ROW, f"reads {', '.join(sorted(calls[s] for s in sources))} only"
        yield from ((calls[s], ShardKind.COLUMN, f"feeds {calls[row]} only") for s in sources)


def _sources(row: fx.Node, calls: Mapping[fx.Node, str], modules: Mapping[str, nn.Module]) -> set[fx.Node]:
    """Return the linear layers of which `row`'s input is an elementwise function.

    Empty if that input depends on anything else.
    """
    linears: set[fx.Node] = set()
    todo: list[Any] = [row.args[0]]
    while todo:
        node = todo.pop()
        if node in calls:
            linears.add(node)
        elif isinstance(node, fx.Node):
            if not _elementwise(node, modules.get(str(node.target))):
                return set()
            todo += node.all_input_nodes
    return linears


def _ends(source: fx.Node, calls: Mapping[fx.Node, str], modules: Mapping[str, nn.Module]) -> set[fx.Node] | None:
    """Return the linear layers that read `source` through elementwise functions.

    None if anything else reads `source`.
    """
    readers: set[fx.Node] = set()
    todo = list(source.users)
    while todo:
        node = todo.pop()
        if node in calls:
            readers.add(node)
        elif _elementwise(node, modules.get(str(node.target))):
            todo += list(node.users)
        else:
            return None
    return readers


def _attention(
    graph: fx.Graph,
    linears: Mapping[str, nn.Linear],
    module: nn.Module,
    heads: tuple[int, int, int],
    known: frozenset[str],
) -> Iterator[tuple[str, ShardKind, str]]:
    query, keys, width = heads
    numbers = {key: value for key, value in vars(module).items() if type(value) is int and key not in known}
    if any(value in (query, keys, query * width, keys * width) and value > 1 for value in numbers.values()):
        return
    calls = _calls(graph, linears)
    if len(calls) != len(linears) or any(node.op == "get_attr" for node in graph.nodes):
        return
    reading = [n for n in calls if isinstance(n.args[0], fx.Node) and n.args[0].op == "placeholder"]
    rest = [n for n in calls if n not in reading]
    sizes = [linears[calls[n]].out_features for n in reading]
    if len(rest) != 1 or len(reading) != 3 or linears[calls[rest[0]]].in_features != query * width:
        return
    if sorted(sizes) != sorted([query * width, keys * width, keys * width]):
        return
    below = _reached(rest[0].args[0])
    if not set(reading) <= below or any(rest[0] not in _reached(n) for n in graph.nodes if n.op == "output"):
        return
    yield calls[rest[0]], ShardKind.ROW, f"reads {query} heads of {width}"
    yield from ((calls[n], ShardKind.COLUMN, f"makes heads of {width} for {calls[rest[0]]}") for n in reading)


def _reached(node: Any) -> set[fx.Node]:
    reached: set[fx.Node] = set()
    todo = [node]
    while todo:
        one = todo.pop()
        if isinstance(one, fx.Node) and one not in reached:
            reached.add(one)
            todo += one.all_input_nodes
    return reached
