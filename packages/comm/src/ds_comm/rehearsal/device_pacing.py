"""The pacer of a device: a stream of high priority that is busy as long as the links would be."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_comm.rehearsal.pacing import Pacer, Trip
from ds_comm.rehearsal.traffic import LinkTransfer

__all__ = ["DevicePacer"]

_CALIBRATION_CYCLES = 100_000_000


class DevicePacer(Pacer):
    """A stream that carries one operation after the other.

    Its kernels run on the pacer's stream, after what the caller's current stream holds when an operation starts; `wait` of a work makes
    the then current stream wait for the operation. Memory is kept by the allocator until both are done (`record_stream`).

    Args:
        multiprocessors: That a collective occupies while it runs; so many one-block kernels spin at once.
    """

    def __init__(self, device: torch.device, multiprocessors: int = 1) -> None:
        super().__init__()
        self._device = device
        with torch.cuda.device(device):
            self._stream: Any = torch.cuda.Stream(priority=-1)
            side = max(0, multiprocessors - 1)
            self._others: list[Any] = [torch.cuda.Stream(priority=-1) for _ in range(side)]
            self._cycles_per_s = self._calibrate()
            self._origin: Any = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize(device)
            self._origin.record()
            self._origin_s = self.now()
        self._under_way: list[tuple[Trip, Any, Any, list[tuple[Any, Any]]]] = []

    def _calibrate(self) -> float:
        torch.cuda._sleep(1000)
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        torch.cuda._sleep(_CALIBRATION_CYCLES)
        ended.record()
        ended.synchronize()
        return _CALIBRATION_CYCLES / (began.elapsed_time(ended) * 1e-3)

    def start(self, trip: Trip) -> dist.Work:
        """Send an operation off; its results are valid on streams that waited for the work."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream), torch.no_grad():
            began.record(stream)
            trip.move()
            cycles = int(trip.passage.seconds * self._cycles_per_s)
            for other in self._others:
                other.wait_event(began)
                with torch.cuda.stream(other):
                    torch.cuda._sleep(cycles)
            torch.cuda._sleep(cycles)
            for tensor in trip.tensors:
                tensor.record_stream(stream)
            ended.record(stream)
        waits: list[tuple[Any, Any]] = []
        self._under_way.append((trip, began, ended, waits))
        work = _DeviceWork(trip, ended, waits)
        trip.release_memory()  # the allocator knows by `record_stream` how long the stream needs it
        return work

    def seconds(self, event: Any) -> float:
        """Return when the device reached an event that has completed."""
        return self._origin_s + float(self._origin.elapsed_time(event)) * 1e-3

    def settle(self) -> list[LinkTransfer]:
        torch.cuda.synchronize(self._device)
        under_way, self._under_way = self._under_way, []
        for trip, began, ended, waits in under_way:
            trip.start_s, trip.end_s = self.seconds(began), self.seconds(ended)
            trip.exposed_s = sum(max(0.0, before.elapsed_time(after)) for before, after in waits) * 1e-3
            self.note(trip)
        return self.records


class _DeviceWork(dist.Work):
    """An operation on the pacer's stream; `wait` makes the current stream wait for it, between two events that time the wait."""

    def __init__(self, trip: Trip, ended: Any, waits: list[tuple[Any, Any]]) -> None:
        super().__init__()
        self._results, self._ended, self._waits = list(trip.tensors), ended, waits

    def is_completed(self) -> bool:
        return bool(self._ended.query())

    def is_success(self) -> bool:
        return True

    def wait(self, timeout: Any = None) -> bool:
        stream: Any = torch.cuda.current_stream()
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(self._ended)
        after.record(stream)
        self._waits.append((before, after))
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return list(self._results)

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future(
            devices=[torch.device("cuda", torch.cuda.current_device())]
        )
        self.wait()
        future.set_result(self.result())
        return future
