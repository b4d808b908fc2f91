"""What an engine is between two steps: what it holds, what may be asked of it, what is saved, and where its state lies.

`ds_engine.engine.Engine` adds the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, NoReturn, SupportsIndex, TypeVar

import torch
from torch import Tensor, nn

import ds_monitor
from ds_config.errors import PlanError, UnsupportedError
from ds_engine.batches import BatchSource
from ds_engine.compiling.compiled_run import CompiledRun
from ds_engine.compiling.schedule_passes import Contract
from ds_engine.components import Components, RunCounters
from ds_engine.deepspeed_checkpoints import load, save
from ds_engine.full_state import full_state, load_whole, save_whole
from ds_engine.garbage_collection import pause_collector
from ds_engine.loss_total import LossAccumulator
from ds_engine.lr_schedules import momentum_of, set_momentum, set_rates
from ds_engine.plan import Plan
from ds_engine.pretrained import SavesWhole
from ds_engine.result import StepResult
from ds_engine.whole_values import KnownState
from ds_parallel.tensor import tensor_parallel_of
from ds_pipe import Action
from ds_zero import ShardedModel, ShardedOptimizer
from ds_zero.runtime.suspend import KINDS

__all__ = ["EngineState"]

F = TypeVar("F")


class EngineState(nn.Module):
    """A plan and the components made from it.

    Unknown attributes are looked up in the model.

    Attributes:
        plan: What was decided; print it.
        module: The model.
        optimizer: A `torch.optim.Optimizer` over shards, or None.
        lr_scheduler: What advances the learning rate after each applied step, or None.
        counters: How far the run is.
        last: What the last call of `step` did; None before the first.
        activations: What `ds_parallel.checkpoint` in the model's forward means.
    """

    def __init__(self, plan: Plan, components: Components) -> None:
        super().__init__()
        self.plan = replace(plan, zero=components.sharding.plan)
        self.module = components.module
        self.optimizer, self._sharding = components.optimizer, components.sharding
        self.lr_scheduler = components.scheduler
        self._feed = BatchSource(components.loader)
        self.mesh, self.device = components.mesh, components.device
        self.counters = RunCounters()
        self.last: StepResult | None = None
        self.checkpointer = components.checkpointer
        self.activations, self._applied = components.activations, components.applied
        self._executor, self._averaging = components.executor, components.mesh["gradient"]
        self._telemetry, self._sinks = components.telemetry, components.sinks
        self._followers, self._near = components.followers, components.near
        self._compilation = CompiledRun(
            self.module, self._sharding, plan.compiling, self.mesh["world"], components.shares
        )
        self._health = components.health
        if self.optimizer is not None:
            self.optimizer.judge = (
                self._health.nonfinite
            )  # not a method of the engine, which would never end by itself then
            self.optimizer.before_update = self.checkpointer.before_update
        self._autocast = _autocast(plan.casting.autocast, self.device)
        self._backwards = self._own_backwards()
        self._position = 0  # which microbatch of the program comes next
        self._ledger = LossAccumulator()
        cut = self.plan.residency.shard_params or self.mesh["tensor"].size > 1
        self._known = KnownState()
        self._saves = SavesWhole.all_in(self) if cut else []
        self._resume_gc = pause_collector(self, plan.pause_gc)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise
            return getattr(module, name)

    # ---- what a loop asks

    @property
    def sharding(self) -> ShardedModel:
        """The units of the model; others after the optimizer has replanned."""
        return self._sharding if self.optimizer is None else self.optimizer.sharding

    @property
    def global_steps(self) -> int:
        """Optimizer steps done, skipped ones included."""
        return self.counters.steps

    @property
    def global_samples(self) -> int:
        """Samples trained on, over all ranks."""
        return self.counters.samples

    @property
    def micro_steps(self) -> int:
        """Microbatches done on this rank."""
        return self.counters.micro_steps

    @property
    def skipped_steps(self) -> int:
        """Steps whose update was left out."""
        return self.counters.skipped

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UnsupportedError(
            f"a copy or a pickle of a {type(self).__name__}, which holds process groups, hooks and threads of this process",
            code="engine-copy",
            fix="Copy engine.module, or write files with save_checkpoint() or save_16bit_model().",
        )

    def follower(self, kind: type[F]) -> F | None:
        """Return the follower of a class, for example a compression schedule; None if the engine has none."""
        return next((follower for follower in self._followers if isinstance(follower, kind)), None)

    def was_step_applied(self) -> bool:
        """Whether the last call of `step` changed the parameters."""
        return self.last is not None and self.last.applied

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's averaged gradient before clipping."""
        return None if self.last is None else self.last.norm

    @property
    def tokens(self) -> int:
        """What sum losses were divided by so far, over all ranks."""
        return self.counters.tokens

    def get_lr(self) -> list[float]:
        """Return the current learning rate of each parameter group."""
        return [float(group["lr"]) for group in self._groups("get_lr")]

    def set_lr(self, lr: float | Sequence[float]) -> None:
        """Set the learning rate of every parameter group, or one for each. A scheduler overwrites it at its next step."""
        set_rates(self._groups("set_lr"), lr)

    def get_mom(self) -> list[Any]:
        """Return the momentum of each parameter group: its betas, or its momentum where it has no betas."""
        return momentum_of(self._groups("get_mom"))

    def set_mom(self, momentum: Any) -> None:
        """Set `betas` (a pair) or `momentum` (a number) of every parameter group that has it."""
        set_momentum(self._groups("set_mom"), momentum)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that were not stepped. Needless after a step; does nothing where nothing is trained."""
        if self.optimizer is not None:
            self._trains("zero_grad").zero_grad(set_to_none)

    # ---- the model's values, and where its state is

    def full_state_dict(self, dtype: torch.dtype | None = None, exclude_frozen: bool = False) -> dict[str, Tensor]:
        """Return the model's full state dict in host memory on rank 0, {} elsewhere. Collective.

        See `full_state.full_state`.
        """
        lead = self.sharding.group.rank == 0 and self.mesh["tensor"].rank == 0
        return self.whole_state_of(self.module, lead=lead, dtype=dtype, exclude_frozen=exclude_frozen)

    def whole_state_of(self, module: nn.Module, *, lead: bool, **options: Any) -> dict[str, Tensor]:
        """Return the full state dict of a module inside the model, on the ranks with `lead`. Collective.

        See `full_state.full_state`.
        """
        self._present("full_state_dict")
        if self.optimizer is not None:
            self.optimizer.synchronise()
        state = full_state(module, self.sharding, lead=lead, **options)
        if module is self.module and options.get("dtype") is None:
            self._known.remember(module, state)
        return state

    def known_state_of(self, module: nn.Module) -> dict[str, Tensor] | None:
        """Return the full state dict of a module inside the model from what `full_state_dict` last gave this rank.

        None if the caller does not have it any more, or weights have changed since.
        """
        return self._known.of(self.module, module)

    def is_gathered(self, module: nn.Module) -> bool:
        """Whether a `GatheredParameters` keeps parameters of a module inside the model whole, which are not parts of larger tensors."""
        if self.mesh["tensor"].size > 1:
            return False
        inside = set(map(id, module.parameters()))
        return any(unit.pins and not inside.isdisjoint(map(id, unit.params)) for unit in self.sharding.units)

    def load_full_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        """Load such a dict, given alike on every rank. Collective. Returns missing and unexpected keys."""
        self._present("load_full_state_dict")
        return load_whole(self.module, state, strict=strict)

    def save_16bit_model(
        self,
        save_dir: str | PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
        dtype: torch.dtype | None = None,
    ) -> bool:
        """Write the whole model into one file, at any ZeRO stage. Collective.

        Args:
            save_filename: Ends in .safetensors, or torch's pickle is written.
            dtype: Format of the values; None is the one the model is trained in.
        """
        state = self.full_state_dict(dtype, exclude_frozen_parameters)
        save_whole(state, Path(save_dir) / save_filename, self.mesh["world"])
        return True

    def offload_states(self, include: Collection[str] | None = None, pin_memory: bool = True) -> None:
        """Move state to the host between steps; `reload_states` brings it back, and nothing runs before that.

        Args:
            include: Of `optimizer`, `masters`, `parameters`, `gradients`; None is all.
            pin_memory: Into page-locked memory.
        """
        kinds = set(KINDS if include is None else include)
        here = kinds - {away.kind for away in self.sharding.away}
        (self.optimizer or self.sharding).suspend(here, pin_memory=pin_memory)

    def reload_states(self) -> None:
        """Bring back what `offload_states` moved."""
        self.sharding.resume()

    def suspend(self) -> None:
        """Finish saves and give back the device memory of everything, for another program to use the device."""
        self.checkpointer.wait()
        self.offload_states()

    def resume(self) -> None:
        """Go on after `suspend`."""
        self.reload_states()

    def compile(
        self,
        backend: str = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Sequence[tuple[int, Sequence[Any]]] | None = None,
        budget_bytes: int | None = None,
        **options: Any,
    ) -> None:
        """Compile the model's forward in place with torch.compile; the first calls take longer. Same call on every rank.

        With `compile.deepcompile` the plan's gathers, releases and reductions become operations in the graphs.

        Args:
            backend: With `compile.deepcompile` inductor, or eager, which runs graphs without compiling them.
            compile_kwargs: Of `torch.compile`, as `options`, too.
            schedule: (step, passes) instead of the plan's: from that step on these names, or functions, and no others.
            budget_bytes: Of device memory, for passes that choose by memory; None: no limit.
        Raises:
            UnsupportedError: layers run two half batches in turn, which no graph can say ("tensor-halves").
        """
        cut = tensor_parallel_of(self.module)
        if cut is not None and cut.plan.halves:
            raise UnsupportedError(
                "compile() with tensor_parallel.half_batches: each layer runs in two threads in turn, which no graph can say",
                code="tensor-halves",
                fix="Leave half_batches out; the compiler's own passes move sums.",
            )
        self._compilation.compile(backend, {**(compile_kwargs or {}), **options}, schedule, budget_bytes)

    def register_compile_pass(self, name: str, fn: Callable[..., Any], contract: Contract | None = None) -> None:
        """Give a name to a pass for `compile(schedule=...)`.

        Args:
            fn: Called with a graph (`torch.fx.Graph`), its number, all numbers with whether they have a backward, what passes know of it,
                the memory budget, its parameters, and whether it is a backward graph; edits it, or returns another.
            contract: What it requires, provides and excludes.
        """
        self._compilation.register(name, fn, contract)

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._compilation.active

    @property
    def compiled(self) -> CompiledRun:
        """Passes, graphs, breaks and times of compilation."""
        return self._compilation

    # ---- checkpoints

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        exclude_frozen_parameters: bool = False,
    ) -> str:
        """Save everything a run needs to go on, on any number of ranks. Collective. Returns the checkpoint's path.

        With `checkpoint.saving.asynchronous` it is written behind the next steps; `close` and the next save wait for it.

        Args:
            save_dir: Directory of checkpoints; the new one is complete or not there at all.
            tag: Its name; `global_step<n>` by default.
            client_state: Values of the caller's own, see `ds_ckpt.client_state`; rank 0's is stored.
            exclude_frozen_parameters: Leave out parameters that need no gradient; a load then leaves them as they are.
        Raises:
            UnsupportedError: on every rank, before anything is written: the client state has values that cannot be stored.
            CheckpointError: on every rank when it is raised on one; older checkpoints are untouched.
        """
        name = tag or f"global_step{self.counters.steps}"
        return save(self, fspath(save_dir), name, client_state or {}, frozen=not exclude_frozen_parameters)

    def load_checkpoint(
        self,
        load_dir: str | PathLike[str],
        tag: str | None = None,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        load_data_state: bool = True,
        strict: bool | Literal["model"] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint, whatever number of ranks and ZeRO stage wrote it. Collective.

        Args:
            load_dir: Directory of checkpoints.
            tag: Which; the newest complete one by default.
            load_optimizer_states, load_lr_scheduler_states, load_data_state: False begins that part anew.
            load_module_only: Only the parameters and buffers.
            strict: By default the run goes on with what checkpoint and run have in common: a parameter that is new, thawed or
                was never trained begins as it is, and a line names it, as well as what is not used. True refuses every
                tensor that only one of them has; "model" those of the model. False also accepts an optimizer of another
                class than the saved one, whose state then begins anew.
        Returns:
            Path and client state; (None, None) when the directory holds no complete checkpoint.
        Raises:
            CheckpointError: there is no such directory or tag, it is damaged, or it does not fit this model; a class in its client
                state is not imported here, or has changed ("ckpt-client-class"). The run is as it was.
        """
        parts = {
            "optimizer": load_optimizer_states and not load_module_only,
            "scheduler": load_lr_scheduler_states and not load_module_only,
            "data": load_data_state and not load_module_only,
            "run": not load_module_only,
            "exact": strict is True,
            "model": strict == "model",
            "any-optimizer": strict is False,
        }
        self._feed.restart()
        if self.optimizer is not None and not self.sharding.away:
            self._drop_step()
        wanted = frozenset(name for name, enabled in parts.items() if enabled)
        return load(self, fspath(load_dir), tag, wanted, self._near)

    def progress(self) -> dict[str, int]:
        """Return the counters at the end of the last step, as JSON values. Microbatches of an incomplete step are rerun."""
        return asdict(self.counters) | {
            "micro_steps": self.counters.micro_steps - self._position,
            "taken": self._feed.consumed,
        }

    def set_progress(self, saved: Mapping[str, int]) -> None:
        """Go on with these counters."""
        self._position, self._feed.consumed = 0, saved.get("taken", 0)  # another library's checkpoint does not say
        self.counters = RunCounters(**{name: value for name, value in saved.items() if name != "taken"})
        ds_monitor.set_step(self.counters.steps, self.counters.samples)
        for follower in self._followers:
            follower.resume(self.counters.steps - self.counters.skipped)

    def record(self) -> dict[str, Any]:
        """Return the configuration, as JSON values."""
        return self.plan.config.model_dump(mode="json")

    # ---- inside

    def _trains(self, what: str) -> ShardedOptimizer:
        if self.optimizer is None:
            raise PlanError(
                f"{what}() needs an optimizer, this engine has none",
                code="engine-no-optimizer",
                fix="Add an optimizer section, or pass optimizer= to initialize().",
            )
        self._present(what)
        return self.optimizer

    def _present(self, what: str) -> None:
        if self.sharding.away:
            kinds = ", ".join(sorted({away.kind for away in self.sharding.away}))
            raise PlanError(
                f"{what}() was called while state is away from the device: {kinds}",
                code="engine-suspended",
                fix="Call reload_states() or resume() first.",
            )

    def _groups(self, what: str) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._trains(what).param_groups
        return groups

    def _between_steps(self, what: str) -> None:
        if self._position:
            raise PlanError(
                f"{what} after {self._position} of {len(self._backwards)} microbatches of a step",
                code="engine-call-order",
                fix="Finish the step with backward() and step() first.",
            )

    def _own_backwards(self) -> tuple[Action, ...]:
        """Return the backward action of each microbatch: those of the rank's first stage, if it has several."""
        backwards = self.plan.program.backwards(self.mesh["pipe"].rank)
        return tuple(action for action in backwards if action.stage == backwards[0].stage)

    def _drop_step(self) -> None:
        """Forget the microbatches of a step that will not be complete."""
        self._trains("zero_grad").zero_grad()
        self._ledger, self._position = LossAccumulator(), 0
        self._health.drop()


def _autocast(dtype: torch.dtype | None, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    return nullcontext if dtype is None else partial(torch.autocast, device.type, dtype)
