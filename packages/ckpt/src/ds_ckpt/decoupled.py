"""Files written by a process of their own: the training process copies into shared memory and goes on.

Whatever writing costs (system calls, interrupts, the interpreter of a storage client) is spent outside the training process.
The slabs of the pool lie in shared memory that both map; over a socket go only offsets. See `writer_process.py`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ds_ckpt.jsontext import Json
from ds_ckpt.local import LocalDraft
from ds_ckpt.protocols import Draft, WriteFile
from ds_ckpt.writer import SLAB_BYTES, SlabPool
from ds_config.errors import CheckpointError, UnsupportedError

__all__ = ["SharedPool", "WriterProcess"]

_SCRIPT = Path(__file__).with_name("writer_process.py")
_END_S = 10.0


class _Slab(mmap.mmap):
    """A slab that knows where in the shared memory it lies."""

    start = 0


class SharedPool(SlabPool):
    """A pool whose slabs another process can map: they lie in the memory `fd`, end to end."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.fd = os.memfd_create("ds-ckpt", os.MFD_CLOEXEC)

    def lock_pages(self, allocate: Callable[[int], memoryview]) -> None:
        """Do nothing: the writer process could not map other memory. A device copies to these slabs through the driver's own memory."""

    def close(self) -> None:
        """Give the memory back, with the last slab that is in use."""
        self.fd, fd = -1, self.fd
        if fd >= 0:
            os.close(fd)

    def _map(self, number: int) -> mmap.mmap:
        os.ftruncate(self.fd, (number + 1) * SLAB_BYTES)
        slab = _Slab(self.fd, SLAB_BYTES, offset=number * SLAB_BYTES)
        slab.start = number * SLAB_BYTES
        return slab


class WriterProcess:
    """The process, started when first needed and again when it has died. Used by one thread at a time."""

    def __init__(self, pool: SharedPool) -> None:
        self._pool = pool
        self._child: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._answers: dict[int, tuple[int, str]] = {}
        self._unread = b""
        self._last = 0

    @property
    def pid(self) -> int | None:
        """The process's number; None while there is none."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Start the writer process unless the process is running."""
        if self._child is not None and self._child.poll() is None:
            return
        self.close()
        self._link, child_end = socket.socketpair()
        with child_end:
            command = [sys.executable, "-I", "-S", str(_SCRIPT), str(child_end.fileno()), str(self._pool.fd)]
            self._child = subprocess.Popen(
                command,
                pass_fds=(child_end.fileno(), self._pool.fd),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def draft(self, draft: Draft) -> Draft:
        """Return `draft` wrapped such that the writer process writes its files.

        Raises:
            UnsupportedError: "ckpt-decoupled": the draft is not on a file system.
        """
        if not isinstance(draft, LocalDraft):
            raise UnsupportedError(
                "a writer process writes files of a directory, not objects of a URL or memory",
                code="ckpt-decoupled",
                fix="Save to a directory, or set checkpoint.writer.decoupled to false and saving.asynchronous to true.",
            )
        return _RemoteDraft(draft, self)

    def send(self, do: str, **order: Json) -> int:
        """Give an order; its number, for `wait`."""
        self._last += 1
        if self._link is None:
            raise self._died()
        try:
            self._link.sendall((json.dumps({"do": do, "id": self._last, **order}) + "\n").encode())
        except (BrokenPipeError, ConnectionError) as error:
            raise self._died() from error
        return self._last

    def wait(self, number: int) -> None:
        """Return when the order is carried out. Raises what went wrong: OSError; "ckpt-writer-died"."""
        while number not in self._answers:
            if self._link is None:
                raise self._died()
            try:
                data = self._link.recv(2**16)
            except ConnectionError as error:
                raise self._died() from error
            if not data:
                raise self._died()
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                answer = json.loads(line)
                self._answers[answer["id"]] = (answer["errno"], answer["why"])
        code, why = self._answers.pop(number)
        if code:
            raise OSError(code, f"{os.strerror(code)} (writer process: {why})")

    def close(self) -> None:
        """End the process; what it has not written is lost."""
        link, child, self._link, self._child = self._link, self._child, None, None
        self._answers, self._unread = {}, b""
        if link is not None:
            link.close()
        if child is not None:
            try:
                child.wait(_END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _died(self) -> CheckpointError:
        code = None
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._child.wait(_END_S)  # its socket closes a little before the process ends
        return CheckpointError(
            f"the writer process {self.pid} is gone (exit status {code}); this checkpoint was not written",
            code="ckpt-writer-died",
            fix="Look for what killed it (memory limits of the job); the next save starts another one.",
        )


class _RemoteDraft:
    """A draft whose data files are written elsewhere; all else happens here."""

    def __init__(self, draft: LocalDraft, process: WriterProcess) -> None:
        self._draft, self._process = draft, process
        self.file_name, self.leaf_name, self.blocks_name = draft.file_name, draft.leaf_name, draft.blocks_name
        self.create, self.commit, self.commit_part, self.abort, self.write_shared = (
            draft.create,
            draft.commit,
            draft.commit_part,
            draft.abort,
            draft.write_shared,
        )

    def write_file(self, name: str, nbytes: int) -> WriteFile:
        if not nbytes:  # a small file of whatever size, from memory that the process does not have
            return self._draft.write_file(name, nbytes)
        self._process.start()
        return _RemoteFile(self._process, self._draft.data_path(name), nbytes)


class _RemoteFile:
    def __init__(self, process: WriterProcess, path: str, nbytes: int) -> None:
        self._process = process
        process.wait(process.send("open", path=path, nbytes=nbytes))

    def write(self, offset: int, data: memoryview) -> Callable[[], None] | None:
        slab = data.obj
        if not isinstance(slab, _Slab):
            raise OSError(errno.EFAULT, "the writer process can read slabs of its own pool only")
        number = self._process.send("write", at=offset, nbytes=data.nbytes, **{"from": slab.start})
        return partial(self._process.wait, number)

    def close(self) -> None:
        self._process.wait(self._process.send("close"))

    def abandon(self) -> None:
        # Ending the process closes the file and is right in every state; the next save starts another one.
        self._process.close()
