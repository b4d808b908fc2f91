"""A scratch file without a name, memory of the host, and a bounded number of buffers between them.

Words: a *record* is what lies in one extent of the file. It is *held* while its bytes are in a *slot*, where they may
be read and written. A slot that was given back with a write to the file or copies to a device under way is taken again only after them. Nothing of the file is left when
the process ends, in whatever way.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from ds_accel import streams
from ds_accel.locked_pages import locked_pages
from ds_accel.streams import DeviceEvent
from ds_config.errors import PlanError
from ds_config.sizes import bytes_text
from ds_ops.io import AsyncIO, FileTransferError, IOSettings, Transfer
from ds_ops.paged_memory import open_nameless

__all__ = ["BufferRing", "Moving", "RingSettings", "ScratchFile", "ScratchRecord", "host_bytes"]

_log = logging.getLogger(__name__)
_told: set[str] = set()
_REPEATS = 20
_PAGE = 4096


def host_bytes(nbytes: int, device: torch.device, *, pin: bool, stays: bool = True) -> Tensor:
    """Allocate [nbytes], uint8, zeros, on the host, at the start of a page.

    Args:
        device: Copies go to and come from this device; page-locked memory helps where that is not the host itself.
        stays: It is there as long as what it belongs to, so it takes its own size and no more; else it is memory that torch keeps for who
            asks again, in powers of two.
    Page-locking may be refused (RLIMIT_MEMLOCK, the driver): then the memory is plain, with one warning a process.
    """
    if pin and device.type not in ("cpu", "meta", "mps"):
        try:
            if stays and (locked := locked_pages(nbytes, device)) is not None:
                return locked
            return streams.page_locked((nbytes,), torch.uint8, zero=True)
        except RuntimeError as error:
            if "pin" not in _told:
                _told.add("pin")
                _log.warning(
                    "page-locking %s was refused (%s): plain memory is used, copies are slower",
                    bytes_text(nbytes),
                    str(error).partition("\n")[0],
                )
    region = mmap.mmap(-1, max(_PAGE, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return streams.host_memory(torch.frombuffer(region, dtype=torch.uint8)[:nbytes])


@dataclass(slots=True)
class Moving:
    """A transfer under way between memory and the scratch file of `folder`.

    Attributes:
        again: Starts the same transfer once more.
    """

    transfer: Transfer
    folder: str
    again: Callable[[], Transfer]

    def done(self) -> bool:
        """Whether it ended, well or badly."""
        return self.transfer.done()

    def wait(self) -> None:
        """Return when every byte is transferred.

        Raises:
            FileTransferError: it failed; the message names the folder ("io-failed", "io-end-of-file").
        """
        for repeat in count():
            try:
                self.transfer.wait()
                return
            except FileTransferError as error:
                # io_uring cancels what waits for a kernel thread when a signal keeps it from starting one.
                if error.errno != errno.ECANCELED or repeat == _REPEATS:
                    raise self._told(error) from error
            self.transfer = self.again()

    def _told(self, error: FileTransferError) -> FileTransferError:
        text = f"scratch file in {self.folder}: {error.message}"
        wrapped = FileTransferError(text, code=error.code or "io-failed", fix=error.fix or "")
        wrapped.errno, wrapped.filename, wrapped.offset = error.errno, self.folder, error.offset
        return wrapped


class ScratchFile:
    """One file of one rank, which grows by extents.

    Args:
        folder: Made if it is not there.
    Raises:
        PlanError: the folder cannot be made or written ("offload-folder").
    """

    def __init__(self, folder: str, settings: IOSettings) -> None:
        self.folder, self.nbytes = folder, 0
        try:
            os.makedirs(folder, exist_ok=True)
            self._fd = open_nameless(folder)
        except OSError as error:
            raise PlanError(
                f"no scratch file in {folder}: {error.strerror}",
                code="offload-folder",
                fix="Set nvme_path to a folder that may be written.",
            ) from error
        self._close = weakref.finalize(self, os.close, self._fd)
        self._io = AsyncIO(settings)

    @property
    def path(self) -> str:
        """Opens the file again, though it has no name."""
        return f"/proc/self/fd/{self._fd}"

    def reserve(self, nbytes: int) -> int:
        """Allocate `nbytes` more, on the device itself. Returns where.

        Raises:
            PlanError: the file system is full ("offload-space").
        """
        start = self.nbytes
        try:
            if nbytes:
                os.posix_fallocate(self._fd, start, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            free = os.statvfs(self.folder)
            raise PlanError(
                f"the scratch file in {self.folder} holds {bytes_text(start)} and has no room for {bytes_text(nbytes)} more: "
                f"{error.strerror}, {bytes_text(free.f_bavail * free.f_frsize)} are free",
                code="offload-space",
                fix="Free space there, or set nvme_path to a folder of another file system.",
            ) from error
        self.nbytes += nbytes
        return start

    def read(self, into: Tensor, offset: int) -> Moving:
        """Start to fill `into` from `offset` on."""
        return self._moving(lambda: self._io.read(self.path, into, offset))

    def write(self, data: Tensor, offset: int) -> Moving:
        """Start to write `data` at `offset`; it must not change before the transfer ended."""
        return self._moving(lambda: self._io.write(self.path, data, offset))

    def _moving(self, start: Callable[[], Transfer]) -> Moving:
        return Moving(start(), self.folder, start)

    def close(self) -> None:
        """Wait for transfers and free the file's space. Failures that nobody waited for are of no interest any more."""
        if self._close.alive:
            with contextlib.suppress(FileTransferError):
                self._io.close()
            self._close()


