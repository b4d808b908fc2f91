"""Parameters that live on some of the ranks: 4 ranks as 2 x 2, experts that differ and layers that are cut, equal one process."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_comm
import ds_zero
from ds_comm.placement import Box
from ds_comm.reduction_group import ParamSharding, ReductionGroup, set_param_sharding
from ds_config.errors import PlanError, UnsupportedError
from ds_testing import world

WIDTH, STEPS = 16, 3
SMALL = ds_zero.UnitSizePolicy(max_numel=300, persist_numel=20)


class Experts(nn.Module):
    """A rank has one expert of two in each layer; one process has both, and is told whose batch it sees."""

    def __init__(self, mine: int | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(WIDTH, WIDTH)
        layers = [[nn.Linear(WIDTH, WIDTH) for _ in range(2)] for _ in range(2)]
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = nn.ModuleList(nn.ModuleList(two if mine is None else [two[mine]]) for two in layers)

    def forward(self, x: Tensor, which: int = 0) -> Tensor:
        x = torch.tanh(self.first(x))
        for two in self.experts:
            x = x + torch.tanh(two[which](self.norm(x)))
        return self.last(x)


class _Copy(torch.autograd.Function):
    """The same on every rank of the group; gradients are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """The sum over the group; every rank gets the whole gradient."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Cut(nn.Module):
    """Two layers in between are cut over the ranks of a group, by rows and by columns."""

    def __init__(self, group: ds_comm.Group | None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.group = group
        if group is not None:
            rows = slice(group.rank * WIDTH, (group.rank + 1) * WIDTH)
            self.up.weight = nn.Parameter(self.up.weight[rows].detach().clone())
            self.up.bias = nn.Parameter(self.up.bias[rows].detach().clone())
            self.down.weight = nn.Parameter(self.down.weight[:, rows].detach().contiguous())

    def forward(self, x: Tensor, which: int = 0) -> Tensor:
        del which
        x = self.norm(torch.tanh(self.first(x)))
        if self.group is None:
            return x + self.down(torch.tanh(self.up(x)))
        inner = self.down(torch.tanh(self.up(_Copy.apply(x, self.group.pg))))
        return x + _Sum.apply(inner, self.group.pg)


def grid():
    """(the two ranks with this rank's expert or part of layers, the two with the other), as groups of their own."""
    rank = dist.get_rank()
    alike = [ds_comm.new_group(ranks, "alike") for ranks in ((0, 2), (1, 3))][rank % 2]
    across = [ds_comm.new_group(ranks, "across") for ranks in ((0, 1), (2, 3))][rank // 2]
    return alike, across


def experts(divisor=4):
    alike, _ = grid()
    mine = dist.get_rank() % 2
    net = Experts(mine).double()
    family = ReductionGroup("expert", alike, divisor)
    for name, param in net.experts.named_parameters():
        layer, _, rest = name.split(".", 2)
        set_param_sharding(param, ParamSharding(family, f"experts.{layer}.{mine}.{rest}"))
    return net, {}


def tensors(way):
    alike, across = grid()
    net = Cut(across).double()
    part = ReductionGroup("part", alike, 2)
    place = across.rank * WIDTH
    set_param_sharding(net.up.weight, ParamSharding(part, None, (2 * WIDTH, WIDTH), Box((place, 0), (WIDTH, WIDTH))))
    set_param_sharding(net.up.bias, ParamSharding(part, None, (2 * WIDTH,), Box((place,), (WIDTH,))))
    set_param_sharding(net.down.weight, ParamSharding(part, None, (WIDTH, 2 * WIDTH), Box((0, place), (WIDTH, WIDTH))))
    if way == "world":
        return net, {}
    between = ReductionGroup("between", alike, 2, copies=2)
    for param in (*net.first.parameters(), *net.norm.parameters()):
        set_param_sharding(param, ParamSharding(between))
    return net, {"group": alike, "norm": ds_comm.world_group()}


MAKE = {"experts": experts, "tensors": lambda: tensors("world"), "tensors of groups": lambda: tensors("data")}


def batch(step, micro, rank):
    made = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(3, WIDTH, generator=made, dtype=torch.float64)


def data_rank(kind):
    return dist.get_rank() if kind == "experts" else dist.get_rank() // 2


def loss(net, x, which=0):
    return net(x, which).pow(2).sum() / 10


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=0.05, foreach=False)


def alone(kind, clip, micros=2, steps=STEPS, weight=1.0):
    """Parameters by logical name and the norms, after steps of one process that sees every rank's data."""
    net = (Experts(None) if kind == "experts" else Cut(None)).double()
    optimizer, norms, ranks = adamw(net), [], 4 if kind == "experts" else 2
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micros):
            for rank in range(ranks):
                (loss(net, batch(step, micro, rank), rank % 2) / (ranks * micros)).backward()
        if kind == "experts":
            for param in net.experts.parameters():
                param.grad *= weight
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), math.inf if clip is None else clip)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in net.named_parameters()}, norms


