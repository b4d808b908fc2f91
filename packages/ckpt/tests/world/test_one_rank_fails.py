"""What fails on one rank before or between collectives is raised on all of them, with that rank's reason: nobody waits for a deadline."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_ckpt
from ds_ckpt import local_checkpoints
from ds_ckpt.adapter import load_adapter, save_adapter
from ds_comm.placement import LocalShard
from ds_config.errors import CheckpointError
from ds_testing import world

SECONDS = 20.0  # of a test whose ranks would wait for each other


def shards(value: float) -> list[LocalShard]:
    return ds_ckpt.full_shards({f"rank{dist.get_rank()}": torch.full((8,), value)})


def refused(call: Callable[[], object], code: str, match: str = "") -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        call()
    assert caught.value.code == code


@world(2, timeout=SECONDS)
def test_a_folder_that_others_can_look_into(tmp_path: Path) -> None:
    """The other rank waited for the group of the thread."""
    folder = tmp_path / f"host{dist.get_rank()}"
    folder.mkdir(mode=0o700)
    if dist.get_rank() == 1:
        folder.chmod(0o755)
    refused(lambda: ds_ckpt.PeerSnapshots(folder), "ckpt-not-private", "mode 755")
    refused(lambda: ds_ckpt.LocalCheckpointer(folder, tmp_path / "slow"), "ckpt-not-private", "mode 755")


@world(2, timeout=SECONDS)
def test_a_store_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(root: object) -> Any:
        raise CheckpointError(f"{root} needs a package", code="ckpt-store", fix="Install it.")

    if dist.get_rank() == 1:
        monkeypatch.setattr(local_checkpoints, "open_storage", missing)
    refused(lambda: ds_ckpt.LocalCheckpointer(tmp_path / "near", tmp_path / "slow"), "ckpt-store", "needs a package")


@world(2, timeout=SECONDS)
def test_a_writer_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(process: Any) -> None:
        raise OSError(11, "no more processes")

    if dist.get_rank() == 1:
        monkeypatch.setattr("ds_ckpt.decoupled.WriterProcess.start", start)
    refused(lambda: ds_ckpt.AsyncCheckpointer(decoupled=True), "ckpt-io", "no more processes")


@world(2, timeout=SECONDS)
def test_shards_of_a_snapshot_that_do_not_fit(tmp_path: Path) -> None:
    """Behind the step the other rank waited for a snapshot that was never taken."""
    snapshots = ds_ckpt.PeerSnapshots(tmp_path / f"host{dist.get_rank()}", distance=1)
    good = shards(1.0)
    bad: Any = [SimpleNamespace(shard=item.shard, data=item.data.double()) for item in good]
    assert snapshots.offer(1, bad if dist.get_rank() == 1 else good, {})
    refused(snapshots.wait, "ckpt-shard", "float64")
    snapshots.offer(2, good, {"step": 2})
    snapshots.wait()
    assert snapshots.restore(shards(0.0)) == (2, {"step": 2})
    snapshots.close()


@world(2, timeout=SECONDS)
def test_something_else_in_the_folder_of_snapshots(tmp_path: Path) -> None:
    rank = dist.get_rank()
    snapshots = ds_ckpt.PeerSnapshots(tmp_path / f"host{rank}", distance=1)
    snapshots.offer(1, shards(1.0), {})
    snapshots.wait()
    if rank == 1:
        shutil.copytree(
            tmp_path / "host1" / "holder-00001" / "owner-00001", tmp_path / "host1" / "holder-00001" / "owner-mine"
        )
    refused(lambda: snapshots.restore(shards(0.0)), "ckpt-failed", "mine")
    snapshots.close()


@world(2, timeout=SECONDS)
def test_shards_that_a_rank_cannot_make_for_a_snapshot(tmp_path: Path) -> None:
    snapshots = ds_ckpt.PeerSnapshots(tmp_path / f"host{dist.get_rank()}", distance=1)
    snapshots.offer(1, shards(1.0), {})

    def wanted(record: Mapping[str, Any]) -> Iterable[LocalShard]:
        if dist.get_rank() == 1:
            raise KeyError("layer 7")
        return shards(0.0)

    refused(lambda: snapshots.restore(wanted), "ckpt-failed", "layer 7")
    snapshots.close()


@world(2, timeout=SECONDS)
def test_a_snapshot_that_is_gone_when_it_is_drained(tmp_path: Path) -> None:
    """Behind the step the other rank waited for a drain that never began."""
    rank = dist.get_rank()
    near = ds_ckpt.LocalCheckpointer(tmp_path / f"host{rank}", tmp_path / "slow")
    assert near.offer(1, shards(1.0), {})
    near._near.wait()
    dist.barrier()
    if rank == 1:
        shutil.rmtree(tmp_path / "host1" / "holder-00001" / "owner-00001")
    refused(near.wait, "ckpt-not-found")
    near.close()


@world(2, timeout=SECONDS)
def test_an_adapter_of_another_base(tmp_path: Path) -> None:
    base, adapter = {"w": torch.ones(4)}, {"a": torch.zeros(2)}
    save_adapter(tmp_path / "lora", adapter, base, {})
    mine = {"w": torch.ones(4) + dist.get_rank()}
    refused(lambda: load_adapter(tmp_path / "lora", adapter, mine), "ckpt-base-differs")
