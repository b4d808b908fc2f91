"""Saving at once, or behind the training step: one protocol, two values.

`AsyncCheckpointer.save` decides together (one small exchange), copies what this rank writes into host slabs (the snapshot), and
returns; a thread of its own, with a process group of its own, writes, agrees and publishes. A parameter that changes
right after the return is not in the file.

- Memory is bounded: `buffer_bytes` of slabs, kept and reused. A save that finds them in use waits for the disk.
- One save is written at a time, in order. Its error is raised on every rank by the next `save`, `wait` or `close`.
- `behind=True` postpones the copying, too: the caller promises not to change the shards before `before_update()`
  returned. Called in front of the optimizer step, the copying hides behind forward and backward.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import ds_monitor
from ds_ckpt.block_packing import BlockPacker, SaveOptions
from ds_ckpt.checkpoint_list import prune
from ds_ckpt.coordinator import Coordinator
from ds_ckpt.decoupled import SharedPool, WriterProcess
from ds_ckpt.jsontext import Json
from ds_ckpt.local_storage import CheckpointRef
from ds_ckpt.save_job import Gathered, PlanCache, SaveJob, SaveResult, prepare, publish
from ds_ckpt.shard_tensors import Local, copier, lock_slabs
from ds_ckpt.writer import FileStream, SlabPool
from ds_config.errors import CheckpointError, PlanError, UnsupportedError

__all__ = ["AsyncCheckpointer", "Checkpointer", "SaveHandle", "SyncCheckpointer"]


class SaveHandle:
    """A save under way. `copied` is set when the shards may change; `wait()` returns when the checkpoint is visible."""

    def __init__(self, copied: threading.Event, future: Future[SaveResult]) -> None:
        self.copied, self._future = copied, future

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._future.done()

    def wait(self) -> SaveResult:
        """Raises CheckpointError: what went wrong, the same on every rank."""
        return self._future.result()


class Checkpointer(Protocol):
    """What a training engine holds. Every method is collective."""

    def save(
        self,
        path: str | os.PathLike[str] | CheckpointRef,
        shards: Iterable[Local],
        meta: Mapping[str, Json],
        *,
        aliases: Mapping[str, str] | None = None,
        behind: bool = False,
    ) -> SaveHandle:
        """Save a checkpoint as `ds_ckpt.save` does, and return a handle of the save.

        The shards may change when `SaveHandle.copied` is set (without `behind`: at return).
        """

    def before_update(self) -> None:
        """Return when no save still reads the shards. Local; costs nothing when none does."""

    def wait(self) -> None:
        """Return when every save is visible; raises the first error that has not been raised yet."""

    def close(self) -> None:
        """`wait`, then give back memory, threads and process groups."""


class SyncCheckpointer:
    """Saves before it returns.

    Args:
        keep: How many checkpoints to keep in the directory, newest first; None for all.
        recipe: As in `ds_ckpt.save`.
    """

    def __init__(self, group: Any = None, *, keep: int | None = None, recipe: SaveOptions | None = None) -> None:
        self._ranks, self._keep = Coordinator.of(group), keep
        self._cache, self._pool = PlanCache(), SlabPool()
        self._packing = None if recipe is None else BlockPacker(recipe)

    def save(
        self,
        path: str | os.PathLike[str] | CheckpointRef,
        shards: Iterable[Local],
        meta: Mapping[str, Json],
        *,
        aliases: Mapping[str, str] | None = None,
        behind: bool = False,
    ) -> SaveHandle:
        with ds_monitor.span("ckpt.save", checkpoint=str(path)):
            gathered = Gathered(shards)
            job = prepare(self._ranks, path, gathered, (meta, aliases or {}), self._cache, self._packing)
            lock_slabs(self._pool, gathered.local)
            stream = job.stream(self._pool)
            saved = publish(self._ranks, job, lambda: job.write(stream, copier(gathered.local)))
            _retain(self._ranks, job, self._keep)
        copied = threading.Event()
        copied.set()
        future: Future[SaveResult] = Future()
        future.set_result(saved)
        return SaveHandle(copied, future)

    def before_update(self) -> None:
        """Do nothing: a synchronous save is never under way."""

    def wait(self) -> None:
        """Do nothing: a synchronous save is never under way."""

    def close(self) -> None:
        self._pool = SlabPool()


class AsyncCheckpointer:
    """Copies, returns, and writes behind.

    Args:
        group: As in `ds_ckpt.save`. Making the engine is collective: it opens a second group for its thread.
        buffer_bytes: Host memory for copies on this rank. None: as much as this rank writes in one save (and twice
            that with `double`), so that a save waits only for an earlier one.
        double: With `buffer_bytes=None`, memory for a second save while the first is being written.
        keep: How many checkpoints to keep in the directory, newest first; None for all. Older ones are removed after a
            save has succeeded, never before.
        decoupled: Let a process of its own do the writing; only for directories, and for files that are not packed.
        recipe: As in `ds_ckpt.save`.

    Raises:
        UnsupportedError: "ckpt-decoupled": both of the last two.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        buffer_bytes: int | None = None,
        double: bool = False,
        keep: int | None = None,
        decoupled: bool = False,
        recipe: SaveOptions | None = None,
    ) -> None:
        if decoupled and recipe is not None:
            raise UnsupportedError(
                "a writer process writes files as they are, and incremental or encoded ones were asked for",
                code="ckpt-decoupled",
                fix="Leave checkpoint.writer.decoupled false where checkpoint.saving has incremental or codecs.",
            )
        if buffer_bytes is not None and not buffer_bytes >= 1:
            raise PlanError(
                f"buffer_bytes is {buffer_bytes}",
                code="config-option",
                fix="Give bytes, or None for what one save needs.",
            )
        self._packing = None if recipe is None else BlockPacker(recipe)
        self._ranks = Coordinator.of(group)
        self._rooms = 0 if buffer_bytes is not None else 1 + double
        self._place = _placed(self._ranks, _InWriter if decoupled else _InProcess, buffer_bytes or 0)
        self._background = self._ranks.twin()
        self._pool = self._place.pool
        self._keep, self._cache = keep, PlanCache()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ds-ckpt-behind")
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="ds-ckpt-copy")
        self._saves: list[SaveHandle] = []
        self._closed = False

    def save(
        self,
        path: str | os.PathLike[str] | CheckpointRef,
        shards: Iterable[Local],
        meta: Mapping[str, Json],
        *,
        aliases: Mapping[str, str] | None = None,
        behind: bool = False,
    ) -> SaveHandle:
        if self._closed:
            raise CheckpointError(
                "this engine is closed", code="ckpt-closed", fix="Make a new one, or save before close()."
            )
        self._raise_failed()
        with ds_monitor.span("ckpt.snapshot", checkpoint=str(path)):
            gathered = Gathered(shards)
            if self._packing is not None:
                self.wait()  # what the save before wrote is what this one refers to
            job = prepare(self._ranks, path, gathered, (meta, aliases or {}), self._cache, self._packing)
            job = self._place.job(job)
            stream = job.stream(self._pool)
            if self._rooms:
                self._pool.at_least(self._rooms * self._pool.room(stream.nbytes))
            future = self._writer.submit(self._publish, job, stream)
            pending = SaveHandle(stream.filled, future)
            self._saves.append(pending)
            self._copy(stream, gathered.local, behind)
        return pending

    def before_update(self) -> None:
        for pending in self._saves:
            pending.copied.wait()

    def wait(self) -> None:
        # Ctrl-C ends the waiting and not the saves: they stay known, so that `before_update` still waits for their copies.
        errors = [error for pending in self._saves if (error := _error(pending)) is not None]
        self._saves = []
        if errors:
            raise errors[0]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._copier.shutdown()
            self._writer.shutdown()
            self._background.close()
            self._place.close()
            self._pool = SlabPool(0)

    def _copy(self, stream: FileStream, local: list[Local], behind: bool) -> None:
        # The save is ordered: an error of its copy ends it on every rank, through the stream, and is raised where all errors of saves are.
        begun = False
        try:
            lock_slabs(self._pool, local)
            copy = copier(local)
            begun = True
            if behind:
                self._copier.submit(stream.fill, copy)
            else:
                stream.fill(copy)
        except BaseException as error:
            if not begun:
                stream.give_up(error)  # else the thread that writes would wait for the bytes for ever
            if not isinstance(error, Exception):
                raise
            ds_monitor.event("ckpt.snapshot_failed", why=str(error))

    def _publish(self, job: SaveJob, stream: FileStream) -> SaveResult:
        try:
            saved = publish(self._background, job, lambda: job.write(stream))
            _retain(self._background, job, self._keep)
            return saved
        finally:
            stream.stop()

    def _raise_failed(self) -> None:
        # Ranks notice the end of a save at different times; they decide together which saves are over.
        over = self._ranks.spread(sum(1 for p in self._saves if p.done()), min)
        finished, self._saves = self._saves[:over], self._saves[over:]
        for error in map(_error, finished):
            if error is not None:
                raise error


