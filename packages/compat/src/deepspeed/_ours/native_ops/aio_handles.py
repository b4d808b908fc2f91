"""Upstream's handle of asynchronous files, `aio_handle`, by `ds_ops.io`; and memory that such transfers like best."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deepspeed._ours.base.forwarding import answers, tells
from deepspeed._ours.base.raising import refused
from ds_accel import get_accelerator
from ds_ops.io import AsyncIO, IOSettings
from ds_ops.io_bench import aligned_bytes


class aio_handle:  # noqa: N801  upstream's spelling
    """Reads and writes whole tensors. Transfers that are begun end at `wait`.

    Args:
        block_size: Bytes of one request.
        queue_depth: Requests in flight a worker.
        single_submit: One system call a request.
        overlap_events: Refill the queue as requests end.
        intra_op_parallelism: Workers.
    """

    def __init__(
        self, block_size: int = 1 << 20, queue_depth: int = 128, single_submit: bool = False, overlap_events: bool =
        True, intra_op_parallelism: int = 1,
    ) -> None:  # fmt: skip
        self._settings = IOSettings(
            block_bytes=max(4096, block_size // 4096 * 4096), queue_depth=queue_depth, workers=intra_op_parallelism,
            single_submit=single_submit, overlap=overlap_events,
        )  # fmt: skip
        self._given = SimpleNamespace(
            block_size=block_size, queue_depth=queue_depth, single_submit=single_submit,
            overlap_events=overlap_events, intra_op_parallelism=intra_op_parallelism,
        )  # fmt: skip
        self._io = AsyncIO(self._settings)
        self._begun = 0

    get_block_size = tells("_given.block_size", "Return the `block_size` that the handle was created with.")
    get_queue_depth = tells("_given.queue_depth", "Return the `queue_depth` that the handle was created with.")
    get_single_submit = tells("_given.single_submit", "Return the `single_submit` that the handle was created with.")
    get_overlap_events = tells("_given.overlap_events", "Return the `overlap_events` that the handle was created with.")
    get_intra_op_parallelism = tells(
        "_given.intra_op_parallelism", "Return the `intra_op_parallelism` that the handle was created with."
    )

    get_alignment = answers(
        4096, "Return the address alignment in bytes of a buffer that is read or written without a copy."
    )

    def _begin(self, write: bool, buffer: Tensor, filename: str | os.PathLike[str], offset: int) -> None:
        if write and not offset:
            self._io.write_file(filename, buffer)
        elif write:
            self._io.write(filename, buffer, offset)
        else:
            self._io.read(filename, buffer, offset)
        self._begun += 1

    def async_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Begin to fill `buffer`. 0."""
        self._begin(False, buffer, filename, file_offset)
        return 0

    def async_pwrite(
        self, buffer: Tensor, filename: str | None = None, file_offset: int = 0, fd: int | None = None
    ) -> int:
        """Begin to write `buffer` to the file of a name, or into the open one of a descriptor, which keeps its position. 0.

        Raises:
            ConfigError: neither was given, or both; a TypeError, too ("compat-argument").
        """
        if (filename is None) == (fd is None):
            raise refused("pwrite-target", filename, fd)
        if filename is not None:
            self._begin(True, buffer, filename, file_offset)
        else:
            self._io.write(f"/proc/self/fd/{fd}", buffer, file_offset)
            self._begun += 1
        return 0

    def sync_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Fill `buffer`. The number of transfers that ended, those begun before among them."""
        self._begin(False, buffer, filename, file_offset)
        return self.wait()

    def sync_pwrite(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Write `buffer`. The number of transfers that ended."""
        self._begin(True, buffer, filename, file_offset)
        return self.wait()

    def read(self, buffer: Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """`sync_pread`. A short file is always an error, so nothing is left to validate."""
        del validate
        return self.sync_pread(buffer, filename, file_offset)

    def write(self, buffer: Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """`sync_pwrite`, and with `validate` a look at the length of the file."""
        result = self.sync_pwrite(buffer, filename, file_offset)
        if validate and Path(filename).stat().st_size < file_offset + buffer.nbytes:
            raise OSError(f"{filename} is shorter than what was written to it")
        return result

    def pread(
        self, buffer: Tensor, filename: str, validate: bool = False, async_: bool = False, file_offset: int = 0, **rest:
        Any,
    ) -> int:  # fmt: skip
        """Read a file into `buffer` with `async_pread` or `read`."""
        begin = rest.get("async", async_)
        return (
            self.async_pread(buffer, filename, file_offset)
            if begin
            else self.read(buffer, filename, validate, file_offset)
        )

    def pwrite(
        self, buffer: Tensor, filename: str, validate: bool = False, async_: bool = False, file_offset: int = 0, **rest:
        Any,
    ) -> int:  # fmt: skip
        """Write `buffer` to a file with `async_pwrite` or `write`."""
        if rest.get("async", async_):
            return self.async_pwrite(buffer, filename, file_offset)
        return self.write(buffer, filename, validate, file_offset)

    def wait(self) -> int:
        """Wait for all transfers; how many ended.

        Raises:
            OSError: one failed.
        """
        begun, self._begun = self._begun, 0
        self._io.wait_all()
        return begun

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """Allocate [num_elem] of the example's dtype: pinned where a device uses pinned memory, else on whole pages."""
        dtype = example_tensor.dtype
        if get_accelerator().facts.pinned:
            return torch.empty(num_elem, dtype=dtype, device="cpu").pin_memory()
        return aligned_bytes(num_elem * dtype.itemsize).view(dtype)

    free_cpu_locked_tensor = answers(True, "Return True without freeing: the memory is freed with its last tensor.")

    def is_pinned(self, buffer: Tensor) -> bool:
        """Whether transfers use the memory in place."""
        return buffer.is_pinned() or buffer.data_ptr() % self.get_alignment() == 0


def functions() -> dict[str, Any]:
    """Return the functions that `AsyncIOBuilder().load()` provides."""

    def aio_write(buffer: Tensor, filename: str, *settings: Any) -> int:
        return aio_handle(*settings[:4]).sync_pwrite(buffer, filename)

    def aio_read(buffer: Tensor, filename: str, *settings: Any) -> int:
        return aio_handle(*settings[:4]).sync_pread(buffer, filename)

    def deepspeed_memcpy(dest: Tensor, src: Tensor) -> int:
        dest.copy_(src)
        return 0

    return {
        "aio_handle": aio_handle,
        "aio_read": aio_read,
        "aio_write": aio_write,
        "deepspeed_memcpy": deepspeed_memcpy,
    }
