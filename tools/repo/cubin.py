"""What a CUDA kernel's machine code says of its speed, read from the image that NVRTC made: registers, spills, instructions of the main path.

Instructions of sm_70 and later are 16 bytes. The main path runs from the first instruction to the end without taking a conditional
branch: tails and the slow paths of divisions lie behind those. Of a kernel with a loop over rows, the loop's body is counted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["KernelCode", "read_code"]

_NOP, _BRA, _EXIT, _LDL, _STL = 0x918, 0x947, 0x94D, 0x983, 0x387
_ALWAYS = 7
_DIVERGED = 27  # the bit of a branch that is taken by a warp whose threads do not run together
_REGISTERS = 0x2F  # EIATTR_REGCOUNT


@dataclass(frozen=True, slots=True)
class KernelCode:
    """registers: a thread. spills: loads and stores of local memory. instructions: of the main path. loop: of the longest loop's body."""

    registers: int
    spills: int
    instructions: int
    loop: int


def read_code(image: bytes, entry: str) -> KernelCode:
    """Read the section of `entry` of a cubin for sm_90 that has one kernel."""
    sections = dict(_sections(image))
    words = list(struct.iter_unpack("<QQ", sections[f".text.{entry}"]))
    spills = sum(low & 0xFFF in (_LDL, _STL) for low, _ in words)
    path = _main_path(words)
    loops = [(_target(i, words[i]), i) for i in range(len(words)) if _jumps(words[i]) and _target(i, words[i]) < i]
    within = [sum(first <= place <= last for place in path) for first, last in loops if last in path]
    return KernelCode(_registers(sections[".nv.info"]), spills, len(path), max(within, default=0))


def _sections(image: bytes) -> Iterator[tuple[str, bytes]]:
    offset = struct.unpack_from("<Q", image, 40)[0]
    size, count, names = struct.unpack_from("<3H", image, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, offset + i * size) for i in range(count)]
    for head in headers:
        start = headers[names][4] + head[0]
        yield image[start : image.index(b"\0", start)].decode(), image[head[4] : head[4] + head[5]]


def _registers(info: bytes) -> int:
    place = 0
    while place < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, place)
        place += 4
        if form == 4 and attribute == _REGISTERS:
            return int(struct.unpack_from("<II", info, place)[1])
        place += size if form == 4 else 0
    raise ValueError("the image does not say how many registers its kernel has")


def _jumps(words: tuple[int, int]) -> bool:
    return words[0] & 0xFFF == _BRA and not words[1] >> _DIVERGED & 1


def _always(words: tuple[int, int]) -> bool:
    return words[0] >> 12 & 0xF == _ALWAYS


def _target(place: int, words: tuple[int, int]) -> int:
    """Return the index of the instruction that a branch at index `place` goes to."""
    high = (words[1] << 64 | words[0]) >> 34 & (1 << 48) - 1
    high -= high >> 47 << 48
    return place + 1 + ((high << 8 | words[0] >> 16 & 0xFF) * 4) // 16


def _main_path(words: list[tuple[int, int]]) -> list[int]:
    """List the places of the instructions that run where no conditional branch is taken."""
    place, path = 0, dict[int, None]()
    while place < len(words) and place not in path:
        here = words[place]
        if here[0] & 0xFFF != _NOP:
            path[place] = None
        if here[0] & 0xFFF == _EXIT and _always(here):
            break
        place = _target(place, here) if _jumps(here) and _always(here) else place + 1
    return list(path)
