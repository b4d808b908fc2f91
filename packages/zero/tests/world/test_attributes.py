"""`param.grad` of a plain loop: what uses it raises by name, what only passes by does nothing, and the numbers stay those of torch."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_comm
import ds_zero
from ds_config.errors import ShardedAccessError
from ds_testing import world

CUT = ds_zero.UnitSizePolicy(max_numel=1, persist_numel=0)
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Net(nn.Module):
    """Three layers, used in the order that a call asks for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, order="abc"):
        for name in order:
            x = getattr(self, name)(x)
        return x


def sharded(stage, **options):
    model = Net()
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, ds_zero.shard(model, made, stage=stage, policy=CUT, **options)


def backward(model, order="abc", seed=0, **how):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    model(x, order).square().mean().backward(**how)


def grads(model):
    return [p.grad for p in model.parameters()]


# ---- what uses values

USES = {
    "clip_grad_norm_": lambda m, o: nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    "clip_grad_norm_ foreach": lambda m, o: nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=True),
    "clip_grad_norm_ inf": lambda m, o: nn.utils.clip_grad_norm_(m.parameters(), 0.1, norm_type=math.inf),
    "clip_grad_norm_ of groups": lambda m, o: nn.utils.clip_grad_norm_(
        [p for group in o.param_groups for p in group["params"]], 0.1
    ),
    "clip_grad_value_": lambda m, o: nn.utils.clip_grad_value_(m.parameters(), 0.1),
    "clip_grad_value_ foreach": lambda m, o: nn.utils.clip_grad_value_(m.parameters(), 0.1, foreach=True),
    "get_total_norm": lambda m, o: nn.utils.get_total_norm(grads(m)),
    "parameters_to_vector": lambda m, o: nn.utils.parameters_to_vector(grads(m)),
    "norm": lambda m, o: m.a.weight.grad.norm(),
    "mul_": lambda m, o: m.a.weight.grad.mul_(0.5),
    "mul": lambda m, o: 0.5 * m.a.weight.grad,
    "add": lambda m, o: m.a.weight.grad.add(1.0),
    "add_": lambda m, o: m.a.weight.grad.add_(m.a.weight.grad, alpha=0.5),
    "isfinite": lambda m, o: m.a.weight.grad.isfinite(),
    "foreach": lambda m, o: torch._foreach_mul_(grads(m), 0.5),
    "foreach norm": lambda m, o: torch._foreach_norm(grads(m)),
    "item": lambda m, o: m.a.weight.grad.sum().item(),
    "float": lambda m, o: float(m.a.weight.grad),
    "bool": lambda m, o: bool(m.a.weight.grad),
    "compare": lambda m, o: m.a.weight.grad == 0,
    "clone": lambda m, o: m.a.weight.grad.clone(),
    "detach": lambda m, o: m.a.weight.grad.detach(),
    "data": lambda m, o: m.a.weight.grad.data,
    "numpy": lambda m, o: m.a.weight.grad.numpy(),
    "tolist": lambda m, o: m.a.weight.grad.tolist(),
    "cpu": lambda m, o: m.a.weight.grad.cpu(),
    "to": lambda m, o: m.a.weight.grad.to(torch.float64),
    "index": lambda m, o: m.a.weight.grad[0],
    "copy_": lambda m, o: torch.empty(4, 4).copy_(m.a.weight.grad),
    "copy into": lambda m, o: m.a.weight.grad.copy_(torch.ones(4, 4)),
    "zero_": lambda m, o: m.a.weight.grad.zero_(),
    "deepcopy": lambda m, o: copy.deepcopy(m.a.weight.grad),
    "save": lambda m, o: torch.save(m.a.weight.grad, io.BytesIO()),
    "another optimizer": lambda m, o: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=False).step(),
    "the inner optimizer": lambda m, o: o.inner.step(),
}


def refused(use, model, optimizer):
    with pytest.raises(ShardedAccessError) as caught:
        use(model, optimizer)
    assert caught.value.code == "sharded-gradient"
    text = str(caught.value)
    assert all(word in text for word in ("clip=", "safe_get_full_grad", "optimizer.last.norm"))
    assert "a.weight" in text or "a.bias" in text


def check_uses(stage):
    """Every use raises, in the first backward and later, and changes nothing."""
    model, optimizer = sharded(stage)
    backward(model)
    for use in USES.values():
        refused(use, model, optimizer)
    backward(model, seed=1)
    for use in USES.values():
        refused(use, model, optimizer)
    optimizer.step()
    assert grads(model) == [None] * 6
    assert all(p.grad is None for group in optimizer.param_groups for p in group["params"])
    optimizer.close()
    twin = Net()
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    backward(twin)
    backward(twin, seed=1)
    plain.step()
    for found, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


@STAGES
def test_uses_of_values_raise_by_name(stage):
    check_uses(stage)


@STAGES
@world(2)
def test_uses_of_values_raise_by_name_on_two_ranks(stage):
    check_uses(stage)


def check_scaler(stage):
    for call in ("unscale_", "step"):
        model, optimizer = sharded(stage)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(3, 4)).mean()).backward()
        with pytest.raises(ShardedAccessError, match='precision="fp16"'):
            getattr(scaler, call)(optimizer)
        optimizer.close()
        assert grads(model) == [None] * 6


@STAGES
def test_a_gradscaler_raises(stage):
    check_scaler(stage)


@STAGES
@world(2)
def test_a_gradscaler_raises_on_two_ranks(stage):
    check_scaler(stage)