def train(net, optimizer, kind, micros=2, first=0, steps=STEPS, clip=None):
    """Train; with `clip` torch's function clips, and says the norms."""
    norms = []
    for step in range(first, first + steps):
        for micro in range(micros):
            (loss(net, batch(step, micro, data_rank(kind))) / micros).backward()
        if clip is not None:
            if (
                kind == "tensors of groups"
            ):  # norms are over more ranks than the group, whose backwards need not end together
                optimizer.measure_gradients()
            norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        if clip is None:
            norms.append(optimizer.last.norm)
    return norms


def put_together(shards):
    """Logical tensors out of what all ranks hold of them."""
    told = [None] * 4
    dist.all_gather_object(told, [(s.shard, s.data.clone()) for s in shards])
    whole = {}
    for shard, data in (one for of in told for one in of):
        made = whole.setdefault(shard.name, torch.full(shard.shape, math.nan, dtype=data.dtype))
        box = made[tuple(slice(o, o + n) for o, n in zip(shard.box.offset, shard.box.shape, strict=True))]
        flat = box.reshape(-1).clone()
        flat[shard.interval.start : shard.interval.stop] = data
        box.copy_(flat.view(box.shape))
    return whole


def check(found, expected):
    assert {name.removeprefix("param/") for name in found} == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[f"param/{name}"], value, rtol=1e-11, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}"
        )


def run(kind, stage, memory, overlap=True, policy=SMALL, clip=0.5):
    net, groups = MAKE[kind]()
    with (
        mock.patch("ds_zero.runtime.reduce_strategies.LEAST_KEPT", 8),
        mock.patch("ds_zero.runtime.reduce_strategies.LEAST_SENT", 8),
    ):
        optimizer = ds_zero.shard(
            net, adamw(net), stage=stage, clip=clip, policy=policy, memory=memory, overlap=overlap, **groups
        )
    norms = train(net, optimizer, kind)
    found = put_together([s for s in optimizer.shards() if s.shard.name.startswith("param/")])
    expected, true_norms = alone(kind, clip)
    check(found, expected)
    assert norms == pytest.approx(true_norms, rel=1e-9)
    optimizer.close()
    own = dict(net.named_parameters())
    torch.testing.assert_close(own["first.weight"].detach(), expected["first.weight"], rtol=1e-11, atol=1e-13)


CELLS = [(0, "private"), (1, "private"), (2, "shared"), (3, "private"), (3, "shared")]


@pytest.mark.parametrize(("stage", "memory"), CELLS)
@pytest.mark.parametrize("kind", MAKE)
@world(4)
def test_equals_one_process(kind, stage, memory):
    run(kind, stage, memory, overlap=stage != 2)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", ["experts", "tensors"])
@world(4, backend="shm")
def test_equals_one_process_by_arena(kind, stage):
    """Private memory over shm: no way around the arena."""
    run(kind, stage, "private")


CLIPPED = [(0, "private"), (1, "private"), (2, "shared"), (3, "shared")]


@pytest.mark.parametrize(
    ("stage", "memory"), [pytest.param(*c, marks=pytest.mark.slow) if c[0] in (0, 3) else c for c in CLIPPED]
)
@pytest.mark.parametrize("kind", MAKE)
@world(4)
def test_torchs_clipping_equals_one_process(kind, stage, memory):
    net, groups = MAKE[kind]()
    optimizer = ds_zero.shard(net, adamw(net), stage=stage, policy=SMALL, memory=memory, **groups)
    norms = train(net, optimizer, kind, clip=0.5)
    found = put_together([s for s in optimizer.shards() if s.shard.name.startswith("param/")])
    expected, true_norms = alone(kind, 0.5)
    assert norms == pytest.approx(true_norms, rel=1e-9)
    check(found, expected)
    optimizer.close()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "policy", [SMALL, ds_zero.UnitSizePolicy(max_numel=1, persist_numel=0), ds_zero.UnitSizePolicy()]
)
@pytest.mark.parametrize(("stage", "memory"), [*CELLS, (2, "private"), (1, "shared")])
@pytest.mark.parametrize("kind", MAKE)
@world(4)
def test_grid(kind, stage, memory, policy, overlap):
    run(kind, stage, memory, overlap, policy)


