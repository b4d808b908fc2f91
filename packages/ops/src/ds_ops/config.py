"""The `aio` section of a configuration: how offloaded state moves between memory and files. Imported only by who reads one."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ds_config import Deprecated, StrictModel, Unsupported
from ds_ops.io import IOSettings

__all__ = ["AioConfig"]


class AioConfig(StrictModel):
    """`aio`: asynchronous file transfers. `ds io tune FOLDER` measures a disk and prints the best section for it."""

    block_size: Annotated[int, Field(ge=4096, multiple_of=4096)] = Field(
        default=1 << 20, description="Bytes of one request to the kernel; a multiple of 4096."
    )
    queue_depth: Annotated[int, Field(ge=1, le=4096)] = Field(default=8, description="Requests in flight per thread.")
    intra_op_parallelism: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="Threads that submit and reap; any size of transfer is shared out among them."
    )
    single_submit: bool = Field(
        default=False, description="One system call a request, instead of one for all that are ready."
    )
    overlap_events: bool = Field(
        default=True, description="Refill the queue as requests end; false waits until all of it has ended."
    )
    use_gds: Annotated[
        bool, Unsupported('leave it out; offloaded state moves through host memory (ds_ops.io has backend="gds")')
    ] = False
    thread_count: Annotated[int, Deprecated("intra_op_parallelism")] = 1

    def settings(self) -> IOSettings:
        """Convert the section to the settings of `ds_ops.io.AsyncIO`; the backend is selected at run time."""
        return IOSettings(
            block_bytes=self.block_size,
            queue_depth=self.queue_depth,
            workers=self.intra_op_parallelism,
            single_submit=self.single_submit,
            overlap=self.overlap_events,
        )
