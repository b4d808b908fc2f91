"""The process that writes files for a training process: run as a script, standard library only.

It starts in some 30 ms and holds some 10 MB, because it knows neither torch nor this package. `decoupled.py` is its client.

Arguments: two inherited descriptors, a socket and the memory that holds the slabs. Both directions are JSON, a line each:

    {"do": "open", "id": 1, "path": "...", "nbytes": n}      create the file, reserve its space
    {"do": "write", "id": 2, "at": a, "from": f, "nbytes": n}  memory f..f+n to byte a of the file; several at a time
    {"do": "close", "id": 3}                                   sync and close, after all writes
    {"do": "abandon", "id": 4}                                 close without a promise
    answer: {"id": 2, "errno": 0, "why": ""}

One file is open at a time. When the socket ends, so does the process: a training process that has ended needs no files.
"""

import contextlib
import errno
import json
import mmap
import os
import socket
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_PAGE = 4096
_THREADS = 4


class _Output:
    """The file being written: through `direct` past the page cache where that works, the rest through `plain`."""

    def __init__(self, path: str, nbytes: int) -> None:
        self.plain = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self.direct = -1
        with contextlib.suppress(OSError):  # a file system without O_DIRECT
            self.direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
        try:
            os.posix_fallocate(self.plain, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
                self.close()
                raise

    def put(self, data: memoryview, at: int) -> None:
        whole = data.nbytes // _PAGE * _PAGE
        done = 0
        while self.direct >= 0 and done < whole:
            try:
                done += os.pwrite(self.direct, data[done:whole], at + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                break  # memory or size that the device does not take directly
            if done % _PAGE:
                break
        while done < data.nbytes:
            done += os.pwrite(self.plain, data[done:], at + done)

    def sync(self) -> None:
        os.fsync(self.plain)

    def close(self) -> None:
        for fd in (self.plain, self.direct):
            if fd >= 0:
                os.close(fd)


class _Writer:
    def __init__(self, link: socket.socket, memory: int) -> None:
        self._link, self._memory = link, memory
        self._sending = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS)
        self._output: _Output | None = None
        self._waiting: list[Future[None]] = []
        self._view = memoryview(b"")

    def serve(self) -> None:
        with self._link.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                order = json.loads(line)
                if order["do"] == "write":
                    self._waiting = [*(w for w in self._waiting if not w.done()), self._threads.submit(self._do, order)]
                else:
                    self._do(order)

    def _do(self, order: dict[str, Any]) -> None:
        number, why = 0, ""
        try:
            getattr(self, f"_{order['do']}")(order)
        except Exception as error:
            number, why = getattr(error, "errno", None) or errno.EIO, f"{type(error).__name__}: {error}"
        with self._sending:
            self._link.sendall((json.dumps({"id": order["id"], "errno": number, "why": why}) + "\n").encode())

    def _open(self, order: dict[str, Any]) -> None:
        self._output = _Output(order["path"], order["nbytes"])

    def _write(self, order: dict[str, Any]) -> None:
        if self._output is None:
            raise OSError(errno.EBADF, "no file is open")
        self._output.put(self._bytes(order["from"], order["nbytes"]), order["at"])

    def _close(self, order: dict[str, Any]) -> None:
        output = self._ended()
        if output is not None:
            try:
                output.sync()
            finally:
                output.close()

    def _abandon(self, order: dict[str, Any]) -> None:
        output = self._ended()
        if output is not None:
            output.close()

    def _ended(self) -> _Output | None:
        for waiting in self._waiting:
            waiting.result()  # `_do` answers for what went wrong
        output, self._output, self._waiting = self._output, None, []
        return output

    def _bytes(self, start: int, nbytes: int) -> memoryview:
        if start + nbytes > self._view.nbytes:  # the memory has grown; views of the old mapping stay valid
            self._view = memoryview(mmap.mmap(self._memory, os.fstat(self._memory).st_size, prot=mmap.PROT_READ))
        return self._view[start : start + nbytes]


if __name__ == "__main__":
    _Writer(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])).serve()
