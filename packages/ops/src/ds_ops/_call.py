"""From tensors to addresses.

Every native call goes through here. The tensors of a call are checked (device, dtype, contiguity, length, overlap) and
stay referenced until it returns, so that no argument can make a kernel read or write memory that is not its own.
A call costs a few microseconds plus about half a microsecond a tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ds_ops._native as _native
from ds_accel import streams
from ds_config.errors import KernelError

__all__ = [
    "DTYPES",
    "Columns",
    "address",
    "columns",
    "device_table",
    "finish",
    "mark_written",
    "native",
    "reach",
    "refuse",
    "require",
    "require_disjoint",
]

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Element types the native kernels store, and their numbers in native/include/ds/types.h."""

_STATUS = {
    1: "an argument is out of range",
    2: "an element type is not supported",
    3: "the device refused the launch",
    4: "another rank failed",
}


def native(name: str = "_cpu") -> ModuleType:
    """Return the native module, or raise `KernelError` with the reason for its absence."""
    loaded = _native.load(name)
    if loaded.module is None:
        raise KernelError(
            f"native kernels were asked for, but {loaded.reason}.",
            code="kernel-missing",
            fix="Run `ds doctor`; `ds ops build` builds what is missing.",
        )
    return loaded.module


def finish(op: str, status: int) -> None:
    """Turn a native status into an error."""
    if status:
        raise KernelError(
            f"{op}: native call failed with status {status}: {_STATUS.get(status, 'unknown')}.",
            code="kernel-status",
            fix="Report this with the shapes and dtypes of the call: checks in Python should have caught it.",
        )


def refuse(message: str, fix: str = "Give tensors the shapes, dtypes and devices of the docstring.") -> KernelError:
    """Build the error for an argument that the kernel does not support."""
    return KernelError(message, code="kernel-argument", fix=fix)


def describe(t: Tensor) -> str:
    """Describe a tensor for error messages: `[3, 4] torch.float32 on cpu, strides (4, 1)`."""
    return f"{list(t.shape)} {t.dtype} on {t.device}, strides {tuple(t.stride())}"


def require(
    name: str,
    t: Tensor,
    *,
    dtypes: Sequence[torch.dtype] | None = None,
    numel: int | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return `t` if a kernel can take it; `name` is the argument's name in the error."""
    allowed = DTYPES if dtypes is None else dtypes
    if type(t) is not Tensor and not isinstance(t, Tensor):
        raise refuse(f"{name}: expected a tensor, found {type(t).__name__}.", "Pass a torch.Tensor.")
    if t.dtype not in allowed:
        names = ", ".join(str(d) for d in allowed)
        raise refuse(f"{name}: expected dtype {names}; found {describe(t)}.", "Convert it with .to(dtype).")
    if t.layout is not torch.strided or not t.is_contiguous():
        raise refuse(f"{name}: expected a contiguous tensor; found {describe(t)}.", "Pass .contiguous().")
    if numel is not None and t.numel() != numel:
        raise refuse(f"{name}: expected {numel} elements; found {describe(t)}.", "Pass tensors of equal length.")
    if device is not None and t.device != device:
        raise refuse(f"{name}: expected device {device}; found {describe(t)}.", "Move it with .to(device).")
    if t.numel() and t.untyped_storage().nbytes() == 0:
        raise refuse(f"{name}: its storage was released; found {describe(t)}.", "Gather it before using it.")
    return t


def address(t: Tensor) -> int:
    """Return the address of a tensor that `require` has checked. The caller keeps `t` alive during the call."""
    return t.data_ptr()


def reach(name: str, t: Tensor, start: int, numel: int, like: Tensor) -> int:
    """Return the address of elements [start, start + numel) of a contiguous tensor, of `like`'s dtype and device.

    Combines `require` and `address`, for calls with dozens of tensors.
    """
    if t.dtype is like.dtype and t.device == like.device and t.is_contiguous() and 0 <= start <= t.numel() - numel:
        first = t.data_ptr()
        if first or not numel:
            return first + start * t.element_size()
    require(name, t, dtypes=(like.dtype,), device=like.device)
    raise refuse(
        f"{name}: expected elements {start} to {start + numel}; found {describe(t)}.",
        "Pass ranges inside of the tensors.",
    )


def mark_written(*streams: Sequence[Tensor]) -> None:
    """Tell autograd that kernels wrote into tensors, so that a backward that saved them refuses instead of lying."""
    for tensors in streams:
        if tensors:
            torch.autograd.graph.increment_version(tensors)


def require_disjoint(**tensors: Tensor) -> None:
    """Refuse tensors of which any two share memory."""
    spans = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), n) for n, t in tensors.items() if t.numel()]
    spans.sort()
    for (_, end, a), (start, _, b) in itertools.pairwise(spans):
        if start < end:
            raise refuse(f"{a} and {b} share memory.", "Pass tensors that do not overlap.")


