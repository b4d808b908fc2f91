"""Writing one object: small ones in one request, others in parts, several at a time, each asked for again when it fails.

S3's multipart upload is used as such (through s3fs): a part may be sent twice, and the object appears when the upload is completed, all
of it or nothing. Other fsspec clients write their own way; there a request that fails in the middle ends the save.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from ds_ckpt.retrying import IncompleteError, RetryPolicy
from ds_config.errors import CheckpointError

__all__ = ["PartsFile", "PlainFile", "put_object", "size_of"]

PART_BYTES: Final = 16 * 2**20
_MAX_PARTS: Final = 9000  # S3 takes 10,000
_UPLOADS: Final = 4


def size_of(fs: Any, path: str) -> int:
    """Return the current number of bytes of an object, whatever an earlier listing returned."""
    fs.invalidate_cache(path.rpartition("/")[0])
    return int(fs.info(path)["size"])


def put_object(fs: Any, retries: RetryPolicy, path: str, data: bytes) -> None:
    """Write a small object and see that it is there. Atomic where the store's puts are."""

    def ask() -> None:
        fs.pipe_file(path, data)
        if (size := size_of(fs, path)) != len(data):
            raise IncompleteError(f"{path} has {size} bytes, {len(data)} were written")

    retries(f"write {path}", ask)


class _InOrder:
    def __init__(self, path: str) -> None:
        self._path, self._at = path, 0

    def _next(self, offset: int, nbytes: int) -> None:
        if offset != self._at:
            raise CheckpointError(
                f"{self._path}: a write at byte {offset} where {self._at} comes next",
                code="ckpt-storage",
                fix="Report this: objects are written in order.",
            )
        self._at += nbytes


class PlainFile(_InOrder):
    """An object through the client's own file."""

    def __init__(self, fs: Any, path: str) -> None:
        super().__init__(path)
        self._file = fs.open(path, "wb")

    def write(self, offset: int, data: memoryview) -> None:
        self._next(offset, data.nbytes)
        self._file.write(data)

    def close(self) -> None:
        self._file.close()

    def abandon(self) -> None:
        # An upload that is not completed leaves no object; `discard` is what fsspec's buffered files call it.
        discard = getattr(self._file, "discard", None)
        if discard is not None:
            discard()
        with contextlib.suppress(AttributeError):  # a file without the flag; with it none uploads when collected
            self._file.closed = True


class PartsFile(_InOrder):
    """An object in parts of S3. `nbytes`: how many will come, or 0 where that is not known."""

    def __init__(self, fs: Any, retries: RetryPolicy, path: str, nbytes: int) -> None:
        super().__init__(path)
        self._fs, self._retries = fs, retries
        self._bucket, self._key, _ = fs.split_path(path)
        self._part_bytes = max(PART_BYTES, -(-nbytes // _MAX_PARTS))
        self._part = bytearray()
        self._upload = ""
        self._parts: list[Future[dict[str, Any]]] = []
        self._threads: ThreadPoolExecutor | None = None

    def write(self, offset: int, data: memoryview) -> None:
        self._next(offset, data.nbytes)
        while data.nbytes:
            take = min(data.nbytes, self._part_bytes - len(self._part))
            self._part += data[:take]
            data = data[take:]
            if len(self._part) == self._part_bytes:
                self._send()

    def close(self) -> None:
        if not self._upload:
            put_object(self._fs, self._retries, self._path, bytes(self._part))
            return
        if self._part:
            self._send()
        parts = [part.result() for part in self._parts]
        self._end_threads()
        self._retries(f"complete {self._path}", lambda: self._complete(parts))
        self._upload = ""

    def abandon(self) -> None:
        self._end_threads()
        upload, self._upload = self._upload, ""
        if upload:
            with contextlib.suppress(Exception):  # the store drops what is left over by its own rules
                self._ask("abort_multipart_upload", UploadId=upload)

    def _send(self) -> None:
        if self._threads is None:
            self._upload = self._retries(
                f"begin {self._path}", lambda: self._ask("create_multipart_upload")["UploadId"]
            )
            self._threads = ThreadPoolExecutor(_UPLOADS, thread_name_prefix="ds-ckpt-upload")
        while len(self._parts) >= _UPLOADS and not self._parts[-_UPLOADS].done():
            self._parts[-_UPLOADS].result()  # memory: no more parts than are being sent, and this one
        number, data, self._part = len(self._parts) + 1, bytes(self._part), bytearray()
        self._parts.append(self._threads.submit(self._send_part, number, data))

    def _send_part(self, number: int, data: bytes) -> dict[str, Any]:
        ask: Callable[[], Any] = lambda: self._ask("upload_part", UploadId=self._upload, PartNumber=number, Body=data)  # noqa: E731
        answer = self._retries(f"write part {number} of {self._path}", ask)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def _complete(self, parts: list[dict[str, Any]]) -> None:
        try:
            self._ask("complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": parts})
        except FileNotFoundError:
            # An answer that was lost: the upload is over, and the object there, or not.
            if size_of(self._fs, self._path) != self._at:
                raise
        self._fs.invalidate_cache(self._path.rpartition("/")[0])
        if (size := size_of(self._fs, self._path)) != self._at:
            raise IncompleteError(f"{self._path} has {size} bytes, {self._at} were written")

    def _ask(self, method: str, **arguments: Any) -> Any:
        return self._fs.call_s3(method, Bucket=self._bucket, Key=self._key, **arguments)

    def _end_threads(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(cancel_futures=True)
