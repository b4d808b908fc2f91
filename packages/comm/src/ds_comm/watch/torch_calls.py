"""Collectives that torch's own functions call, as DDP and FSDP2 do: the watchdog sees them without standing in their way.

gloo and NCCL note their calls in torch's flight recorder, which is read here; our own backend notes its calls in a `CallLog`. Nobody says which thread waits
for such a call, so the main thread counts as blocked where a call has not ended and that thread has not moved: its innermost Python frame stands at one
instruction, and it computes nothing (on a device a thread that waits may spin, so there only the frame counts). Calls between two ranks are left out: a receive may be posted long before it is waited for.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from ds_comm._torch import default_name, flight_records, group_ranks
from ds_comm.watch.stamp_ring import Stamp

__all__ = ["CallLog", "TorchCall", "TorchCalls"]

_KEPT = 256  # calls of a group in a log
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32", "Short": "int16",
    "Char": "int8", "Byte": "uint8", "Bool": "bool",
}  # fmt: skip
_BUSY = 0.02  # a thread that has computed for a larger part of the time does not wait; on a crowded host one that computes gets few turns
_ALIKE = ("all_reduce", "allreduce", "broadcast", "reduce_scatter", "barrier")
"""Operations whose input has as many elements on every rank; of others no size is noted."""


@dataclass(slots=True)
class TorchCall:
    """A collective that torch called.

    Attributes:
        group: torch's name of the process group.
        number: Its place in the order of the group's collectives, the same on all ranks.
        created_s: On the clock of time.time().
        ended: Whether it has ended, as far as its backend says.
        on_device: Whether a device runs it.
        work: What tells its end, set within `with call:`.
    """

    group: str
    number: int
    op: str
    dtype: str
    shape: tuple[int, ...]
    created_s: float
    ended: Callable[[], bool]
    on_device: bool = False

    work: Any = None

    def __enter__(self) -> TorchCall:
        return self

    def __exit__(self, *_: object) -> None:
        """End the call; or let it end with `work`, where it returns before it has ended."""
        work, self.work = self.work, None
        self.ended = _yes if work is None else partial(_is_over, weakref.ref(work))


def _is_over(work: weakref.ref[Any]) -> bool:
    """Whether a work is complete, or nobody has it any more. The log must not hold it: its buffers are large."""
    known = work()
    return known is None or bool(known.is_completed())


def _yes() -> bool:
    return True


def _no() -> bool:
    return False


class CallLog:
    """The last calls of a process group of our backend. `name` returns torch's name of the group."""

    def __init__(self, name: Callable[[], str]) -> None:
        self._name, self._number = name, 0
        self.calls: deque[TorchCall] = deque(maxlen=_KEPT)
        _logs.add(self)

    def begin(self, op: str, tensor: Tensor | None) -> TorchCall:
        """Note a call that begins; `with` the result it ends."""
        self._number += 1
        dtype, shape = ("", ()) if tensor is None else (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        call = TorchCall(self._name(), self._number, op, dtype, shape, time.time(), _no)
        self.calls.append(call)
        return call


_logs: weakref.WeakSet[CallLog] = weakref.WeakSet()


class TorchCalls:
    """What torch called in this process, as stamps. Times are of time.monotonic()."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident or 0
        self._cpu_clock = time.pthread_getcpuclockid(self._main)
        self._place: tuple[int, int] | None = None  # the main thread's frame and its instruction
        self._looked_s, self._cpu_s = 0.0, 0.0
        self._since_s = 0.0

    def blocked_since(self) -> float:
        """Return since when the main thread has stood still while a call is under way; 0 where it has not. Call often."""
        heads = self._heads(self._calls(active=True))
        frame = sys._current_frames().get(self._main)
        place = None if frame is None else (id(frame), frame.f_lasti)
        now, cpu = time.monotonic(), time.clock_gettime(self._cpu_clock)
        computes = cpu - self._cpu_s > _BUSY * (now - self._looked_s) and not all(call.on_device for call in heads)
        if place != self._place or computes:
            self._since_s = now
        self._place, self._looked_s, self._cpu_s = place, now, cpu
        return max(self._since_s, min(map(_monotonic, heads))) if heads else 0.0

    def stamps(self, waiting: bool) -> list[Stamp]:
        """Return the last calls of all groups, oldest first; `waiting`: the main thread waits for the first of each group that has not ended."""
        calls = self._calls(active=False)
        heads = {(call.group, call.number) for call in self._heads(calls)} if waiting else set()
        stamps = [_stamp(call) for call in calls]
        return [
            replace(stamp, waited_s=stamp.began_s) if (call.group, call.number) in heads else stamp
            for call, stamp in zip(calls, stamps, strict=True)
        ]

    @staticmethod
    def groups() -> dict[str, tuple[int, ...]]:
        """Return the world ranks of every process group of this process by the key of its stamps."""
        return {_key(name): ranks for name, ranks in group_ranks().items()}

    @staticmethod
    def _heads(calls: Iterable[TorchCall]) -> list[TorchCall]:
        """Return the first call of each group that has not ended."""
        first: dict[str, TorchCall] = {}
        for call in calls:
            if not call.ended():
                first.setdefault(call.group, call)
        return list(first.values())

    @staticmethod
    def _calls(active: bool) -> list[TorchCall]:
        calls = [_recorded(entry) for text in flight_records(active) for entry in json.loads(text).get("entries", ())
                 if not entry["is_p2p"]]  # fmt: skip
        for log in list(_logs):
            calls += [call for call in list(log.calls) if not active or not call.ended()]
        return sorted(calls, key=lambda call: call.created_s)


def _recorded(entry: dict[str, Any]) -> TorchCall:
    """Read an entry of torch's flight recorder."""
    sizes, dtypes = entry["input_sizes"], entry["input_dtypes"]
    op = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    dtype = _DTYPES.get(dtypes[0], dtypes[0].lower()) if dtypes else ""
    return TorchCall(
        entry["process_group"][0],
        entry["collective_seq_id"],
        op,
        dtype,
        tuple(sizes[0]) if sizes else (),
        entry["time_created_ns"] / 1e9,
        _yes if entry["retired"] else _no,
        not entry["profiling_name"].startswith("gloo"),
    )


def _monotonic(call: TorchCall) -> float:
    return time.monotonic() - (time.time() - call.created_s)


def _key(group: str) -> str:
    return f"torch:{group}"


def _stamp(call: TorchCall) -> Stamp:
    began, numel = _monotonic(call), 1
    for size in call.shape:
        numel *= size
    alike = call.op.startswith(_ALIKE)
    return Stamp(
        key=_key(call.group),
        group="world" if call.group == default_name() else call.group,
        mark=call.number,
        op=call.op,
        unit="torch",
        dtype=call.dtype,
        shape=call.shape if alike else (),
        numel=numel if alike else 0,
        peer=-1,
        began_s=began,
        waited_s=0.0,
        ended_s=began if call.ended() else 0.0,
        thread=threading.main_thread().ident or 0,
    )
