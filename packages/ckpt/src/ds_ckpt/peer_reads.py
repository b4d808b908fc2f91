"""Snapshots in host memory, each kept on two hosts: going on after a failure without reading the disk.

Every few steps each rank's shards are copied, stored under a folder in memory (`/dev/shm/...`), and sent to a *buddy* on
another host, who stores them, too. Memory files outlive the processes; the copy at the buddy outlives the host. After a
restart on as many ranks `restore` finds the newest step of which every rank's shards are somewhere, moves those that are not
where they are needed, and fills the shards. It answers None where that cannot be done: then a checkpoint is loaded. `near.LocalCheckpointer`
does so, and writes some of the snapshots to a slower store behind the steps.

Words: an *owner* is the rank whose shards a snapshot holds; a *holder* is a rank that stores it, itself or its buddy.
Snapshots are checkpoints of one rank in the usual format, so every byte is proven before it is used.

    snapshots = PeerSnapshots("/dev/shm/run", every=10)
    found = snapshots.restore(optimizer.shards())        # (step, meta) or None
    ...
    snapshots.offer(step, optimizer.shards(), meta)      # copies on every tenth step, and sends behind the next ones
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import ds_monitor
from ds_ckpt.checkpoint_list import inspect, list_tags, prune
from ds_ckpt.checkpoint_loader import load
from ds_ckpt.coordinator import TRANSFER_S, Coordinator
from ds_ckpt.dtypes import ITEMSIZE
from ds_ckpt.jsontext import Json, dump, from_json, to_json
from ds_ckpt.local import LocalStorage
from ds_ckpt.local_storage import CheckpointRef
from ds_ckpt.save_job import save
from ds_ckpt.shard_tensors import Local, check_local, full_shards, torch_dtype
from ds_comm import GroupLike, irecv, isend
from ds_comm.placement import Box, Interval, LocalShard, TensorShard
from ds_config.errors import CheckpointError

__all__ = ["PeerSnapshots", "shards_of", "wait_for"]

_ALIGN = 64  # of each shard in a snapshot, so that it can be viewed as its dtype
_KEEP = 2  # a host may fail while a step is being sent: the one before is still whole


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """One owner's shards at one step, as bytes."""

    data: Tensor
    record: dict[str, Json]


