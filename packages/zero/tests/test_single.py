"""One process, no process group: the same path."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import ds_zero
from ds_config.errors import PlanError


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_equals_plain_torch(stage, clip):
    model, twin = net(), net()
    optimizer = ds_zero.shard(model, torch.optim.AdamW(model.parameters(), foreach=False), stage=stage, clip=clip)
    plain = torch.optim.AdamW(twin.parameters(), foreach=False)
    for step in range(5):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        twin(x).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), clip or float("inf"))
        plain.step()
        plain.zero_grad()
        assert (
            optimizer.last.norm is None if clip is None else optimizer.last.norm == pytest.approx(norm.item(), rel=1e-5)
        )
    optimizer.close()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        if clip is None:
            assert torch.equal(a, b)
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("stage", [1, 2])
def test_models_can_be_copied_and_saved_while_sharded(stage):
    model = net()
    optimizer = ds_zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    twin = copy.deepcopy(pickle.loads(pickle.dumps(model)))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in torch.load(buffer, weights_only=True).items())
    twin(torch.ones(1, 4)).sum().backward()
    assert twin[0].weight.grad is not None
    twin.zero_grad()
    assert twin[0].weight.grad is None
    assert optimizer.zero_grad() is None
    optimizer.close()
    assert "zero_grad" not in vars(model)


def test_a_zero_grad_of_the_models_own_is_called_and_given_back():
    model = net()
    called = []
    model.zero_grad = called.append  # a client's wrapper
    optimizer = ds_zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    before = model[0].weight.detach().clone()
    model(torch.ones(1, 4)).sum().backward()
    model.zero_grad(False)
    optimizer.step()
    optimizer.zero_grad()
    assert called == [False]
    assert torch.equal(model[0].weight, before)
    optimizer.close()
    assert vars(model)["zero_grad"] == called.append


def test_a_closure_is_called_once_and_its_loss_returned():
    model = net()
    optimizer = ds_zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1)

    def closure():
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        return loss

    before = model(torch.ones(1, 4)).sum()
    assert torch.equal(optimizer.step(closure), before)
    assert model(torch.ones(1, 4)).sum() < before
    optimizer.close()


def test_a_model_without_an_optimizer():
    model = net().requires_grad_(False)
    sharding = ds_zero.shard(model, stage=3)
    assert torch.equal(model(torch.ones(1, 4)), net()(torch.ones(1, 4)))
    assert sorted(s.shard.name for s in sharding.param_shards()) == sorted(
        f"param/{n}" for n, _ in model.named_parameters()
    )
    sharding.close()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_compiled_without_graph_breaks(stage):
    model = net()
    optimizer = ds_zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    twin = net()
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for step in range(4):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        for forward, o in ((compiled, optimizer), (twin, plain)):
            forward(x).square().mean().backward()
            o.step()
            o.zero_grad()
    assert counter.frame_count == 1
    optimizer.close()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def _layer(make):
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(make())
    return layer


def _as_it_was(layer):
    before = layer.weight.data_ptr()
    values = layer.weight.detach().clone()
    optimizer = ds_zero.shard(layer, torch.optim.SGD(layer.parameters(), lr=0.5), stage=2)
    kept = layer.weight.data_ptr() == before
    assert torch.equal(layer.weight, values)
    layer(torch.ones(1, layer.weight.shape[1])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(layer.weight, values - 0.5)
    optimizer.close()
    assert torch.equal(layer.weight, values - 0.5)
    return kept


def test_a_parameter_that_fills_its_unit_is_not_copied():
    square, long = nn.Linear(4, 8, bias=False), nn.Linear(3, 16, bias=False)
    assert _as_it_was(square)
    assert _as_it_was(long)


def test_memory_that_is_not_the_parameters_alone_is_left_to_its_owner():
    others, array = torch.ones(9, 4), np.ones((8, 4), dtype=np.float32)
    for make in (
        lambda: others[:8],
        lambda: others[1:],
        lambda: torch.from_numpy(array),
        lambda: torch.ones(4, 8).t(),
        lambda: torch.ones(8, 4).share_memory_(),
    ):
        layer = _layer(make)
        assert not _as_it_was(layer)
    assert others.sum() == 36
    assert array.sum() == 32


def test_a_parameter_that_does_not_fill_its_unit_is_copied():
    layer = nn.Linear(5, 3, bias=False)
    assert not _as_it_was(layer)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_format_after_shard_is_named_at_every_stage(stage, dtype):
    model = net()
    optimizer = ds_zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    model.to(dtype)

    def step():
        model(torch.ones(1, 4, dtype=dtype)).sum().backward()
        optimizer.step()

    with pytest.raises(PlanError, match=r"0\.weight was sharded as torch\.float32") as caught:
        step()
    assert caught.value.code == "zero-replaced"


OPTIONS = [
    {"clip": -1.0},  # turned every gradient around
    {"clip": 0.0},  # made them all zero
    {"clip": float("nan")},  # clipped nothing
    {"memory": "AUTO"},
    {"stage": True},
    {"strict": "yes"},
    {"shard_size": "2"},
    {"offload_params": "host"},
    {"quantized_comm": {"weights": 8}},
    {"policy": 1000},
    {"max_numel": 1000},
]


@pytest.mark.parametrize("keys", OPTIONS, ids=lambda keys: f"{next(iter(keys))}={next(iter(keys.values()))}")
def test_options_without_a_meaning_are_refused_before_anything_changes(keys):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(PlanError, match=next(iter(keys))) as caught:
        ds_zero.shard(model, optimizer, **keys)
    assert caught.value.code == "config-option"
    assert isinstance(ds_zero.shard(model, optimizer, stage=2), ds_zero.ShardedOptimizer)


def test_none_is_a_default():
    model = net()
    none = dict.fromkeys(("policy", "quantized_comm", "offload_optimizer", "offload_params", "memory", "overlap"))
    optimizer = ds_zero.shard(model, torch.optim.AdamW(model.parameters()), stage=3, **none)
    assert optimizer.sharding.options == ds_zero.ShardOptions(stage=3)


def test_parameters_that_are_never_released_are_not_offloaded_in_silence():
    model = net()
    with pytest.raises(PlanError, match="stage 2") as caught:
        ds_zero.shard(
            model, torch.optim.AdamW(model.parameters()), stage=2, offload_params=ds_zero.OffloadPolicy("host")
        )
    assert caught.value.code == "offload-placement"


def test_what_is_no_model_and_no_optimizer_is_named():
    model = net()
    for arguments, words in (((model.parameters(),), "generator"), ((model, [1]), "list")):
        with pytest.raises(PlanError, match=words):
            ds_zero.shard(*arguments)


def test_a_rule_that_matches_nothing_is_told(caplog):
    model = net()
    rules = (ds_zero.PrecisionRule("*.bais", param=torch.bfloat16), ds_zero.PrecisionRule("2.*", param=torch.bfloat16))
    ds_zero.shard(
        model, torch.optim.AdamW(model.parameters()), stage=1, precision=ds_zero.Precision(rules=rules)
    ).close()
    assert "'*.bais' has no effect" in caplog.text
    assert "2.*" not in caplog.text
