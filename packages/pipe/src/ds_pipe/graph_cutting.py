"""A traced model's graph cut into stages: which node is on which stage, and a graph of each stage. By torch.fx; no process group.

A stage is given the values that were made before it and are used in it or after it, as a tuple, and returns those that were made up to its
end and are used after it: skip connections pass through the stages between. Shapes, dtypes and devices are not sent; a stage that needs
one takes it from its tensor again.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import fx, nn

from ds_config import nearest
from ds_config.errors import PlanError, UnsupportedError
from ds_pipe._torch import TreeSpec, tree_unflatten
from ds_pipe.partition import balanced

__all__ = ["StageGraph", "Tracer", "balanced_stages", "cut_graph", "spec_stages", "trace_model"]

Tracer = Literal["fx", "export"]
_OUT_SPEC = "ds_pipe_out_spec"
_DERIVED_METHODS = ("size", "dim", "stride", "numel")
_DERIVED_ATTRIBUTES = ("shape", "dtype", "device", "ndim")


class StageGraph(nn.Module):
    """One stage: its part of the graph, called with the tuple of live values, or with the model's inputs.

    Attributes:
        graph_module: Has the parameters and modules that the stage uses, by their names in the whole model.
        names: Of the values it takes, in the tuple's order; on the first stage those of the model's arguments.
    """

    def __init__(
        self, graph_module: fx.GraphModule, names: Sequence[str], first: bool, out_spec: TreeSpec | None
    ) -> None:
        super().__init__()
        self.graph_module, self.names, self.first, self._out_spec = graph_module, tuple(names), first, out_spec

    def forward(self, value: Any) -> Any:
        out = self.graph_module(*(self._arguments(value) if self.first else value))
        return out if self._out_spec is None else tree_unflatten(out, self._out_spec)

    def _arguments(self, value: Any) -> list[Any]:
        """Match a microbatch's inputs to the arguments that were traced."""
        if isinstance(value, Mapping):
            missing = [name for name in self.names if name not in value]
            if missing:
                raise _refuse_inputs(f"a dict without {', '.join(missing)}", self.names)
            return [value[name] for name in self.names]
        values = list(value) if isinstance(value, (tuple, list)) else [value]
        if len(values) != len(self.names):
            raise _refuse_inputs(f"{len(values)} values", self.names)
        return values


def _refuse_inputs(inputs: str, names: Sequence[str]) -> PlanError:
    return PlanError(
        f"the model was traced with the inputs {', '.join(names)}; a microbatch has {inputs}",
        code="pipe-batch",
        fix="Trace with a sample that has the inputs of a microbatch, in the same order or as a dict.",
    )


def trace_model(model: nn.Module, sample: Any, tracer: Tracer, dynamic_shapes: Any = None) -> fx.GraphModule:
    """Trace a model with torch.fx (modules of torch.nn stay modules) or torch.export (operators of ATen).

    Args:
        sample: Inputs: a tensor, a tuple of positional ones, or a dict of keywords. Arguments that it leaves out have their defaults.
        dynamic_shapes: As of `torch.export.export`; None: shapes are those of the sample.
    Returns: A graph whose nodes say in which module they are (`nn_module_stack`).

    Raises:
        UnsupportedError: the model cannot be traced ("pipe-trace-model").
    """
    args, kwargs = _split_sample(sample)
    try:
        if tracer == "export":
            exported = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)
            unlifted: Any = exported.module(check_guards=False)
            traced = fx.GraphModule(unlifted, unlifted.graph)
            traced.graph.set_codegen(
                fx.graph.CodeGen()
            )  # flat inputs and outputs; the last stage gives the output its form
            traced.meta[_OUT_SPEC] = exported.call_spec.out_spec
            return traced
        return _symbolic(model, args, kwargs)
    except Exception as error:  # whatever the tracer makes of the model's code
        other = "export" if tracer == "fx" else "fx"
        raise UnsupportedError(
            f"{type(model).__name__} cannot be traced by torch.{tracer}: {type(error).__name__}: {str(error)[:300]}",
            code="pipe-trace-model",
            fix=f"Use tracer={other!r}, or a PipelineModule of its layers.",
        ) from error


def _split_sample(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)), {}


