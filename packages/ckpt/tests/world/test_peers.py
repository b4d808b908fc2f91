"""Snapshots in memory: a lost host's shards come back from its buddy, to the bit; what cannot be trusted is passed over."""

import shutil

import pytest
import torch
import torch.distributed as dist

import ds_ckpt
from ds_ckpt.peer_reads import _both
from ds_config.errors import CheckpointError
from ds_testing import world


def _filled(model, style="flat", data=None):
    data = dist.get_world_size() if data is None else data
    return [model.local(s, fill=True) for s in model.layout(dist.get_rank(), data, 1, style)]


def _emptied(model, style="flat"):
    return [model.local(s, fill=False) for s in model.layout(dist.get_rank(), dist.get_world_size(), 1, style)]


def _lose(folder, *holders):
    dist.barrier()
    if dist.get_rank() == 0:
        for holder in holders:
            shutil.rmtree(folder / f"holder-{holder:05d}")
    dist.barrier()


@world(3)
def test_a_lost_host_comes_back_from_its_buddy(tmp_path, model):
    rank = dist.get_rank()
    # Each rank is a host of its own: what others hold is out of its sight.
    snapshots = ds_ckpt.PeerSnapshots(tmp_path / f"host{rank}", every=2)
    state = _filled(model)
    taken = []
    for step in range(1, 7):
        taken.append(snapshots.offer(step, state, {"step": step, "rank": rank}))
        for item in state:
            item.data.add_(1)
    assert taken == [False, True] * 3
    snapshots.wait()
    dist.barrier()
    if rank == 1:
        shutil.rmtree(tmp_path / "host1")
    dist.barrier()
    back = _emptied(model)
    assert snapshots.restore(back) == (6, {"step": 6, "rank": rank})
    for item in back:
        assert torch.equal(item.data, model.expected(item.shard) + 5)
    # Kept: two steps of two owners.
    held = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.glob("host0/holder-*/owner-*/step-*"))
    assert held == [f"host0/holder-00000/owner-{o:05d}/step-{s}" for o in (0, 2) for s in (4, 6)]
    snapshots.close()


@world(3)
def test_two_neighbours_lost_is_no_snapshot(tmp_path, model):
    snapshots = ds_ckpt.PeerSnapshots(tmp_path, distance=1)
    snapshots.offer(1, _filled(model), {})
    snapshots.wait()
    _lose(tmp_path, 1, 2)
    assert snapshots.restore(_emptied(model)) is None
    snapshots.close()


@world(2)
def test_damage_and_older_steps(tmp_path, model):
    """A damaged copy is passed over for the buddy's; when both are damaged, for the step before."""
    rank = dist.get_rank()
    snapshots = ds_ckpt.PeerSnapshots(tmp_path / f"host{rank}", distance=1)
    state = _filled(model)
    for step in (1, 2):
        snapshots.offer(step, state, {"step": step})
        for item in state:
            item.data.add_(1)
    snapshots.wait()
    for holder, step in ((0, 2), (1, 1)):  # a byte of owner 0, at itself, then at its buddy
        dist.barrier()
        if rank == 0:
            path = next((tmp_path / f"host{holder}").glob("holder-*/owner-00000/step-2/data-*"))
            content = bytearray(path.read_bytes())
            content[-100] ^= 1
            path.write_bytes(content)
        dist.barrier()
        back = _emptied(model)
        found = snapshots.restore(back)
        assert found == (step, {"step": step})
        for item in back:
            assert torch.equal(item.data, model.expected(item.shard) + step - 1)
    snapshots.close()


@world(2)
def test_other_shards_are_not_filled(tmp_path, model):
    snapshots = ds_ckpt.PeerSnapshots(tmp_path)
    assert snapshots.restore(_emptied(model)) is None
    snapshots.offer(3, _filled(model), {})
    assert snapshots.restore(_emptied(model, "replica")) is None
    back = _emptied(model)
    assert snapshots.restore(back) == (3, {})
    assert all(torch.equal(item.data, model.expected(item.shard)) for item in back)
    snapshots.close()


def test_alone_it_is_a_copy_in_memory(tmp_path, model):
    state = [model.local(s, fill=True) for s in model.layout(0, 1, 1, "flat")]
    snapshots = ds_ckpt.PeerSnapshots(tmp_path)
    snapshots.offer(5, state, {"x": 1.5})
    snapshots.close()
    again = ds_ckpt.PeerSnapshots(tmp_path)
    back = [model.local(s, fill=False) for s in model.layout(0, 1, 1, "flat")]
    assert again.restore(back) == (5, {"x": 1.5})
    assert all(torch.equal(a.data, b.data) for a, b in zip(state, back, strict=True))
    again.close()
    with pytest.raises(CheckpointError):
        ds_ckpt.PeerSnapshots(tmp_path, every=0)


def test_which_steps_everybody_has():
    assert _both([1, 2, 3], [2, 3, 4]) == [2, 3]
    assert _both([2], [1]) == []


def test_a_folder_that_others_can_look_into_is_refused(tmp_path):
    made = ds_ckpt.PeerSnapshots(tmp_path / "new")
    made.close()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    (tmp_path / "new").chmod(0o755)
    with pytest.raises(CheckpointError, match="mode 755") as caught:
        ds_ckpt.PeerSnapshots(tmp_path / "new")
    assert caught.value.code == "ckpt-not-private"