@dataclass(frozen=True, slots=True)
class Columns:
    """A list of tensors per stream, as the table the native update takes; keeps every tensor alive.

    rows: int64 [6, count]: numel, then addresses of param, grad, state0, state1, copy; -1 in absent rows.
    dtypes: the dtype numbers of param, grad, state, copy, one byte each.
    """

    rows: np.ndarray
    dtypes: int
    keep: tuple[Sequence[Tensor], ...]
    lengths: list[int] = field(default_factory=list)
    addresses: tuple[list[int], ...] = ()
    stream_dtypes: tuple[torch.dtype | None, ...] = ()

    @property
    def count(self) -> int:
        return self.rows.shape[1]

    @property
    def rows_address(self) -> int:
        return self.rows.ctypes.data

    def same_memory(self, streams: Sequence[Sequence[Tensor]]) -> bool:
        """Whether `streams` (in the order of `keep`) have the lengths, dtypes and addresses that were checked."""
        lengths = self.lengths
        for new, addresses, dtype in zip(streams, self.addresses, self.stream_dtypes, strict=False):
            if [t.data_ptr() for t in new] != addresses or [t.numel() for t in new] != lengths:
                return False
            if not all(t.dtype is dtype and t.is_contiguous() for t in new):
                return False
        return True

    def forgetting(self) -> Columns:
        """Return the same table without references to its tensors: to compare with later, not to call with."""
        return replace(self, keep=())


