"""Stages of a model whose forward is traced: cut at modules that are named, or where parameters balance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ds_config.errors import PlanError, UnsupportedError
from ds_pipe.building import annotate_params, broadcast_ties, tie
from ds_pipe.graph_cutting import StageGraph, Tracer, balanced_stages, cut_graph, spec_stages, trace_model
from ds_pipe.programs import PipelineSpec, placement_of
from ds_pipe.recompute import Backwards, checkpointed
from ds_pipe.staged import StagedModel
from ds_pipe.topology import PipelineGroups, ProcessTopology, plain_topology

__all__ = ["TracedStages"]

_MODE_OPERATORS = ("dropout", "batch_norm")


class TracedStages(nn.Module):
    """The stages of this rank of any model that torch.fx or torch.export can trace.

    A microbatch's inputs are a tensor, a tuple or a dict, as `sample`. Parameters have their names in the whole model.

    Args:
        model: Whole, the same on every rank. Its modules are used, not copied.
        sample: Inputs of a microbatch. With `tracer="fx"` nothing runs on them: they say which arguments there are.
        num_stages: Ranks of one pipeline. Or give `topology`.
        topology: Ranks by axes, one of which is `pipe`.
        split_spec: Module paths to "beginning" or "end" (or torch's SplitPoint), one fewer than stages; None balances parameters.
        loss_fn: `loss_fn(outputs, labels)`; without it the model's output is the loss.
        schedule: Decides how many stages a rank has.
        virtual: Stages a rank, for `interleaved`.
        tracer: "fx" keeps modules of torch.nn whole, takes any shape, and follows `train()` and `eval()`; it needs a forward without
            branches on values. "export" takes what `torch.export` takes, for the mode and shapes of the sample.
        dynamic_shapes: As of `torch.export.export`.
    Raises:
        UnsupportedError: the model cannot be traced ("pipe-trace-model").
        PlanError: the cuts do not fit ("pipe-partition", "pipe-layers"), or the ranks do not ("pipe-topology").
    Collective over the world.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Any,
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        *,
        split_spec: Mapping[str, Any] | None = None,
        loss_fn: Callable[..., Any] | None = None,
        schedule: str = "1f1b",
        virtual: int = 2,
        tracer: Tracer = "fx",
        dynamic_shapes: Any = None,
    ) -> None:
        super().__init__()
        places = PipelineGroups.build(topology or plain_topology(num_stages))
        self.pipe_staging = PipelineSpec(
            schedule, places.pipe.size, virtual, "split_spec" if split_spec else "parameters"
        )
        rank_of = placement_of(schedule, places.pipe.size, virtual)
        traced = trace_model(model, sample, tracer, dynamic_shapes)
        count = len(rank_of)
        self.node_stages = balanced_stages(traced, count) if split_spec is None else spec_stages(traced, split_spec)
        if max(self.node_stages) + 1 != count:
            raise PlanError(
                f"split_spec cuts the model into {max(self.node_stages) + 1} stages, schedule {schedule} needs {count}",
                code="pipe-partition",
                fix=f"Name {count - 1} places that differ.",
            )
        graphs = cut_graph(traced, self.node_stages, [s for s, r in enumerate(rank_of) if r == places.pipe.rank])
        shapes = _shapes(sample) if tracer == "export" and dynamic_shapes is None else None
        parts = {
            s: _TracedPart(graph, model.training if tracer == "export" else None, shapes) for s, graph in graphs.items()
        }
        for s, part in parts.items():
            self.add_module(f"stage{s}", part)
        self.train(model.training)
        names, holders = _names(model), _holders(model, traced, self.node_stages, rank_of)
        local = {name: names.get(id(t), name.split("graph_module.", 1)[-1]) for name, t in _tensors(self)}
        tied = {local[name]: p for name, p in self.named_parameters() if local[name] in holders}
        ties = tie(places, holders, tied)
        if not any(p.is_meta for p in self.parameters()):
            broadcast_ties(ties)
        self._staged = StagedModel(self, parts, rank_of, places, loss_fn, local, ties)
        annotate_params(self._staged)

    @property
    def staged(self) -> StagedModel:
        """For `ds_pipe.pipeline`."""
        return self._staged

    def set_checkpoint_interval(self, interval: int) -> None:
        """Enable activation checkpointing of whole stages for an interval above 0."""
        for part in self._staged.parts.values():
            part.again = interval > 0  # type: ignore[assignment]

    def forward(self, value: Any) -> Any:
        """Run the stages of this rank, one after the other: the whole model where there is one rank."""
        for part in self._staged.parts.values():
            value = part(value)
        return value


class _TracedPart(nn.Module):
    """A stage's graph, computed again in the backward if asked.

    Args:
        mode: Of training or evaluation that the graph was exported in, if its operators know no other; else None.
        shapes: Of the inputs that the graph was exported for; None: any.
    """

    def __init__(self, graph: StageGraph, mode: bool | None, shapes: list[torch.Size] | None) -> None:
        super().__init__()
        self.graph, self.again = graph, False
        self.backwards: Backwards | None = None  # the Stage that runs it says
        operators = [str(n.target) for n in graph.graph_module.graph.nodes if n.op == "call_function"]
        depends = any(word in operator for operator in operators for word in _MODE_OPERATORS)
        self._mode, self._traced_shapes = (mode if depends else None), shapes if graph.first else None

    def forward(self, value: Any) -> Any:
        if self._mode is not None and self.training != self._mode:
            raise UnsupportedError(
                f"the model was exported in {_mode_name(self._mode)} mode, with dropout or batch norm, and is to run in {_mode_name(self.training)} mode",
                code="pipe-trace-mode",
                fix='Use tracer="fx", which follows train() and eval().',
            )
        if self._traced_shapes is not None and _shapes(value) != self._traced_shapes:
            raise PlanError(
                f"the model was exported for inputs of shapes {[list(s) for s in self._traced_shapes]}, a microbatch has {[list(s) for s in _shapes(value)]}",
                code="pipe-trace-shape",
                fix='Pass dynamic_shapes=, or use tracer="fx", which takes any shape.',
            )
        if self.again and self.backwards is not None and torch.is_grad_enabled():
            return checkpointed(self.graph, value, self.backwards)
        return self.graph(value)


def _mode_name(training: bool) -> str:
    return "training" if training else "evaluation"


def _shapes(value: Any) -> list[torch.Size]:
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else [value]
    return [v.shape for v in values if isinstance(v, Tensor)]


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _names(model: nn.Module) -> dict[int, str]:
    return {id(t): name for name, t in _tensors(model)}


def _holders(model: nn.Module, traced: Any, stages: list[int], rank_of: tuple[int, ...]) -> dict[str, list[int]]:
    """The ranks that hold each parameter that several stages use, by its name in the whole model."""
    names, used = _names(model), dict[str, set[int]]()
    for stage, graph in cut_graph(traced, stages, range(len(rank_of))).items():
        for p in graph.parameters():
            if id(p) in names:
                used.setdefault(names[id(p)], set()).add(stage)
    return {name: [rank_of[s] for s in sorted(where)] for name, where in used.items() if len(where) > 1}
