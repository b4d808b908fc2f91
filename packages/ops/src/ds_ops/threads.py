"""How many threads a kernel of the CPU uses: as many as torch says, or fewer where the calling thread was told so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["at_most", "kernel_threads"]


class _Told(threading.local):
    most: int | None = None


_told = _Told()


def kernel_threads() -> int:
    """Return the number of threads of the calling thread's next kernel; at least 1."""
    threads = torch.get_num_threads()
    return threads if _told.most is None else min(threads, _told.most)


@contextmanager
def at_most(threads: int) -> Iterator[None]:
    """Limit the threads of kernels that this thread calls inside the context; other threads are unaffected.

    For a thread that works beside the training thread. Nested contexts combine with *min*.
    """
    before = _told.most
    _told.most = max(1, threads if before is None else min(before, threads))
    try:
        yield
    finally:
        _told.most = before
