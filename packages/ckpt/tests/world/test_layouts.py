"""Saved by some ranks in one layout, loaded by others in another: equal, in every pair; and an error of one is of all."""

import os
import re
import shutil

import pytest
import torch
import torch.distributed as dist

import ds_ckpt
from ds_config.errors import CheckpointError
from ds_testing import world

# (data, tensor, style): world sizes 1, 2 and 4
LAYOUTS = [
    (1, 1, "flat"),
    *((2, 1, s) for s in ("flat", "replica", "mixed")),
    (1, 2, "flat"),
    *((4, 1, s) for s in ("flat", "replica", "mixed")),
    *((2, 2, s) for s in ("flat", "replica", "mixed")),
    (1, 4, "flat"),
]


@world(4)
def test_each_layout_in_some_others(tmp_path, model):
    """Every layout is written, and read as three others."""
    _pairs(tmp_path, model, lambda i: [LAYOUTS[(i + step) % len(LAYOUTS)] for step in (1, 5, 7)])


@pytest.mark.slow
@world(4)
def test_every_layout_in_every_other(tmp_path, model):
    _pairs(tmp_path, model, lambda i: LAYOUTS)


def _pairs(tmp_path, model, targets_of):
    groups = {n: dist.new_group(list(range(n))) for n in (1, 2, 4)}
    rank = dist.get_rank()

    def run(layout, action):
        data, tensor, style = layout
        if rank < data * tensor:
            action(model.layout(rank, data, tensor, style), groups[data * tensor])

    for i, layout in enumerate(LAYOUTS):

        def save(shards, group, i=i):
            saved = ds_ckpt.save(tmp_path / f"l{i}", [model.local(s, fill=True) for s in shards], {"i": i}, group=group)
            assert saved.nbytes == model.nbytes  # replicas are written once

        run(layout, save)
    dist.barrier()
    for i, target in ((at, target) for at in range(len(LAYOUTS)) for target in targets_of(at)):

        def load(shards, group, i=i):
            local = [model.local(s, fill=False) for s in shards]
            assert ds_ckpt.load(tmp_path / f"l{i}", local, group=group) == {"i": i}
            for item in local:
                assert torch.equal(item.data, model.expected(item.shard)), (i, item.shard)

        run(target, load)


@world(2)
def test_one_rank_with_a_bad_shard_fails_all_and_says_which(tmp_path, model):
    shards = [model.local(s, fill=True) for s in model.layout(dist.get_rank(), 2, 1, "flat")]
    if dist.get_rank() == 1:
        shards[2] = model.Shard(shards[2].shard, shards[2].data[:-1])
    with pytest.raises(CheckpointError) as caught:
        ds_ckpt.save(tmp_path / "a", shards, {})
    assert caught.value.code == "ckpt-shard"
    assert ("rank 1: " in str(caught.value)) == (dist.get_rank() == 0)
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@world(2)
def test_a_missing_rank_is_a_named_hole(tmp_path, model):
    shards = [model.local(s, fill=True) for s in model.layout(dist.get_rank(), 2, 1, "flat")]
    if dist.get_rank() == 1:
        shards = []
    with pytest.raises(CheckpointError) as caught:
        ds_ckpt.save(tmp_path / "a", shards, {})
    assert caught.value.code == "ckpt-incomplete-tensor"


@world(2)
def test_ranks_that_disagree_are_told_in_what(tmp_path, model):
    rank = dist.get_rank()
    shards = [model.local(s, fill=True) for s in model.layout(rank, 2, 1, "flat")]
    for expected, path, meta in [
        ("ckpt-tag-differs", tmp_path / f"a{rank}", {}),
        ("ckpt-meta-differs", tmp_path / "a", {"same": 1, "step": rank}),
    ]:
        with pytest.raises(CheckpointError) as caught:
            ds_ckpt.save(path, shards, meta)
        assert caught.value.code == expected
    odd = torch.zeros((), dtype=torch.float64 if rank else torch.float32)
    with pytest.raises(CheckpointError, match=re.escape("float64[]")) as caught:
        ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards({"x": odd}), {})
    assert caught.value.code == "ckpt-shape-conflict"


