"""Snapshots in host memory, each kept on two hosts: going on after a failure without reading the disk.

Every few steps each rank's shards are copied, stored under a folder in memory (`/dev/shm/...`), and sent to a *buddy* on
another host, who stores them, too. Memory files outlive the processes; the copy at the buddy outlives the host. After a
restart on as many ranks `restore` finds the newest step of which every rank's shards are somewhere, moves those that are not
where they are needed, and fills the shards. It answers None where that cannot be done: then a checkpoint is loaded.

Words: an *owner* is the rank whose shards a snapshot holds; a *holder* is a rank that stores it, itself or its buddy.
Snapshots are checkpoints of one rank in the usual format, so every byte is proven before it is used.

    snapshots = PeerSnapshots("/dev/shm/run", every=10)
    found = snapshots.restore(optimizer.shards())        # (step, meta) or None
    ...
    snapshots.offer(step, optimizer.shards(), meta)      # copies on every tenth step, and sends behind the next ones
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import ds_monitor
from ds_ckpt.agree import TRANSFER_S, Ranks
from ds_ckpt.catalog import inspect, list_tags, prune
from ds_ckpt.dtypes import ITEMSIZE
from ds_ckpt.jsontext import Json
from ds_ckpt.loading import load
from ds_ckpt.local import LocalStorage
from ds_ckpt.saving import save
from ds_ckpt.storage import At
from ds_ckpt.tensors import Local, check_local, torch_dtype, whole
from ds_comm import GroupLike, irecv, isend
from ds_comm.placement import TensorShard
from ds_config.errors import CheckpointError

__all__ = ["PeerSnapshots"]

_ALIGN = 64  # of each shard in a snapshot, so that it can be viewed as its dtype
_KEEP = 2  # a host may fail while a step is being sent: the one before is still whole


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """One owner's shards at one step, as bytes."""

    data: Tensor
    record: dict[str, Json]


