"""The last operations of a rank, in memory that outlives it.

A *stamp* says what one operation is and when it began, was waited for and ended. Stamps are written into fixed slots of a
ring, in a memfd of 544 KiB: another process of the same user and host that opened it can still read what this rank did
last when it was killed. The file has no name, so nothing is left behind when all are gone.

Writing one costs about a microsecond and allocates nothing that stays (measured in tools/bench/comm.py).
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["MESSAGES", "OPS", "UNEVEN", "RingReader", "Stamp", "StampRing"]

OPS = (
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "reduce_scatter_single",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "all_gather_single",
    "all_gather",
    "all_gather_coalesced",
    "all_to_all_single",
    "all_to_all_pieces",
    "all_to_all",
    "broadcast",
    "gather",
    "scatter",
    "barrier",
    "monitored_barrier",
    "send",
    "recv",
    "post",
    "batch_isend_irecv",
)
MESSAGES = frozenset({"send", "recv", "batch_isend_irecv"})  # only two ranks see them: no place in the group's order
UNEVEN = frozenset(
    {"all_gather", "all_to_all", "all_to_all_pieces", "all_to_all_single", "gather", "scatter", *MESSAGES}
)
_UNEVEN_CODES = [code for code, op in enumerate(OPS) if op in UNEVEN]
_OP_CODES = {op: code for code, op in enumerate(OPS)}
_DTYPES = ("", *sorted({str(v)[6:] for v in vars(torch).values() if isinstance(v, torch.dtype)}))
_DTYPE_CODES = {getattr(torch, name): code for code, name in enumerate(_DTYPES) if name}

_SLOTS = 4096  # a power of two
_HEAD_BYTES = 32 << 10  # names of the groups, one JSON text a line
# mark, began, waited, ended, thread, numel | op, dtype, ndim, unused | group, peer | four dims | end of the unit's name
_RECORD = struct.Struct("<QdddQQBBBBHHQQQQ40s")
_BLOCK = 64  # operations of a group under one digest
_COLUMNS = np.dtype(
    {
        "names": ["mark", "began", "waited", "ended", "numel", "op", "dtype", "group", "peer", "unit"],
        "formats": ["<u8", "<f8", "<f8", "<f8", "<u8", "u1", "u1", "<u2", "<u2", "S40"],
        "offsets": [0, 8, 16, 24, 40, 48, 49, 52, 54, 88],
        "itemsize": 128,
    }
)
_WAITED_AT, _ENDED_AT = 16, 24
_UNIT_BYTES = 40
_pack, _pack_time = _RECORD.pack_into, struct.Struct("<d").pack_into


@dataclass(frozen=True, slots=True)
class Stamp:
    """One operation of one rank.

    Attributes:
        key: torch's name of the group; `group` is the one messages show.
        mark: Number of the operation in the group's order; 0 for messages between two ranks.
        peer: The root or the other rank, within the group; -1 where there is none.
        shape: Up to four dims of what was passed; `numel` counts all elements.
        began_s, waited_s, ended_s: time.monotonic() of this host; 0 for what did not happen yet.
        thread: Identity of the Python thread that made the call.
    """

    key: str
    group: str
    mark: int
    op: str
    unit: str
    dtype: str
    shape: tuple[int, ...]
    numel: int
    peer: int
    began_s: float
    waited_s: float
    ended_s: float
    thread: int

    @property
    def waits(self) -> bool:
        """Whether a thread of the rank is blocked in it."""
        return self.waited_s > 0 and self.ended_s == 0

    def __str__(self) -> str:
        number = f" #{self.mark}" if self.mark else ""
        what = f" {self.dtype}{list(self.shape)}" if self.dtype else ""
        return f"{self.op}[{self.unit}]{number}{what} of group {self.group!r}"


class StampRing:
    """The stamps that this rank writes. `begin` from any thread; a slot is overwritten after 4096 operations."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("ds-comm-ring") if hasattr(os, "memfd_create") else -1
        size = _HEAD_BYTES + _SLOTS * _RECORD.size
        if self.fd >= 0:
            os.fchmod(self.fd, 0o600)
            os.ftruncate(self.fd, size)
        self._map = mmap.mmap(self.fd, size)
        self._next = 0
        self._groups: dict[str, int] = {}
        self._units: dict[str, bytes] = {"": b""}
        self._head = 0
        self._lock = threading.Lock()

    def begin(self, key: str, group: str, mark: int, what: tuple[str, str, int], tensor: Tensor | None) -> int:
        """Stamp an operation. `what` is its name, the unit, and the peer. Returns its slot."""
        op, unit, peer = what
        slot = self._next
        self._next = slot + 1 & _SLOTS - 1  # two threads at once may share a slot: one stamp is lost, nothing breaks
        code = self._groups.get(key)
        if code is None:
            code = self._add_group(key, group)
        name = self._units.get(unit)
        if name is None:
            name = self._add_unit(unit)
        dims: Sequence[int] = () if tensor is None else tensor.shape
        _pack(
            self._map,
            _HEAD_BYTES + slot * 128,
            mark,
            time.monotonic(),
            0.0,
            0.0,
            threading.get_ident(),
            0 if tensor is None else tensor.numel(),
            _OP_CODES[op],
            0 if tensor is None else _DTYPE_CODES.get(tensor.dtype, 0),
            len(dims),
            0,
            code,
            peer + 1,
            *(*dims, 0, 0, 0, 0)[:4],
            name,
        )
        return slot

    def waiting(self, slot: int) -> None:
        """Mark the operation of `slot` as blocking a thread from now on."""
        _pack_time(self._map, _HEAD_BYTES + slot * 128 + _WAITED_AT, time.monotonic())

    def ended(self, slot: int) -> None:
        """Mark the operation of `slot` as complete."""
        _pack_time(self._map, _HEAD_BYTES + slot * 128 + _ENDED_AT, time.monotonic())

    def stamp(self, slot: int) -> Stamp | None:
        """Return the stamp in one slot; None when the slot is empty."""
        at = _HEAD_BYTES + slot * _RECORD.size
        return next(_records(self._map[at : at + _RECORD.size], _groups(self._map)), None)

    def stamps(self) -> list[Stamp]:
        """Return all stamps in the ring, oldest first.

        Takes some 20 ms: not for the training path.
        """
        return _parse(self._map)

    def blocked_since(self) -> float:
        """Return when the longest present wait began, in time.monotonic(); 0 when no thread waits. Takes 20 us."""
        times = np.frombuffer(self._map, _COLUMNS, _SLOTS, _HEAD_BYTES)
        waits = times["waited"][(times["waited"] > 0) & (times["ended"] == 0)]
        return float(waits.min()) if len(waits) else 0.0

    def digests(self, known: Mapping[str, Iterable[int]]) -> dict[str, dict[int, int]]:
        """Compute, by group, digests of complete blocks of 64 operations that are still in the ring and not `known`.

        Ranks that ran the same operations have the same digests. Takes some 200 us.
        """
        rows = np.frombuffer(self._map, _COLUMNS, _SLOTS, _HEAD_BYTES)
        rows = rows[(rows["began"] > 0) & (rows["mark"] > 0)].copy()
        rows["numel"][np.isin(rows["op"], _UNEVEN_CODES)] = 0
        by_group: dict[str, dict[int, int]] = {}
        for key, code in list(self._groups.items()):
            group_rows = rows[rows["group"] == code]
            blocks, counts = np.unique((group_rows["mark"] - 1) // _BLOCK, return_counts=True)
            skip = set(known.get(key, ()))
            for block in blocks[counts == _BLOCK].tolist():
                if block not in skip:
                    by_group.setdefault(key, {})[block] = _digest(
                        group_rows[(group_rows["mark"] - 1) // _BLOCK == block]
                    )
        return by_group

    @staticmethod
    def block_marks(block: int) -> tuple[int, int]:
        """Return the marks of the first and last operation under a digest."""
        return block * _BLOCK + 1, (block + 1) * _BLOCK

    def goodbye(self, why: str) -> None:
        """Leave a word for who reads the ring when this process is gone."""
        self._write_line({"goodbye": why})

    def close(self) -> None:
        """Close the file descriptor of the ring; afterwards no new reader can open it.

        The mapping stays until its last user is gone: works may still stamp their end.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _add_group(self, key: str, group: str) -> int:
        with self._lock:
            code = self._groups.setdefault(key, len(self._groups))
            self._write_line({"key": key, "group": group, "code": code})
            return code

    def _add_unit(self, unit: str) -> bytes:
        if len(self._units) > _SLOTS:  # names that never repeat must not fill the memory
            self._units = {"": b""}
        # The end of a module path says more than its beginning.
        self._units[unit] = name = unit.encode()[-_UNIT_BYTES:]
        return name

    def _write_line(self, value: dict[str, int | str]) -> None:
        line = json.dumps(value).encode() + b"\n"
        if self._head + len(line) < _HEAD_BYTES:
            self._map[self._head : self._head + len(line)] = line
            self._head += len(line)


class RingReader:
    """The ring of another process of this host and user, readable also after that process has died."""

    def __init__(self, pid: int, fd: int) -> None:
        """Raises OSError when the process is gone, is another user's, or is not on this host."""
        descriptor = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
        try:
            self._map = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)

    def stamps(self) -> list[Stamp]:
        """Return all stamps in the ring, oldest first."""
        return _parse(self._map)

    def goodbye(self) -> str:
        """Return the reason that the process recorded at its end; empty when the process was killed."""
        return next((str(line["goodbye"]) for line in _lines(self._map) if "goodbye" in line), "")

    def close(self) -> None:
        self._map.close()


def _digest(rows: np.ndarray[Any, Any]) -> int:
    rows = rows[np.argsort(rows["mark"])]
    return zlib.crc32(b"".join(rows[name].tobytes() for name in ("op", "dtype", "peer", "numel", "unit")))


def _lines(memory: mmap.mmap) -> Iterator[dict[str, Any]]:
    return map(json.loads, memory[:_HEAD_BYTES].split(b"\0", 1)[0].splitlines())


def _groups(memory: mmap.mmap) -> dict[int, tuple[str, str]]:
    return {line["code"]: (line["key"], line["group"]) for line in _lines(memory) if "code" in line}


def _parse(memory: mmap.mmap) -> list[Stamp]:
    return sorted(_records(memory[_HEAD_BYTES:], _groups(memory)), key=lambda stamp: stamp.began_s)


def _records(data: bytes, groups: dict[int, tuple[str, str]]) -> Iterator[Stamp]:
    for mark, began, waited, ended, thread, numel, op, dtype, ndim, _, group, peer, *dims, unit in _RECORD.iter_unpack(
        data
    ):
        if not began:
            continue
        key, name = groups.get(group, (f"?{group}", "?"))
        yield Stamp(
            key=key,
            group=name,
            mark=mark,
            op=OPS[op],
            unit=unit.rstrip(b"\0").decode(errors="replace"),
            dtype=_DTYPES[dtype],
            shape=tuple(dims[:ndim]),
            numel=numel,
            peer=peer - 1,
            began_s=began,
            waited_s=waited,
            ended_s=ended,
            thread=thread,
        )