@world(2)
def test_a_write_that_fails_on_one_rank_fails_on_both_and_leaves_nothing(tmp_path, model, monkeypatch):
    rank = dist.get_rank()
    shards = [model.local(s, fill=True) for s in model.layout(rank, 2, 1, "flat")]
    ds_ckpt.save(tmp_path / "good", shards, {"step": 1})

    class Full(ds_ckpt.local.Disk):
        def write(self, fd, data, offset):
            raise OSError(28, "No space left on device")

    storage = ds_ckpt.LocalStorage(tmp_path, Full() if rank == 1 else None)
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        ds_ckpt.save(ds_ckpt.CheckpointRef(storage, "bad"), shards, {"step": 2})
    assert caught.value.code == "ckpt-io"
    # Other ranks name the rank that failed. What stands before it (this rank's place) depends on what ran earlier in this process.
    assert ("rank 1: OSError" in str(caught.value)) == (rank == 0)
    dist.barrier()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good"]
    assert ds_ckpt.find_latest(tmp_path) == str(tmp_path / "good")


@world(2)
def test_damage_found_by_one_rank_is_an_error_on_both(tmp_path, model):
    rank = dist.get_rank()
    shards = [model.local(s, fill=True) for s in model.layout(rank, 2, 1, "flat")]
    ds_ckpt.save(tmp_path / "a", shards, {})
    if rank == 0:
        path = tmp_path / "a" / "data-00001.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    dist.barrier()
    for layout in ("flat", "replica", "mixed"):
        targets = [model.local(s, fill=False) for s in model.layout(rank, 2, 1, layout)]
        with pytest.raises(CheckpointError, match=r"data-00001\.safetensors is damaged") as caught:
            ds_ckpt.load(tmp_path / "a", targets)
        assert caught.value.code == "ckpt-block-damaged"


@pytest.mark.parametrize("engine", ["save", "sync", "asynchronous"])
@world(2)
def test_each_rank_saves_into_its_own_directory_and_what_is_joined_loads(tmp_path, model, engine):
    """As Ray has it: the directories of the workers become one."""
    rank = dist.get_rank()
    shards = [model.local(s, fill=True) for s in model.layout(rank, 2, 1, "flat")]
    own = tmp_path / f"worker{rank}"
    if engine == "save":
        ds_ckpt.save(own / "t", shards, {"step": 1})
    else:
        made = (ds_ckpt.AsyncCheckpointer if engine == "asynchronous" else ds_ckpt.SyncCheckpointer)()
        made.save(own / "t", shards, {"step": 1}).wait()
        made.close()
    dist.barrier()
    assert [path.name for path in own.iterdir()] == ["t"]
    assert ("manifest.json" in os.listdir(own / "t")) == (rank == 0)
    if rank == 0:
        for worker in ("worker0", "worker1"):
            shutil.copytree(tmp_path / worker, tmp_path / "joined", dirs_exist_ok=True)
    dist.barrier()
    assert ds_ckpt.find_latest(tmp_path / "joined") == str(tmp_path / "joined" / "t")
    empty = [model.local(s, fill=False) for s in model.layout(rank, 2, 1, "flat")]
    assert ds_ckpt.load(tmp_path / "joined" / "t", empty) == {"step": 1}
    for found, saved in zip(empty, shards, strict=True):
        assert torch.equal(found.data, saved.data)


@world(2)
def test_a_save_apart_that_fails_leaves_nothing(tmp_path, model):
    rank = dist.get_rank()
    shards = [model.local(s, fill=True) for s in model.layout(rank, 2, 1, "flat")]

    class Full(ds_ckpt.local.Disk):
        def rename(self, source, target):
            raise OSError(28, "No space left on device")

    storage = ds_ckpt.LocalStorage(tmp_path / f"worker{rank}", Full() if rank == 0 else None)
    with pytest.raises(CheckpointError, match="No space left"):
        ds_ckpt.save(ds_ckpt.CheckpointRef(storage, "t"), shards, {"step": 1})
    dist.barrier()
    assert [path.name for path in (tmp_path / f"worker{rank}").iterdir()] == []
