"""The layer on several ranks equals a dense loop over experts in one process: outputs and all gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import ds_comm
from ds_config.errors import CommError, PlanError
from ds_moe import GateRule, MoE, expert_load, place_experts, record_routing, replay_routing
from ds_moe.moe_layer import TopKGate
from ds_testing import world

KINDS = ["even", "uneven", "none", "one", "few"]
GRID = list(itertools.product((1, 2, 4), (False, True)))


def wanted(bench, k, drop, kind, size):
    """Loss of each rank, gradients of their mean."""
    net = bench.model(k=k, drop=drop, kind=kind)
    losses = [bench.dense(net, bench.batch(rank, kind)) for rank in range(size)]
    (sum(losses) / size).backward()
    return losses, {name: param.grad for name, param in net.named_parameters()}


def found(bench, ep_size, k, drop, kind):
    """This rank's loss, its averaged gradients by logical name."""
    size = dist.get_world_size()
    net = bench.model(ep_size, dist.get_rank() % ep_size, k, drop, kind)
    placed = place_experts(net)
    loss = net(bench.batch(dist.get_rank(), kind))
    loss.backward()
    grads = {}
    for name, param in net.named_parameters():
        family = ds_comm.param_sharding(param).family
        dist.all_reduce(param.grad, group=None if family is None else family.group.pg) if (
            family is None or family.group.size > 1
        ) else None
        grads[name] = param.grad / (size if family is None else family.divisor)
    logical = bench.logical(grads, dist.get_rank() % ep_size, ep_size)
    placed.close()
    return loss, logical


def check(bench, ep_size, k, drop, kind):
    loss, grads = found(bench, ep_size, k, drop, kind)
    losses, expected = wanted(bench, k, drop, kind, dist.get_world_size())
    torch.testing.assert_close(loss, losses[dist.get_rank()], atol=1e-9, rtol=1e-9)
    bench.close(grads, expected, 1e-9)


@world(2)
def test_two_ranks_equal_a_dense_loop(bench):
    for (k, drop), kind in itertools.product(GRID, KINDS):
        check(bench, 2, k, drop, kind)


@world(4)
@pytest.mark.parametrize("ep_size", [2, 4])
def test_four_ranks_equal_a_dense_loop(bench, ep_size):
    for kind, (k, drop) in zip(KINDS * 2, GRID * 2, strict=False):
        check(bench, ep_size, k, drop, kind)


@world(2)
def test_names_in_checkpoints_do_not_depend_on_ranks(bench):
    net = bench.model(2, dist.get_rank())
    place_experts(net)
    names = [ds_comm.param_sharding(p).name for p in net.moe.deepspeed_moe.experts.parameters()]
    assert names[0] == f"moe.deepspeed_moe.experts.deepspeed_experts.{4 * dist.get_rank()}.up.weight"
    family = ds_comm.param_sharding(next(net.moe.deepspeed_moe.experts.parameters())).family
    assert (family.group.size, family.divisor) == (1, 2)


@world(2)
def test_a_checkpointed_layer_routes_once(bench):
    net = bench.model(2, dist.get_rank(), k=2)
    net.moe.deepspeed_moe.gate = TopKGate(8, 8, GateRule(2, 0.7, 1, use_rts=True)).double()  # draws the second expert
    place_experts(net)
    x = bench.batch(dist.get_rank())
    torch.manual_seed(7)
    plain = net(x)
    plain.backward()
    grads = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    expert_load(net)
    torch.manual_seed(7)
    again = checkpoint(net, x, use_reentrant=False)
    again.backward()
    assert torch.equal(plain, again)
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), grads, strict=True))
    assert sum(expert_load(net)["moe.deepspeed_moe"].counts) == 32  # counted once, not twice


@world(2)
def test_recorded_choices_are_applied_also_under_checkpointing(bench):
    rank = dist.get_rank()
    net = bench.model(2, rank, k=2)
    place_experts(net)
    x = bench.batch(rank)
    with record_routing(net) as tape:
        net(x)
    choices = tape.choices["moe.deepspeed_moe.gate"][0].clone()
    with torch.no_grad():
        net.moe.deepspeed_moe.gate.wg.weight.neg_()  # by itself it would choose others now
    with replay_routing(net, tape):
        loss = checkpoint(net, x, use_reentrant=False)
        loss.backward()
    wanted = torch.bincount(choices.flatten(), minlength=8)
    assert torch.equal(net.moe.deepspeed_moe.exp_counts, wanted)
    with pytest.raises(PlanError, match="moe-replay"), replay_routing(net, tape):
        net(x[:3])


@world(2)
def test_bad_input_is_an_error_on_every_rank(bench):
    rank = dist.get_rank()
    unplaced = MoE(8, torch.nn.Linear(8, 8), num_experts=4, ep_size=2, k=1, drop_tokens=False)
    with pytest.raises(PlanError, match=r"ds_moe\.place"):
        unplaced(torch.randn(3, 8))
    with pytest.raises(PlanError, match="moe-places"):
        MoE(8, torch.nn.Linear(8, 8), num_experts=5, ep_size=2)
    with pytest.raises(PlanError, match="moe-places"):
        place_experts(MoE(8, torch.nn.Linear(8, 8), num_experts=6, ep_size=3))
    place_experts(unplaced)
    with pytest.raises(CommError, match="moe-ranks-differ"):
        unplaced(torch.randn(3, 8, dtype=torch.float64 if rank else torch.float32))
    broken = torch.full((3, 8), float("nan")) if rank else torch.ones(3, 8)
    out, _, _ = unplaced(broken)
    assert bool(out.isnan().all()) == bool(rank)


@world(2)
def test_load_is_read_once_for_all_layers(bench):
    net = bench.model(2, dist.get_rank(), k=2, drop=True, kind="one")
    place_experts(net)
    for _ in range(3):
        net(bench.batch(dist.get_rank(), "one"))
    load = expert_load(net)["moe.deepspeed_moe"]
    assert load.counts[0] == 36
    assert load.dropped == 3 * (2 * 12 - 2 * 3)
    assert load.largest == pytest.approx(4.0)
    assert not expert_load(net)


@world(2)
def test_a_layer_runs_without_an_engine_once_it_has_its_ranks(bench):
    net = bench.model(2, dist.get_rank(), 1, False, "uneven")
    layers = [module for module in net.modules() if isinstance(module, MoE)]
    for layer in layers:
        layer.set_deepspeed_parallelism()
    losses, _ = wanted(bench, 1, False, "uneven", 2)
    assert layers
    torch.testing.assert_close(
        net(bench.batch(dist.get_rank(), "uneven")), losses[dist.get_rank()], atol=1e-9, rtol=1e-9
    )
    place_experts(net).close()  # as an engine does later
