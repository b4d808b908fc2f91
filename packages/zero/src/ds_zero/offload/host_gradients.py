"""Summed gradients on their way to memory of the host, and there: what frees the device where the optimizer is not on it.

A unit's reduced gradient is copied to page-locked memory on a stream of its own when its reduction ends (`GradientCopies.send`). The memory
that it leaves is in use by the copy until a later one is queued, and is the device's again after that: of the gradients of a model, at most
three units are on the device at a time.

Words: *landing* is where copies end, in the format that gradients are reduced in; *wide* is the sum of several backwards, in the accumulate
format, which a thread of the host adds up. After one backward there is a landing alone, which an optimizer of ds-ops reads as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ds_accel import streams
from ds_accel.streams import DeviceEvent
from ds_ops.scratch import host_bytes

__all__ = ["GradientCopies", "HostGradients"]

_MOST_LENT = 2


class GradientCopies:
    """The stream of the copies, what they read, and the thread that adds up what they brought. Of all units on one device.

    Note "memory in use". A tensor under copy must not be written before the copy has ended. Its allocator gives it away in the order of the
    stream on which it was made; so that stream waits for the copy before the tensor is dropped, and the host never does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, streams.new_stream(device)
        self._lent: deque[tuple[list[Tensor], DeviceEvent, Any]] = deque()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="ds-zero-gradients")

    @property
    def lent_bytes(self) -> int:
        """Device bytes that are in use by copies."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for ts, _, _ in self._lent for t in ts}
        return sum(storage.nbytes() for storage in storages.values())

    def send(self, sources: Sequence[Tensor], places: Sequence[Tensor]) -> DeviceEvent:
        """Queue copies of `sources`, valid on the current stream, to `places` of the host. Waits for nothing.

        Returns:
            The event after which the places may be read. The sources are dropped by the caller, and must not be written.
        """
        current = streams.current_stream(self._device)
        streams.wait_stream(self._stream, current)
        with streams.on_stream(self._stream, self._device):
            for place, source in zip(places, sources, strict=True):
                streams.copy_into(place, source)
            copied = streams.record_event(self._device)
        self._lent.append((list(sources), copied, current))
        while len(self._lent) > _MOST_LENT:
            self._take_back()
        return copied

    def _take_back(self) -> None:
        tensors, copied, stream = self._lent.popleft()
        copied.wait(stream)
        tensors.clear()

    def take_back_all(self) -> None:
        """Give memory in use back, in the order of the stream on which it was made."""
        while self._lent:
            self._take_back()

    def run(self, job: Callable[[], None]) -> Future[None]:
        """Run `job` on the thread of the host, after the jobs before."""
        return self._worker.submit(self._run, job)

    def _run(self, job: Callable[[], None]) -> None:
        with torch.no_grad(), streams.on_device(self._device):
            job()

    def close(self) -> None:
        """End the thread."""
        self.take_back_all()
        self._worker.shutdown()


class HostGradients:
    """The summed gradients of one unit in memory of the host.

    Args:
        ranges: (start, stop) in the shard of each tensor of the sum.
        accumulate: Format in which sums of several backwards add up.
        copies: Of the device.
        pin: Page-lock the memory.
    Attributes:
        filled: Whether there is a sum.
    """

    def __init__(
        self,
        ranges: Sequence[tuple[int, int]],
        accumulate: torch.dtype,
        device: torch.device,
        copies: GradientCopies,
        pin: bool = True,
    ) -> None:
        self.filled = False
        self._moves = self._arrivals = 0
        self.copies, self._ranges, self._accumulate = copies, ranges, accumulate
        self._device, self._pin = device, pin
        self._landing: Tensor | None = None
        self._wide: Tensor | None = None
        self._is_wide = False  # the sum is in `wide`; else it is in the landing
        self._accumulates = False  # as the last step did
        self._copied: DeviceEvent | None = None
        self._job: Future[None] | None = None

    @property
    def version(self) -> int:
        """Another one after every change that was queued, and after every write to what `wide` returned."""
        # What comes from the device, and the thread, write by aliases (`data`), whose writes do not count here.
        return self._moves + sum(t._version for t in (self._landing, self._wide) if t is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, in use or not."""
        return sum(t.nbytes for t in (self._landing, self._wide) if t is not None)

    def receive(self, sums: Sequence[Tensor], scale: float) -> None:
        """Queue the copy of `sums`, valid on the current stream, one tensor a range; what is there already is added to.

        Args:
            scale: What the sum that is there has been multiplied by.
        """
        dtype = sums[0].dtype if sums else self._accumulate
        if self.filled:
            self._widen()
            self._wait_for_job()
        landing = self._landing
        if landing is None or landing.dtype != dtype:
            landing = self._landing = self._memory(dtype)
        self._copied = copied = self.copies.send(sums, self._cut(landing.data))
        self._moves += 1
        self._arrivals += 1
        if self.filled:
            wide = self._wide

            def add() -> None:
                copied.synchronize()
                if wide is not None:
                    wide.data.add_(landing, alpha=scale)

            self._job = self.copies.run(add)
        elif self._accumulates:
            self.filled = True
            self._widen()
        self.filled = True

    def narrow(self) -> list[Tensor]:
        """Return the sum as it is, one tensor a range: in the format of the reduction after one backward. Waits for it."""
        self._settle()
        memory = self._wide if self._is_wide else self._landing
        return [] if memory is None else self._cut(memory)

    def wide(self) -> list[Tensor]:
        """Return the sum in the accumulate format, one tensor a range, to be read and written. Waits for it."""
        self._widen()
        return self.narrow()

    def clear(self) -> None:
        """Forget the sum. What was queued ends first."""
        self._settle()
        self._accumulates, self._arrivals = self._arrivals > 1, 0
        self.filled = self._is_wide = False
        self._moves += 1
        self.copies.take_back_all()

    def _widen(self) -> None:
        """Start to move what landed to memory in the accumulate format."""
        if self._is_wide or not self.filled or self._landing is None or self._copied is None:
            return
        self._is_wide = True
        landing, copied = self._landing, self._copied
        if landing.dtype == self._accumulate:
            self._wide, self._landing = landing, self._wide
            self._job = self.copies.run(copied.synchronize)
            return
        if self._wide is None:
            self._wide = self._memory(self._accumulate)
        wide = self._wide

        def move() -> None:
            copied.synchronize()
            wide.data.copy_(landing)

        self._job = self.copies.run(move)

    def _settle(self) -> None:
        self._wait_for_job()
        if self._copied is not None:
            self._copied.synchronize()

    def _wait_for_job(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def _memory(self, dtype: torch.dtype) -> Tensor:
        numel = self._ranges[-1][1] if self._ranges else 0
        return host_bytes(numel * dtype.itemsize, self._device, pin=self._pin).view(dtype)

    def _cut(self, memory: Tensor) -> list[Tensor]:
        return [memory[start:stop] for start, stop in self._ranges]
