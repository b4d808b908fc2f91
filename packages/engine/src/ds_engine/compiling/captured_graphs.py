"""One captured piece of a model's forward, and its backward: graphs that are lowered with the actions of the passes of the day.

A piece is captured once. Its graphs are kept as they were captured; when other passes are due they are lowered again from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import fx

from ds_engine.compiling._torch import Context, inputs_of, own_results, without_torch_function
from ds_engine.compiling.graph import Graph
from ds_engine.compiling.graph_reader import ParamLocation, base_of, bytes_of, read
from ds_engine.compiling.ops import OPS
from ds_engine.compiling.rewriting import rewrite

__all__ = ["Frame", "Lowered", "Owner"]


class Owner(Protocol):
    """Who decides about graphs, and lowers them."""

    key: int
    measuring: bool

    def decide(self, piece: Lowered) -> Graph:
        """Return the graph of a piece with its actions."""

    def edit(self, piece: Lowered, gm: fx.GraphModule) -> fx.GraphModule:
        """Apply the users' passes to the graph module of a piece."""

    def lower(self, piece: Lowered, gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """Compile a graph module to code that takes a list of inputs."""

    def add(self, piece: Lowered) -> None:
        """Register a captured graph so that later schedules re-lower it."""


class Lowered:
    """One graph.

    Attributes:
        gm, inputs, options: As captured.
        params: Where its parameters are, by name of its inputs.
        facts: What passes know of it; with times once it was measured.
        backward: Whether it makes gradients.
        seconds: One gather of each unit took, as measured.
    """

    def __init__(
        self, owner: Owner, gm: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any], frame: Frame
    ) -> None:
        self._boxed_call = True  # torch: it takes a list, and may empty it. On the object, from where wrappers copy it
        self.owner, self.gm, self.inputs, self.options = owner, fx.GraphModule(gm, gm.graph), inputs, dict(options)
        self.backward = bool(options.get("is_backward"))
        self.frame = frame
        self.context = Context(inputs)
        self.params = frame.params_of(gm, backward=self.backward)
        saved = None if options.get("is_inference") or self.backward else own_results()
        self.facts = read(gm.graph, self.params, backward=self.backward, saved=saved, ours=frame.ours)
        if not self.backward:
            frame.ours = frozenset(one.name for one in self.facts.saved if one.owned)
        self.actions: Graph = self.facts
        self.seconds: dict[int, float] = {}
        self.measured = False
        self._run: Callable[[list[Any]], Any] | None = None
        owner.add(self)
        self._lower()

    def forget(self) -> None:
        """Discard the compiled code: other passes are due, so the graph is lowered again before its next run."""
        self._run = None

    def close(self) -> None:
        """Let go of everything: it runs no more."""
        self._run = _gone
        self.inputs, self.options = (), {}
        self.frame.__dict__.pop("owner", None)
        del self.owner, self.frame, self.context

    def _lower(self) -> Callable[[list[Any]], Any]:
        self.actions = self.owner.decide(self)
        gm = self.owner.edit(self, rewrite(self.gm, self.actions, self.params, self.owner.key))
        with self.context.again():
            self._run = self.owner.lower(self, gm)
        return self._run

    def __call__(self, inputs: list[Any]) -> Any:
        run = self._run or self._lower()
        with without_torch_function():
            return self._measure(inputs) if self.owner.measuring else run(inputs)

    def _measure(self, inputs: list[Any]) -> Any:
        """Run it operation by operation, and note what each one takes."""
        gm = rewrite(self.gm, self.actions, self.params, self.owner.key)
        run, args = _Measure(gm), list(inputs)
        inputs.clear()
        result = run.run(*args)
        self.facts = replace(
            self.facts,
            nodes=tuple(
                replace(n, nbytes=n.nbytes and run.nbytes.get(n.name, 0), seconds=run.seconds.get(n.name, 0.0))
                for n in self.facts.nodes
            ),
        )
        self.seconds, self.measured = run.gathers, True
        return result


def _gone(inputs: list[Any]) -> Any:
    raise RuntimeError(f"a graph with {len(inputs)} inputs runs after the engine that compiled it was closed")


class _Measure(fx.Interpreter):
    """Attributes:
    seconds, nbytes: By name of the node.
    gathers: Seconds of each unit's gather.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.seconds: dict[str, float] = {}
        self.nbytes: dict[str, int] = {}
        self.gathers: dict[int, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        begun = perf_counter()
        result = super().run_node(n)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        took = perf_counter() - begun
        self.seconds[n.name], self.nbytes[n.name] = took, bytes_of(result)
        if n.target is OPS.need.default:
            self.gathers[n.args[2]] = took  # type: ignore[index]
        return result


class Frame:
    """One captured piece.

    Args:
        captured: As torch's capture gave it; its parameters are inputs.
        find: Where a tensor is; None for one that no unit has.
    Attributes:
        ours: Names of what its forward graph keeps for backward in memory that nobody else has.
    """

    def __init__(
        self, owner: Owner, captured: fx.GraphModule, find: Callable[[torch.Tensor], ParamLocation | None]
    ) -> None:
        self.owner = owner
        self._inputs = [None if tensor is None else find(tensor) for tensor in inputs_of(captured)]
        self.ours: frozenset[str] = frozenset()
        self._places: dict[str, ParamLocation] = {}
        self._views: dict[str, ParamLocation] = {}

    def inner(self, gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Lowered:
        """Create the piece that compiles the forward or the backward graph."""
        return Lowered(self.owner, gm, inputs, options, self)

    def params_of(self, gm: fx.GraphModule, *, backward: bool) -> dict[str, ParamLocation]:
        """Return the inputs of a graph that are parameters, or in backward views of them that forward saved.

        Of a backward graph all parameters of the forward graph, by their names there: gradients stand in that order,
        also of those
        that backward does not read.
        """
        if backward:
            return {**self._views, **self._places}
        for node in gm.graph.nodes:
            if node.op == "placeholder" and (place := self._place(node.meta.get("desc"))) is not None:
                self._places[node.name] = place
        results = next(node for node in gm.graph.nodes if node.op == "output").args[0]
        for node in results if isinstance(results, (tuple, list)) else ():
            if isinstance(node, fx.Node) and base_of(node).name in self._places:
                self._views[node.name] = self._places[base_of(node).name]
        return dict(self._places)

    def _place(self, source: Any) -> ParamLocation | None:
        """Find the parameter of an input by torch's description of its source."""
        number = getattr(source, "idx", None)
        return self._inputs[number] if isinstance(number, int) else None
