"""Page-locked memory of the host that is given back at will (`DS_PIN_MEMORY_BACKEND=native`), and how much has been pinned.

Memory is locked by the system, or by the device's driver where the device has one, and is freed with the last tensor that
uses it: what is unpinned early is no longer locked, and stays valid.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor

from deepspeed._ours.base._torch import is_fake
from deepspeed._ours.base.raising import refused
from deepspeed._ours.monitor.upstream_logging import logger
from ds_accel import PinnedMemoryError, get_accelerator, streams

_system = ctypes.CDLL(None, use_errno=True)


class PinHandle:
    """Allocates flat page-locked tensors, and knows which memory is theirs. `ranges` has their addresses, begin by end."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """Allocate [num_elem] of the example's dtype, uninitialized.

        Raises:
            PinnedMemoryError: the system lets this process lock no more ("pinned-alloc").
        """
        dtype, nbytes = example_tensor.dtype, num_elem * example_tensor.dtype.itemsize
        if get_accelerator().facts.pinned:
            root = streams.page_locked((num_elem,), dtype)
        else:
            root = torch.frombuffer(mmap.mmap(-1, nbytes + dtype.itemsize), dtype=dtype)
            if _system.mlock(ctypes.c_void_p(root.data_ptr()), ctypes.c_size_t(nbytes)):
                raise PinnedMemoryError(
                    f"{nbytes} bytes cannot be locked: {os.strerror(ctypes.get_errno())}", code="pinned-alloc",
                    fix="Raise the locked-memory limit of the process (ulimit -l).",
                )  # fmt: skip
        begin = root.data_ptr()
        self.ranges[begin] = begin + nbytes
        weakref.finalize(root, self.ranges.pop, begin, None)
        return root[:num_elem]  # a view keeps `root` alive, and so does a view of it

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """Unlock what begins at `address`. Whether something did."""
        end = self.ranges.pop(address, None)
        if end is not None and not get_accelerator().facts.pinned:
            _system.munlock(ctypes.c_void_p(address), ctypes.c_size_t(end - address))
        return end is not None

    def free_cpu_locked_tensor(self, buffer: Tensor) -> bool:
        """Unlock a tensor that `new_cpu_locked_tensor` returned. Whether it was locked."""
        return self.free_cpu_locked_tensor_by_ptr(buffer.data_ptr())

    def is_pinned(self, buffer: Tensor) -> bool:
        """Whether `buffer` begins in memory of this handle."""
        if buffer.is_meta or is_fake(buffer):  # it has no address
            return False
        return any(begin <= buffer.data_ptr() < end for begin, end in self.ranges.items())


def pin_functions() -> Mapping[str, Any]:
    """Return the functions that `PinMemoryBuilder().load()` provides."""
    return {"pin_handle": PinHandle}


class NativePinnedMemory:
    """Pinned tensors of any shape.

    Raises:
        UnsupportedError: `PinMemoryBuilder` of `deepspeed.ops.op_builder` gives no handle ("compat-missing").
    """

    def __init__(self) -> None:
        try:
            self._handle = import_module("deepspeed.ops.op_builder").PinMemoryBuilder().load().pin_handle()
        except Exception as error:
            raise refused("pinned-handle", error) from error
        self._ranges = self._handle.ranges

    def pin(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Any:
        """Return a pinned copy of `tensor`, flat unless `match_shape`; undefined contents unless `make_copy`."""
        shape = tensor.shape if match_shape else (tensor.numel(),)
        pinned = self.pin_empty(tensor, shape)
        return pinned.copy_(tensor.reshape(shape)) if make_copy else pinned

    def pin_empty(self, example: Tensor, shape: Sequence[int]) -> Any:
        """Allocate a pinned tensor of this shape and of the example's dtype."""
        pinned: Any = self._handle.new_cpu_locked_tensor(prod(shape), example).view(tuple(shape))
        pinned.ds_pinned, pinned.ds_pin_base = True, pinned.data_ptr()
        return pinned

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether `tensor` was returned by `pin`, or is a view of one that was."""
        return bool(getattr(tensor, "ds_pinned", False) or self._handle.is_pinned(tensor))

    def unpin(self, tensor: Any) -> bool:
        """Unlock the memory that `tensor` was pinned with, even if its `.data` is another now. Whether it was locked."""
        freed = self._handle.free_cpu_locked_tensor_by_ptr(getattr(tensor, "ds_pin_base", None) or tensor.data_ptr())
        tensor.ds_pinned = False
        return bool(freed)


def get_native_pinned_memory() -> NativePinnedMemory:
    """Return the one of this process, where `deepspeed.utils.pin_memory` keeps it: programs start it anew there."""
    home: Any = import_module("deepspeed.utils.pin_memory")
    if home._shared_native_pins is None:
        home._shared_native_pins = NativePinnedMemory()
    shared: NativePinnedMemory = home._shared_native_pins
    return shared


def get_active_native_pinned_memory() -> NativePinnedMemory | None:
    """Return the process's own if `DS_PIN_MEMORY_BACKEND` is `native`; None: torch pins."""
    native = os.environ.get("DS_PIN_MEMORY_BACKEND", "torch").strip().lower() == "native"
    return get_native_pinned_memory() if native else None


# ---- how much


def _fmt_bytes(num_bytes: int) -> str:
    for power, unit, digits in ((3, "GB", 3), (2, "MB", 2), (1, "KB", 1)):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.{digits}f} {unit}"
    return f"{num_bytes} B"


class _Tracker:
    """Bytes pinned by the accelerator so far, freed ones among them. Crossing 32 GB, 64 GB, 128 GB, ... is logged."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._bytes = self._calls = 0
        self._next_checkpoint = 32 * 1024**3

    def track(self, num_bytes: int) -> None:
        self._bytes += num_bytes
        self._calls += 1
        while self._bytes >= self._next_checkpoint:
            logger.info(f"pinned memory: {self._text()}, past the checkpoint of {_fmt_bytes(self._next_checkpoint)}")
            self._next_checkpoint *= 2

    def summary(self, tag: str = "") -> None:
        logger.info(f"pinned memory{tag and f' ({tag})'}: {self._text()}")

    def _text(self) -> str:
        return f"{_fmt_bytes(self._bytes)} in {self._calls} allocations"


_tracker = _Tracker()
track_pinned_memory, pinned_memory_summary = _tracker.track, _tracker.summary
