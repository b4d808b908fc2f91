"""Experts and parts of layers on 4 ranks as 2 x 2: saved at every stage, loaded at every other, and whole on fewer ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_ckpt
import ds_comm
import ds_zero
from ds_comm.placement import Box
from ds_comm.reduction_group import ParamSharding, ReductionGroup, set_param_sharding
from ds_testing import world

STAGES = [0, 1, 3]


class Net(nn.Module):
    """Dense parts, experts and a layer cut by columns; `mine` are the expert and the columns of this rank, None: all of them."""

    def __init__(self, mine):
        super().__init__()
        self.dense, self.norm = nn.Linear(6, 5), nn.LayerNorm(6)
        self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(2 if mine is None else 1))
        self.cut = nn.Parameter(torch.zeros(6, 10 if mine is None else 5))
        self.register_buffer("seen", torch.zeros(3))


def make(stage, groups=None):
    rank = dist.get_rank()
    mine = None if groups is None else rank % 2
    net, inner_of = Net(mine), lambda net: torch.optim.AdamW(net.parameters(), lr=0.05)
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    if groups is not None:
        for name, param in net.experts[0].named_parameters():
            set_param_sharding(param, ParamSharding(ReductionGroup("expert", groups, 4), f"experts.{mine}.{name}"))
        set_param_sharding(
            net.cut, ParamSharding(ReductionGroup("part", groups, 4), None, (6, 10), Box((0, 5 * mine), (6, 5)))
        )
    policy = ds_zero.UnitSizePolicy(max_numel=40, persist_numel=6)
    return net, ds_zero.shard(net, inner_of(net), stage=stage, policy=policy, clip=1.0)


def step(net, optimizer, number):
    """A gradient that says of which logical element it is."""
    for local in optimizer.sharding.param_shards():
        assert local.data.isfinite().all()
    for name, param in net.named_parameters():
        logical = optimizer.sharding.logical[name]
        made = torch.Generator().manual_seed(sum(map(ord, logical.name)) + 1000 * number)
        whole = torch.randn(logical.shape, generator=made)
        index = tuple(slice(o, o + n) for o, n in zip(logical.box.offset, logical.box.shape, strict=True))
        # Sums over fewer ranks than the divisor: the same mean, if each of them has as much more.
        family = optimizer.sharding.families[ds_zero.layout.reduction_groups.family_name(param)]
        param.grad = whole[index].clone() * (family.divisor / family.group.size)
    optimizer.step()
    optimizer.zero_grad()


def groups():
    return [ds_comm.new_group(ranks, "alike") for ranks in ((0, 2), (1, 3))][dist.get_rank() % 2]


def save(optimizer, path):
    ds_ckpt.save(path, optimizer.shards(), {"optimizer": optimizer.common_state_dict()})


def load(optimizer, path):
    optimizer.materialize({name: t.shape for name, t in ds_ckpt.inspect(path).tensors.items()})
    optimizer.load_state_dict(ds_ckpt.load(path, optimizer.shards())["optimizer"])
    optimizer.refresh()


def same(optimizer, truth):
    for local in optimizer.shards():
        s = local.shard
        part = truth[s.name][tuple(slice(o, o + n) for o, n in zip(s.box.offset, s.box.shape, strict=True))]
        found, wanted = local.data, part.reshape(-1)[s.interval.start : s.interval.stop]
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7, msg=lambda m, n=s.name: f"{n}: {m}")


def whole(path):
    manifest = ds_ckpt.inspect(path)
    truth = {n: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for n, t in manifest.tensors.items()}
    ds_ckpt.load(path, ds_ckpt.full_shards(truth))
    return truth


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


@world(4)
def test_saved_on_four_and_loaded_at_another_stage(folder):
    alike = groups()
    for stage in STAGES:
        net, optimizer = make(stage, alike)
        for number in range(2):
            step(net, optimizer, number)
        save(optimizer, folder / f"two-{stage}")
        step(net, optimizer, 2)
        save(optimizer, folder / f"three-{stage}")
        optimizer.close()
    truth = whole(folder / "three-0")
    names = {f"param/experts.{e}.{kind}" for e in range(2) for kind in ("weight", "bias")} | {"param/cut"}
    assert names < set(truth)
    assert truth["param/cut"].shape == (6, 10)
    for stage in STAGES:
        for source in STAGES:
            net, optimizer = make(stage, alike)
            load(optimizer, folder / f"two-{source}")
            step(net, optimizer, 2)
            same(optimizer, truth)
            optimizer.close()


@world(2)
def test_loaded_whole_on_two(folder):
    for stage in STAGES:
        net, optimizer = make(stage)
        load(optimizer, folder / "two-3")
        step(net, optimizer, 2)
        same(optimizer, whole(folder / "three-1"))
        if stage == 3:
            save(optimizer, folder / "of-two")
        optimizer.close()


@world(4)
def test_what_was_whole_is_cut_again(folder):
    _, optimizer = make(1, groups())
    load(optimizer, folder / "of-two")
    same(optimizer, whole(folder / "three-0"))
    optimizer.close()


@world(4)
def test_pretrained_files_hold_logical_tensors(folder):
    from safetensors.torch import save_file

    truth = whole(folder / "three-0")
    if dist.get_rank() == 0:
        save_file({n.removeprefix("param/"): t for n, t in truth.items() if n.startswith("param/")} | {"seen": torch.ones(3)},
                  folder / "model.safetensors")  # fmt: skip
    dist.barrier()
    net, optimizer = make(3, groups())
    assert ds_zero.load_pretrained(net, folder / "model.safetensors") == ()
    for local in optimizer.sharding.param_shards():
        s = local.shard
        part = truth[s.name][tuple(slice(o, o + n) for o, n in zip(s.box.offset, s.box.shape, strict=True))]
        assert torch.equal(local.data, part.reshape(-1)[s.interval.start : s.interval.stop])
    optimizer.close()
