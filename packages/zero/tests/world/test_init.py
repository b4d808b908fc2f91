"""Models that never exist whole in one process, and weights that go from files to shards."""

from __future__ import annotations

import copy
import json
import struct

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_zero
from ds_config.errors import CheckpointError, PlanError, ShardedAccessError
from ds_testing import world
from ds_zero.runtime.init_shards import chunk_of
from ds_zero.runtime.sharded_parameter import ShardedParameter

SMALL = ds_zero.UnitSizePolicy(max_numel=300, persist_numel=8)


class Net(nn.Module):
    """Initialises itself in every way: in modules, in a parent's apply, by hand, with a tied and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 12)
        self.body = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 30, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(5, 3))
        self.register_buffer("table", torch.arange(12.0).sin(), persistent=False)
        self.register_buffer("count", torch.zeros(3))
        self.apply(self._init)
        with torch.no_grad():
            self.body[0].weight[0].fill_(0.25)
            self.body[2].weight.mul_(2.0)

    @staticmethod
    def _init(module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)

    def forward(self, x):
        y = self.norm(self.body(self.embed(x) + self.table)) * self.gain.sum()
        return self.head(y)


def train(net, stage, **options):
    optimizer = ds_zero.shard(net, torch.optim.AdamW(net.parameters(), lr=1e-2), stage=stage, policy=SMALL, **options)
    for step in range(3):
        x = torch.randint(0, 30, (4, 6), generator=torch.Generator().manual_seed(9 * step + dist.get_rank()))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("memory", ["private", "shared"])
@pytest.mark.parametrize("stage", [1, 3])
@world(2)
def test_built_inside_equals_built_outside(stage, memory):
    torch.manual_seed(1)
    outside = Net()
    state = torch.random.get_rng_state()
    torch.manual_seed(1)
    with ds_zero.Init():
        inside = Net()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert inside.head.weight is inside.embed.weight
    held = sum(p.untyped_storage().nbytes() for p in inside.parameters())
    assert held == 0
    assert torch.equal(inside.table, outside.table)
    expected = train(outside, stage, memory=memory)
    assert all(torch.equal(a, b) for a, b in zip(train(inside, stage, memory=memory), expected, strict=True))


@world(2)
def test_rank_zeros_values_win_and_nothing_in_torch_stays_changed():
    before = {name: getattr(nn.Linear, name) for name in ("__init__", "forward", "__setattr__")}
    torch.manual_seed(dist.get_rank())
    with ds_zero.Init(dtype=torch.bfloat16):
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    assert {name: getattr(nn.Linear, name) for name in before} == before
    assert nn.Linear(3, 3).weight.dtype == torch.float32
    assert net[0].weight.dtype == torch.bfloat16
    assert net[0].weight.shape == (8, 8)
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).bfloat16()
    assert torch.equal(net[1].weight + 0, twin[1].weight)  # using one outside shows it whole
    sharding = ds_zero.shard(net, stage=3, policy=SMALL)
    sharding.close()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))


@world(2)
def test_a_failed_construction_leaves_no_hooks():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)
            raise KeyError("broken")

    with pytest.raises(KeyError), ds_zero.Init(meta=True):
        Broken()
    assert not nn.Linear(2, 2).weight.is_meta


def write_safetensors(path, tensors):
    header, blob = {"__metadata__": {"format": "pt"}}, b""
    codes = {torch.float32: "F32", torch.bfloat16: "BF16"}
    for name, tensor in tensors.items():
        raw = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
        header[name] = {
            "dtype": codes[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(blob), len(blob) + len(raw)],
        }
        blob += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + blob)


def weights(tmp, dtype=torch.float32):
    torch.manual_seed(3)
    net = Net()
    state = {k: v.to(dtype) for k, v in net.state_dict().items() if k != "embed.weight"}  # the tied one has one name
    if dist.get_rank() == 0:
        names = list(state)
        write_safetensors(tmp / "model-1.safetensors", {k: state[k] for k in names[::2]})
        write_safetensors(tmp / "model-2.safetensors", {k: state[k] for k in names[1::2]} | {"extra": torch.zeros(2)})
    dist.barrier()
    return net


@pytest.mark.parametrize("memory", ["private", "shared"])
@pytest.mark.parametrize(("stage", "dtype"), [(0, torch.float32), (2, torch.bfloat16), (3, torch.float32)])
@world(2)
def test_weights_stream_into_a_model_on_meta(tmp_path, stage, dtype, memory):
    expected = weights(tmp_path, dtype)
    with ds_zero.Init(meta=True):
        net = Net()
    assert all(p.is_meta for p in net.parameters())
    assert torch.equal(net.table, expected.table)
    inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
    optimizer = ds_zero.shard(net, inner, stage=stage, policy=SMALL, memory=memory)
    with pytest.raises(PlanError, match="no values yet"):
        optimizer.step()
    assert ds_zero.load_pretrained(net, tmp_path) == ("extra",)
    optimizer.close()
    assert net.head.weight is net.embed.weight
    for (name, a), b in zip(net.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b.to(dtype).to(a.dtype)), name
    if dtype == torch.float32:
        trained = train(net, stage, memory=memory)
        assert all(torch.equal(a, b) for a, b in zip(trained, train(expected, stage, memory=memory), strict=True))


@world(2)
def test_what_does_not_fit_is_told_before_anything_is_written(tmp_path):
    weights(tmp_path)
    plain = nn.Linear(4, 4)
    with pytest.raises(PlanError, match="not sharded"):
        ds_zero.load_pretrained(plain, tmp_path)
    other = nn.ModuleDict({"norm": nn.LayerNorm(13)})
    sharding = ds_zero.shard(other, stage=3)
    with pytest.raises(CheckpointError, match=r"norm.weight has shape \(13,\), the file says \(12,\)"):
        ds_zero.load_pretrained(other, tmp_path)
    sharding.close()
    more = nn.ModuleDict({"norm": nn.LayerNorm(12), "tail": nn.Linear(2, 2)})
    sharding = ds_zero.shard(more, stage=3)
    with pytest.raises(CheckpointError, match="2 tensors of the model are in no file"):
        ds_zero.load_pretrained(more, tmp_path)
    with torch.no_grad():
        assert "gain" in ds_zero.load_pretrained(more, tmp_path, strict=False)
    if dist.get_rank() == 0:
        (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 64)
    dist.barrier()
    with pytest.raises(CheckpointError, match="header"):
        ds_zero.load_pretrained(more, tmp_path / "bad.safetensors")
    sharding.close()


@world(2)
def test_a_tiled_linear_is_a_linear():
    torch.manual_seed(0)
    plain, tiled = nn.Linear(10, 7), ds_zero.TiledLinear(10, 7, in_splits=3, out_splits=2)
    tiled.copy_params_from(plain)
    x = torch.randn(3, 10)
    torch.testing.assert_close(tiled(x), plain(x))
    optimizer = ds_zero.shard(tiled, torch.optim.SGD(tiled.parameters(), lr=0.1), stage=3, policy=SMALL)
    tiled(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.close()
    with pytest.raises(PlanError, match="cannot be split"):
        ds_zero.TiledLinear(2, 2, in_splits=3)


@world(2)
def test_scattered_parameters_are_gathered_and_given_back():
    """What clients do between Init and shard: read, write on one rank, nest, take a state_dict, replace, move."""
    rank = dist.get_rank()
    with ds_zero.Init():
        net = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    weight, bias = net[0].weight, net[0].bias
    with ds_zero.GatheredParameters({weight, bias}, modifier_rank=0):
        if rank == 0:
            nn.init.constant_(weight, 2.0)
        with ds_zero.GatheredParameters(weight):
            assert type(weight) is nn.Parameter
        nn.init.constant_(bias, float(rank))
    assert type(weight) is ds_zero.ShardedParameter
    assert weight.untyped_storage().nbytes() == 0
    with ds_zero.GatheredParameters([weight, bias, bias]):
        assert bool((weight == 2.0).all())
        assert bool((bias == 0.0).all())
        kept = weight.detach()
    assert bool((kept == 2.0).all())  # it may outlive the context
    with (
        pytest.raises(ShardedAccessError, match=r"0\.bias|bias changed|parameter \d"),
        ds_zero.GatheredParameters(bias),
        torch.no_grad(),
    ):
        bias.add_(1.0)
    with ds_zero.GatheredParameters(bias, write=True), torch.no_grad():
        assert bool((bias == 0.0).all())
        bias.add_(3.0)
    state = net.state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == {n: tuple(p.shape) for n, p in net.named_parameters()}
    assert sum(t.untyped_storage().nbytes() for t in state.values()) == 0
    assert bool((state["0.bias"] + 0 == 3.0).all())
    assert sum(t.untyped_storage().nbytes() for t in state.values()) == 0
    sharding = ds_zero.shard(net, stage=3, policy=SMALL)
    with pytest.raises(ShardedAccessError, match="after the model was sharded"):
        state["0.bias"].add(1)
    sharding.close()
    assert bool((net[0].bias == 3.0).all())


@world(2)
def test_a_copy_of_a_cut_parameter_is_another_one_cut_the_same_way():
    """As PEFT does for `modules_to_save`: the head is copied between Init and shard, and the copy is trained beside it."""
    with ds_zero.Init():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    net[1].weight.requires_grad_(False)
    twin = copy.deepcopy(net)
    tied = copy.deepcopy(nn.ModuleList([net[0], net[0]]))
    assert tied[0].weight is tied[1].weight
    weight, other = net[1].weight, twin[1].weight
    assert type(other) is ds_zero.ShardedParameter
    assert other is not weight
    assert not other.requires_grad
    assert other.untyped_storage().nbytes() == 0
    with ds_zero.GatheredParameters([weight, other], modifier_rank=0):
        assert torch.equal(weight, other)
        if dist.get_rank() == 0:
            other.data.fill_(2.0)
    with ds_zero.GatheredParameters([weight, other]):
        assert not bool((weight == 2.0).any())
        assert bool((other == 2.0).all())
    both = nn.ModuleDict({"one": net, "two": twin})
    optimizer = ds_zero.shard(both, torch.optim.SGD(both.parameters(), lr=0.1), stage=3, policy=SMALL)
    both["two"](torch.ones(1, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.close()
    assert bool((other == 2.0).all())
    assert not torch.equal(net[0].weight, twin[0].weight)


class _Large(nn.Module):
    """Sixteen layers, each of which says how much is held while it is made."""

    def __init__(self, watch):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(16):
            self.layers.append(nn.Sequential(nn.Linear(64, 64, bias=False)))
            watch(self)


@pytest.mark.parametrize("memory", ["private", "shared"])
@world(2)
def test_no_process_holds_the_whole_model(memory):
    """Bytes of parameters: while it is built, loaded on one rank, and handed to shard."""
    layer, most = 64 * 64 * 4, 0

    def held(module):
        tensors = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}
        chunks = [chunk_of(p) for p in module.parameters()]
        return sum(tensors.values()) + sum(c.nbytes for c in chunks if c is not None)

    def watch(module):
        nonlocal most
        most = max(most, held(module))

    with ds_zero.Init():
        net = _Large(watch)
    watch(net)
    for block in net.layers:
        with ds_zero.GatheredParameters(block.parameters(), modifier_rank=0):
            watch(net)
            if dist.get_rank() == 0:
                nn.init.eye_(block[0].weight)
    assert most == 8 * layer + layer
    sharding = ds_zero.shard(net, stage=3, policy=SMALL, memory=memory)
    with ds_zero.GatheredParameters(net.layers[3].parameters()):
        assert torch.equal(net.layers[3][0].weight, torch.eye(64))
    sharding.close()


@world(1)
def test_one_rank_cuts_as_many_do_and_keeps_what_it_writes():
    with ds_zero.Init():
        net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    weight = net[0].weight
    assert type(weight) is ShardedParameter
    with ds_zero.GatheredParameters([weight]):
        weight.data.fill_(7.0)
        with torch.no_grad():
            net[0].weight.mul_(2.0)
    assert type(weight) is ShardedParameter
    assert torch.equal(weight, torch.full((3, 4), 14.0))
