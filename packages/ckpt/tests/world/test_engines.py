"""Several ranks behind the step: plans are reused, errors of one rank reach all, nothing mixes with training traffic."""

import pytest
import torch
import torch.distributed as dist

import ds_ckpt
from ds_ckpt.save_planner import plan_save
from ds_config.errors import CheckpointError
from ds_testing import world


@world(2)
def test_saves_behind_training_collectives(tmp_path, model):
    rank = dist.get_rank()
    local = [model.local(s, fill=True) for s in model.layout(rank, 2, 1, "flat")]
    engine = ds_ckpt.AsyncCheckpointer(keep=2)
    traffic = torch.ones(1000)
    for step in range(4):
        engine.save(tmp_path / f"s{step}", local, {"step": step}, behind=step % 2 == 1)
        dist.all_reduce(traffic)
        engine.before_update()
        for item in local:
            item.data.add_(1)
    engine.close()
    assert ds_ckpt.list_tags(tmp_path) == ["s2", "s3"]
    back = [model.local(s, fill=False) for s in model.layout(rank, 2, 1, "replica")]
    assert ds_ckpt.load(tmp_path / "s2", back) == {"step": 2}
    for item in back:
        assert torch.equal(item.data, model.expected(item.shard) + 2)


@world(2)
def test_a_plan_is_made_again_only_when_a_layout_changes(tmp_path, model, monkeypatch):
    rank, made = dist.get_rank(), []

    def counted(*args, **options):
        made.append(1)
        return plan_save(*args, **options)

    monkeypatch.setattr(ds_ckpt.save_planner, "plan_save", counted)
    engine = ds_ckpt.SyncCheckpointer()
    for step, style in enumerate(("flat", "flat", "replica", "replica", "flat")):
        # In step 2 only rank 1 changes: rank 0 must notice.
        style = "flat" if rank == 0 and step == 2 else style
        engine.save(tmp_path / f"s{step}", [model.local(s, fill=True) for s in model.layout(rank, 2, 1, style)], {})
        if step != 2:
            back = [model.local(s, fill=False) for s in model.layout(rank, 2, 1, "mixed")]
            ds_ckpt.load(tmp_path / f"s{step}", back)
            assert all(torch.equal(item.data, model.expected(item.shard)) for item in back)
    assert len(made) == (4 if rank == 0 else 0)  # rank 0 plans for both
    engine.close()


@world(2)
def test_an_error_of_one_rank_surfaces_on_both(tmp_path, model):
    rank = dist.get_rank()
    local = [model.local(s, fill=True) for s in model.layout(rank, 2, 1, "flat")]

    class Broken(ds_ckpt.local.Disk):
        def write(self, fd, data, offset):
            raise OSError(5, "Input/output error")

    engine = ds_ckpt.AsyncCheckpointer()
    broken = ds_ckpt.LocalStorage(tmp_path, Broken() if rank == 1 else None)
    engine.save(ds_ckpt.CheckpointRef(broken, "a"), local, {})
    with pytest.raises(CheckpointError, match="Input/output error"):
        engine.wait()
    engine.save(tmp_path / "b", local, {})
    engine.close()
    assert ds_ckpt.list_tags(tmp_path) == ["b"]
