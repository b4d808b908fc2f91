"""Layers and sequences over ranks with everything on a device: equal to one process. In `nox -s gpu` between ranks on a card."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import ds_comm
from ds_comm import Mesh, MeshSpec, world_group
from ds_config.errors import set_place
from ds_parallel import ActivationCheckpointing, ActivationPolicy
from ds_parallel.heads import spread
from ds_parallel.sequence import DistributedAttention, RingAttention, plan_ring
from ds_parallel.tensor import (
    TensorOptions,
    clip_grad_norm_,
    facts_of,
    make_tensor_plan,
    parallelize_model,
    reduce_gradients,
    vocab_parallel_cross_entropy,
)
from ds_testing.device_worlds import device_world


def attention(query, key, value, causal=True):
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


@pytest.mark.parametrize(
    "name", ["llama", "llama-tied", "qwen2", "gpt2", "mixtral", "phi3", "gemma", "bloom", "chatglm"]
)
@device_world(2)
def test_family(name, tiny, device):
    reference, batch = tiny(name)
    reference, batch = reference.to(device), {key: value.to(device) for key, value in batch.items()}
    wanted = reference(**batch)
    wanted.loss.backward()
    mesh = Mesh.build(MeshSpec.fit(2, tensor=2))
    model = tiny(name)[0].to(device)
    cut = parallelize_model(model, make_tensor_plan(facts_of(model), TensorOptions(2)), mesh["tensor"])
    found = model(**batch)
    torch.testing.assert_close(found.logits, wanted.logits, atol=1e-4, rtol=1e-4)
    found.loss.backward()
    grads = {key: param.grad for key, param in reference.named_parameters(remove_duplicate=False)}
    for key, param in model.named_parameters(remove_duplicate=False):
        shard = cut.shards.get(key)
        grad = grads[shard.name if shard else key]
        if grad is not None and shard is not None:
            box = shard.box(cut.group.rank)
            for dim, (offset, size) in enumerate(zip(box.offset, box.shape, strict=True)):
                grad = grad.narrow(dim, offset, size)
        if grad is not None:
            torch.testing.assert_close(param.grad, grad, atol=1e-4, rtol=1e-3)
    whole = cut.state_dict()
    assert all(torch.equal(whole[key].cpu(), value.cpu()) for key, value in reference.state_dict().items())
    cut.undo()
    set_place("")


@device_world(4)
def test_two_steps_with_one_norm_over_copies(tiny, device):
    model, batch = tiny("llama")
    whole = tiny("llama")[0].to(device)
    model, batch = model.to(device), {key: value.to(device) for key, value in batch.items()}
    mesh = Mesh.build(MeshSpec.fit(4, tensor=2))
    cut = parallelize_model(model, make_tensor_plan(facts_of(model), TensorOptions(2)), mesh["tensor"])
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.5) for m in (model, whole))
    for step in range(2):
        parts = [{key: value.roll(step + rank, dims=-1) for key, value in batch.items()} for rank in range(2)]
        model(**parts[mesh["data"].rank]).loss.backward()
        for part in parts:
            (whole(**part).loss / 2).backward()
        reduce_gradients(model, mesh)
        norm, wanted = clip_grad_norm_(model, 0.1), torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        assert float(norm) == pytest.approx(float(wanted), rel=1e-4)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    state = cut.state_dict()
    assert all(torch.allclose(state[key].cpu(), value.cpu(), atol=1e-4) for key, value in whole.state_dict().items())
    cut.undo()
    set_place("")


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 3), (5, 5)], ids=str)
@pytest.mark.parametrize("length", [8, 13])
@device_world(2)
def test_heads_are_exchanged_for_the_sequence(length, heads, device):
    group = world_group()
    torch.manual_seed(7)
    shapes = [(2, length, n, 4) for n in (heads[0], heads[1], heads[1])]
    whole = [torch.randn(shape, dtype=torch.float64).to(device).requires_grad_() for shape in shapes]
    weight = torch.randn(2, length, heads[0], 4, dtype=torch.float64).to(device)
    lengths = [stop - start for start, stop in spread(length, 2)]
    wanted = attention(*whole)
    (wanted * weight).sum().backward()
    local = [t.detach().split(lengths, 1)[group.rank].clone().requires_grad_() for t in whole]
    found = DistributedAttention(attention, group, scatter_idx=2, gather_idx=1)(*local, 0, lengths=lengths)
    torch.testing.assert_close(found, wanted.split(lengths, 1)[group.rank], atol=1e-9, rtol=1e-9)
    (found * weight.split(lengths, 1)[group.rank]).sum().backward()
    for part, full in zip(local, whole, strict=True):
        torch.testing.assert_close(part.grad, full.grad.split(lengths, 1)[group.rank], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("zigzag", [False, True], ids=["contiguous", "zigzag"])
@device_world(2)
def test_keys_go_round_a_ring(zigzag, device):
    group, length = world_group(), 12
    torch.manual_seed(3)
    whole = [torch.randn(2, length, n, 4, dtype=torch.float64).to(device).requires_grad_() for n in (4, 2, 2)]
    plan = plan_ring(length, 2, zigzag=zigzag)
    wanted = attention(*whole)
    wanted.square().sum().backward()
    local = [plan.part(t.detach(), group.rank, 1).clone().requires_grad_() for t in whole]
    found = RingAttention(plan, group, causal=True)(*local, None)
    torch.testing.assert_close(found, plan.part(wanted, group.rank, 1), atol=1e-9, rtol=1e-9)
    found.square().sum().backward()
    for part, full in zip(local, whole, strict=True):
        torch.testing.assert_close(part.grad, plan.part(full.grad, group.rank, 1), atol=1e-9, rtol=1e-9)


@device_world(2)
def test_cross_entropy_of_a_cut_vocabulary(device):
    group, widths = world_group(), [5, 7]
    torch.manual_seed(1)
    whole = (torch.randn(7, 12) * 30).to(device).requires_grad_()
    labels = torch.tensor([0, 11, 5, -100, 4, 3, -100], device=device)
    wanted = functional.cross_entropy(whole, labels, reduction="none")
    wanted.sum().backward()
    start = sum(widths[: group.rank])
    local = whole.detach()[:, start : start + widths[group.rank]].clone().requires_grad_()
    found = vocab_parallel_cross_entropy(local, labels, group, widths=widths)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    found.sum().backward()
    torch.testing.assert_close(local.grad, whole.grad[:, start : start + widths[group.rank]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["checkpoint", "checkpoint_reentrant"])
@device_world(2)
def test_each_rank_keeps_its_part_of_an_input(form, device):
    policy = ActivationCheckpointing(ActivationPolicy(slices=True), ds_comm.world_group())
    weight = torch.randn(5, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()

    def run(call):
        weight.grad = None
        x = torch.linspace(0, 1, 35, device=device).view(7, 5) * weight
        for _ in range(3):
            x = call(torch.sin, x)
        x.sum().backward()
        return x.detach(), weight.grad

    plain = run(lambda f, *args: f(*args))
    for a, b in zip(plain, run(getattr(policy, form)), strict=True):
        torch.testing.assert_close(a, b)
    assert policy.account.device == 0