def _private(folder: Path) -> Path:
    """`folder`, made so that only this user can look into it: places in memory are shared by all users of a host."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise CheckpointError(
            f"{folder} (owner {found.st_uid}, mode {found.st_mode & 0o777:o}) is open to other users, who could read or change "
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
        self._folder, self._every = _private(Path(folder)), every
        self._ranks = Ranks.of(group)
        self._behind = self._ranks.twin()
        near = distance if distance is not None else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._distance = near % self._ranks.size or min(1, self._ranks.size - 1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ds-ckpt-peers")
        self._under_way: Future[None] | None = None

    def offer(self, step: int, shards: Iterable[Local], meta: Mapping[str, Json]) -> bool:
        """Take a snapshot if it is time for one; whether it was. The shards may change when this returns.

        Raises:
            CheckpointError: what went wrong with the snapshot before, on every rank.
        """
        if step % self._every:
            return False
        self.wait()
        with ds_monitor.span("ckpt.peer_snapshot", step=step):
            taken = _taken(step, self._ranks.size, check_local(shards), meta)
        self._under_way = self._thread.submit(self._spread, step, taken)
        return True

    def wait(self) -> None:
        """Return when the last snapshot is where it should be."""
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

    def restore(self, shards: Iterable[Local]) -> tuple[int, dict[str, Json]] | None:
        """Fill `shards` from the newest complete snapshot; its step and meta. None: there is none for these shards.

        A snapshot that is damaged, or of other shards or another number of ranks, is passed over.
        """
        self.wait()
        local = check_local(shards)
        passed: set[tuple[int, int, int]] = set()  # (step, owner, holder)
        while True:
            held = self._ranks.agree(lambda: self._held(passed))
            choice = _newest([{int(o): set(s) for o, s in have.items()} for have in held])
            if choice is None:
                return None
            step, holders = choice
            mine = [owner for owner, holder in enumerate(holders) if holder == self._ranks.rank]
            read, bad = self._read(step, mine)
            shown = self._ranks.agree(
                lambda: {"bad": bad, "shards": {str(o): s.record["shards"] for o, s in read.items()}},  # noqa: B023
                patience_s=TRANSFER_S,
            )
            broken = [(step, owner, rank) for rank, answer in enumerate(shown) for owner in answer["bad"]]
            passed.update(broken)
            if broken:
                continue
            described = {int(owner): found for answer in shown for owner, found in answer["shards"].items()}
            if not all(self._ranks.agree(lambda: described[self._ranks.rank] == _described(local))):  # noqa: B023
                ds_monitor.event("ckpt.peer_skipped", step=step, why="the shards of a rank are others now")
                return None
            snapshot = self._moved(holders, read)
            _fill(local, snapshot.data)
            return step, snapshot.record["meta"]

    # -- behind the steps

    def _spread(self, step: int, own: _Snapshot) -> None:
        rank, size = self._ranks.rank, self._ranks.size
        sizes = self._behind.agree(lambda: [own.data.numel(), own.record])
        owner = (rank - self._distance) % size
        kept = [(rank, own)]
        if owner != rank:
            nbytes, record = sizes[owner]
            theirs = _Snapshot(torch.empty(nbytes, dtype=torch.uint8), record)
            works = [
                isend(own.data, group=self._behind.group, group_dst=(rank + self._distance) % size, unit="snapshot"),
                irecv(theirs.data, group=self._behind.group, group_src=owner, unit="snapshot"),
            ]
            for work in works:
                work.wait()
            kept.append((owner, theirs))

        def store() -> None:
            for whose, snapshot in kept:
                storage = LocalStorage(self._place(rank, whose))
                at = At(storage, f"step-{step}")
                save(at, whole({"bytes": snapshot.data}), snapshot.record, group=Ranks.alone())

        self._behind.agree(store, patience_s=TRANSFER_S)

        def thin() -> None:  # only now: until every rank has the new step, the older one is what all have
            for whose, _ in kept:
                prune(LocalStorage(self._place(rank, whose)), _KEEP)

        self._behind.agree(thin)

    # -- restoring

    def _place(self, holder: int, owner: int) -> Path:
        return self._folder / f"holder-{holder:05d}" / f"owner-{owner:05d}"

    def _found(self, owner: int) -> dict[int, Path]:
        """Snapshots of an owner on this host, whoever holds them: step -> where."""
        out: dict[int, Path] = {}
        for place in sorted(self._folder.glob(f"holder-*/owner-{owner:05d}")):
            for tag in list_tags(place):
                meta = inspect(place / tag).meta
                if meta["world"] == self._ranks.size:
                    out[int(meta["step"])] = place / tag
        return out

    def _held(self, passed: set[tuple[int, int, int]]) -> Json:
        held = {owner: self._found(owner) for owner in range(self._ranks.size)}
        rank = self._ranks.rank
        return {str(o): [s for s in steps if (s, o, rank) not in passed] for o, steps in held.items() if steps}

    def _read(self, step: int, owners: Sequence[int]) -> tuple[dict[int, _Snapshot], list[int]]:
        """The snapshots of these owners, proven; and the owners whose snapshot is damaged."""
        read, bad = {}, []
        for owner in owners:
            path = self._found(owner)[step]
            try:
                data = torch.empty(inspect(path).nbytes, dtype=torch.uint8)
                read[owner] = _Snapshot(data, load(path, whole({"bytes": data}), group=Ranks.alone()))
            except CheckpointError as error:
                ds_monitor.event("ckpt.peer_skipped", step=step, owner=owner, why=error.message)
                bad.append(owner)
        return read, bad

    def _moved(self, holders: Sequence[int], read: Mapping[int, _Snapshot]) -> _Snapshot:
        """This rank's snapshot, from whoever read it."""
        rank = self._ranks.rank
        shown = self._ranks.agree(lambda: {str(o): [s.data.numel(), s.record] for o, s in read.items() if o != rank})
        works = []
        mine = read.get(rank)
        if mine is None:
            nbytes, record = shown[holders[rank]][str(rank)]
            mine = _Snapshot(torch.empty(nbytes, dtype=torch.uint8), record)
            works.append(irecv(mine.data, group=self._behind.group, group_src=holders[rank], unit="snapshot"))
        for owner, snapshot in read.items():
            if owner != rank:
                works.append(isend(snapshot.data, group=self._behind.group, group_dst=owner, unit="snapshot"))
        for work in works:
            work.wait()
        return mine


def _newest(held: Sequence[Mapping[int, set[int]]]) -> tuple[int, list[int]] | None:
    """The newest step of which every owner's snapshot is held, and who gives each: the owner itself where it can.

    Args:
        held: By rank: owner -> steps on that rank's host.
    """
    size = len(held)
    for step in sorted({s for have in held for steps in have.values() for s in steps}, reverse=True):
        givers = [[r for r in range(size) if step in held[r].get(owner, ())] for owner in range(size)]
        if all(givers):
            return step, [owner if owner in found else found[0] for owner, found in enumerate(givers)]
    return None


def _taken(step: int, world: int, local: Sequence[Local], meta: Mapping[str, Json]) -> _Snapshot:
    starts, nbytes = _starts([item.shard for item in local])
    data = torch.zeros(nbytes, dtype=torch.uint8)
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
