"""The thread that updates units while backward goes on, and what takes its work back; which and when is decided in `overlap_plan.py`.

Before it writes, the thread copies the unit's master shard and the optimizer's state of it into host memory that is kept for that.
Whoever wants the state before the step (`OptimizerStateStore.fetch`: whole access, a checkpoint, an edit) gets it as the last step left it: the update is
taken back first, and the step makes it. Sums of gradients are only read. What the thread raises ends the step, on all ranks.

Cost: 12 bytes of host memory for an element with Adam in fp32, and a read and a write of them besides the update.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_accel import get_accelerator, streams
from ds_config.errors import KernelError
from ds_ops.stream import copy_ranges
from ds_ops.threads import at_most
from ds_zero.layout.shard_options import OffloadPolicy
from ds_zero.layout.units import DENSE
from ds_zero.offload.state_stores import HostStateStore, OptimizerSlice
from ds_zero.runtime.sharded_model import ShardedModel
from ds_zero.runtime.unit import Unit
from ds_zero.update.apply_step import Updater, scales_before_cast
from ds_zero.update.overlap_plan import Outlook, OverlapLedger, OverlapState, Terms
from ds_zero.update.rank_agreement import weight_of
from ds_zero.update.wrapped_optimizer import check_early, settings_of

__all__ = ["Ahead", "PendingStep"]


class PendingStep(Protocol):
    """Of the step that comes what an early update has to know: `ShardedOptimizer`."""

    backwards: int
    updater: Updater
    before_update: Callable[[], None]

    def average(self, divisor: float) -> float: ...


class Ahead:
    """The early updates of one model. All of it but the thread's own part is called by the thread that trains.

    Args:
        sharding: Units whose tier is early (`OffloadPolicy.overlap_ratio`) are watched; there may be none.
        step: The coming one.
        outlook: What to expect of it.
    Attributes:
        units: Those that may be updated early, by number. Where there are none, nothing has to be called in a step.
    Raises:
        PlanError: the optimizer's updates cannot begin early ("zero-early").
    """

    def __init__(self, sharding: ShardedModel, step: PendingStep, outlook: Outlook) -> None:
        self.outlook = outlook
        self._sharding, self._step = sharding, step
        self.units = {unit.number: unit for unit in sharding.units if unit.plan.early}
        self.ledger = OverlapLedger(self.units)
        if not self.units:
            return
        check_early(step.updater.inner)
        self._changed, self._jobs = threading.Condition(), SimpleQueue[Callable[[], None] | None]()
        self._thread: threading.Thread | None = None
        self._retained = {number: _Kept() for number in self.units}
        self._errors: dict[int, BaseException] = {}
        self._open = False
        self._side: Any = None
        self._first = any(
            unit.dtypes.accumulate != unit.dtypes.master or unit.device.type != unit.shard.device.type
            for unit in sharding.units
            if unit.spec.trained and unit.gradients.host is None
        )
        for unit in self.units.values():
            unit.gradients.changing = partial(self._changing, unit)
            unit.gradients.summed = partial(self._summed, unit)
            if isinstance(unit.state_store, HostStateStore):
                unit.state_store.wanted = partial(self._wanted, unit)

    # ---- in backward

    def _changing(self, unit: Unit) -> None:
        self.take_back(unit)
        self.ledger.collect(unit.number, self._step.backwards)

    def _summed(self, unit: Unit) -> None:
        ready = self.ledger.ready(unit.number, self._step.backwards, self.outlook)
        if not ready or not self._step.updater.foresees() or unit.gradients.applied != 1.0:
            return
        states = (self._sharding.state_of(part) for part in unit.parts)
        if not unit.parts or self._sharding.runtime.reducing.absent(unit.number) or not all(states):
            return  # what of it is updated is known in the step, or its state is made there
        if not self._open:
            self._step.before_update()
            self._open = True
        # Where gradients are on the host, or come there, whoever reads them waits for that.
        leaves = unit.gradients.leaves
        summed = None if leaves or unit.device.type == "cpu" else streams.record_event(unit.device)
        with self._changed:
            self.ledger.line_up(unit.number)
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name="ds-zero-early", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        self._jobs.put(partial(self._job, unit, summed))

    # ---- on the thread

    def _job(self, unit: Unit, summed: Any) -> None:
        with self._changed:
            if not self.ledger.begin(unit.number):
                return
        terms: Terms | None = None
        try:
            terms = self._update(unit, summed)
        except BaseException as error:  # it is raised by the step
            self._errors[unit.number] = error
        finally:
            with self._changed:
                self.ledger.end(unit.number, terms)
                self._changed.notify_all()

    def _update(self, unit: Unit, summed: Any) -> Terms:
        place = unit.state_store.placement if isinstance(unit.state_store, HostStateStore) else OffloadPolicy()
        threads = math.ceil(place.overlap_ratio * torch.get_num_threads())
        with torch.no_grad(), at_most(threads):
            self._retained[unit.number].copy(unit, self._sharding.state_of)
            factor = self._step.average(self.outlook.divisor)
            terms = self._terms(unit, factor, self._first)
            if self._step.updater.reads_host_gradients(unit):
                views: dict[Tensor, Tensor] = {
                    p.tensor: unit.gradients.narrow_view(p.start, p.stop).view(p.tensor.shape) for p in unit.parts
                }
                self._step.updater.early(unit, views, factor * self._weight(unit))
            else:
                grads = self._gradients(unit, terms, summed)
                self._step.updater.early(unit, grads, 1.0 if terms.first else factor)
            after = self._terms(unit, factor, self._first)
        # A rate that changed meanwhile: nobody can say which one was used.
        return terms if terms == after else replace(terms, version=-1)

    def _gradients(self, unit: Unit, terms: Terms, summed: Any) -> dict[Tensor, Tensor]:
        """Compute the gradients that the step would pass to the optimizer, by part; the sums stay unchanged.

        With `summed` the gradients are valid on the update stream of the device.
        """
        if summed is not None:
            summed.synchronize()
        weight = self._weight(unit)
        grads: dict[Tensor, Tensor] = {}
        with nullcontext() if summed is None else self._stream(unit.device):
            for part in unit.parts:
                grad = unit.gradients.view(part.start, part.stop)
                if grad is None:
                    raise RuntimeError(f"unit {unit.spec.name} has no sum of gradients to be updated with")
                grad = grad * weight if weight != 1.0 else grad
                grad = grad * terms.factor if terms.first else grad
                grads[part.tensor] = unit.state_store.gradient(grad, part.tensor)
        return grads

    def _weight(self, unit: Unit) -> float:
        return weight_of(unit, self._sharding.families[DENSE].divisor)

    def _stream(self, device: torch.device) -> AbstractContextManager[Any]:
        """Work of the thread on the device; on the usual stream it would wait for all of backward that was launched before."""
        accelerator = get_accelerator()
        if device.index is not None:
            accelerator.set_device(device.index)
        if self._side is None:
            self._side = accelerator.new_stream()
        return accelerator.on_stream(self._side)

    def _terms(self, unit: Unit, factor: float, first: bool) -> Terms:
        if unit.gradients.leaves:
            first = scales_before_cast(unit) and not self._step.updater.reads_host_gradients(unit)
        return Terms(factor, first, settings_of(self._step.updater.inner, unit), unit.gradients.version)

    # ---- in the step, and for whoever wants the state before

    def finish(self) -> BaseException | None:
        """Stop the update thread for the step, which does the queued updates. Returns the thread's error, or None."""
        with self._changed:
            for number in self.units:
                self.ledger.call_off(number)
            self._changed.wait_for(lambda: not self.ledger.writing)
        self._open = False
        return next(iter(self._errors.values()), None)

    def settle(self, factor: float, first: bool) -> list[Unit]:
        """Return the units whose early update used exactly this step's terms; undo the other early updates."""
        updated = []
        for number in self.ledger.busy:
            unit = self.units[number]
            if self.ledger.holds(number, self._terms(unit, factor, first)):
                updated.append(unit)
            else:
                self.take_back(unit)
        return updated

    def _wanted(self, unit: Unit) -> None:
        self._open = False
        self.take_back(unit)

    def take_back(self, unit: Unit) -> None:
        """Restore the unit's state from before its early update, waiting while the thread writes to the unit."""
        number = unit.number
        if self.ledger.state(number) is OverlapState.PLAIN:
            return
        with self._changed:
            if self.ledger.call_off(number):
                return
            self._changed.wait_for(lambda: self.ledger.state(number) is not OverlapState.WRITING)
            self._retained[number].restore()
            self.ledger.undo(number)
            self._errors.pop(number, None)

    def take_back_all(self) -> None:
        """Undo the early update of every unit."""
        for number in self.ledger.busy:
            self.take_back(self.units[number])

    def failed(self, ranks: int, error: BaseException | None) -> KernelError:
        """Take everything back, and say that a thread failed, on this rank or on another one."""
        self.take_back_all()
        why = "on another rank" if error is None else f"here with {type(error).__name__}: {error}"
        failure = KernelError(
            f"an update that began during backward failed on {ranks} ranks, {why}. Nothing was updated; gradients are kept",
            code="zero-early-failed",
            fix="Call the optimizer's step() again to update after backward, or train without early updates.",
        )
        failure.__cause__ = error
        return failure

    def close(self) -> None:
        """Take everything back, and end the thread."""
        self.take_back_all()
        for unit in self.units.values():
            unit.gradients.changing = unit.gradients.summed = None
            if isinstance(unit.state_store, HostStateStore):
                unit.state_store.wanted = None
        if self.units and self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    """Do jobs until there is a None. Holds nothing between jobs, so that who made them can end."""
    while (job := jobs.get()) is not None:
        job()
        del job


