"""Ranks that take different paths: absent gradients are zeros, and nobody waits for ever."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_comm
import ds_ops.optim
import ds_zero
from ds_config.errors import PlanError
from ds_testing import world

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
SMALL = ds_zero.UnitSizePolicy(max_numel=300, persist_numel=8)


class Routed(nn.Module):
    """Each call goes through the experts its caller names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.last = nn.Linear(16, 1)

    def forward(self, x, route):
        x = self.first(x)
        for i in route:
            x = x + torch.tanh(self.experts[i](x))
        return self.last(x)


def make():
    torch.manual_seed(0)
    return Routed().double()


def data(step, rank):
    made = torch.Generator().manual_seed(1000 * step + rank)
    route = torch.randperm(6, generator=made)[: int(torch.randint(0, 4, (), generator=made))].tolist()
    return torch.randn(4, 8, generator=made, dtype=torch.float64), route


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def check_routing(stage, steps, memory="private", frozen=(), forwards=1):
    net, twin = make(), make()
    for model in (net, twin):
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)

    def loss(model, step, rank):
        every = [data(step + 100_000 * again, rank) for again in range(forwards)]
        return torch.stack([model(x, route).square().mean() for x, route in every]).sum()

    optimizer = ds_zero.shard(net, sgd(net), stage=stage, policy=SMALL, memory=memory)
    plain = sgd(twin)
    for step in range(steps):
        loss(net, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(2):
            (loss(twin, step, rank) / 2).backward()
        plain.step()
        plain.zero_grad()
    optimizer.close()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@STAGES
@world(2, timeout=120)
def test_random_routing_for_many_steps(stage):
    check_routing(stage, 120)


@STAGES
@world(2)
def test_one_backward_of_several_forwards(stage):
    """At stage 3 a frozen unit was gathered once more for the second graph, where other ranks had no use for it."""
    check_routing(stage, 12, frozen=[f"experts.{i}.weight" for i in range(6)], forwards=2)


@pytest.mark.parametrize("frozen", [("first.weight",), ("first.weight", "first.bias", "experts.0.weight")], ids=str)
@STAGES
@world(2)
def test_routing_beside_parameters_that_are_frozen(stage, frozen):
    """At stage 3 those before the first that is trained were in no order of the backward."""
    check_routing(stage, 6, frozen=frozen)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "memory"), [*((s, "private") for s in range(4)), (2, "shared"), (3, "shared")])
@world(2, timeout=300)
def test_random_routing_for_500_steps(stage, memory):
    check_routing(stage, 500, memory)


