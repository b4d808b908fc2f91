"""CRC-32 of bytes read in pieces, by several readers, in any order.

A CRC is linear over GF(2): for data cut into consecutive segments, the checksum of the whole is the XOR of
`shifted(crc(segment), bytes after the segment)`. So ranks that each read a part of a chunk can check the chunk without
anyone reading all of it: each contributes one 32-bit number.

Polynomial and conditioning are zlib's (ISO 3309, reflected 0xEDB88320). Reference: M. Adler's note on combining CRCs in
the zlib manual; the arithmetic here is multiplication of polynomials modulo P, bit 31 being the coefficient of x^0.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from ds_ops.checksum import copy_crc32, crc32

__all__ = ["copy_crc32", "crc32", "shifted"]

_POLY: Final = 0xEDB88320


def _multiply(a: int, b: int) -> int:
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ _POLY if b & 1 else b >> 1
    return product


@lru_cache(maxsize=64)
def _power(k: int) -> int:
    # x^(8 * 2^k): the step over 2^k bytes.
    if k == 0:
        return 1 << (31 - 8)
    half = _power(k - 1)
    return _multiply(half, half)


@lru_cache(maxsize=4096)
def _step(num_bytes: int) -> int:
    product, k = 1 << 31, 0
    while num_bytes >> k:
        if num_bytes >> k & 1:
            product = _multiply(product, _power(k))
        k += 1
    return product


def shifted(crc: int, num_bytes_after: int) -> int:
    """Return the contribution of a segment with checksum `crc` that is followed by `num_bytes_after` bytes."""
    return _multiply(crc, _step(num_bytes_after)) if num_bytes_after else crc
