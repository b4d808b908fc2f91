"""The training engine: it holds components and calls them in the order of the plan's program.

Words: a *microbatch* is one forward and backward; a *step* is one optimizer update. Which backwards reduce gradients is
written in the program (`plan.program`); the three-call loop looks the current action up, `train_batch` runs the program.
There is no other state that says where a step ends.

    loss = engine(batch); engine.backward(loss); engine.step()      # once per microbatch
    result = engine.train_batch()                                   # all microbatches of a step

Both give the same parameters. Calls that are collective say so; every rank makes them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, NoReturn, SupportsIndex, TypeVar

import torch
from torch import Tensor, nn

import ds_monitor
from ds_config.errors import PlanError, UnsupportedError
from ds_engine.all_or_nothing import anywhere
from ds_engine.batch import BatchRequest
from ds_engine.batches import BatchSource
from ds_engine.checkpoints import keep_near
from ds_engine.compiling.compiled_run import CompiledRun
from ds_engine.compiling.schedule_passes import Contract
from ds_engine.components import Components, RunCounters
from ds_engine.deepspeed_checkpoints import load, save
from ds_engine.device_placement import to_device
from ds_engine.executor import Passes
from ds_engine.full_state import full_state, load_whole, save_whole, shared_state
from ds_engine.garbage_collection import pause_collector
from ds_engine.loader import LoaderRole, ResumableLoader, loader_of
from ds_engine.loss_total import LossAccumulator, SumLoss, loss_of
from ds_engine.lr_schedules import advance, momentum_of, set_momentum, set_rates
from ds_engine.mixed_precision import buffer_note
from ds_engine.plan import Plan
from ds_engine.planner import rebatched
from ds_engine.pretrained import SavesWhole
from ds_engine.result import StepResult
from ds_engine.step_telemetry import RunStatus
from ds_engine.step_totals import gain_of, settle, totals_after
from ds_engine.uneven_inputs import WeightedBatch
from ds_engine.whole_values import KnownState
from ds_parallel.sequence.part_check import check_parts
from ds_parallel.tensor import tensor_parallel_of
from ds_pipe import Action
from ds_pipe.staged import evaluating
from ds_zero import ShardedModel, ShardedOptimizer
from ds_zero.runtime.suspend import KINDS

__all__ = ["Engine"]

F = TypeVar("F")


class Engine(nn.Module):
    """Runs a plan on a model: the plan, and the components made from it. Made by `ds_engine.initialize`.

    Unknown attributes are looked up in the model.

    Attributes:
        plan: What was decided; print it.
        module: The model.
        optimizer: A `torch.optim.Optimizer` over shards, or None.
        lr_scheduler: What advances the learning rate after each applied step, or None.
        counters: How far the run is.
        last: What the last call of `step` did; None before the first.
        activations: What `ds_parallel.checkpoint` in the model's forward means.
        torn: What a load that met damaged data has changed in part; nothing goes on with it until a load succeeds.
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
        self.torn: set[str] = set()
        self.activations, self._applied = components.activations, components.applied
        self._executor, self._averaging = components.executor, components.mesh["gradient"]
        self._telemetry, self._run = components.telemetry, components.run
        self._followers, self._near = components.followers, components.near
        self._compilation = CompiledRun(
            self.module, self._sharding, plan.compiling, self.mesh["world"], components.shares
        )
        self._health = components.health
        if self.optimizer is not None:
            # A method of the engine would be a circle, and the engine would never end by itself.
            self.optimizer.judge = self._health.nonfinite
            self.optimizer.before_update = self.checkpointer.before_update
            self.optimizer.gain = gain_of(plan, scaled=False)
        self._thaws = anywhere(self.mesh)(self.optimizer is not None and self.optimizer.may_thaw)
        self._autocast = _autocast(plan.casting.autocast, self.device)
        self._backwards = self._own_backwards()
        self._position = 0  # which microbatch of the program comes next
        self._ledger = LossAccumulator()
        cut = self.plan.residency.shard_params or self.mesh["tensor"].size > 1
        self._known, self._unchecked = KnownState(), self.mesh["sequence"].size > 1
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

    # ---- the loop of three calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on inputs that are moved to its device, and cast if the plan says so."""
        dtype = self.plan.casting.inputs
        self._present("forward")
        self._intact("forward")
        self._compilation.called()
        if self.module.training:
            kwargs = {**self.plan.arguments(self.counters.steps), **kwargs}
        with self._telemetry.phase("forward", self.module), self._as_planned():
            args, kwargs = to_device(args, self.device, dtype), to_device(kwargs, self.device, dtype)
            if self.module.training and torch.is_grad_enabled():
                self._follow_requires_grad(bool)
                self._health.forward(args, kwargs)
                if self._unchecked and not self._compilation.active:
                    check_parts(self.module, kwargs, self.mesh["sequence"], args)
                self._unchecked = False
            try:
                return self.module(*args, **kwargs)
            except RuntimeError as error:
                if (note := buffer_note(self.module, self.plan.precision, error)) is not None:
                    error.add_note(note)
                raise

    def backward(self, loss: Tensor | SumLoss, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Accumulate the gradients of one microbatch's loss, and reduce them if the program says so.

        Args:
            loss: Mean loss (scalar with a graph), or a SumLoss.
            retain_graph: As in `Tensor.backward`.
            scale_wrt_gas: Whether the loss is divided by the number of microbatches; False if the caller did it.
        Returns:
            The loss as it was differentiated, without the loss scale; detached.
        Collective when the program reduces here.
        """
        with self._reducing(self.next_backward()):
            part, start = self._start(loss, scale_wrt_gas)
            if start.numel() != 1 or not start.requires_grad:
                raise PlanError(
                    f"backward() was called with a loss of shape {tuple(start.shape)}"
                    + ", which depends on no parameter that is trained" * (not start.requires_grad),
                    code="loss-missing",
                    fix="Pass a scalar, computed from the engine's outputs with gradients: outside of no_grad, not detached.",
                )
            start.backward(retain_graph=retain_graph)
        self._note(loss, scale_wrt_gas)
        return part.detach()

    def next_backward(self) -> Action:
        """Return the schedule's action for the next backward, for subclasses whose caller decides where a step ends."""
        if self.plan.managed:
            return self._backwards[self._position]
        return replace(self._backwards[0], reduce=self.plan.residency.shard_grads)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> StepResult:
        """End a microbatch; at the last one of the program, update the parameters and advance the learning rate.

        Args:
            lr_kwargs: Passed to the scheduler's `step`; one that wants a number and is given nothing gets the batch size.
        Collective at the last microbatch.
        Raises:
            PlanError: no backward began since the last call ("engine-no-backward").
            TrainingError: the numbers went wrong, and the configuration says that the run ends there; see `HealthWatch.step`.
        """
        self._intact("step")
        if not self._health.moved(self._trains("step").backwards):
            self._no_backward()
        last = not self.plan.managed or self.is_gradient_accumulation_boundary()
        self.counters.micro_steps += 1
        self._position += 1
        result = self._update(lr_kwargs or {}) if last else StepResult(self.counters.steps, applied=False)
        self.last = result
        return result

    def _no_backward(self) -> None:
        raise PlanError(
            "step() was called, and no backward has begun since the last step()",
            code="engine-no-backward",
            fix="Call engine.backward(loss) before each step().",
        )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current microbatch is the last of its step; never known in advance where the loop decides."""
        return self.plan.managed and self._position == len(self._backwards) - 1

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients of backwards inside without reducing, at every ZeRO stage; `step` reduces the rest.

        A rank then holds unsharded gradients: 4 bytes a parameter more at stages 2 and 3.
        """
        return self._trains("no_sync").reduction(False)

    # ---- whole steps

    def train_batch(self, data_iter: Iterator[Any] | Iterable[Any] | None = None) -> StepResult:
        """Run the program: every microbatch of one step, then the update. Collective.

        Args:
            data_iter: Yields microbatches; by default the engine's own loader. What can only be iterated over (a loader, a list) goes
                on where the last call with it ended, epoch after epoch. A dict is passed to the model as keywords, a tuple or
                list as positional arguments.
        Raises:
            PlanError: called between the microbatches of a step ("engine-call-order"); no data ("data-missing").
            StopIteration: `data_iter` ended within the step, whose gradients are dropped.
        """
        self._trains("train_batch")
        self._intact("train_batch")
        self._between_steps("train_batch() was called")
        self._follow_requires_grad(anywhere(self.mesh) if self._thaws else bool)
        data = self._feed.stream(data_iter)
        try:
            self._executor.train(self.plan.program.ranks[self.mesh["pipe"].rank], data, self._passes())
            self.counters.micro_steps += len(self._backwards)
            result = self._update({})
        except BaseException:
            self._drop_step()
            raise
        self.last = result
        return result

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any], num_micro_batches: int | None = None) -> float:
        """Compute the mean loss over microbatches and ranks, in evaluation mode and without gradients. Collective.

        Args:
            data_iter: Yields microbatches, the same number on every rank.
            num_micro_batches: Number of microbatches; by default that of a training step.
        """
        self._intact("eval_batch")
        count = num_micro_batches or len(self._backwards)
        ledger = LossAccumulator()
        with evaluating(self.module):
            for loss in self._executor.evaluate(count, iter(data_iter), self._passes()):
                ledger.add(loss)
        totals = ledger.close(self._averaging)
        self._telemetry.pause()
        return float("nan") if totals is None else float(totals.loss)

    # ---- data

    @property
    def training_dataloader(self) -> ResumableLoader | Any | None:
        """Microbatches of this rank, or None. Set it to read another loader, whose position checkpoints do not know."""
        return self._feed.loader

    @training_dataloader.setter
    def training_dataloader(self, loader: Iterable[Any] | None) -> None:
        self._feed.replace(loader)

    def deepspeed_io(
        self, dataset: Any, batch_size: int | None = None, route: str = "train", **options: Any
    ) -> ResumableLoader:
        """Build a loader of this rank's microbatches over a map-style dataset.

        Args:
            batch_size: Samples a microbatch; by default that of the plan.
            route: `train` shuffles; `eval` and `predict` keep the dataset's order.
            options: Passed to torch's DataLoader (`collate_fn`, `num_workers`, ...).
        """
        return loader_of(self.plan, self.mesh["data"], dataset, LoaderRole(route, batch_size), options)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Take another number of microbatches a step, from the next step on. Raises PlanError if it does not fit."""
        self._rebatch(BatchRequest(train_batch_size, self.plan.batch.micro))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Take larger or smaller microbatches; the engine's loader gives them from its next iteration on."""
        self._rebatch(BatchRequest(None, micro_batch_size, self.plan.batch.accumulation))

    def close(self) -> None:
        """Give the model back whole, take hooks and sinks away. Collective. The engine is not usable afterwards."""
        self.resume()
        for saves in self._saves:
            saves.close()
        self.checkpointer.close()
        if self._near is not None:
            self._near.close()
        self._telemetry.close()
        self._compilation.close()
        self._applied.undo()
        ds_monitor.detach(self._run.sinks)
        self._feed.close()
        self._resume_gc()

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
        """Return the momentum of each parameter group: its betas, or its momentum where it has no betas, or 0."""
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
        self._intact("full_state_dict")
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
        """Load such a dict; a rank whose own is empty takes that of the first rank that has one. Collective. Returns missing and unexpected keys."""
        self._present("load_full_state_dict")
        return load_whole(self.module, shared_state(state, self.mesh["world"]), strict=strict)

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
        self._intact("save_checkpoint")
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
        load_module: bool = True,
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
            load_module: False leaves parameters and buffers as they are.
        Returns:
            Path and client state; (None, None) when the directory holds no complete checkpoint.
        Raises:
            CheckpointError: there is no such directory or tag, it is damaged, or it does not fit this model; a class in its client
                state is not imported here, or has changed ("ckpt-client-class"). The run is as it was; where damage was found within
                the data, weights and optimizer are of two states, and are refused until a load succeeds ("engine-torn").
        """
        parts = {
            "weights": load_module,
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
        with self._run:
            ds_monitor.set_step(self.counters.steps, self.counters.samples)
        for follower in self._followers:
            follower.resume(max(self.counters.steps - self.counters.skipped, 0))

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

    def _intact(self, what: str) -> None:
        if self.torn:
            raise PlanError(
                f"{what}() was called after a load that failed when it had changed part of: {', '.join(sorted(self.torn))}",
                code="engine-torn",
                fix="Load another checkpoint; the error of that load names what is damaged.",
            )

    def _groups(self, what: str) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._trains(what).param_groups
        return groups

    def _follow_requires_grad(self, anywhere: Callable[[bool], bool]) -> None:
        if self.optimizer is not None:
            self.optimizer.follow_requires_grad(anywhere)
            if self.plan.zero is not self.sharding.plan:  # units were planned anew
                self.plan = replace(self.plan, zero=self.sharding.plan)

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

    def _rebatch(self, request: BatchRequest) -> None:
        self._between_steps("changing the batch size")
        self.plan = rebatched(self.plan, request)
        self._backwards = self._own_backwards()
        self._feed.rebatch(self.plan.batch.micro, self.plan.batch.train)

    def _call(self, batch: Any) -> Any:
        if isinstance(batch, WeightedBatch):
            return batch.weigh(loss_of(self._call(batch.batch)))
        if isinstance(batch, Mapping):
            return self(**batch)
        return self(*batch) if isinstance(batch, tuple | list) else self(batch)

    def _passes(self) -> Passes:
        """Return the interface that the executor uses of this engine."""
        return _Passes(self)

    @contextmanager
    def _as_planned(self) -> Iterator[None]:
        with self._autocast(), self.activations.active():
            yield

    def _reducing(self, action: Action) -> AbstractContextManager[None]:
        """Time the backwards inside, and reduce their gradients if the action says so."""
        return _both(self._telemetry.phase("backward"), self._trains("backward").reduction(action.reduce))

    def _start(self, loss: Tensor | SumLoss, divide: bool = True) -> tuple[Tensor, Tensor]:
        """Return a loss as its part of the step's loss, and the scaled scalar that backward starts from."""
        value = loss.total if isinstance(loss, SumLoss) else loss
        if not isinstance(value, Tensor):
            raise PlanError(
                f"backward() was called with a {type(value).__name__} where a scalar loss is needed",
                code="loss-missing",
                fix="Pass the tensor: outputs.loss of a model of transformers.",
            )
        part = value / len(self._backwards) if divide else value
        before = part / self.plan.predivide if self.plan.predivide != 1.0 else part
        optimizer = self._trains("backward")
        optimizer.gain = gain_of(self.plan, scaled=True)
        return part, optimizer.scale(before)

    def _note(self, loss: Tensor | SumLoss, divide: bool = True) -> None:
        self._health.loss(loss.total if isinstance(loss, SumLoss) else loss)
        self._ledger.add(loss if divide or isinstance(loss, SumLoss) else loss * len(self._backwards))

    def _update(self, lr_kwargs: Mapping[str, Any]) -> StepResult:
        with self._run:
            return self._updated(lr_kwargs)

    def _updated(self, lr_kwargs: Mapping[str, Any]) -> StepResult:
        optimizer, counters, feed = self._trains("step"), self.counters, self._feed
        samples = feed.samples() or self._samples(self._ledger.losses)
        totals = settle(self._ledger, optimizer, self.plan, self._averaging, self.device)
        lr = tuple(self.get_lr())
        self.checkpointer.before_update()
        self._health.step_number = counters.steps + 1
        with self._telemetry.phase("step"):
            optimizer.step()
        if optimizer.keeps_gradients:
            optimizer.zero_grad()
        self._position, waited_s, report = 0, feed.complete(), optimizer.last
        totals, skipped = totals_after(optimizer, totals), report is not None and report.skipped
        tokens = 0 if totals is None else int(totals.count or 0)
        counters.add(samples=samples, tokens=tokens, skipped=skipped)
        advance(self.lr_scheduler, lr_kwargs, applied=not skipped, samples=samples)
        for follower in () if skipped else self._followers:
            follower.step()
        self._compilation.stepped()
        result = StepResult(
            step=counters.steps,
            applied=not skipped,
            skipped=skipped,
            norm=report.norm if report else None,
            scale=report.scale if report else 1.0,
            lr=lr,
            samples=samples,
            tokens=tokens,
            timings=self._telemetry.timings(),
            waited_s=waited_s,
            mean=totals.loss if totals else None,
        )
        if self._near is not None:
            keep_near(self, self._near)
        momentum = momentum_of(optimizer.param_groups)
        standing = RunStatus(counters.samples, counters.skipped, counters.micro_steps, feed.epoch, momentum)
        self._telemetry.step(result, standing)
        self._health.step(result)
        return result

    def _samples(self, losses: int) -> int:
        """Samples of the step over all ranks; where the caller decides where it ends, by the number of losses."""
        batch = self.plan.batch
        return batch.train if self.plan.managed else batch.train // batch.accumulation * losses


def _autocast(dtype: torch.dtype | None, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    return nullcontext if dtype is None else partial(torch.autocast, device.type, dtype)


@contextmanager
def _both(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield


@dataclass(frozen=True, slots=True)
class _Passes:
    """What an executor uses of its engine; see `executor.Passes`."""

    engine: Engine

    def call(self, batch: Any) -> Any:
        return self.engine._call(batch)

    def start(self, loss: Tensor | SumLoss) -> Tensor:
        self.engine._note(loss)
        return self.engine._start(loss)[1]

    def backward(self, action: Action) -> AbstractContextManager[None]:
        return self.engine._reducing(action)

    def forward(self) -> AbstractContextManager[None]:
        return self.engine._as_planned()

    def place(self, value: Any, inputs: bool) -> Any:
        return to_device(value, self.engine.device, self.engine.plan.casting.inputs if inputs else None)

    def expect_gradients(self) -> None:
        self.engine._trains("backward").scale(torch.zeros((), device="cpu"))

    def reduce(self) -> None:
        self.engine._trains("backward").reduce()