class _Kept:
    """What an update of one unit overwrites. The memory is kept for the next one."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []
        self._tensors: list[Tensor] = []
        self._others: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def copy(self, unit: Unit, states: Callable[[OptimizerSlice], Any]) -> None:
        """Copy it. If that raises, nothing is there to be restored."""
        self._tensors, self._others = [], []
        snapshots = [dict(states(part)) for part in unit.parts]
        tensors = [unit.shard, *(v for state in snapshots for v in state.values() if isinstance(v, Tensor))]
        shapes = [(t.numel(), t.dtype) for t in self._memory]
        if shapes != [(t.numel(), t.dtype) for t in tensors]:
            self._memory = [torch.empty(t.numel(), dtype=t.dtype, device=t.device) for t in tensors]
        for buffer, tensor in zip(self._memory, tensors, strict=True):
            copy_ranges(buffer, [(tensor.detach(), [(0, 0, tensor.numel())])])
        self._tensors = tensors
        self._others = [(states(part), state) for part, state in zip(unit.parts, snapshots, strict=True)]

    def restore(self) -> None:
        """Put it back, into the same tensors."""
        with torch.no_grad():
            for buffer, tensor in zip(self._memory, self._tensors, strict=False):
                tensor.copy_(buffer.view(tensor.shape))
        for now, before in self._others:
            now.clear()
            now.update(before)
        self._tensors, self._others = [], []
