"""Files of others, opened without waiting and read up to a limit.

A name in somebody's folder may be a pipe, which would hang its reader, or a device, which never ends. What is read here is a regular
file, or a pipe that this process already holds (`/dev/stdin`, `/dev/fd/63` of a shell's `<(...)`).
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = [
    "MAX_TEXT_BYTES",
    "leads_out",
    "open_regular",
    "read_regular",
    "read_regular_text",
    "replace_text",
    "replacing",
]

MAX_TEXT_BYTES: Final = 2**26  # of a file that people write: far above any, far below what hurts
_DESCRIPTORS: Final = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
_PART_BYTES: Final = 2**20


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading and return its descriptor; a pipe without a writer does not block the call.

    Raises:
        OSError: as `os.open`; EINVAL: it is a pipe, a device or a socket; EISDIR.
    """
    name = os.fspath(path)
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    if stat.S_ISFIFO(mode) and name.startswith(_DESCRIPTORS):
        os.set_blocking(fd, True)
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    raise OSError(errno.EINVAL, "not a regular file", name)


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return at most the first `limit` bytes of a regular file.

    Raises:
        OSError: as `open_regular`.
    """
    fd = open_regular(path)
    try:
        parts, left = [], limit
        while left and (part := os.read(fd, min(left, _PART_BYTES))):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def read_regular_text(path: str | os.PathLike[str], limit: int = MAX_TEXT_BYTES, encoding: str = "utf-8-sig") -> str:
    """Return the text of a regular file.

    Raises:
        OSError: as `open_regular`; EFBIG: more than `limit` bytes.
        UnicodeDecodeError: the bytes are not of this encoding.
    """
    data = read_regular(path, limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", os.fspath(path))
    return data.decode(encoding)


def leads_out(folder: str | os.PathLike[str], name: str) -> bool:
    """Whether `folder/name` is, or leads through a link to, a place that is not below `folder`."""
    if not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
        return True
    root = os.path.realpath(folder)
    place = os.path.realpath(os.path.join(root, name))
    return place == root or not place.startswith(root.rstrip(os.sep) + os.sep)


def replace_text(path: str | os.PathLike[str], text: str, mode: int = 0o666) -> None:
    """Write a text file under a name that may exist: all of it or nothing, and never through a link.

    Raises:
        OSError: as `os.open` and `os.write`.
    """
    with replacing(path, mode) as draft:
        draft.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: str | os.PathLike[str], mode: int = 0o666) -> Iterator[Path]:
    """Yield a new file beside `path` for somebody to write, which takes its place at the end: all of it or nothing.

    For libraries that write to a name. A link of the name `path` is replaced, not followed: it may lead out of the folder.

    Raises:
        OSError: as `os.open` and `os.replace`.
    """
    folder, name = os.path.split(os.path.abspath(path))
    draft = os.path.join(folder, f".{name[:100]}.{secrets.token_hex(8)}{os.path.splitext(name)[1][:20]}")
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
    try:
        yield Path(draft)
        os.replace(draft, os.path.join(folder, name))
    except BaseException as error:
        os.unlink(draft)
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from None  # torch's archives end a write that failed with words about positions
        raise
