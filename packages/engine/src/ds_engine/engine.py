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
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import ds_monitor
from ds_ckpt import NearCopies
from ds_ckpt.engines import Checkpointer
from ds_comm import Mesh
from ds_compress import CompressionScheduler
from ds_config.errors import PlanError, UnsupportedError
from ds_data.order import Lane
from ds_data.variable import VariableBatchSizeLR
from ds_engine.batch import BatchRequest
from ds_engine.checkpoints import keep_near, load_run, save_run
from ds_engine.executing import Executor
from ds_engine.exporting import load_whole, save_whole, whole_state
from ds_engine.foreign import draft_of, latest_tag, layout_of, translated, write_as_deepspeed
from ds_engine.health import HealthWatch
from ds_engine.loader import PackedLoader, ResumableLoader, make_loader
from ds_engine.losses import Ledger, SumLoss, Totals, loss_of
from ds_engine.parts import Follower
from ds_engine.placing import to_device
from ds_engine.plan import Plan
from ds_engine.planning import rebatched
from ds_engine.pretrained import SavesWhole
from ds_engine.reading import Order
from ds_engine.result import StepResult
from ds_engine.schedules import set_rates
from ds_engine.telemetry import Standing, Telemetry
from ds_engine.transforms import Applied
from ds_engine.uneven import Share
from ds_parallel import ActivationCheckpointing
from ds_pipe import Action
from ds_zero import ShardedOptimizer, Sharding
from ds_zero.offload.suspend import KINDS

__all__ = ["Components", "Counters", "Engine"]


@dataclass(slots=True)
class Components:
    """What an engine holds; made by `ds_engine.build`.

    Attributes:
        module: The model, on its device and sharded.
        optimizer: None for an engine that only evaluates.
        sharding: The units of the model.
        scheduler: Anything with `step`, `state_dict`, `load_state_dict`; None for a constant rate.
        loader: The training data; None when the caller brings it.
        mesh: The groups of this rank.
        device: Where the model is.
        telemetry: Tells of steps.
        checkpointer: Saves at once, or behind the next steps.
        activations: How calls are checkpointed.
        executor: Runs the program of this rank.
        health: Watches for numbers that go wrong.
        applied: The transforms that the model went through.
        followers: What goes on with each applied update.
        near: Copies on the nodes; None without `checkpoint.near`.
        sinks: Monitor sinks that this engine added and takes away when it is closed.
    """

    module: nn.Module
    optimizer: ShardedOptimizer | None
    sharding: Sharding
    scheduler: Any
    loader: ResumableLoader | None
    mesh: Mesh
    device: torch.device
    telemetry: Telemetry
    checkpointer: Checkpointer
    activations: ActivationCheckpointing
    executor: Executor
    health: HealthWatch
    applied: Applied
    followers: tuple[Follower, ...] = ()
    near: NearCopies | None = None
    sinks: tuple[ds_monitor.Sink, ...] = ()


@dataclass(slots=True)
class Counters:
    """How far a run is. Saved and resumed.

    Attributes:
        steps: Optimizer steps, skipped ones included.
        samples: Samples trained on, over all ranks.
        micro_steps: Calls of `step` on this rank, that is microbatches.
        skipped: Steps whose update was left out.
        tokens: What sum losses were divided by, over all ranks.
    """

    steps: int = 0
    samples: int = 0
    micro_steps: int = 0
    skipped: int = 0
    tokens: int = 0