def _private(folder: Path) -> Path:
    """Create `folder` with access for this user only, and return the path.

    Places in memory are shared by all users of a host.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise CheckpointError(
            f"{folder} (owner {status.st_uid}, mode {status.st_mode & 0o777:o}) is open to other users, who could read or change "
            "the snapshots",
            code="ckpt-not-private",
            fix="Choose a folder that does not exist yet, or is yours with mode 700.",
        )
    return folder


class PeerSnapshots:
    """Making one is collective over `group`, as is every method.

    Args:
        folder: On each host, in memory or on a local disk. Ranks of a host may share it, runs may not.
        every: `offer` takes the steps that this divides.
        distance: The buddy of rank r is r + distance. None: the number of ranks on a host (as the launcher set it), so
            that a buddy is on another host wherever there is one.

    Cost: on every rank host memory of four times its shards (two copies in work, two steps of two owners in the folder
    once they differ), and one send of its shards a snapshot.
    """

    def __init__(
        self, folder: str | os.PathLike[str], group: GroupLike = None, *, every: int = 1, distance: int | None = None
    ) -> None:
        if every < 1:
            raise CheckpointError(
                f"every is {every}; a snapshot is taken when it divides the step",
                code="ckpt-keep",
                fix="Use 1 or more.",
            )
        self._every = every
        self._ranks = Coordinator.of(group)
        self._folder: Path = self._ranks.settle(lambda: _private(Path(folder)))
        self._behind = self._ranks.twin()
        near = distance if distance is not None else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._distance = near % self._ranks.size or min(1, self._ranks.size - 1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ds-ckpt-peers")
        self._under_way: Future[None] | None = None

    def offer(self, step: int, shards: Iterable[Local], meta: Mapping[str, Json]) -> bool:
        """Take a snapshot if it is time for one; whether it was. The shards may change when this returns.

        Raises:
            CheckpointError: what went wrong with the snapshot before, on every rank; also that shards of one rank do not fit their data.
        """
        if step % self._every:
            return False
        self.wait()
        with ds_monitor.span("ckpt.peer_snapshot", step=step):
            try:
                snapshot: _Snapshot | Exception = _taken(step, self._ranks.size, check_local(shards), meta)
            except Exception as error:  # the others are told behind the step, and raise it where it is raised here
                snapshot = error
        self._under_way = self._thread.submit(self._spread, step, snapshot)
        return True

    def wait(self) -> None:
        """Return when the last snapshot is where it should be."""
        wait_for(self._under_way)
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """`wait`, and end the thread and its group. The snapshots stay."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._behind.close()

    def restore(
        self, shards: Iterable[Local] | Callable[[Mapping[str, Json]], Iterable[Local]], *, newer_than: int = -1
    ) -> tuple[int, dict[str, Json]] | None:
        """Fill `shards` from the newest complete snapshot; its step and meta. None: there is none for these shards.

        A snapshot that is damaged, or of other shards or another number of ranks, is passed over.

        Args:
            shards: This rank's, or what gives them for the record of a snapshot (its `meta`, and its `shards`, name first).
            newer_than: Steps up to this one do not count; the same on every rank.
        """
        self.wait()
        shards = shards if callable(shards) else list(shards)
        passed: set[tuple[int, int]] = set()  # (step, holder) whose copy of this rank's shards is damaged
        while True:
            givers = self._givers(passed)
            common = self._ranks.spread(sorted(s for s in givers if s > newer_than), _both)
            if not common:
                return None
            step = max(common)
            giver = self._ranks.rank if self._ranks.rank in givers[step] else min(givers[step])
            read, record = self._read(step, giver)
            if record is None:
                passed.add((step, giver))
            if self._ranks.spread(record is None, lambda mine, theirs: mine or theirs) or record is None:
                continue
            snapshot_record = record
            local: list[Local] = self._ranks.settle(
                lambda record=snapshot_record: check_local(shards(record) if callable(shards) else shards)  # type: ignore[misc]
            )
            same = record["shards"] == _described(local)
            if not self._ranks.spread(same, lambda mine, theirs: mine and theirs):
                ds_monitor.event("ckpt.peer_skipped", step=step, why="the shards of a rank are others now")
                return None
            _fill(local, self._moved(giver, read, record))
            return step, record["meta"]

    def copy_of(self, step: int) -> tuple[CheckpointRef, dict[str, Json]]:
        """Return this rank's snapshot of a step, where it lies on this host, and its record."""
        at = CheckpointRef(LocalStorage(self._place(self._ranks.rank, self._ranks.rank)), f"step-{step}")
        return at, dict(from_json(inspect(at).meta))

    # -- behind the steps

    def _spread(self, step: int, snapshot_or_error: _Snapshot | Exception) -> None:
        def unless_failed() -> _Snapshot:
            if isinstance(snapshot_or_error, Exception):
                raise snapshot_or_error
            return snapshot_or_error

        own_snapshot: _Snapshot = self._behind.settle(unless_failed)
        rank, size = self._ranks.rank, self._ranks.size
        owner, buddy = (rank - self._distance) % size, (rank + self._distance) % size
        snapshots = [(rank, own_snapshot)]
        if owner != rank:
            header = json.loads(
                self._behind.swap(json.dumps([own_snapshot.data.numel(), own_snapshot.record]).encode(), buddy, owner)
            )
            owner_snapshot = _Snapshot(torch.empty(header[0], dtype=torch.uint8, device="cpu"), header[1])
            works = [
                isend(own_snapshot.data, group=self._behind.group, group_dst=buddy, unit="snapshot"),
                irecv(owner_snapshot.data, group=self._behind.group, group_src=owner, unit="snapshot"),
            ]
            for work in works:
                work.wait()
            snapshots.append((owner, owner_snapshot))

        def store() -> None:
            for whose, snapshot in snapshots:
                storage = LocalStorage(self._place(rank, whose))
                at = CheckpointRef(storage, f"step-{step}")
                save(at, full_shards({"bytes": snapshot.data}), snapshot.record, group=Coordinator.alone())

        self._behind.settle(store, patience_s=TRANSFER_S)

        def thin() -> None:  # only now: until every rank has the new step, the older one is what all have
            for whose, _ in snapshots:
                prune(LocalStorage(self._place(rank, whose)), _KEEP)

        self._behind.settle(thin)

    # -- restoring

    def _place(self, holder: int, owner: int) -> Path:
        return self._folder / f"holder-{holder:05d}" / f"owner-{owner:05d}"

    def _find_snapshots(self) -> dict[int, dict[int, Path]]:
        """Snapshots on this host, in whichever process: owner -> step -> where."""
        out: dict[int, dict[int, Path]] = {}
        for place in sorted(self._folder.glob("holder-*/owner-*")):
            for tag in list_tags(place):
                meta = inspect(place / tag).meta
                if meta["world"] == self._ranks.size:
                    out.setdefault(int(place.name.removeprefix("owner-")), {})[int(meta["step"])] = place / tag
        return out

    def _givers(self, passed: set[tuple[int, int]]) -> dict[int, set[int]]:
        """Find which ranks' hosts have each step of this rank's shards: step -> ranks. Collective."""
        local_copies: dict[int, dict[int, Path]] = self._ranks.settle(self._find_snapshots)
        messages = {owner: json.dumps(sorted(steps)).encode() for owner, steps in local_copies.items()}
        out: dict[int, set[int]] = {}
        for holder, data in self._ranks.route({o: d for o, d in messages.items() if o < self._ranks.size}).items():
            for step in json.loads(data):
                if (step, holder) not in passed:
                    out.setdefault(step, set()).add(holder)
        return out

    def _read(self, step: int, giver: int) -> tuple[dict[int, _Snapshot], dict[str, Json] | None]:
        """Read what is asked of this rank, and receive what `giver` read for it: snapshots by owner, and the own one's record.

        None for a record: the giver's copy is damaged.
        """
        requests = self._ranks.route({giver: b""})
        local_copies = self._find_snapshots()
        read: dict[int, _Snapshot] = {}
        answers = {}
        for owner in requests:
            try:
                path = local_copies[owner][step]
                data = torch.empty(inspect(path).nbytes, dtype=torch.uint8, device="cpu")
                read[owner] = _Snapshot(data, load(path, full_shards({"bytes": data}), group=Coordinator.alone()))
            except (CheckpointError, KeyError) as error:
                ds_monitor.event("ckpt.peer_skipped", step=step, owner=owner, why=str(error))
            answers[owner] = dump(to_json(read[owner].record) if owner in read else None).encode()
        came = self._ranks.route(answers)
        record = from_json(json.loads(came[giver]))
        return read, record

    def _moved(self, giver: int, read: Mapping[int, _Snapshot], record: Mapping[str, Json]) -> Tensor:
        """Receive this rank's snapshot from rank `giver`, and send the snapshots that this rank read to their owners."""
        rank = self._ranks.rank
        works = []
        if giver == rank:
            buffer = read[rank].data
        else:
            buffer = torch.empty(_starts([_shard(row) for row in record["shards"]])[1], dtype=torch.uint8, device="cpu")
            works.append(irecv(buffer, group=self._behind.group, group_src=giver, unit="snapshot"))
        for owner, snapshot in read.items():
            if owner != rank:
                works.append(isend(snapshot.data, group=self._behind.group, group_dst=owner, unit="snapshot"))
        for work in works:
            work.wait()
        return buffer


