"""CPU memory for big tensors: huge pages, and starts that do not collide.

Two facts decide the speed of a pass over several large arrays. Memory behind 4 KiB pages costs a third of the bandwidth
in address translation, so an arena asks for 2 MiB pages. And arrays whose starts agree in their low 12 bits fight for
the same cache sets and store buffers, so each view of an arena starts 1 KiB further into its page than the one before.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

import ds_ops._call as _call

__all__ = ["HUGE_PAGE_BYTES", "make_huge", "trim", "zeros_huge"]

HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25  # since Linux 6.1; Python's mmap has no name for it
_STAGGER_BYTES, _STAGGER_STEPS, _ALIGN_BYTES = 1024, 4, 64


def zeros_huge(numels: Sequence[int], dtype: torch.dtype, *, stream: int = 0) -> list[Tensor]:
    """Allocate 1-D zero tensors on the CPU, one per length, as views of a single arena of huge pages.

    Args:
        stream: which of the arrays that one pass reads together this is; different streams start at different offsets
            into their pages.

    Arenas smaller than a huge page are ordinary memory. The kernel allocates pages when first written, in huge units
    where it allows that (`/sys/kernel/mm/transparent_hugepage/enabled` is `madvise` or `always`).
    """
    item = dtype.itemsize
    offsets, end = [], 0
    for n in numels:
        offsets.append(end)
        end += -(-n * item // _ALIGN_BYTES) * _ALIGN_BYTES
    if end < HUGE_PAGE_BYTES:
        return [torch.zeros(n, dtype=dtype, device="cpu") for n in numels]
    start = stream % _STAGGER_STEPS * _STAGGER_BYTES
    base = _mapping(end + start)[start:]
    return [base[o : o + n * item].view(dtype) for o, n in zip(offsets, numels, strict=True)]


def make_huge(t: Tensor) -> bool:
    """Gather the memory of an existing CPU tensor into huge pages, where it is; contents and address stay.

    Returns whether the kernel did it: it needs Linux 6.1, private anonymous memory (what torch allocates) and free huge
    pages, and at least one aligned huge page inside the tensor. Cost: one copy of the tensor inside the kernel, once.
    """
    if t.device.type != "cpu" or not t.is_contiguous() or t.numel() * t.element_size() < 2 * HUGE_PAGE_BYTES:
        return False
    start = _call.address(t)
    first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    size = (start + t.numel() * t.element_size() - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    madvise = getattr(_libc(), "madvise", None)
    if madvise is None or size <= 0:
        return False
    done: int = madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), ctypes.c_int(_MADV_COLLAPSE))
    return done == 0


def trim() -> bool:
    """Give the system what the C library kept of freed memory; whether there is such a function (glibc), and something to give.

    For the end of a load that made and dropped many tensors: some hundred MB would stay with the process.
    """
    give = getattr(_libc(), "malloc_trim", None)
    return bool(give is not None and give(ctypes.c_size_t(0)))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _mapping(num_bytes: int) -> Tensor:
    """Map fresh private memory that starts at a huge page's boundary, as a uint8 tensor."""
    size = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES + HUGE_PAGE_BYTES
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)  # keeps the mapping alive; unmapped with the last view
    skip = -_call.address(whole) % HUGE_PAGE_BYTES
    return whole[skip : skip + num_bytes]