@pytest.mark.parametrize("stage", [0, 1, 3])
@world(4)
def test_a_divisor_of_its_own(stage):
    """Experts averaged over the two ranks that have them, not over the four that the batch is cut over."""
    net, _ = experts(divisor=2)
    optimizer = ds_zero.shard(net, adamw(net), stage=stage, clip=0.5, policy=SMALL)
    (loss(net, batch(0, 0, dist.get_rank()))).backward()
    weight = net.experts[0][0].weight
    grad = ds_zero.safe_get_full_grad(weight)
    ds_zero.safe_set_full_grad(weight, grad)
    optimizer.step()
    optimizer.zero_grad()
    expected, norms = alone("experts", 0.5, micros=1, steps=1, weight=2.0)
    assert optimizer.last.norm == pytest.approx(norms[0], rel=1e-9)
    check(put_together(optimizer.sharding.param_shards()), expected)
    optimizer.close()


@pytest.mark.parametrize("stage", [1, 3])
@world(4)
def test_what_ranks_hold_of_their_own_is_left_to_them(stage):
    """Values at the start, whole access and edits go by family; logical names never collide."""
    net, _ = experts()
    rank, mine = dist.get_rank(), dist.get_rank() % 2
    with torch.no_grad():
        net.experts[1][0].bias.fill_(10.0 + rank)  # ranks 0 and 1 win, each in its family
        net.first.bias.fill_(float(rank))
    optimizer = ds_zero.shard(net, adamw(net), stage=stage, policy=SMALL)
    bias = net.experts[1][0].bias
    assert ds_zero.safe_get_full_fp32_param(bias).unique().tolist() == [10.0 + mine]
    assert ds_zero.safe_get_full_fp32_param(net.first.bias).unique().tolist() == [0.0]
    with ds_zero.GatheredParameters([bias], modifier_rank=1), torch.no_grad():
        bias.fill_(20.0 + rank)
    assert ds_zero.safe_get_full_fp32_param(bias).unique().tolist() == [22.0 + mine]
    train(net, optimizer, "experts", steps=1)
    steps = optimizer.state_dict()["scalars"]["step"]
    assert {f"experts.{layer}.{e}.weight" for layer in "01" for e in "01"} < set(steps)
    whole = ds_zero.safe_get_full_optimizer_state(bias, "exp_avg")
    assert whole.shape == bias.shape
    optimizer.load_state_dict(optimizer.state_dict())
    net.experts[0][0].weight.requires_grad_(False)
    before = put_together([s for s in optimizer.shards() if "experts.1" in s.shard.name])
    optimizer.replan()
    after = put_together([s for s in optimizer.shards() if "experts.1" in s.shard.name])
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    optimizer.close()


@world(4)
def test_a_step_that_one_family_must_skip_is_skipped_by_all():
    net, _ = experts()
    optimizer = ds_zero.shard(net, adamw(net), stage=2, precision=ds_zero.Precision(skip_nonfinite=True))
    loss(net, batch(0, 0, dist.get_rank())).backward()
    weight = net.experts[1][0].weight
    if dist.get_rank() % 2:
        ds_zero.safe_set_full_grad(weight, torch.full_like(weight, math.inf))
    optimizer.step()
    optimizer.zero_grad()
    assert (optimizer.last.skipped, optimizer.last.nonfinite) == (True, "experts.1.1.weight")
    optimizer.close()


@world(4)
def test_ranks_of_a_family_that_take_another_path_are_told():
    net, _ = experts()
    optimizer = ds_zero.shard(net, adamw(net), stage=1, strict=True, policy=SMALL)
    x = batch(0, 0, dist.get_rank())
    (net.first(x) if dist.get_rank() == 3 else net(x)).sum().backward()
    with pytest.raises(PlanError, match="used these parameters"):
        optimizer.step()
    optimizer.close()