@STAGES
@world(2)
def test_a_rank_skips_a_module_only_once(stage):
    """The order is learned from steps that agree, and must hold when they stop to."""
    net, twin = make(), make()
    optimizer = ds_zero.shard(net, sgd(net), stage=stage, policy=SMALL)
    plain = sgd(twin)
    routes = {4: ([0, 1, 2], [5]), 5: ([], [3, 4]), 6: ([5, 0], [0, 5])}
    for step in range(8):
        for rank in range(2):
            x = data(step, rank)[0]
            route = routes.get(step, ([0, 1, 2], [0, 1, 2]))[rank]
            if rank == dist.get_rank():
                net(x, route).square().mean().backward()
            (twin(x, route).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        plain.zero_grad()
    optimizer.close()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@STAGES
@world(2)
def test_strict_raises_on_every_rank(stage):
    net = make()
    optimizer = ds_zero.shard(net, sgd(net), stage=stage, policy=SMALL, strict=True)
    net(data(0, 0)[0], [0, 1]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    net(data(0, 0)[0], [0] if dist.get_rank() else [0, 1]).sum().backward()
    with pytest.raises(PlanError, match=r"experts\.1\.weight"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.close()


@STAGES
@world(2)
def test_what_no_rank_used_is_an_error_on_all_where_it_is_not_ignored(stage):
    net = make()
    optimizer = ds_zero.shard(net, sgd(net), stage=stage, policy=SMALL, ignore_unused_parameters=False)
    x = data(0, 0)[0]
    net(x, [0, 1, 2] if dist.get_rank() else [3, 4, 5]).sum().backward()  # each is used by one rank
    optimizer.step()
    optimizer.zero_grad()
    net(x, [0, 2, 3, 4, 5]).sum().backward()
    with pytest.raises(PlanError, match=r"ignore_unused_parameters.*experts\.1\.weight") as caught:
        optimizer.step()
    assert caught.value.code == "zero-unused"
    assert "experts.2" not in caught.value.message
    optimizer.zero_grad()
    optimizer.close()


@STAGES
@world(2)
def test_parameters_that_no_rank_used_have_no_step(stage):
    """As in torch: no decay, no moment, no step count for a parameter without a gradient."""
    net, twin = make(), make()
    optimizer = ds_zero.shard(
        net, torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5), stage=stage, policy=SMALL
    )
    plain = torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(9):
        route = [step % 3]
        for rank in range(2):
            x = data(step, rank)[0]
            if rank == dist.get_rank():
                net(x, route).square().mean().backward()
            (twin(x, route).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        plain.zero_grad()
    optimizer.close()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@world(2)
def test_different_models_are_refused_on_every_rank():
    net = nn.Linear(4, 4 + dist.get_rank())
    with pytest.raises(PlanError, match="different models"):
        ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=1)


@STAGES
@world(2)
def test_different_values_become_rank_zeros(stage):
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    net[1].running_mean += dist.get_rank()
    optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=stage)
    optimizer.close()
    torch.manual_seed(0)
    assert torch.equal(net[0].weight, nn.Linear(4, 4).weight)
    assert not net[1].running_mean.any()


class Repeated(nn.Module):
    """Calls a block as often as its caller says, each time checkpointed by a nested backward."""

    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x, times):
        x = self.first(x)
        for _ in range(times):
            x = checkpoint(self.block, x, use_reentrant=True).tanh()
        return self.last(x)


def check_repeats(optimizer, net, twin, plain, steps):
    """Train with blocks called `steps[i][rank]` times; the same numbers as one process."""
    for number, times in enumerate(steps):
        inputs = [data(number, rank)[0].to(next(twin.parameters()).dtype) for rank in range(2)]
        optimizer.scale(net(inputs[dist.get_rank()], times[dist.get_rank()]).square().mean()).backward()
        for x, repeats in zip(inputs, times, strict=True):
            (twin(x, repeats).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        plain.zero_grad()
        for name, param in twin.named_parameters():
            full = ds_zero.safe_get_full_fp32_param(net.get_parameter(name))
            torch.testing.assert_close(full.to(param.dtype), param.data, rtol=1e-5, atol=1e-6, msg=f"{name} {times}")
    optimizer.close()


TIMES = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 0), (0, 3), (1, 1)]


@pytest.mark.parametrize("shows", [True, False])
@STAGES
@world(2)
def test_a_block_that_ranks_checkpoint_another_number_of_times(stage, shows):
    torch.manual_seed(0)
    net, twin = Repeated().double(), Repeated().double()
    twin.load_state_dict(net.state_dict())
    optimizer = ds_zero.shard(net, sgd(net), stage=stage, policy=SMALL)
    optimizer.show_gradients(sharded=shows)
    check_repeats(optimizer, net, twin, sgd(twin), TIMES)