class _InProcess:
    """Where the writing happens: on a thread of this process."""

    def __init__(self, buffer_bytes: int) -> None:
        self.pool = SlabPool(buffer_bytes)

    def job(self, job: SaveJob) -> SaveJob:
        return job

    def close(self) -> None:
        """Do nothing: the buffer pool is freed with its last user."""


class _InWriter:
    """Where the writing happens: in another process, out of memory that both have."""

    def __init__(self, buffer_bytes: int) -> None:
        self.pool = SharedPool(buffer_bytes)
        self._process = WriterProcess(self.pool)
        self._process.start()  # it is there when the first save comes

    def job(self, job: SaveJob) -> SaveJob:
        return replace(job, draft=self._process.draft(job.draft))

    def close(self) -> None:
        self._process.close()
        self.pool.close()


def _placed(ranks: Coordinator, kind: type[_InProcess] | type[_InWriter], buffer_bytes: int) -> _InProcess | _InWriter:
    """Make the place of writing on every rank, or on none. Collective."""
    places: list[_InProcess | _InWriter] = []
    try:
        ranks.settle(lambda: places.append(kind(buffer_bytes)))
    except BaseException:
        for place in places:
            place.close()
        raise
    return places[0]


def _error(pending: SaveHandle) -> BaseException | None:
    try:
        pending.wait()
    except Exception as error:
        return error
    return None


def _retain(ranks: Coordinator, job: SaveJob, keep: int | None) -> None:
    if keep is not None:
        ranks.first(lambda: prune(job.at.storage, keep))
