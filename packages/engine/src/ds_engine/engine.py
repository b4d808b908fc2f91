"""The training engine: it holds components and calls them in the order of the plan's program.

Words: a *microbatch* is one forward and backward; a *step* is one optimizer update. Which backwards reduce gradients is
written in the program (`plan.program`); the three-call loop looks the current action up, `train_batch` runs the program.
There is no other state that says where a step ends.

    loss = engine(batch); engine.backward(loss); engine.step()      # once per microbatch
    result = engine.train_batch()                                   # all microbatches of a step

Both give the same parameters. Calls that are collective say so; every rank makes them in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import ds_monitor
from ds_config.errors import PlanError
from ds_engine.batch import BatchRequest
from ds_engine.checkpoints import keep_near
from ds_engine.device_placement import to_device
from ds_engine.engine_state import EngineState
from ds_engine.executor import Passes
from ds_engine.loader import LoaderRole, ResumableLoader, loader_of
from ds_engine.loss_total import LossAccumulator, SumLoss, loss_of
from ds_engine.lr_schedules import advance, momentum_of
from ds_engine.mixed_precision import buffer_note
from ds_engine.optimizer_step import settle, totals_after
from ds_engine.planner import rebatched
from ds_engine.result import StepResult
from ds_engine.step_telemetry import RunStatus
from ds_engine.uneven_inputs import WeightedBatch
from ds_pipe import Action

__all__ = ["Engine"]


class Engine(EngineState):
    """Runs a plan on a model. Made by `ds_engine.initialize`. What it holds, saves and reports is in `EngineState`."""

    # ---- the loop of three calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on inputs that are moved to its device, and cast if the plan says so."""
        dtype = self.plan.casting.inputs
        self._present("forward")
        self._compilation.called()
        if self.module.training:
            kwargs = {**self.plan.arguments(self.counters.steps), **kwargs}
        with self._telemetry.phase("forward", self.module), self._as_planned():
            args, kwargs = to_device(args, self.device, dtype), to_device(kwargs, self.device, dtype)
            if self.module.training and torch.is_grad_enabled():
                self._health.forward(args, kwargs)
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
        self._between_steps("train_batch() was called")
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
        count = num_micro_batches or len(self._backwards)
        # One by one: a frozen BatchNorm evaluates in a model that trains.
        ledger, training = LossAccumulator(), [module for module in self.module.modules() if module.training]
        self.module.eval()
        try:
            for loss in self._executor.evaluate(count, iter(data_iter), self._passes()):
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
        ds_monitor.detach(self._sinks)
        self._sinks = ()
        self._feed.close()
        self._resume_gc()

    # ---- inside

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
        return part, self._trains("backward").scale(before)

    def _note(self, loss: Tensor | SumLoss, divide: bool = True) -> None:
        self._health.loss(loss.total if isinstance(loss, SumLoss) else loss)
        self._ledger.add(loss if divide or isinstance(loss, SumLoss) else loss * len(self._backwards))

    def _update(self, lr_kwargs: Mapping[str, Any]) -> StepResult:
        optimizer, counters, feed = self._trains("step"), self.counters, self._feed
        samples = feed.samples() or self._samples(self._ledger.losses)
        totals = settle(self._ledger, optimizer, self.plan, self._averaging, self.device)
        lr = tuple(self.get_lr())
        self.checkpointer.before_update()
        self._health.step_number = counters.steps + 1
        with self._telemetry.phase("step"):
            optimizer.step()
        self._position, waited_s, report = 0, feed.complete(), optimizer.last
        totals, skipped = totals_after(optimizer, totals), report is not None and report.skipped
        tokens = 0 if totals is None else int(totals.count or 0)
        counters.add(samples=samples, tokens=tokens, skipped=skipped)
        advance(self.lr_scheduler, lr_kwargs, applied=not skipped)
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


@contextmanager
def _both(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield


@dataclass(frozen=True, slots=True)
class _Passes:
    """What an executor uses of its engine; see `executing.Passes`."""

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
        self.engine._trains("backward").scale(torch.zeros(()))

    def reduce(self) -> None:
        self.engine._trains("backward").reduce()