class Enclosed(Repeated):
    """The first layer and the last share all that they train, so that a backward's first gradients are those of a block."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 16, bias=False)
        self.first.bias, self.last.weight = None, self.first.weight

    def forward(self, x, times):
        x = self.first(x)
        for _ in range(times):
            x = checkpoint(self.block, x, use_reentrant=True).tanh()
        return x @ self.last.weight


@STAGES
@world(2)
def test_a_backward_that_begins_inside_a_nested_one_is_one_backward(stage):
    torch.manual_seed(0)
    net, twin = Enclosed(), Enclosed()
    twin.load_state_dict(net.state_dict())
    policy = ds_zero.UnitSizePolicy(max_numel=300, persist_numel=1000)
    optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=stage, policy=policy)
    check_repeats(optimizer, net, twin, torch.optim.SGD(twin.parameters(), lr=0.1), TIMES)


@world(2)
def test_updates_that_began_in_backward_take_back_what_came_late():
    torch.manual_seed(0)
    net, twin = Repeated(), Repeated()
    twin.load_state_dict(net.state_dict())
    early = ds_zero.OffloadPolicy("host", overlap_ratio=1.0)
    options = {"stage": 2, "policy": SMALL, "offload_optimizer": early, "clip": float("inf")}
    optimizer = ds_zero.shard(net, ds_ops.optim.AdamW(net.parameters(), lr=1e-2), **options)
    check_repeats(optimizer, net, twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), TIMES)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("shows", [True, False])
@pytest.mark.parametrize("steps", [[((0, 1), ()), ((0,), (0,))], [((0,), ()), ((), (0,))], [((), (0,)), ((0,), ())]])
@STAGES
@world(2, backend=None)
def test_modules_of_some_ranks_in_microbatches_that_are_not_sent(stage, steps, shows, backend):
    """Of bf16, which waits in fp32 on the ranks that have some, and travels in one format."""
    ds_comm.init_distributed(backend)
    net, twin = make().float(), make().float()
    optimizer = ds_zero.shard(net, sgd(net), stage=stage, policy=SMALL, precision="bf16")
    optimizer.show_gradients(sharded=shows)
    for micro, routes in enumerate(steps):
        inputs = [data(micro, rank)[0].float() for rank in range(2)]
        with optimizer.reduction(micro == 1):
            net(inputs[dist.get_rank()].bfloat16(), routes[dist.get_rank()]).float().square().mean().backward()
        for x, route in zip(inputs, routes, strict=True):
            (twin(x, route).square().mean() / 2).backward()
    before = {name: param.detach().clone() for name, param in twin.named_parameters()}
    optimizer.step()
    sgd(twin).step()
    for name, param in twin.named_parameters():
        moved, wanted = ds_zero.safe_get_full_fp32_param(net.get_parameter(name)) - before[name], param - before[name]
        assert torch.linalg.vector_norm(moved - wanted) <= 0.05 * torch.linalg.vector_norm(wanted), name
    optimizer.close()


@STAGES
@world(2)
def test_a_gradient_that_one_rank_has_set_is_summed(stage):
    net, twin = make(), make()
    optimizer = ds_zero.shard(net, sgd(net), stage=stage, policy=SMALL)
    optimizer.show_gradients(sharded=False)
    net(data(0, 0)[0], [0]).square().mean().backward()
    twin(data(0, 0)[0], [0]).square().mean().backward()
    if dist.get_rank() == 1:
        net.experts[3].bias.grad = torch.ones(16, dtype=torch.float64)
    twin.experts[3].bias.grad = torch.full((16,), 0.5, dtype=torch.float64)
    optimizer.step()
    sgd(twin).step()
    optimizer.close()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("where", ["one rank", "other places"])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2, backend=None)
def test_a_backward_that_raises_on_one_rank_or_elsewhere_leaves_the_ranks_together(stage, backend, where):
    """What it had not sent met the next backward's reductions; a rank that did not raise waited, or added up other gradients."""
    ds_comm.init_distributed(backend)
    torch.manual_seed(0)
    net, twin = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))) for _ in range(2))
    twin.load_state_dict(net.state_dict())
    policy = ds_zero.UnitSizePolicy(max_numel=72, persist_numel=0)
    optimizer, plain = ds_zero.shard(net, sgd(net), stage=stage, policy=policy), sgd(twin)
    optimizer.show_gradients()
    x, rank = torch.ones(2, 8), dist.get_rank()
    for _ in range(2):
        fails = rank == 1 or where == "other places"
        split = 2 if rank else 3
        error = "out of memory" if fails else "on another rank"
        with pytest.raises(RuntimeError, match=error):
            (net[split:](_Fails.apply(net[:split](x))) if fails else net[2:](net[:2](x))).sum().backward()
        optimizer.zero_grad()
        net(x).sum().backward()
        twin(x).sum().backward()
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    optimizer.close()
    torch.testing.assert_close(list(net.parameters()), list(twin.parameters()))