class Engine(nn.Module):
    """Runs a plan on a model. Made by `ds_engine.initialize`.

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
        self._loader: ResumableLoader | None = components.loader
        self._brought: Iterable[Any] | None = None  # a loader that the caller put in its place
        self.mesh, self.device = components.mesh, components.device
        self.counters = Counters()
        self.last: StepResult | None = None
        self.checkpointer = components.checkpointer
        self.activations, self._applied = components.activations, components.applied
        self._executor, self._averaging = components.executor, components.mesh["gradient"]
        self._telemetry, self._sinks = components.telemetry, components.sinks
        self._followers, self._near = components.followers, components.near
        self._health = components.health
        if self.optimizer is not None:
            self.optimizer.judge = self._judge
        self._autocast = _autocast(plan.casting.autocast, self.device)
        self._backwards = self._own_backwards()
        self._position = 0  # which microbatch of the program comes next
        self._waited_s = 0.0  # for the caller's data, in this step
        self._taken = 0  # samples taken from the loader by the steps that are complete
        self._ledger = Ledger()
        self._stream: Iterator[Any] | None = None
        self._lent: tuple[Iterable[Any], Iterator[Any]] | None = None  # a loader of the caller's, and where it is
        cut = self.plan.residency.shard_params or self.mesh["tensor"].size > 1
        self._saves = SavesWhole.all_in(self) if cut else []

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
        if self.module.training:
            kwargs = {**self.plan.arguments(self.counters.steps), **kwargs}
        with self._telemetry.phase("forward", self.module), self._as_planned():
            args, kwargs = to_device(args, self.device, dtype), to_device(kwargs, self.device, dtype)
            if self.module.training and torch.is_grad_enabled():
                self._health.forward(args, kwargs)
            return self.module(*args, **kwargs)

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
            start.backward(retain_graph=retain_graph)
        self._note(loss, scale_wrt_gas)
        return part.detach()

    def next_backward(self) -> Action:
        """What the program says of the backward that comes next. For subclasses whose caller decides where a step ends."""
        if self.plan.managed:
            return self._backwards[self._position]
        return replace(self._backwards[0], reduce=self.plan.residency.shard_grads)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> StepResult:
        """End a microbatch; at the last one of the program, update the parameters and advance the learning rate.

        Args:
            lr_kwargs: Passed to the scheduler's `step`.
        Collective at the last microbatch.
        Raises:
            PlanError: no backward began since the last call ("engine-no-backward").
            TrainingError: the numbers went wrong, and the configuration says that the run ends there; see `HealthWatch.step`.
        """
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

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside accumulate without reducing, at every ZeRO stage; what is open is reduced in `step`.

        A rank then holds whole gradients: 4 bytes a parameter more at stages 2 and 3.
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
            PlanError: called between the microbatches of a step ("engine-order"); no data ("data-missing").
            StopIteration: `data_iter` ended within the step, whose gradients are dropped.
        """
        self._trains("train_batch")
        self._between_steps("train_batch() was called")
        data = self._data(data_iter)
        try:
            self._executor.train(self.plan.program.ranks[self.mesh["pipe"].rank], data, _Passes(self))
            self.counters.micro_steps += len(self._backwards)
            result = self._update({})
        except BaseException:
            self._drop_step()
            raise
        self.last = result
        return result

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any], num_micro_batches: int | None = None) -> float:
        """Mean loss over microbatches and ranks, in evaluation mode and without gradients. Collective.

        Args:
            data_iter: Yields microbatches, the same number on every rank.
            num_micro_batches: How many to take; by default those of one training step.
        """
        count = num_micro_batches or len(self._backwards)
        # One by one: a frozen BatchNorm evaluates in a model that trains.
        ledger, training = Ledger(), [module for module in self.module.modules() if module.training]
        self.module.eval()
        try:
            for loss in self._executor.evaluate(count, iter(data_iter), _Passes(self)):
                ledger.add(loss)
        finally:
            for module in training:
                module.training = True
        totals = ledger.close(self._averaging)
        self._telemetry.pause()
        return float("nan") if totals is None else float(totals.loss)

    # ---- data

    @property
    def training_dataloader(self) -> ResumableLoader | Any | None:
        """Microbatches of this rank, or None. Set it to read another loader, whose position checkpoints do not know."""
        return self._loader if self._brought is None else self._brought

    @training_dataloader.setter
    def training_dataloader(self, loader: Iterable[Any] | None) -> None:
        if isinstance(loader, ResumableLoader):
            self._loader, self._brought, self._taken = loader, None, loader.taken
        else:
            self._loader, self._brought, self._taken = None, loader, 0
        self._stream = None

    def deepspeed_io(
        self, dataset: Any, batch_size: int | None = None, route: str = "train", **options: Any
    ) -> ResumableLoader:
        """A loader of this rank's microbatches over a map-style dataset.

        Args:
            batch_size: Samples a microbatch; by default that of the plan.
            route: `train` shuffles; `eval` and `predict` keep the dataset's order.
            options: Passed to torch's DataLoader (`collate_fn`, `num_workers`, ...).
        """
        if route not in ("train", "eval", "predict"):
            raise UnsupportedError(
                f"there is no data route {route!r}", code="data-route", fix="Use train, eval or predict."
            )
        data = self.mesh["data"]
        lane = Lane(data.rank, data.size, batch_size or self.plan.batch.micro)
        if route != "train":
            return ResumableLoader(dataset, lane, Order(shuffle=False), options)
        return make_loader(self.plan, lane, dataset, options)

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
            client_state: JSON of the caller's own, the same on every rank.
            exclude_frozen_parameters: Leave out parameters that need no gradient; load with `load_module_strict=False`.
        Raises:
            CheckpointError: on every rank when it is raised on one; older checkpoints are untouched.
        """
        name, root = tag or f"global_step{self.counters.steps}", fspath(save_dir)
        foreign = self.plan.foreign
        layout = foreign and layout_of(self.plan.residency, self.mesh["data"], self.plan.precision.param, self.module)
        path = f"{root}/{draft_of(name) if foreign else name}"
        save_run(self, path, client_state or {}, frozen=not exclude_frozen_parameters)
        if not layout:
            return path
        self.checkpointer.wait()
        return write_as_deepspeed(root, name, layout, self.mesh["world"])

    def load_checkpoint(
        self,
        load_dir: str | PathLike[str],
        tag: str | None = None,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        load_data_state: bool = True,
        load_module_strict: bool = True,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint, whatever number of ranks and ZeRO stage wrote it. Collective.

        Args:
            load_dir: Directory of checkpoints.
            tag: Which; the newest complete one by default.
            load_optimizer_states, load_lr_scheduler_states, load_data_state: False begins that part anew.
            load_module_only: Only the parameters and buffers.
            load_module_strict: False takes what checkpoint and model have in common, and leaves the rest as it is.
        Returns:
            Path and client state; (None, None) when the directory holds no complete checkpoint.
        Raises:
            CheckpointError: there is no such directory or tag, it is damaged, or it does not fit this model.
        """
        parts = {
            "optimizer": load_optimizer_states and not load_module_only,
            "scheduler": load_lr_scheduler_states and not load_module_only,
            "data": load_data_state and not load_module_only,
            "run": not load_module_only,
            "partly": not load_module_strict,
        }
        self._stream = None
        if self.optimizer is not None and not self.sharding.away:
            self._drop_step()
        root, wanted = fspath(load_dir), frozenset(name for name, asked in parts.items() if asked)
        if not self.plan.foreign:
            return load_run(self, root, tag, wanted, self._near)
        tag = tag or latest_tag(root)
        with translated(root, tag, self.mesh["world"]) as copy:
            path, client = load_run(self, root, copy or tag, wanted)
        return (f"{root}/{tag}" if copy and path else path), client

    def progress(self) -> dict[str, int]:
        """The counters at the end of the last step, as JSON. Microbatches of a step that is not complete are run again."""
        return asdict(self.counters) | {"micro_steps": self.counters.micro_steps - self._position, "taken": self._taken}

    def set_progress(self, saved: Mapping[str, int]) -> None:
        """Go on with these counters."""
        self._position, self._taken = 0, saved.get("taken", 0)  # another library's checkpoint does not say
        self.counters = Counters(**{name: value for name, value in saved.items() if name != "taken"})
        ds_monitor.set_step(self.counters.steps, self.counters.samples)
        for follower in self._followers:
            follower.resume(self.counters.steps - self.counters.skipped)

    def record(self) -> dict[str, Any]:
        """The configuration, as JSON."""
        return self.plan.config.model_dump(mode="json")

    # ---- what a loop asks

    @property
    def sharding(self) -> Sharding:
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

    @property
    def compression_scheduler(self) -> Follower | None:
        """What moves the schedule of a compressed model on; None of another model."""
        return next((follower for follower in self._followers if isinstance(follower, CompressionScheduler)), None)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current microbatch is the last of its step; never known in advance where the loop decides."""
        return self.plan.managed and self._position == len(self._backwards) - 1

    def was_step_applied(self) -> bool:
        """Whether the last call of `step` changed the parameters."""
        return self.last is not None and self.last.applied

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last step's averaged gradient before clipping."""
        return None if self.last is None else self.last.norm

    @property
    def tokens(self) -> int:
        """What sum losses were divided by so far, over all ranks."""
        return self.counters.tokens

    def get_lr(self) -> list[float]:
        """Current learning rate of each parameter group."""
        return [float(group["lr"]) for group in self._groups("get_lr")]

    def set_lr(self, lr: float | Sequence[float]) -> None:
        """Set the learning rate of every parameter group, or one for each. A scheduler overwrites it at its next step."""
        set_rates(self._groups("set_lr"), lr)

    def get_mom(self) -> list[Any]:
        """Momentum of each parameter group: its betas, or its momentum where it has no betas."""
        return _momentum(self._groups("get_mom"))

    def set_mom(self, momentum: Any) -> None:
        """Set `betas` (a pair) or `momentum` (a number) of every parameter group that has it."""
        key = "betas" if isinstance(momentum, tuple | list) else "momentum"
        for group in self._groups("set_mom"):
            if key in group:
                group[key] = tuple(momentum) if key == "betas" else momentum

    def set_train_batch_size(self, train: int) -> None:
        """Take another number of microbatches a step, from the next step on. Raises PlanError if it does not fit."""
        self._rebatch(BatchRequest(train, self.plan.batch.micro))

    def set_train_micro_batch_size(self, micro: int) -> None:
        """Take larger or smaller microbatches; the engine's loader gives them from its next iteration on."""
        self._rebatch(BatchRequest(None, micro, self.plan.batch.accumulation))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that were not stepped. Needless after a step."""
        self._trains("zero_grad").zero_grad(set_to_none)

    # ---- the model's values, and where its state is

    def whole_state_dict(self, dtype: torch.dtype | None = None, exclude_frozen: bool = False) -> dict[str, Tensor]:
        """The model's state dict in host memory on rank 0, {} elsewhere. Collective. See `exporting.whole_state`."""
        lead = self.sharding.group.rank == 0 and self.mesh["tensor"].rank == 0
        return self.whole_state_of(self.module, lead=lead, dtype=dtype, exclude_frozen=exclude_frozen)

    def whole_state_of(self, module: nn.Module, *, lead: bool, **options: Any) -> dict[str, Tensor]:
        """The same of a model inside the model, on the ranks that say `lead`. Collective. See `exporting.whole_state`."""
        self._present("whole_state_dict")
        if self.optimizer is not None:
            self.optimizer.synchronise()
        return whole_state(module, self.sharding, lead=lead, **options)

    def load_whole_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        """Load such a dict, given alike on every rank. Collective. Returns missing and unexpected keys."""
        self._present("load_whole_state_dict")
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
        state = self.whole_state_dict(dtype, exclude_frozen_parameters)
        save_whole(state, Path(save_dir) / save_filename, self.mesh["world"])
        return True

    def offload_states(self, include: Collection[str] | None = None, pin_memory: bool = True) -> None:
        """Move state to the host between steps; `reload_states` brings it back, and nothing runs before that.

        Args:
            include: Of `optimizer`, `masters`, `parameters`, `gradients`; None is all.
            pin_memory: Into page-locked memory.
        """
        asked = set(KINDS if include is None else include)
        here = asked - {away.kind for away in self.sharding.away}
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

    def compile(self, backend: str = "inductor", **options: Any) -> None:
        """Compile the model's forward in place with torch.compile; the first calls take longer."""
        self.module.compile(backend=backend, **options)

    def close(self) -> None:
        """Give the model back whole, take hooks and sinks away. Collective. The engine is not usable afterwards."""
        self.resume()
        for saves in self._saves:
            saves.close()
        self.checkpointer.close()
        if self._near is not None:
            self._near.close()
        self._telemetry.close()
        self._applied.undo()
        ds_monitor.detach(self._sinks)
        self._sinks, self._stream, self._lent = (), None, None

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
                code="engine-away",
                fix="Call reload_states() or resume() first.",
            )

    def _groups(self, what: str) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._trains(what).param_groups
        return groups

    def _rebatch(self, asked: BatchRequest) -> None:
        self._between_steps("changing the batch size")
        self.plan = rebatched(self.plan, asked)
        self._backwards = self._own_backwards()
        if self._loader is not None:
            self._loader.rebatch(self.plan.batch.micro, self.plan.batch.train)
            self._stream = None

    def _between_steps(self, what: str) -> None:
        if self._position:
            raise PlanError(
                f"{what} after {self._position} of {len(self._backwards)} microbatches of a step",
                code="engine-order",
                fix="Finish the step with backward() and step() first.",
            )

    def _call(self, batch: Any) -> Any:
        if isinstance(batch, Share):
            return batch.weigh(loss_of(self._call(batch.batch)))
        if isinstance(batch, Mapping):
            return self(**batch)
        return self(*batch) if isinstance(batch, tuple | list) else self(batch)

    def _data(self, data_iter: Iterator[Any] | Iterable[Any] | None) -> Iterator[Any]:
        if isinstance(data_iter, Iterator):
            return self._timed(data_iter)
        if data_iter is not None:
            if self._lent is None or self._lent[0] is not data_iter:
                self._lent = data_iter, _forever(data_iter)
            return self._timed(self._lent[1])
        if self._brought is not None:
            return self._data(self._brought)
        if self._loader is None:
            raise PlanError(
                "train_batch() has no data: initialize() was called without training_data",
                code="data-missing",
                fix="Pass training_data= to initialize(), or an iterator to train_batch().",
            )
        if self._stream is None:
            self._stream = self._loader.forever()
        return self._stream

    def _timed(self, data: Iterator[Any]) -> Iterator[Any]:
        """`data`, and how long it took."""
        while True:
            begun = perf_counter()
            try:
                batch = next(data)
            except StopIteration:
                return
            self._waited_s += perf_counter() - begun
            yield batch

    def _own_backwards(self) -> tuple[Action, ...]:
        """One a microbatch: those of the rank's first stage, if it has several."""
        found = self.plan.program.backwards(self.mesh["pipe"].rank)
        return tuple(action for action in found if action.stage == found[0].stage)

    @contextmanager
    def _as_planned(self) -> Iterator[None]:
        with self._autocast(), self.activations.active():
            yield

    def _reducing(self, action: Action) -> AbstractContextManager[None]:
        """Backwards inside are timed, and reduce their gradients if the action says so."""
        return _both(self._telemetry.phase("backward"), self._trains("backward").reduction(action.reduce))

    def _start(self, loss: Tensor | SumLoss, divide: bool = True) -> tuple[Tensor, Tensor]:
        """A loss as a part of the step's, and the scalar that backward starts from."""
        value = loss.total if isinstance(loss, SumLoss) else loss
        part = value / len(self._backwards) if divide else value
        before = part / self.plan.predivide if self.plan.predivide != 1.0 else part
        return part, self._trains("backward").scale(before)

    def _note(self, loss: Tensor | SumLoss, divide: bool = True) -> None:
        self._health.loss(loss.total if isinstance(loss, SumLoss) else loss)
        self._ledger.add(loss if divide or isinstance(loss, SumLoss) else loss * len(self._backwards))

    def _drop_step(self) -> None:
        """Forget the microbatches of a step that will not be complete."""
        self._trains("zero_grad").zero_grad()
        self._ledger, self._position = Ledger(), 0
        self._health.drop()

    def _judge(self, first: str | None) -> bool:
        return self._health.nonfinite(self.counters.steps + 1, first)

    def _update(self, lr_kwargs: Mapping[str, Any]) -> StepResult:
        optimizer, counters, ranks = self._trains("step"), self.counters, self._averaging
        losses, steps = self._ledger.losses, len(self._backwards)
        # Only the count of sum losses is needed before the update; else the losses go with what ranks agree on in it.
        rides = self.device.type == "cpu" and self._ledger.waits and optimizer.sharding.group.ranks == ranks.ranks
        totals, optimizer.riders = (None, self._ledger.leave()) if rides else (self._ledger.close(ranks), ())
        samples = self.plan.batch.train if self.plan.managed else self.plan.batch.train // steps * losses
        if isinstance(self._loader, PackedLoader) and self._loader.taken > self._taken:
            samples = self._loader.samples_between(self._taken, self._loader.taken)
        if totals is not None and totals.count is not None:
            # Gradients are sums so far, divided by microbatches and ranks; make that a division by the count.
            optimizer.divisor = (totals.count or 1.0) / (steps * ranks.size)
        elif self.plan.sums:
            optimizer.divisor = 1.0 / ranks.size
        if losses:
            optimizer.divisor /= self.plan.predivide
        lr = tuple(float(group["lr"]) for group in optimizer.param_groups)
        self.checkpointer.before_update()
        with self._telemetry.phase("step"):
            optimizer.step()
        waited, self._waited_s = self._waited_s, 0.0
        if (loader := self._loader) is not None:
            waited, loader.waited_s = waited + loader.waited_s, 0.0
        self._position, self._taken = 0, 0 if loader is None else loader.taken
        report = optimizer.last
        totals = Totals.of(*report.riders) if report is not None and report.riders else totals
        skipped = report is not None and report.skipped
        counters.steps += 1
        counters.samples += samples
        counters.skipped += skipped
        counters.tokens += int(totals.count) if totals is not None and totals.count is not None else 0
        if self.lr_scheduler is not None and not skipped:
            self.lr_scheduler.step(**lr_kwargs)
        elif isinstance(self.lr_scheduler, VariableBatchSizeLR):
            self.lr_scheduler.skip()
        if not skipped:
            for follower in self._followers:
                follower.step()
        result = StepResult(
            step=counters.steps,
            applied=not skipped,
            skipped=skipped,
            norm=report.norm if report else None,
            scale=report.scale if report else 1.0,
            lr=lr,
            samples=samples,
            tokens=int(totals.count) if totals is not None and totals.count is not None else 0,
            timings=self._telemetry.timings(),
            waited_s=waited,
            mean=totals.loss if totals else None,
        )
        if self._near is not None:
            keep_near(self, self._near)
        epoch, momentum = (0 if loader is None else loader.epoch), _momentum(optimizer.param_groups)
        self._telemetry.step(
            result, Standing(counters.samples, counters.skipped, counters.micro_steps, epoch, momentum)
        )
        self._health.step(result)
        return result


def _forever(data: Iterable[Any]) -> Iterator[Any]:
    """`data` again and again; it ends when a pass has nothing."""
    empty = False
    while not empty:
        empty = True
        for item in data:
            empty = False
            yield item


def _momentum(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [group.get("betas", group.get("momentum")) for group in groups]


@contextmanager
def _both(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield


@dataclass(frozen=True, slots=True)
class _Passes:
    """What an engine lends its executor; see `executing.Passes`."""

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

    def given(self) -> None:
        self.engine._trains("backward").scale(torch.zeros(()))

    def reduce(self) -> None:
        self.engine._trains("backward").reduce()


def _autocast(dtype: torch.dtype | None, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    return nullcontext if dtype is None else partial(torch.autocast, device.type, dtype)