def wait_for(under_way: Future[None] | None) -> None:
    """Wait until `under_way` is over, whatever came of it; it stays its owner's while Ctrl-C ends the waiting.

    Who forgot it then would use the group beside the thread that uses it still.
    """
    if under_way is not None:
        futures.wait([under_way])


def _both(first: Json, second: Json) -> Json:
    """Steps that both have."""
    return sorted(set(first) & set(second))


def shards_of(record: Mapping[str, Json], data: Tensor) -> list[Local]:
    """Return the shards of a snapshot as views of its bytes."""
    shards = [_shard(row) for row in record["shards"]]
    starts, _ = _starts(shards)
    return [LocalShard(s, _part(data, s, start)) for s, start in zip(shards, starts, strict=True)]


def _shard(row: Json) -> TensorShard:
    name, dtype, shape, offset, size, start, stop = row
    return TensorShard(name, tuple(shape), dtype, Box(tuple(offset), tuple(size)), Interval(start, stop))


def _taken(step: int, world: int, local: Sequence[Local], meta: Mapping[str, Json]) -> _Snapshot:
    starts, nbytes = _starts([item.shard for item in local])
    data = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    for item, start in zip(local, starts, strict=True):
        _part(data, item.shard, start).copy_(item.data.detach().reshape(-1))
    return _Snapshot(data, {"step": step, "world": world, "shards": _described(local), "meta": dict(meta)})


def _fill(local: Sequence[Local], data: Tensor) -> None:
    starts, _ = _starts([item.shard for item in local])
    for item, start in zip(local, starts, strict=True):
        item.data.detach().copy_(_part(data, item.shard, start).reshape(item.data.shape))


def _part(data: Tensor, shard: TensorShard, start: int) -> Tensor:
    return data[start : start + shard.numel * ITEMSIZE[shard.dtype]].view(torch_dtype(shard.dtype))


def _starts(shards: Sequence[TensorShard]) -> tuple[list[int], int]:
    starts, at = [], 0
    for shard in shards:
        starts.append(at)
        at += -(-shard.numel * ITEMSIZE[shard.dtype] // _ALIGN) * _ALIGN
    return starts, at


def _described(local: Sequence[Local]) -> Json:
    out = []
    for item in local:
        s = item.shard
        place = [list(s.shape), list(s.box.offset), list(s.box.shape), s.interval.start, s.interval.stop]
        out.append([s.name, s.dtype, *place])
    return out