@dataclass(slots=True, eq=False)
class ScratchSlot:
    """Memory of at least one record.

    Attributes:
        memory: uint8, starts on a page.
        writing: From it to the file, under way.
        copying: After each of these a device has read it.
        extra: Beside the bounded number; freed when given back.
    """

    memory: Tensor
    writing: Moving | None = None
    copying: Sequence[DeviceEvent] = ()
    extra: bool = False

    def settled(self) -> bool:
        """Whether nobody reads it: it may be written."""
        return (self.writing is None or self.writing.done()) and all(event.query() for event in self.copying)

    def settle(self) -> None:
        """Return when nobody reads it."""
        if self.writing is not None:
            self.writing.wait()
            self.writing = None
        for event in self.copying:
            event.synchronize()
        self.copying = ()


@dataclass(frozen=True, slots=True)
class RingSettings:
    """What a ring is.

    Attributes:
        folder: Of its file; made if it is not there. Nothing is left in it, however the process ends.
        buffers: Slots, while no more are held.
        pin: Page-lock them where the device gains from it; a refusal falls back to plain memory with one warning.
        write_behind: `ScratchRecord.put` does not wait for the write.
        io: How transfers are cut and queued.
    """

    folder: str
    buffers: int = 4
    pin: bool = True
    write_behind: bool = True
    io: IOSettings = field(default_factory=IOSettings)


