"""CRC-32 of bytes, alone or of bytes that are copied on the way.

The checksum is zlib's (ISO 3309), so that any program can check what was written. The native kernels fold 512 bits at a
time and check at the speed of the memory; a copy that checks costs little more than a copy. Without them zlib does it.
"""

from __future__ import annotations

import zlib
from types import ModuleType

import numpy as np

import ds_ops._native as _native

__all__ = ["copy_crc32", "crc32"]


def _kernels() -> ModuleType | None:
    # zlib's tables are better than ours: the native code is for machines with carry-less products.
    module = _native.load("_cpu").module
    return module if module is not None and module.crc32_best() > 0 else None


_KERNELS = _kernels()


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """Compute zlib's CRC-32 of contiguous memory, continuing from `value`. Releases the interpreter lock."""
    return zlib.crc32(data, value) if _KERNELS is None else int(_KERNELS.crc32(data, value, -1))


def copy_crc32(target: bytearray | memoryview, source: bytes | bytearray | memoryview, value: int = 0) -> int:
    """Copy `source` over `target` (as many bytes, no common memory) and return `crc32(source, value)`.

    Cost: one pass over both; does not hold the interpreter.

    Raises:
        ValueError: they differ in length.
    """
    if _KERNELS is not None:
        return int(_KERNELS.copy_crc32(target, source, value, -1))
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8), casting="no")
    return zlib.crc32(target, value)
