"""Ranks that have the same tokens take a part of them each; both orders of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import ds_comm
from ds_comm import Mesh, MeshSpec
from ds_config.errors import CommError
from ds_moe import place_experts
from ds_testing import world


def check(bench, spec, ep_size, *, data_first=False):
    """Every rank of a tensor group has the batch of its data rank; gradients are those of all data ranks' mean."""
    mesh = Mesh.build(spec)
    data = mesh["gradient"].rank
    probe = bench.model(ep_size, 0, k=2)
    placed = place_experts(probe, mesh, data_first=data_first)
    at = probe.moe.deepspeed_moe.places.expert.rank
    placed.close()
    net = bench.model(ep_size, at, k=2)
    placed = place_experts(net, mesh, data_first=data_first)
    loss = net(bench.batch(data, "uneven"))
    loss.backward()
    dense = bench.model(k=2)
    losses = [bench.dense(dense, bench.batch(r, "uneven")) for r in range(mesh["gradient"].size)]
    (sum(losses) / len(losses)).backward()
    torch.testing.assert_close(loss, losses[data], atol=1e-9, rtol=1e-9)
    grads = {}
    for name, param in net.named_parameters():
        family = ds_comm.param_sharding(param).family
        group = mesh["gradient"] if family is None else family.group
        if group.size > 1:
            dist.all_reduce(param.grad, group=group.pg)
        grads[name] = param.grad / (mesh["gradient"].size if family is None else family.divisor)
    bench.close(bench.logical(grads, at, ep_size), {n: p.grad for n, p in dense.named_parameters()}, 1e-9)
    return net, placed


@world(2)
def test_tensor_parallel_ranks_share_the_tokens(bench):
    net, placed = check(bench, MeshSpec(tensor=2), 1)
    layer = net.moe.deepspeed_moe
    layer.how = replace(layer.how, compare=True)
    x = bench.batch(0)
    net(x)
    with torch.no_grad():
        layer.gate.wg.weight.mul_(1 - 2 * dist.get_rank())
    with pytest.raises(CommError, match="moe-routing-differs"):
        net(x)
    placed.close()


@world(4)
def test_experts_beside_tensor_parallelism_and_in_both_orders(bench):
    check(bench, MeshSpec(data_shard=2, tensor=2), 2)
    check(bench, MeshSpec(data_shard=4), 2, data_first=True)
    check(bench, MeshSpec(data_shard=2, sequence=2), 4)