class BufferRing:
    """The slots of one scratch file.

    Args:
        device: What the slots are copied to and from.

    Attributes:
        extras: Slots beside the bounded number that are held now: whole access holds more units than an update does.
        reads, writes: Bytes so far.
        ahead: Records that are read before their use, oldest first.
        numbers: Of records.
    """

    def __init__(self, settings: RingSettings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.scratch = ScratchFile(settings.folder, settings.io)
        self.extras = self.reads = self.writes = 0
        self._allocated = 0
        self._free: deque[ScratchSlot] = deque()
        self.ahead: list[ScratchRecord] = []
        self._after: dict[tuple[int, int], ScratchRecord] = {}
        self._last = (-1, -1)
        self.numbers = count()

    def take(self, nbytes: int) -> ScratchSlot:
        """A slot of at least so many bytes; waits for the oldest write or copy if all are being read."""
        if not self._free and self._allocated < self.settings.buffers:
            self._allocated += 1
            return ScratchSlot(self._memory(nbytes))
        if not self._free and self.ahead:
            self.ahead[0].drop()  # it was read for a use that did not come
        if not self._free:
            self.extras += 1
            return ScratchSlot(self._memory(nbytes), extra=True)
        slot = self._free.popleft()
        slot.settle()
        if slot.memory.numel() < nbytes:
            slot.memory = self._memory(nbytes)
        return slot

    def free(self) -> bool:
        """Whether `take` would return at once and within the bound."""
        if self._free:
            return self._free[0].settled()
        return self._allocated < self.settings.buffers

    def forget(self, record: ScratchRecord) -> None:
        """Remove a record from the prefetched records: the record is used or released."""
        if record in self.ahead:
            self.ahead.remove(record)

    def give(self, slot: ScratchSlot) -> None:
        """Back; a write or copies from it may be under way."""
        if slot.extra:
            slot.settle()
            self.extras -= 1
        elif slot.writing is None and not slot.copying:
            self._free.appendleft(slot)
        else:
            self._free.append(slot)

    def used(self, record: ScratchRecord) -> ScratchRecord | None:
        """Note the use of a record, and predict the next record.

        The prediction is the record that followed when the same two records were used last: training repeats.
        """
        before, self._last = self._last, (self._last[1], record.number)
        self._after[before] = record
        return self._after.get(self._last)

    def _memory(self, nbytes: int) -> Tensor:
        return host_bytes(-(-nbytes // _PAGE) * _PAGE, self.device, pin=self.settings.pin)

    def close(self) -> None:
        """Give everything back."""
        self._free.clear()
        self._after.clear()
        self.scratch.close()


class ScratchRecord:
    """Bytes of one owner: in a slot, in the file, or on the way.

    Args:
        nbytes: Space that is reserved; `grow` asks for more.
    """

    def __init__(self, ring: BufferRing, nbytes: int) -> None:
        self.ring, self.number = ring, next(ring.numbers)
        self.nbytes = -(-nbytes // _PAGE) * _PAGE
        self._offset = ring.scratch.reserve(self.nbytes)
        self._slot: ScratchSlot | None = None
        self._reading: Moving | None = None
        self._writing: Moving | None = None

    def begin(self) -> None:
        """Start to read, if it is not held and a slot is free."""
        if self._slot is None and self.ring.free():
            self._read()
            self.ring.ahead.append(self)

    def _read(self) -> None:
        if self._writing is not None:
            self._writing.wait()
            self._writing = None
        self._slot = self.ring.take(self.nbytes)
        self._reading = self.ring.scratch.read(self._slot.memory[: self.nbytes], self._offset)
        self.ring.reads += self.nbytes

    def hold(self) -> Tensor:
        """Return the record's bytes, [nbytes], uint8, to be read and written until `put` or `drop`."""
        if self._slot is None:
            self._read()
        if self._reading is not None:
            self._reading.wait()
            self._reading = None
        return self.blank()

    def blank(self) -> Tensor:
        """Return the record's slot, [nbytes], uint8, without reading the file."""
        self.ring.forget(self)
        if self._slot is None:
            self._slot = self.ring.take(self.nbytes)
        return self._slot.memory[: self.nbytes]

    def grow(self, nbytes: int) -> Tensor:
        """`hold` with space for `nbytes`; what is held stays, and has to be `put`. The old extent stays unused."""
        old = self.hold()
        if nbytes <= self.nbytes:
            return old
        slot, old_size = self._slot, self.nbytes
        self.nbytes = -(-nbytes // _PAGE) * _PAGE
        self._offset = self.ring.scratch.reserve(self.nbytes)
        self._slot = self.ring.take(self.nbytes)
        new = self.blank()
        new[:old_size].copy_(old[:old_size])
        if slot is not None:
            self.ring.give(slot)
        return new

    def put(self, after: Sequence[DeviceEvent] = ()) -> None:
        """Write what is held, and let the slot go.

        Args:
            after: Of the device: it copies from the slot until these have happened.
        """
        slot, self._slot = self._slot, None
        if slot is None:
            return
        slot.copying = after
        self._writing = slot.writing = self.ring.scratch.write(slot.memory[: self.nbytes], self._offset)
        self.ring.writes += self.nbytes
        if not self.ring.settings.write_behind:
            self._writing.wait()
            self._writing = slot.writing = None
        self.ring.give(slot)

    def drop(self, after: Sequence[DeviceEvent] = ()) -> None:
        """Let the slot go; the file has what it had. `after` as in `put`."""
        slot, self._slot = self._slot, None
        self.ring.forget(self)
        if self._reading is not None:
            self._reading.wait()
            self._reading = None
        if slot is not None:
            slot.copying = after
            self.ring.give(slot)