@world(2)
def test_a_step_after_a_backward_that_raised_on_one_rank_is_an_error():
    net = nn.Linear(8, 8)
    optimizer = ds_zero.shard(net, sgd(net), stage=1)
    optimizer.show_gradients(sharded=False)
    if dist.get_rank():
        with pytest.raises(RuntimeError, match="out of memory"):
            (net(_Fails.apply(torch.ones(2, 8, requires_grad=True)))).sum().backward()
    else:
        net(torch.ones(2, 8)).sum().backward()
    with pytest.raises(PlanError, match="backwards that raised: 0 on rank 0 and 1 on rank 1"):
        optimizer.step()


@world(2, backend=None)
def test_sums_of_two_models_in_shared_memory_do_not_meet():
    ds_comm.init_distributed("shm")
    torch.manual_seed(0)
    nets, twins = [nn.Linear(8, 8).double() for _ in range(2)], [nn.Linear(8, 8).double() for _ in range(2)]
    for net, twin in zip(nets, twins, strict=True):
        twin.load_state_dict(net.state_dict())
    optimizers = [ds_zero.shard(net, sgd(net), stage=2) for net in nets]
    optimizers[0].show_gradients(sharded=False)
    optimizers[1].show_gradients(sharded=False)
    x = torch.ones(2, 8, dtype=torch.float64)
    sum(net(x).square().mean() for net in nets[:: -1 if dist.get_rank() else 1]).backward()
    sum(twin(x).square().mean() for twin in twins).backward()
    for optimizer, twin in zip(optimizers, twins, strict=True):
        optimizer.step()
        sgd(twin).step()
        optimizer.close()
    for net, twin in zip(nets, twins, strict=True):
        torch.testing.assert_close(net.weight, twin.weight)


@pytest.mark.parametrize("stage", [0, 1, 2])
@world(2)
def test_sums_of_two_models_that_meet_are_an_error(stage):
    """One backward through both: each sum has its like, of the other model."""
    nets = [nn.Linear(8, 8), nn.Linear(8, 8)]
    optimizers = [ds_zero.shard(net, sgd(net), stage=stage) for net in nets]
    for swapped in (False, True):
        order = nets[:: -1 if swapped and dist.get_rank() else 1]
        sum(net(torch.ones(2, 8)).square().mean() for net in order).backward()
        if swapped:
            with pytest.raises(PlanError, match="in another order on each of them"):
                optimizers[0].step()
        for optimizer in optimizers:
            if not swapped:
                optimizer.step()
            optimizer.zero_grad()
    for optimizer in optimizers:
        optimizer.close()


@STAGES
@world(2)
def test_a_gradient_that_waits_is_read_on_ranks_that_have_none(stage):
    net = make()
    optimizer = ds_zero.shard(net, sgd(net), stage=stage, policy=SMALL)
    with optimizer.no_sync():
        net(data(0, 0)[0], [0] if dist.get_rank() == 0 else []).square().mean().backward()
    weight = net.experts[0].weight
    for _ in range(2):
        read = ds_zero.safe_get_full_grad(weight)
        assert (read is None or not read.any()) == (dist.get_rank() == 1)
    optimizer.reduce()
    summed = ds_zero.safe_get_full_grad(weight)
    assert summed is not None
    assert summed.any()
    optimizer.step()
    optimizer.close()
