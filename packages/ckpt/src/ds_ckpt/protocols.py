"""What a storage of checkpoints must do. Words: a *root* holds checkpoints by *tag*; a *draft* is a checkpoint under way,
invisible to readers until `commit`. How that is made atomic is the storage's own business.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from ds_ckpt.manifest_owner import has_manifest
from ds_config.errors import CheckpointError

__all__ = [
    "SHARED",
    "CheckpointStorage",
    "Draft",
    "OnDisk",
    "PartialDraft",
    "ReadFile",
    "Remote",
    "WriteFile",
    "not_found",
    "put",
    "truncated",
]

SHARED: Final = ".blocks"  # where files lie that several checkpoints use: as if it were a tag


class WriteFile(Protocol):
    """A data file being written, from the first byte to the last."""

    def write(self, offset: int, data: memoryview) -> Callable[[], None] | None:
        """Write all of `data` at byte `offset`, where the write before ended.

        Returns: what waits until the memory may change, and raises what went wrong; None when all is done already.
        """

    def close(self) -> None:
        """Return when the bytes are durable. Everything that was written has been waited for."""

    def abandon(self) -> None:
        """Let go of the file without any promise about its content."""


class ReadFile(Protocol):
    """A data file being read, at any offset, from any thread."""

    nbytes: int

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a view of `nbytes` from byte `offset` on, to be read at once; the file's memory where it has any.

        Raises:
            CheckpointError: "ckpt-file-truncated": the file ends before.
            OSError: the device failed.
        """

    def close(self) -> None: ...


@runtime_checkable
class OnDisk(Protocol):
    """A ReadFile that may be read past the page cache."""

    def on_disk(self, offset: int, nbytes: int) -> str | None:
        """Return the path of the local file when these bytes of the file are not in memory yet, else None.

        Reads nothing.
        """


class Draft(Protocol):
    """A checkpoint under way. Rank 0 creates, commits and aborts; every rank writes its own files.

    Where ranks save into directories of their own, the first rank of each does so for its part.
    """

    def file_name(self, rank: int) -> str: ...
    def leaf_name(self, rank: int) -> str: ...
    def blocks_name(self, rank: int) -> str:
        """Return a name for a file of encoded or shared blocks that no other save uses."""

    def create(self) -> None: ...
    def write_file(self, name: str, nbytes: int) -> WriteFile: ...
    def write_shared(self, name: str) -> WriteFile:
        """Create a file beside the checkpoints, of as many bytes as will be written.

        `abort` removes the file.
        """

    def commit(self, manifest: bytes) -> None: ...
    def abort(self) -> None: ...


@runtime_checkable
class PartialDraft(Protocol):
    """A draft that can be published in parts, by ranks that save into directories of their own."""

    def commit_part(self) -> None:
        """Publish the files of ranks that save into another directory than rank 0, whose manifest lists them."""


class CheckpointStorage(Protocol):
    """Checkpoints by tag."""

    def tags(self) -> list[str]:
        """Tags that have a manifest, in no order. Whether it is a good one is for the caller to see."""

    def read(self, tag: str, name: str, limit: int) -> bytes:
        """Read at most the first `limit` bytes of a file.

        Raises CheckpointError "ckpt-not-found".
        """

    def open(self, tag: str, name: str) -> ReadFile: ...
    def draft(self, tag: str, token: str) -> Draft: ...
    def remove(self, tag: str) -> None: ...
    def shared(self) -> list[tuple[str, float]]:
        """List the files beside the checkpoints, with the seconds since each was written.

        `open(SHARED, name)` opens such a file.
        """

    def remove_shared(self, names: Collection[str]) -> None: ...
    def hold(self, tag: str, seconds: float) -> Callable[[], None]:
        """Keep a checkpoint from being removed for so long; the returned function ends that earlier.

        A storage that is read-only is left as it is.
        """

    def tags_in_use(self) -> set[str]:
        """Tags that must not be removed now."""

    def where(self, tag: str) -> str:
        """Return the tag as a user would write it, for error messages."""


@runtime_checkable
class Remote(Protocol):
    """A Storage where each read is a request: better few and long ones."""

    range_bytes: int


def put(draft: Draft, name: str, data: bytes) -> None:
    """Write a small file of a draft, durably."""
    file = draft.write_file(name, 0)
    try:
        ended = file.write(0, memoryview(data))
        if ended is not None:
            ended()
        file.close()
    except BaseException:
        file.abandon()
        raise


def not_found(where: str, name: str) -> CheckpointError:
    """Build the error for a missing file, with the names of the checkpoints beside it where they can be listed."""
    siblings = ""
    parent = Path(where).parent
    if parent.is_dir():
        near = sorted(p.name for p in parent.iterdir() if has_manifest(p))[:8]
        siblings = f"; checkpoints beside it: {', '.join(near) or 'none'}"
    return CheckpointError(
        f"{where} has no {name}{siblings}",
        code="ckpt-not-found",
        fix="Give the directory of one checkpoint, as `ds_ckpt.find_latest(dir)` returns it.",
    )


def truncated(where: str, offset: int, nbytes: int) -> CheckpointError:
    """Build the error for a file that ends too early."""
    return CheckpointError(
        f"{where} ends before byte {offset + nbytes} ({nbytes} bytes were asked for at {offset})",
        code="ckpt-file-truncated",
        fix="The file was cut; use another checkpoint.",
    )
