"""Checkpoints of tensors on a device: every layout, behind the step, and errors. In `nox -s gpu` between ranks on a card, with NCCL."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

import ds_ckpt
from ds_config.errors import CheckpointError
from ds_testing.device_worlds import device_world

STYLES = ["flat", "replica", "mixed"]


def local(model, style, device, *, fill, data=2, tensor=1):
    shards = [model.local(s, fill=fill) for s in model.layout(dist.get_rank(), data, tensor, style)]
    return [model.Shard(item.shard, item.data.to(device)) for item in shards]


def check(model, items, device, plus=0):
    for item in items:
        assert item.data.device == device
        assert torch.equal(item.data.cpu(), model.expected(item.shard).cpu() + plus), item.shard


@pytest.mark.parametrize(("style", "other"), list(itertools.product(STYLES, STYLES)))
@device_world(2)
def test_each_layout_in_each_other(style, other, tmp_path, model, device):
    ds_ckpt.save(tmp_path / "a", local(model, style, device, fill=True), {"style": style})
    back = local(model, other, device, fill=False)
    assert ds_ckpt.load(tmp_path / "a", back) == {"style": style}
    check(model, back, device)


@pytest.mark.parametrize("behind", [False, True])
@device_world(2)
def test_training_goes_on_while_a_save_is_written(behind, tmp_path, model, device):
    items = local(model, "flat", device, fill=True)
    engine = ds_ckpt.AsyncCheckpointer(keep=2)
    for step in range(3):
        engine.save(tmp_path / f"s{step}", items, {"step": step}, behind=behind)
        engine.before_update()
        for item in items:
            item.data.add_(1)
    engine.close()
    for step in (1, 2):
        back = local(model, "replica", device, fill=False)
        assert ds_ckpt.load(tmp_path / f"s{step}", back) == {"step": step}
        check(model, back, device, step)


@device_world(4)
def test_another_number_of_ranks_reads_it(tmp_path, model, device):
    ds_ckpt.save(tmp_path / "four", local(model, "flat", device, fill=True, data=4), {})
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        back = local(model, "mixed", device, fill=False, data=2)
        ds_ckpt.load(tmp_path / "four", back, group=pair)
        check(model, back, device)
    cut = local(model, "flat", device, fill=False, data=2, tensor=2)
    ds_ckpt.load(tmp_path / "four", cut)
    check(model, cut, device)


@device_world(2)
def test_an_error_of_one_rank_is_of_both(tmp_path, model, device):
    items = local(model, "flat", device, fill=True)
    if dist.get_rank() == 1:
        items[2] = model.Shard(items[2].shard, items[2].data[:-1])
    with pytest.raises(CheckpointError) as caught:
        ds_ckpt.save(tmp_path / "a", items, {})
    assert caught.value.code == "ckpt-shard"


@device_world(2)
def test_copies_on_the_other_rank_are_read(tmp_path, model, device):
    items = local(model, "replica", device, fill=True)
    engine = ds_ckpt.SyncCheckpointer()
    for step in range(2):
        engine.save(tmp_path / f"s{step}", items, {"step": step})
    engine.close()
    assert ds_ckpt.list_tags(tmp_path) == ["s0", "s1"]
    back = local(model, "flat", device, fill=False)
    ds_ckpt.load(tmp_path / "s1", back)
    check(model, back, device)