@STAGES
@world(2)
def test_what_is_asked_of_no_values_is_answered(stage):
    model, optimizer = sharded(stage)
    assert grads(model) == [None] * 6
    backward(model, "ac")
    for name, param in model.named_parameters():
        grad = param.grad
        if name.startswith("b."):  # as in torch
            assert grad is None
            continue
        assert isinstance(grad, ds_zero.ShardedGradient)
        assert isinstance(grad, torch.Tensor)
        assert (grad.shape, grad.dtype, grad.device) == (param.shape, param.dtype, param.device)
        assert (grad.numel(), grad.dim(), len(grad)) == (param.numel(), param.dim(), len(param))
        assert (grad.is_sparse, grad.requires_grad, grad.grad_fn, grad.is_leaf) == (False, False, None, True)
        assert name in repr(grad)
        assert name in f"{grad}"
    first = grads(model)
    backward(model)
    assert all(now is before for now, before in zip(grads(model), first, strict=True) if before is not None)
    assert all(isinstance(grad, ds_zero.ShardedGradient) for grad in grads(model))
    twin = copy.deepcopy(model)
    assert grads(twin) == [None] * 6
    if stage < 3:
        pickle.loads(pickle.dumps(twin))
    optimizer.step()
    optimizer.close()


# ---- loops that do no such thing


def drop(model, optimizer, how):
    if how == "optimizer":
        optimizer.zero_grad()
    elif how == "parameters":
        for param in model.parameters():
            param.grad = None
    elif how == "groups":
        optimizer.inner.zero_grad()
    else:
        model.zero_grad(set_to_none=how == "model")


def check_loop(stage, how, graph):
    """Accumulation, paths that begin elsewhere each time, gradients asked for between, and gradients dropped."""
    model, optimizer = sharded(stage)
    twin = Net()
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)

    def both(order, seed):
        backward(model, order, seed, create_graph=graph)
        backward(twin, order, seed, create_graph=graph)
        assert [g is None for g in grads(model)] == [g is None for g in grads(twin)]

    seeds = itertools.count()
    for _ in range(2):
        for order in ("abc", "cab", "ab", "bca", "c"):
            both(order, next(seeds))
        if stage == 0:  # elsewhere a parameter that is released has no values outside of forward and backward
            assert torch.autograd.grad(model(torch.ones(1, 4)).sum(), [model.c.weight])[0].shape == (4, 4)
            assert all(isinstance(grad, ds_zero.ShardedGradient) for grad in grads(model))
        drop(model, optimizer, how)
        plain.zero_grad()
        both("bc", next(seeds))
        both("ac", next(seeds))
        optimizer.step()
        plain.step()
        plain.zero_grad()
        assert grads(model) == [None] * 6
    watched = [p for p in model.parameters() if p._backward_hooks]
    assert len(watched) <= 3, "one hook for each layer that a backward began with"
    optimizer.close()
    assert not any(p._backward_hooks for p in model.parameters())
    for found, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


HOW = pytest.mark.parametrize("how", ["optimizer", "model", "model to zeros", "parameters", "groups"])


@STAGES
@HOW
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_loops_equal_torch(stage, how, graph):
    check_loop(stage, how, graph)


@STAGES
@HOW
@world(2)
def test_loops_equal_torch_on_two_ranks(stage, how):
    check_loop(stage, how, False)


@STAGES
@world(2)
def test_gradients_that_were_set_in_part_raise(stage):
    """They were ignored, or added to the sum."""
    model, optimizer = sharded(stage)
    for value in (None, torch.ones(4, 4)):
        for call in (optimizer.step, lambda: backward(model)):
            backward(model)
            kept, model.b.weight.grad = model.b.weight.grad, value
            with pytest.raises(ShardedAccessError, match=r"b\.weight(.|\n)*#sharded-gradient-set"):
                call()
            model.b.weight.grad = kept
    optimizer.step()
    optimizer.close()


@STAGES
@world(2)
def test_they_stay_where_gradients_wait_for_the_step(stage):
    model, optimizer = sharded(stage)
    with optimizer.no_sync():
        backward(model)
        refused(USES["clip_grad_norm_"], model, optimizer)
        assert isinstance(ds_zero.safe_get_full_grad(model.a.weight), torch.Tensor)
    optimizer.reduce()
    refused(USES["clip_grad_norm_"], model, optimizer)
    assert torch.count_nonzero(ds_zero.safe_get_full_grad(model.a.weight))
    optimizer.step()
    optimizer.replan()
    backward(model)
    refused(USES["clip_grad_norm_"], model, optimizer)
    optimizer.close()
    assert grads(model) == [None] * 6


@STAGES
@world(2)
def test_an_optimizer_that_was_not_told_to_shows_none(stage):
    """What the engine and the facade make."""
    model = Net()
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = ds_zero.ShardedOptimizer(model, made, ds_zero.ShardOptions(stage=stage, policy=CUT))
    backward(model)
    assert grads(model) == [None] * 6
    optimizer.step()
    optimizer.close()


@STAGES
@world(2, backend=None)
def test_ranks_without_a_group_train_one_model(stage):
    assert not dist.is_initialized()
    model, optimizer = sharded(stage)
    assert dist.get_world_size() == 2
    backward(model, seed=dist.get_rank())
    optimizer.step()
    optimizer.close()
    told = [None, None]
    dist.all_gather_object(told, [p.tolist() for p in model.parameters()])
    assert told[0] == told[1]
    ds_comm.destroy_process_group()


@pytest.mark.parametrize("stage", [0, 2])
def test_a_compiled_model_compiles_again_between_backwards(stage):
    torch._dynamo.reset()
    model, optimizer = sharded(stage)
    compiled = torch.compile(model, backend="aot_eager")
    for rows in (2, 3, 5):
        compiled(torch.ones(rows, 4)).sum().backward()
        assert isinstance(model.a.weight.grad, ds_zero.ShardedGradient)
    optimizer.step()
    optimizer.close()