def _symbolic(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:

    parameters = inspect.signature(model.forward).parameters
    names = list(parameters)
    given = [*names[: len(args)], *kwargs]
    defaults = {name: p.default for name, p in parameters.items() if name not in given and p.default is not p.empty}
    graph = fx.Tracer().trace(model, concrete_args=defaults or None)
    traced = fx.GraphModule(model, graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node, name in zip(inputs, names, strict=False):
        if name in defaults:  # the default is part of the graph; what checks that the caller passes it has no use
            _erase(graph, node)
    traced.recompile()
    return traced


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)


# ---- which node is on which stage ------------------------------------------------------------------------------------


def spec_stages(traced: fx.GraphModule, spec: Mapping[str, Any]) -> list[int]:
    """Return the stage of every node: a new one begins before or after each module of `spec`.

    Args:
        spec: Module paths to "beginning" or "end", or to torch's SplitPoint.
    Raises:
        PlanError: no node is in such a module, or the words are others ("pipe-partition").
    """
    nodes = list(traced.graph.nodes)
    cuts: set[int] = set()
    for path, point in spec.items():
        word = str(getattr(point, "name", point)).lower()
        inside = [i for i, node in enumerate(nodes) if _within(node, path)]
        if not inside or word not in ("beginning", "end"):
            known = {p for node in nodes for p in _paths(node)}
            close = nearest(path, known)
            raise PlanError(
                f"split_spec has {path!r}: {point!r}"
                + ("" if inside else ", and no traced operation is in a module of that path"),
                code="pipe-partition",
                fix=f"Did you mean {close[0]!r}?" if close and not inside else 'Use "beginning" or "end".',
            )
        cuts.add(inside[0] if word == "beginning" else inside[-1] + 1)
    stages, stage = [], 0
    for i in range(len(nodes)):
        stage += i in cuts
        stages.append(stage)
    return stages


def balanced_stages(traced: fx.GraphModule, parts: int) -> list[int]:
    """Return the stage of every node so that stages have about as many parameters, cut where few values pass.

    Raises:
        PlanError: fewer operations with parameters than parts ("pipe-layers").
    """
    nodes = list(traced.graph.nodes)
    counted: set[int] = set()
    weights = [_weight(traced, node, counted) for node in nodes]
    heavy = [i for i, weight in enumerate(weights) if weight]
    bounds = balanced([weights[i] for i in heavy], parts)
    live = _live_counts(nodes)
    cuts = []
    for bound in bounds[1:-1]:
        low, high = heavy[bound - 1] + 1, heavy[bound]  # anywhere between two operations with parameters
        cuts.append(min(range(low, high + 1), key=lambda i: (live[i], -i)))
    return [sum(cut <= i for cut in cuts) for i in range(len(nodes))]


def _within(node: fx.Node, path: str) -> bool:
    return any(p == path or p.startswith(f"{path}.") for p in _paths(node))


def _paths(node: fx.Node) -> list[str]:
    """The modules in which a node lies, by their names in the whole model."""
    stack = [
        entry[0] if isinstance(entry, tuple) else key for key, entry in node.meta.get("nn_module_stack", {}).items()
    ]
    found = [str(p).removeprefix("L['self'].") for p in stack]
    return [*found, str(node.target)] if node.op == "call_module" else found


def _weight(traced: fx.GraphModule, node: fx.Node, counted: set[int]) -> float:
    """Elements of the parameters that a node is the first to use."""
    held: list[Any] = []
    if node.op == "call_module":
        held = list(traced.get_submodule(str(node.target)).parameters())
    elif node.op != "get_attr":
        held = [_attribute(traced, str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
    fresh = {id(p): p.numel() for p in held if isinstance(p, nn.Parameter) and id(p) not in counted}
    counted.update(fresh)
    return float(sum(fresh.values()))


def _attribute(root: nn.Module, path: str) -> Any:
    value: Any = root
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _live_counts(nodes: Sequence[fx.Node]) -> list[int]:
    """How many values pass the border before each node."""
    place = {node: i for i, node in enumerate(nodes)}
    live = [0] * (len(nodes) + 1)
    for node, i in place.items():
        last = max((place[user] for user in node.users), default=i)
        for border in range(i + 1, last + 1) if node.op != "get_attr" else ():
            live[border] += 1
    return live


# ---- a graph of each stage -------------------------------------------------------------------------------------------


def cut_graph(traced: fx.GraphModule, stages: Sequence[int], which: Sequence[int]) -> dict[int, StageGraph]:
    """Build the graphs of the stages `which` of a graph whose i-th node is on stage `stages[i]`.

    Parameters and modules are those of `traced`, not copies.
    """
    nodes = list(traced.graph.nodes)
    stage_of = dict(zip(nodes, stages, strict=True))
    output = next(node for node in nodes if node.op == "output")
    last = max(stages)
    stage_of[output] = last
    for node in nodes:
        if node.op == "placeholder":
            stage_of[node] = 0
    taken = {s: _taken(nodes, stage_of, s) for s in range(last + 2)}
    inputs = [node for node in nodes if node.op == "placeholder"]
    built = {}
    for s in which:
        source = inputs if s == 0 else taken[s]
        graph = _stage_graph([n for n in nodes if stage_of[n] == s], source, None if s == last else taken[s + 1])
        module = fx.GraphModule(traced, graph)
        names = [str(node.target) if s == 0 else node.name for node in source]
        built[s] = StageGraph(module, names, s == 0, traced.meta.get(_OUT_SPEC) if s == last else None)
    return built


def _taken(nodes: Sequence[fx.Node], stage_of: Mapping[fx.Node, int], stage: int) -> list[fx.Node]:
    """The values made before `stage` that it, or one after it, uses."""
    used: dict[fx.Node, None] = {}
    for node in nodes:
        if stage_of[node] >= stage:
            for needed in node.all_input_nodes:
                used.update(dict.fromkeys(_sources(needed)))
    return [n for n in nodes if n in used and stage_of[n] < stage]


def _sources(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values have to be there to have that of `node`: itself, or the tensors of which it is the shape."""
    if node.op == "get_attr":
        return []
    return [s for n in node.all_input_nodes for s in _sources(n)] if _is_derived(node) else [node]


def _is_derived(node: fx.Node) -> bool:
    """Whether a value is a shape, dtype or device, or made of these alone."""
    if node.op == "call_method":
        return node.target in _DERIVED_METHODS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in _DERIVED_ATTRIBUTES
    symbolic = getattr(node.target, "__name__", "") in ("sym_size.int", "sym_stride.int", "sym_numel.default")
    arithmetic = getattr(node.target, "__module__", "") in ("_operator", "operator", "math")
    return symbolic or (arithmetic and bool(node.all_input_nodes) and all(map(_is_derived, node.all_input_nodes)))


def _stage_graph(nodes: Sequence[fx.Node], source: Sequence[fx.Node], passed: Sequence[fx.Node] | None) -> fx.Graph:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in source:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:  # a parameter, or a shape that was taken on an earlier stage
            for needed in node.all_input_nodes:
                copied(needed)
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        return copies[node]

    for node in nodes:
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], copied))
        elif node.op not in ("placeholder", "get_attr"):
            copied(node)
    if passed is not None:
        graph.output(tuple(copied(node) for node in passed))
    graph.lint()
    return graph