def device_table(table: Columns, chunk: int) -> tuple[Tensor, list[int]]:
    """Copy the rows of `table` to its device for the CUDA kernel, and return how many chunks each tensor has.

    Returns: int64 [7, count]: the six rows with 0 for what is absent, then the number of chunks before each tensor.
    The copy is valid on the current stream, by which equal tables are cached. A table that a graph records stays for ever: every replay
    reads its address, and copies it again from the host where it was made while the graph was captured.
    """
    chunks = -(-table.rows[0] // chunk)
    before = np.cumsum(chunks) - chunks
    rows = np.concatenate((np.maximum(table.rows, 0), before[None]))
    device = table.keep[0][0].device
    key = (device, streams.current_stream(device), rows.tobytes())
    if key in _recorded_tables:
        return _recorded_tables[key], chunks.tolist()
    device_rows, recorded = _tables.pop(key, None), streams.is_capturing(device)
    if device_rows is None:
        host = torch.from_numpy(rows)
        if device.type == "cuda":
            host = streams.pin(host)
        device_rows = streams.copy_to(host, device)
        if recorded:
            _recorded_hosts.append(host)
        if len(_tables) >= _MOST_TABLES:
            _tables.pop(next(iter(_tables)))
    if recorded:
        _recorded_tables[key] = device_rows
    else:
        _tables[key] = device_rows  # last: the one that goes latest
    return device_rows, chunks.tolist()


# Tensors of a model stay where they are, so that a step finds its table on the device, and can be part of a CUDA graph.
_tables: dict[tuple[torch.device, Any, bytes], Tensor] = {}
_recorded_tables: dict[tuple[torch.device, Any, bytes], Tensor] = {}
_recorded_hosts: list[Tensor] = []
_MOST_TABLES = 256


_STREAMS = ("param", "grad", "state0", "state1", "copy")


def columns(
    params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[Sequence[Tensor]], copies: Sequence[Tensor]
) -> Columns:
    """Check and collect the tensors of one update.

    All of one stream have one dtype, all are on one device, tensors at one index have one length, none overlap.
    `copies` may be empty.
    """
    streams: tuple[Sequence[Tensor], ...] = (params, grads, *states, *[()] * (2 - len(states)), copies)
    count = len(params)
    rows = np.full((6, count), -1, dtype=np.int64)
    if count == 0:
        return Columns(rows, 0, streams)
    device = params[0].device
    rows[0] = lengths = [t.numel() for t in params]
    addresses: list[list[int]] = [[] for _ in streams]
    for row, (name, tensors) in enumerate(zip(_STREAMS, streams, strict=True), start=1):
        if not tensors and row >= 3:
            continue
        if len(tensors) != count:
            raise refuse(f"{name}: expected {count} tensors, found {len(tensors)}.", "Pass lists of equal length.")
        rows[row] = addresses[row - 1] = _addresses(name, tensors, lengths, device)
    state_dtypes = [s[0].dtype for s in states]
    if len(set(state_dtypes)) > 1:
        raise refuse(f"states: expected one dtype, found {state_dtypes}.", "Keep all states of a tensor in one dtype.")
    kinds = [params[0].dtype, grads[0].dtype, *(state_dtypes or [torch.float32])[:1], *(c.dtype for c in copies[:1])]
    _require_disjoint_rows(rows, streams)
    packed = sum(DTYPES[d] << 8 * i for i, d in enumerate(kinds))
    stream_dtypes = tuple(t[0].dtype if t else None for t in streams)
    return Columns(rows, packed, streams, lengths, tuple(addresses), stream_dtypes)


def _addresses(name: str, tensors: Sequence[Tensor], lengths: Sequence[int], device: torch.device) -> list[int]:
    dtype = tensors[0].dtype
    allowed = (dtype,) if dtype in DTYPES else tuple(DTYPES)
    out = []
    for i, (t, n) in enumerate(zip(tensors, lengths, strict=True)):
        # The quick test of what `require` explains.
        if t.dtype is not dtype or t.numel() != n or t.device != device or not t.is_contiguous() or dtype not in DTYPES:
            require(f"{name}[{i}]", t, dtypes=allowed, numel=n, device=device)
        pointer = t.data_ptr()
        if pointer == 0 and n:
            require(f"{name}[{i}]", t, dtypes=allowed, numel=n, device=device)
            raise refuse(f"{name}[{i}]: has no memory; found {describe(t)}.", "Pass a tensor with data.")
        out.append(pointer)
    return out


def _require_disjoint_rows(rows: np.ndarray, streams: Sequence[Sequence[Tensor]]) -> None:
    present = [r for r in range(1, 6) if streams[r - 1]]
    sizes = np.array([streams[r - 1][0].element_size() for r in present], dtype=np.int64)
    starts = rows[present]
    ends = starts + rows[0][None, :] * sizes[:, None]
    filled = np.broadcast_to(rows[0] > 0, starts.shape).ravel()
    index = np.flatnonzero(filled)
    order = index[np.argsort(starts.ravel()[index], kind="stable")]
    first, last = starts.ravel()[order], ends.ravel()[order]
    clash = np.flatnonzero(last[:-1] > first[1:])
    if clash.size:
        count = rows.shape[1]
        a, b = (divmod(int(order[clash[0] + k]), count) for k in (0, 1))
        names = [f"{_STREAMS[present[r] - 1]}[{i}]" for r, i in (a, b)]
        raise refuse(f"{names[0]} and {names[1]} share memory.", "Pass tensors that do not overlap.")
