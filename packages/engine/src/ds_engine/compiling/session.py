"""A compiled run: which passes are due, what was measured, and the pieces that were captured. One for each engine.

    start     from now on the model's forward is captured and compiled
    stepped   a step is over: measure the next one, or lower everything again with other passes
    stop      the model runs as before

Ranks decide alike: what is measured is made one before it is used. Where a piece is captured, and how often, may differ between ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor, fx, nn

import ds_comm as comm
from ds_comm import Group
from ds_comm.fsdp import unwatch_fsdp
from ds_config.errors import DsError, PlanError, UnsupportedError
from ds_engine.compiling import _torch
from ds_engine.compiling.backends import BACKENDS, Compiling
from ds_engine.compiling.captured_graphs import Frame, Lowered
from ds_engine.compiling.graph import Graph, GraphVerb, PassInputs
from ds_engine.compiling.graph_moves import substitute_moves
from ds_engine.compiling.graph_reader import ParamLocation
from ds_engine.compiling.graph_split import EDITS
from ds_engine.compiling.ops import Target, register_target
from ds_engine.compiling.pass_choice import choose_kept
from ds_engine.compiling.schedule_passes import PassEntry
from ds_engine.compiling.sequence_sharding import SharedBatch
from ds_engine.compiling.verbs import Graphs
from ds_parallel.tensor import tensor_parallel_of
from ds_zero import ShardedModel

__all__ = ["CompileSettings", "Session"]

_log = logging.getLogger("ds_engine")
_KWARGS = ("dynamic", "fullgraph", "mode", "options")


class CompileSettings:
    """How `torch.compile` is asked.

    Args:
        backend: `inductor` or `eager`.
        kwargs: Of `torch.compile`: dynamic, fullgraph, mode, options.
        budget: Bytes that a rank may use; None: as many as the device has.
    """

    def __init__(self, backend: str, kwargs: Mapping[str, Any], budget: int | None = None) -> None:
        unknown = sorted(set(kwargs) - set(_KWARGS))
        if backend not in BACKENDS or unknown:
            request = f"backend {backend!r}" + (f" and {', '.join(unknown)}" if unknown else "")
            raise PlanError(
                f"compile() was asked for {request}; actions go into graphs of {' and '.join(BACKENDS)}, with {', '.join(_KWARGS)}",
                code="compile-backend",
                fix="Use one of these, or leave compile.deepcompile out: then compile() is torch's.",
            )
        self.backend, self.budget = backend, budget
        self.kwargs = {k: v for k, v in kwargs.items() if k in ("dynamic", "fullgraph")}
        self.patches: dict[str, Any] = dict(kwargs.get("options") or {})
        if mode := kwargs.get("mode"):
            self.patches = {**_inductor().mode_options(mode), **self.patches}
        if self.patches.pop("triton.cudagraphs", False):
            _log.warning(
                "compile() was asked for CUDA graphs: a replay would leave out what actions in graphs do, so none is recorded"
            )


class Session:
    """See the module's docstring.

    Args:
        model: Whose forward is compiled.
        sharding: Its units.
        plan: Which passes.
        settings: How it is compiled.
        everyone: Ranks that decide alike.
    Attributes:
        key, measuring: For the graphs, see `captured_graphs.Owner`.
        steps: Since `start`.
        pieces: Graphs so far.
        seconds: Spent with capturing and lowering.
        breaks: Why captures ended early, and how often.
    """

    def __init__(
        self, model: nn.Module, sharding: ShardedModel, plan: Compiling, settings: CompileSettings, everyone: Group
    ) -> None:
        self.model, self.plan, self.settings, self.everyone = model, plan, settings, everyone
        self.graphs = Graphs(sharding)
        self._target = Target(self.graphs, plan.section)
        self.key = register_target(self._target)
        self.steps, self.seconds = 0, 0.0
        self.pieces: list[Lowered] = []
        self.breaks: dict[str, int] = {}
        self._sharding = sharding
        self._inside, self._ahead, self._begun = False, self.graphs.ahead_numel, 0.0
        self._known_breaks = _torch.break_reasons()
        self._shared: SharedBatch | None = None
        self._capture = ExitStack()
        self._watch = ExitStack()
        schedule = plan.schedule
        if schedule[0].measured:  # the step before the first one is the first one
            bare = PassEntry(schedule[0].step, tuple(p for p in schedule[0].passes if not p.measured))
            later = replace(schedule[0], step=schedule[0].step + 1)
            schedule = (bare, later, *(e for e in schedule[1:] if e.step > later.step))
        self._schedule = schedule
        self._known = self._facts()
        self._enter(schedule[0])

    def _facts(self) -> PassInputs:
        """Collect the pass inputs that follow from the plan, without measurements."""
        units = [(n, unit) for n, unit in enumerate(self.graphs.units) if self.graphs.released(n)]
        gathered = {n: unit.plan.bytes.gathered for n, unit in units}
        seconds = {n: float(unit.plan.sent["gather"]) for n, unit in units}
        persistent = sum(self._sharding.plan.persistent_bytes.values())
        all_units = list(enumerate(self.graphs.units))
        return PassInputs(
            gathered,
            seconds,
            self.settings.budget,
            persistent,
            self.plan.section.free_activation_threshold,
            states={
                n: unit.plan.bytes.optim for n, unit in all_units if unit.state_store.parks and unit.plan.bytes.optim
            },
            resting={
                n: unit.layout.shard_numel * unit.dtypes.param.itemsize for n, unit in units if unit.storage.rests
            },
            buckets=self.graphs.buckets(self.plan.bucket),
        )

    # ---- start and stop

    def start(self, shared: SharedBatch | None = None) -> None:
        """Compile the model's forward in place. Nothing is captured before it is called. `shared`: cuts what the model is given."""
        self._shared = shared
        _torch.keep_out("ds_zero.runtime", "ds_comm", "ds_monitor")
        unwatch_fsdp(self.model)  # ds-zero has sharded it, and a hook that is kept out ends a graph
        substitute_moves()
        self.graphs.hook_with(self.model, _torch.quiet)
        self.graphs.hide_gradients()
        params = [param for unit in self.graphs.units for param in unit.params]
        options = {**self.settings.kwargs, **({"fullgraph": True} if shared is not None and shared.in_graphs else {})}
        compiled = _torch.compile_model(self.model._call_impl, self._backend, params, **options)
        cut = tensor_parallel_of(self.model)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if cut is not None:
                cut.check_inputs(args, kwargs)
            if shared is None:
                return self._run(compiled, args, kwargs)
            part, tokens = shared.cut(args, kwargs)
            result = self._run(compiled, (), part)
            shared.check_wrapped()
            return shared.whole(result, tokens)

        self.model._compiled_call_impl = forward
        self._watch.enter_context(_torch.watch_compiles(self._begin_capture, self._end_capture))
        if not self.plan.section.double_buffer:
            self._watch.callback(self.graphs.in_flight, self.graphs.in_flight(0))

    def _run(self, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        before, self._inside = self._inside, True
        try:
            with self.graphs.forward():
                return compiled(*args, **kwargs)
        except _torch.CAPTURE_ERRORS as error:
            explained = self._explained(error)
            if explained is None:
                raise
            raise explained from error
        finally:
            self._inside = before

    def _explained(self, error: Exception) -> DsError | None:
        inner = getattr(error, "inner_exception", None)
        if isinstance(inner, DsError):
            return inner  # torch wraps what a backend raises
        if self._shared is None or not self._shared.in_graphs or inner is not None:
            return None
        return UnsupportedError(
            f"the pass autosp needs the model's forward in one graph, and the capture ends early: {' '.join(str(error).split())[:300]}",
            code="compile-cuts",
            fix="Take out what ends it, or use ds_parallel.sequence.DistributedAttention, which exchanges outside of graphs as well.",
        )

    def stop(self) -> None:
        """Restore the model's eager execution and release every captured graph. Between steps, on all ranks."""
        self.model._compiled_call_impl = None
        self._watch.close()
        self.graphs.keep(())
        self.graphs.sum_together(())
        self.graphs.stay()
        self.graphs.run_ahead(self._ahead)
        self.graphs.hook_with(self.model, lambda hook: hook)
        # torch keeps what it captured for as long as the model's class lives: nothing of it may lead to the run's memory and groups.
        for piece in self.pieces:
            piece.close()
        self.pieces = []
        self._shared = None
        del self.graphs, self._sharding, self._target, self.model, self.everyone, self._watch, self._capture

    def _begin_capture(self) -> None:
        if self._inside:  # else it is another engine's, or a backward graph, which `lower` accounts for
            self._begun = time.perf_counter()
            self._capture.enter_context(self.graphs.tracing())

    def _end_capture(self) -> None:
        if not self._inside:
            return
        self._capture.close()
        self.seconds += time.perf_counter() - self._begun
        for reason, count in _torch.break_reasons().items():
            if count > self._known_breaks.get(reason, 0):
                self._known_breaks[reason] = count
                if reason not in self.breaks:
                    _log.warning(
                        "a graph ends early, and hooks do what is between graphs: %s", " ".join(reason.split())[:300]
                    )
                self.breaks[reason] = self.breaks.get(reason, 0) + 1

    # ---- graphs

    def _backend(self, gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        del options
        if self._shared is not None:
            owned = {id(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())}
            self._shared.wrap(gm, [tensor is None or id(tensor) in owned for tensor in _torch.inputs_of(gm)])
        _torch.bind(gm, lambda tensor: self._sharding.find(tensor) is not None)
        frame = Frame(self, gm, self._place)
        if self.settings.backend == "eager":
            return _torch.eager_backend(gm, inputs, frame.inner)
        return _inductor().backend(gm, inputs, frame.inner, self.settings.patches)

    def _place(self, tensor: Tensor) -> ParamLocation | None:
        location = self._sharding.find(tensor)
        if location is None:
            return None
        # A gradient that somebody looks at on its way (a hook) goes by way of autograd.
        watched = bool(tensor._backward_hooks)
        return ParamLocation(location[0].number, location[1], location[0].spec.trained and not watched)

    def decide(self, piece: Lowered) -> Graph:
        """Apply the current schedule's passes to a piece and return its graph with actions."""
        graph = piece.facts
        for each in self._entry.passes:
            if each.decide is not None:
                graph = each.decide(graph, self._known)
        return graph

    def edit(self, piece: Lowered, gm: fx.GraphModule) -> fx.GraphModule:
        """Passes that edit graphs, in the form that DeepSpeed's have."""
        order = [
            (id(one.frame), any(p.backward for p in self.pieces if p.frame is one.frame))
            for one in self.pieces
            if not one.backward
        ]
        for each in self._entry.passes:
            edit = each.edit or EDITS.get(each.name)
            if edit is not None:
                number = id(piece.frame)
                edited = edit(
                    gm.graph,
                    number,
                    order,
                    {number: piece.facts},
                    self._known.budget,
                    {number: piece.params},
                    piece.backward,
                )
                if isinstance(edited, fx.Graph):
                    gm.graph = edited
                gm.graph.lint()
                gm.recompile()
        return gm

    def lower(self, piece: Lowered, gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """Lower a graph to code with the chosen backend."""
        if self.plan.section.debug_log:
            side = "backward" if piece.backward else "forward"
            for line in self._describe(piece.actions):
                _log.info("graph %d %s, step %d: %s", len(self.pieces), side, self.steps, line)
        begun = time.perf_counter()
        try:
            if self.settings.backend == "eager":
                return _torch.lower_eager(gm)
            return _inductor().lower(gm, piece.inputs, piece.context.fake, self.settings.patches, piece.options)
        finally:
            if not self._inside:  # else it is part of a capture
                self.seconds += time.perf_counter() - begun

    def add(self, piece: Lowered) -> None:
        """Register a captured graph so that later schedules re-lower it."""
        self.pieces.append(piece)

    def __str__(self) -> str:
        """Describe the passes of the next step, and their actions in every graph so far."""
        lines = [f"step {self.steps}: {' -> '.join(self.passes)}"]
        for piece in self.pieces:
            lines.append("  backward" if piece.backward else "  forward")
            lines += [f"    {line}" for line in self._describe(self.decide(piece))]
        return "\n".join(lines)

    def _describe(self, actions: Graph) -> list[str]:
        names = self._sharding.plan.units
        return actions.lines(lambda unit: names[unit].name)

    # ---- steps

    @property
    def passes(self) -> tuple[str, ...]:
        """Names of the passes of this step."""
        return tuple(each.name for each in self._entry.passes)

    @property
    def _next(self) -> PassEntry | None:
        return next((entry for entry in self._schedule if entry.step > self._entry.step), None)

    def _enter(self, entry: PassEntry) -> None:
        self._entry = entry
        following = self._next
        self.measuring = following is not None and following.measured and following.step == self.steps + 1
        self.graphs.run_ahead(0 if entry.has("prefetch") else self._ahead)
        self.graphs.keep(self._known.saved if entry.has("keep") else ())
        self.graphs.sum_together(self._known.buckets if entry.has("bucket") else ())
        if entry.has("offload_opt_states") or entry.has("offload_opt_states_all"):
            self.graphs.park(pin=self.plan.section.offload_activation_pin_memory)
        else:
            self.graphs.stay()
        for piece in self.pieces:
            piece.forget()

    def stepped(self) -> None:
        """Count a finished step and switch to the passes that are due. Collective where other passes are due."""
        self.steps += 1
        following = self._next
        if following is None:
            return
        if following.step <= self.steps:
            if following.measured:
                self._known = self._agree()
            self._enter(following)
            _log.info("compiled step %d: %s", self.steps, " -> ".join(self.passes))
        else:
            self.measuring = following.measured and following.step == self.steps + 1

    def _agree(self) -> PassInputs:
        """Merge the measurements of all ranks: the longest all-gathers, the highest peak. Collective."""
        seconds: dict[int, float] = {}
        for piece in self.pieces:
            for unit, took in piece.seconds.items():
                seconds[unit] = max(took, seconds.get(unit, 0.0))
        sides = [
            {a.unit for p in self.pieces if p.backward is side for a in p.actions.actions if a.verb is GraphVerb.NEED}
            for side in (False, True)
        ]
        peak = max((max(piece.facts.live(), default=0) for piece in self.pieces), default=0)
        gathered = self._known.gathered
        passing = max(
            (max(p.actions.resident(lambda u: gathered.get(u, 0)), default=0) for p in self.pieces), default=0
        )
        local = {
            "seconds": {str(unit): took for unit, took in seconds.items()},
            "both": sorted(sides[0] & sides[1]),
            "peak": peak + passing,
            "budget": self.settings.budget,
        }
        everyone: list[dict[str, Any]] = comm.all_gather_json(local, self.everyone, unit="passes")
        both = frozenset.intersection(*(frozenset(one["both"]) for one in everyone))
        longest = {u: max(float(one["seconds"].get(str(u), 0.0)) for one in everyone) for u in gathered}
        budgets = [one["budget"] for one in everyone if one["budget"] is not None]
        known = replace(
            self._known,
            seconds=longest,
            both=both,
            peak=max(one["peak"] for one in everyone),
            budget=min(budgets, default=None),
        )
        return replace(known, saved=choose_kept(known))


def _inductor() -> ModuleType:
    """Import torch's compiler, for the runs that use it."""
    return import_module("ds_engine.compiling._inductor")
