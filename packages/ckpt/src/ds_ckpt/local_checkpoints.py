"""Near copies: a snapshot on the node and one on a neighbour's every few steps, and some of them drained to the slow store behind.

    near = LocalCheckpointer("/local/run", "s3://bucket/run", every=10, persist_every=1000)
    found = near.restore(shards)               # the newest there is, near or far: (step, meta) or None
    ...
    near.offer(step, shards, meta)             # returns after a copy in memory

A node that is lost is restored from its neighbour, at the last snapshot; a job that is lost with all its nodes from the store, at the last one
that was drained. What goes to the store is read from the node's own copy, which is kept until it is there: a slow store delays the
next drain, never a step. A drained step is an ordinary checkpoint, `<root>/step-<n>`, which loads on any number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

import ds_monitor
from ds_ckpt.block_packing import BlockPacker, SaveOptions
from ds_ckpt.checkpoint_list import inspect, newest_tag, prune
from ds_ckpt.checkpoint_loader import load
from ds_ckpt.coordinator import TRANSFER_S, Coordinator
from ds_ckpt.jsontext import Json
from ds_ckpt.load_validation import LoadOptions
from ds_ckpt.local_storage import CheckpointRef, open_storage
from ds_ckpt.peer_reads import PeerSnapshots, shards_of, wait_for
from ds_ckpt.protocols import CheckpointStorage
from ds_ckpt.save_job import PlanCache, prepare, publish
from ds_ckpt.shard_tensors import Local, copier, full_shards
from ds_ckpt.writer import SlabPool
from ds_comm import GroupLike
from ds_config.errors import CheckpointError
from ds_config.option_checks import check_options

__all__ = ["DrainOptions", "LocalCheckpointer"]

_STEP = "near_step"


@dataclass(frozen=True, slots=True)
class DrainOptions:
    """What goes to the slow store.

    Attributes:
        every: Steps that this divides, of those that are taken; a later one where the store was busy then.
        keep: Checkpoints that stay in the store; None: all.
        recipe: As in `ds_ckpt.save`.
    """

    every: int = 1
    keep: int | None = None
    recipe: SaveOptions | None = None

    def __post_init__(self) -> None:
        check_options(self)


class LocalCheckpointer:
    """Making one is collective over `group`, as is every method.

    Args:
        folder: On each node, as for `PeerSnapshots`.
        root: The slow store: a directory, a URL, or a storage.
        every: Take the steps that this divides.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        root: str | os.PathLike[str] | CheckpointStorage,
        group: GroupLike = None,
        *,
        every: int = 1,
        draining: DrainOptions | None = None,
    ) -> None:
        self._draining = draining or DrainOptions()
        if self._draining.every < 1:
            raise CheckpointError(
                f"draining.every is {self._draining.every}; a step is drained when it divides it",
                code="ckpt-keep",
                fix="Use 1 or more.",
            )
        self._ranks = Coordinator.of(group)
        self._near, self._every = PeerSnapshots(folder, group, every=every), every
        self._storage: CheckpointStorage = self._ranks.settle(lambda: open_storage(root))
        self._behind = self._ranks.twin()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ds-ckpt-drain")
        self._under_way: Future[None] | None = None
        self._due = False  # a drain has yet to begin
        self._latest_step = -1  # the last step that is on this node, or soon will be: what a drain takes
        self._cache, self._pool = PlanCache(), SlabPool()
        recipe = self._draining.recipe
        self._packing = None if recipe is None else BlockPacker(recipe)

    def due(self, step: int) -> bool:
        """Whether `offer` takes this step."""
        return step % self._every == 0

    def offer(
        self,
        step: int,
        shards: Iterable[Local],
        meta: Mapping[str, Json],
        aliases: Mapping[str, str] | None = None,
        near_only: Iterable[str] = (),
    ) -> bool:
        """Take a snapshot if it is time for one; whether it was. The shards may change when this returns.

        Args:
            meta, aliases: As for `ds_ckpt.save`.
            near_only: Names of this rank's shards that are not drained: another rank's go to the store.

        Raises:
            CheckpointError: what went wrong with the one before, or with what was drained, on every rank.
        """
        self._start_drain()  # of the snapshot before: by now it is on the nodes, or is waited for below
        if not self._near.offer(step, shards, _told(meta, aliases or {}, near_only)):
            return False
        self._latest_step = step
        self._due = self._due or step % self._draining.every == 0
        return True

    def restore(
        self, shards: Iterable[Local], options: LoadOptions | None = None
    ) -> tuple[int, dict[str, Json]] | None:
        """Fill `shards` from the newest copy, on the nodes or in the store; its step and meta. None: there is none."""
        local = list(shards)
        tag = self._ranks.first(lambda: newest_tag(self._storage))
        far = (
            -1
            if tag is None
            else int(self._ranks.first(lambda: inspect(CheckpointRef(self._storage, tag)).meta.get(_STEP, -1)))
        )
        snapshot = self._near.restore(local, newer_than=far)
        if snapshot is not None:
            return snapshot[0], dict(snapshot[1]["meta"])
        if tag is None:
            return None
        meta = load(CheckpointRef(self._storage, tag), local, group=self._ranks, options=options)
        return int(meta.pop(_STEP, -1)), meta

    def restore_near(
        self,
        shards: Callable[[Mapping[str, Json], Mapping[str, Sequence[int]]], Iterable[Local]],
        *,
        newer_than: int = -1,
    ) -> tuple[int, dict[str, Json]] | None:
        """Fill shards from the nodes alone; step and meta. None: they have nothing newer that fits.

        Args:
            shards: Gives this rank's for the meta of a snapshot, and the shapes of its tensors by name.
        """

        def wanted(record: Mapping[str, Json]) -> Iterable[Local]:
            return shards(record["meta"]["meta"], {row[0]: row[2] for row in record["shards"]})

        snapshot = self._near.restore(wanted, newer_than=newer_than)
        return None if snapshot is None else (snapshot[0], dict(snapshot[1]["meta"]))

    def wait(self) -> None:
        """Return when the last snapshot is on the nodes, and what was due is in the store."""
        self._near.wait()
        self._end_drain()
        if self._due:
            self._submit()
            self._end_drain()

    def close(self) -> None:
        """`wait`, and end threads and groups. The copies stay."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._behind.close()
            self._near.close()

    def _start_drain(self) -> None:
        """Begin to drain what is due, when the drain before is over on every rank."""
        if not self._due:
            return
        idle = self._under_way is None or self._under_way.done()
        if self._ranks.spread(idle, lambda mine, theirs: mine and theirs):
            self._near.wait()
            self._end_drain()
            self._submit()

    def _submit(self) -> None:
        step, self._due = self._latest_step, False
        at, record = self._ranks.settle(lambda: self._near.copy_of(step))
        over = at.storage.hold(at.tag, TRANSFER_S)

        def drain() -> None:
            try:
                self._drain(step, at, record)
            finally:
                over()

        self._under_way = self._thread.submit(drain)

    def _end_drain(self) -> None:
        wait_for(self._under_way)
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _drain(self, step: int, at: CheckpointRef, record: Mapping[str, Json]) -> None:
        with ds_monitor.span("ckpt.drain", step=step):
            local: list[Local] = []

            def read() -> None:
                data = torch.empty(inspect(at).nbytes, dtype=torch.uint8, device="cpu")
                load(at, full_shards({"bytes": data}), group=Coordinator.alone())
                hidden = set(record["meta"]["near_only"])
                local.extend(item for item in shards_of(record, data) if item.shard.name not in hidden)

            self._behind.settle(read, patience_s=TRANSFER_S)
            snapshot_meta = record["meta"]
            what = ({**snapshot_meta["meta"], _STEP: step}, snapshot_meta["aliases"])
            target = CheckpointRef(self._storage, f"step-{step}")
            job = prepare(
                self._behind, target, lambda: [item.shard for item in local], what, self._cache, self._packing
            )
            stream = job.stream(self._pool)
            publish(self._behind, job, lambda: job.write(stream, copier(local)))
            if self._draining.keep is not None:
                self._behind.first(lambda: prune(self._storage, self._draining.keep or 1))


def _told(meta: Mapping[str, Json], aliases: Mapping[str, str], near_only: Iterable[str]) -> dict[str, Json]:
    return {"meta": dict(meta), "aliases": dict(aliases), "near_only": sorted(near_only)}
