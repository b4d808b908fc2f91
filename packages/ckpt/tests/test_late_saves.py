"""On a device whose work comes late: a save has the values of the moment, through page-locked slabs, whatever is queued next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ds_ckpt
from ds_ckpt import checkpoint_loader, shard_tensors
from ds_ckpt.engines import AsyncCheckpointer, SyncCheckpointer
from ds_ckpt.writer import SLAB_BYTES, SlabPool
from ds_testing.current_device import follow_current_device
from ds_testing.late_device import LateEvent, drawn_orders, late_device

COUNT = 1_300_000  # 5.2 MB in fp32 and 2.6 in bf16: two slabs, with their bound inside of an entry


def state() -> dict[str, Tensor]:
    base = torch.arange(COUNT, dtype=torch.float32)
    return {
        "weight": (base * 3).to(torch.bfloat16),
        "master": base * 3,
        "odd": (base[:1000].reshape(20, 50) + 1).T.contiguous(),
    }


def load(path: Path) -> dict[str, Tensor]:
    target = {name: torch.zeros_like(value) for name, value in state().items()}
    ds_ckpt.load(path, ds_ckpt.full_shards(target))
    return target


def save_once(path: Path, values: dict[str, Tensor]) -> None:
    ds_ckpt.save(path, ds_ckpt.full_shards(values), {})


def save_at_once(path: Path, values: dict[str, Tensor]) -> None:
    engine = SyncCheckpointer()
    engine.save(path, ds_ckpt.full_shards(values), {})
    engine.close()


def save_behind(path: Path, values: dict[str, Tensor], buffer_bytes: int | None = None) -> None:
    engine = AsyncCheckpointer(buffer_bytes=buffer_bytes)
    engine.save(path, ds_ckpt.full_shards(values), {})
    for value in values.values():
        value.fill_(7)  # an update right after the return
    engine.close()


def save_in_little_memory(path: Path, values: dict[str, Tensor]) -> None:
    save_behind(path, values, 2 * SLAB_BYTES)


@pytest.mark.parametrize("save", [save_once, save_at_once, save_behind, save_in_little_memory])
@drawn_orders
def test_a_save_has_the_values_of_the_moment(
    order: int, save: Callable[[Path, dict[str, Tensor]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[SlabPool] = []
    lock = SlabPool.lock_pages
    monkeypatch.setattr(SlabPool, "lock_pages", lambda pool, make: (pools.append(pool), lock(pool, make))[1])
    with late_device(order):
        values = state()
        save(tmp_path / "c", values)
    assert pools
    expected = state()
    for name, value in load(tmp_path / "c").items():
        assert torch.equal(value, expected[name]), name


def test_copies_are_queued_before_one_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot of a save behind waits once, after all of its copies."""
    log: list[str] = []
    plain: Any = shard_tensors._SideStream.send

    def send(self: Any, target: memoryview, source: Tensor) -> Any:
        log.append("copy")
        return plain(self, target, source)

    wait = shard_tensors._SideTransfer.wait
    monkeypatch.setattr(shard_tensors._SideStream, "send", send)
    monkeypatch.setattr(shard_tensors._SideTransfer, "wait", lambda self: (log.append("wait"), wait(self))[1])
    monkeypatch.setattr(
        shard_tensors._SideTransfer, "checksum", lambda self: (wait(self), shard_tensors.crc32(self._target))[1]
    )
    with late_device(0):
        save_behind(tmp_path / "c", state())
    assert log.count("copy") == 4
    assert log == sorted(log)


def test_the_thread_that_writes_waits_on_the_device_of_the_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new thread begins with device 0, and an event that is waited for there makes a context on that one."""
    current, waits = follow_current_device(monkeypatch), list[tuple[str, bool]]()
    plain = LateEvent.synchronize

    def synchronize(event: LateEvent) -> None:
        waits.append((threading.current_thread().name, current() is not None))
        plain(event)

    monkeypatch.setattr(LateEvent, "synchronize", synchronize)
    with late_device(0):
        engine = AsyncCheckpointer(buffer_bytes=2 * SLAB_BYTES)
        engine.save(tmp_path / "c", ds_ckpt.full_shards(state()), {})
        engine.close()
    behind = [inside for thread, inside in waits if thread.startswith("ds-ckpt-behind")]
    assert behind
    assert all(behind)


@drawn_orders
def test_a_load_fills_tensors_of_the_device(order: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through page-locked memory, in several parts; what is queued next sees the loaded values."""
    expected = state()
    save_once(tmp_path / "c", expected)
    monkeypatch.setattr(checkpoint_loader, "_STAGING_BYTES", SLAB_BYTES)
    with late_device(order):
        target = {name: torch.zeros_like(value) for name, value in expected.items()}
        ds_ckpt.load(tmp_path / "c", ds_ckpt.full_shards(target))
        twice = {name: value * 2 for name, value in target.items()}
    for name, value in expected.items():
        assert torch.equal(target[name], value), name
        assert torch.equal(twice[name], value * 2), name


@drawn_orders
def test_a_snapshot_has_the_values_of_the_moment(order: int, tmp_path: Path) -> None:
    expected = {name: value[:1000].clone() for name, value in state().items() if name != "odd"}
    with late_device(order):
        values = {name: value[:1000] * 1 for name, value in state().items() if name != "odd"}
        snapshots = ds_ckpt.PeerSnapshots(tmp_path / "memory")
        snapshots.offer(1, ds_ckpt.full_shards(values), {})
        for value in values.values():
            value.fill_(7)
        back = {name: torch.zeros_like(value) for name, value in values.items()}
        assert snapshots.restore(ds_ckpt.full_shards(back)) == (1, {})
        snapshots.close()
    for name, value in expected.items():
        assert torch.equal(back[name], value), name
