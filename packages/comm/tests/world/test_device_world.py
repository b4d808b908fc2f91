"""Collectives, groups and channels with everything on a device; in `nox -s gpu` between ranks on a card, with NCCL."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ds_comm
from ds_comm import Mesh, MeshSpec, differentiable, world_group
from ds_comm.channels import Channels
from ds_config.errors import CommError, set_place
from ds_testing.device_worlds import device_world


def rows(rank, device, count=3):
    return torch.arange(4 * count, device=device, dtype=torch.float32).view(count, 4) + 100 * rank


@device_world(2)
def test_sums_and_gathers(device):
    rank, size = dist.get_rank(), dist.get_world_size()
    total = rows(rank, device)
    ds_comm.all_reduce(total)
    wanted = sum(rows(r, device) for r in range(size))
    assert torch.equal(total, wanted)
    part = torch.empty(6, device=device)
    ds_comm.reduce_scatter_single(part, rows(rank, device).view(-1))
    assert torch.equal(part, wanted.view(-1)[6 * rank : 6 * rank + 6])
    whole = torch.empty(24, device=device)
    work = ds_comm.all_gather_single(whole, rows(rank, device).view(-1), async_op=True)
    work.wait()
    assert torch.equal(whole, torch.cat([rows(r, device).view(-1) for r in range(size)]))
    first = rows(rank, device)
    ds_comm.broadcast(first, 0)
    assert torch.equal(first, rows(0, device))


@device_world(2)
def test_rows_go_to_their_ranks(device):
    rank = dist.get_rank()
    out = torch.empty(4, 4, device=device)
    ds_comm.all_to_all_single(out, rows(rank, device, 4))
    assert torch.equal(out, torch.cat([rows(r, device, 4)[2 * rank : 2 * rank + 2] for r in range(2)]))
    x = rows(rank, device, 3).requires_grad_()
    sizes = [[1, 2], [2, 1]]
    moved = differentiable.all_to_all_rows(x, None, sizes[rank], [sizes[r][rank] for r in range(2)])
    (moved * (rank + 1)).sum().backward()
    assert x.grad.device == device
    assert x.grad[:, 0].tolist() == [1.0] * sizes[rank][0] + [2.0] * sizes[rank][1]


@pytest.mark.parametrize(
    "spec", [MeshSpec(data_shard=2, tensor=2), MeshSpec(pipe=2, data_shard=2)], ids=["tensor", "pipe"]
)
@device_world(4)
def test_groups_of_a_mesh(spec, device):
    mesh = Mesh.build(spec)
    set_place("")
    for group in mesh.values():
        value = torch.tensor([float(10 ** dist.get_rank())], device=device)
        ds_comm.all_reduce(value, group=group)
        assert value.item() == sum(10**rank for rank in group.ranks)


@device_world(3)
def test_members_make_a_group_alone(device):
    if dist.get_rank() < 2:
        group = ds_comm.new_local_group((0, 1), "part")
        value = torch.ones(2, device=device)
        ds_comm.all_reduce(value, group=group)
        assert value.tolist() == [2, 2]
        ds_comm.destroy_group(group)


@device_world(2)
def test_what_is_no_tensor_travels(device):
    rank = dist.get_rank()
    found = [None, None]
    ds_comm.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": 0}, {"rank": 1}]
    assert ds_comm.all_gather_json([rank]) == [[0], [1]]
    assert ds_comm.broadcast_json({"from": rank}) == {"from": 0}
    counts = ds_comm.all_to_all_counts(torch.tensor([rank, 10 + rank], device=device))
    assert counts.tolist() == [[0, 1], [10, 11]][rank]
    with pytest.raises((CommError, ValueError), match="of rank 1"):
        ds_comm.metadata.raise_together(ValueError("of rank 1") if rank else None)
    ds_comm.barrier()


@device_world(2)
def test_gradients_pass_collectives(device):
    rank, size = dist.get_rank(), dist.get_world_size()
    x = rows(rank, device).requires_grad_()
    whole = differentiable.all_gather(x, world_group(), 0)
    assert torch.equal(whole, torch.cat([rows(r, device) for r in range(size)]))
    (whole * torch.arange(6, device=device)[:, None]).sum().backward()
    assert torch.equal(x.grad, size * torch.arange(3 * rank, 3 * rank + 3, device=device)[:, None].expand(3, 4))


def travel(device, shared):
    """Messages of tensors on a device, of the host, and of both; large ones, in both directions at once."""
    rank = dist.get_rank()
    channels = Channels(world_group(), shared=shared, device=device)
    there, back = channels.sender(1 - rank), channels.receiver(1 - rank)
    messages = [
        (rows(rank, device), torch.arange(5)),
        (rows(rank, device) + 1, torch.arange(5) + 1),
        (torch.full((300_000,), float(rank), device=device),),
        (torch.zeros(0, device=device), torch.tensor(float(rank))),
    ]
    for message in messages:
        work = there.send(message)
        came = back.recv()
        work.wait()
        other = 1 - rank
        assert [tensor.device for tensor in came] == [tensor.device for tensor in message]
        assert [tensor.shape for tensor in came] == [tensor.shape for tensor in message]
        wanted = [tensor + 100 * (other - rank) if tensor.shape == (3, 4) else tensor for tensor in message]
        wanted = [torch.full_like(t, float(other)) if t.dim() < 2 and t.numel() in (1, 300_000) else t for t in wanted]
        assert all(torch.equal(a, b) for a, b in zip(came, wanted, strict=True))
    channels.close()


@pytest.mark.parametrize("shared", [True, False], ids=["memory", "messages"])
@device_world(2)
def test_channels_carry_tensors_of_a_device(shared, device):
    """What arrived was on the CPU."""
    travel(device, shared)


@device_world(2)
def test_numbers_of_the_host_are_made_where_the_group_wants_them(device):
    value = torch.ones(1, device=ds_comm.metadata.metadata_device(world_group()))
    ds_comm.all_reduce(value)
    assert value.item() == 2
    assert ds_comm.find_differences({"a": str(dist.get_rank()), "b": "same"}) == {"a": ["0", "1"]}