class Tied(nn.Module):
    """A stage of two: the first has the embedding, the second a head with the same weight."""

    def __init__(self, last: bool | None) -> None:
        super().__init__()
        torch.manual_seed(4)
        table, self.first, self.second = (
            nn.Parameter(torch.randn(WIDTH, WIDTH)),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.table = table
        if last is not None:
            delattr(self, "first" if last else "second")

    def head(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x @ self.table))

    def tail(self, x: Tensor) -> Tensor:
        return self.second(x) @ self.table.t()


@pytest.mark.parametrize(("stage", "memory"), CELLS)
@world(4)
def test_a_weight_tied_over_stages_waits_for_the_step(stage, memory):
    """Stages on ranks (0, 1) and (2, 3); the second one's backward ends before the first one's begins."""
    rank, last = dist.get_rank(), dist.get_rank() // 2 == 1
    stages = [ds_comm.new_group(ranks, "stage") for ranks in ((0, 1), (2, 3))]
    net = Tied(last).double()
    set_param_sharding(net.table, ParamSharding(ReductionGroup("tied", ds_comm.world_group(), 2), "table"))
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = ds_zero.shard(
        net, inner, stage=stage, memory=memory, clip=0.5, group=stages[last], norm=ds_comm.world_group(),
        policy=ds_zero.UnitSizePolicy(max_numel=1, persist_numel=0),
    )  # fmt: skip
    peer = rank - 2 if last else rank + 2
    gathered = {"stage": stage == 3}
    for step in range(STEPS):
        x = batch(step, 0, rank % 2)
        with ds_zero.GatheredParameters(list(net.parameters()), enabled=gathered["stage"]):
            if not last:
                out = net.head(x)
                dist.send(out.detach(), peer)
                grad = torch.empty_like(out)
                dist.recv(grad, peer)
                out.backward(grad)
            else:
                inp = torch.empty(3, WIDTH, dtype=torch.float64)
                dist.recv(inp, peer)
                inp.requires_grad_()
                (net.tail(inp).pow(2).sum() / 10).backward()
                dist.send(inp.grad, peer)
        optimizer.step()
        optimizer.zero_grad()
    found = put_together(optimizer.sharding.param_shards())
    optimizer.close()
    whole = Tied(None).double()
    sgd = torch.optim.SGD(whole.parameters(), lr=0.1)
    for step in range(STEPS):
        sgd.zero_grad()
        for data in range(2):
            (whole.tail(whole.head(batch(step, 0, data))).pow(2).sum() / 20).backward()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        sgd.step()
    assert optimizer.last.norm == pytest.approx(float(norm), rel=1e-9)
    check(found, {name: param.detach() for name, param in whole.named_parameters()})


@world(4)
def test_what_cannot_be_is_refused():
    alike, across = grid()
    net = Experts(0)
    set_param_sharding(net.first.weight, ParamSharding(ReductionGroup("expert", alike, 4)))
    set_param_sharding(net.first.bias, ParamSharding(ReductionGroup("expert", alike, 2)))
    with pytest.raises(PlanError, match="Give each set of ranks"):
        ds_zero.shard(net, adamw(net))
    net = Experts(0)
    if dist.get_rank() < 3:
        set_param_sharding(net.first.weight, ParamSharding(ReductionGroup("expert", alike, 4)))
    with pytest.raises(PlanError, match=r"on ranks \[3\] it has none"):
        ds_zero.shard(net, adamw(net))
    net = Experts(0)
    set_param_sharding(net.first.weight, ParamSharding(None, None, (40, WIDTH), Box((0, 0), (40, WIDTH))))
    with pytest.raises(PlanError, match="was assigned Box"):
        ds_zero.shard(net, adamw(net))
    net = Experts(0)
    for param in net.experts.parameters():
        set_param_sharding(param, ParamSharding(ReductionGroup("expert", alike, 4)))
    if dist.get_rank() >= 2:
        del net.experts[1]
    with pytest.raises(PlanError, match="parameters of family 'expert'"):
        ds_zero.shard(net, adamw(net))
    net = nn.Linear(2, 2)
    set_param_sharding(net.weight, ParamSharding(ReductionGroup("tied", ds_comm.world_group(), 2)))
    with pytest.raises(PlanError, match="the norm goes over"):
        ds_zero.shard(net, adamw(net), group=across, clip=1.0)
    net, _ = experts()
    inner = adamw(net)
    inner.owns_reduction = True
    with pytest.raises(UnsupportedError, match="averages gradients itself"):
        ds_zero.shard(net, inner, stage=0)
