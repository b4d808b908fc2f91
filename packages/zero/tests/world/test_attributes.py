"""`param.grad` of a plain loop: whole or sharded, read and written, and what needs other ranks raises by name."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_comm
import ds_zero
from ds_config.errors import PlanError, ShardedAccessError
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


# ---- what cannot be answered on one rank

REFUSED = {
    "parameters_to_vector": lambda m, o: nn.utils.parameters_to_vector(grads(m)),
    "sum": lambda m, o: m.a.weight.grad.sum(),
    "float": lambda m, o: float(m.a.weight.grad),
    "bool": lambda m, o: bool(m.a.weight.grad),
    "numpy": lambda m, o: m.a.weight.grad.numpy(),
    "tolist": lambda m, o: m.a.weight.grad.tolist(),
    "index": lambda m, o: m.a.weight.grad[0],
    "rows": lambda m, o: m.a.weight.grad.norm(dim=1),
    "spectral norm": lambda m, o: torch.linalg.norm(m.a.weight.grad, 2),
    "copy_ to another": lambda m, o: torch.empty(4, 4).copy_(m.a.weight.grad),
    "save": lambda m, o: torch.save(m.a.weight.grad, io.BytesIO()),
    "another parameter's": lambda m, o: m.a.weight.grad + m.b.bias.grad,
    "another optimizer": lambda m, o: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=False).step(),
}


def refused(use, model, optimizer, code="sharded-gradient"):
    with pytest.raises(ShardedAccessError) as caught:
        use(model, optimizer)
    assert caught.value.code in (code, "sharded-access")  # at stage 3 of the parameter
    assert "a.weight" in str(caught.value) or "a.bias" in str(caught.value)


@pytest.mark.parametrize("stage", [1, 2, 3])
@world(2)
def test_what_needs_other_ranks_raises_by_name(stage):
    model, optimizer = sharded(stage)
    backward(model)
    for use in REFUSED.values():
        refused(use, model, optimizer)
    with pytest.raises(PlanError) as caught:
        optimizer.inner.step()
    assert caught.value.code == "zero-inner-step"
    norm = float(model.a.weight.grad.norm())
    model.a.weight.grad.clamp_(-1e-3, 1e-3)
    refused(lambda m, o: m.a.weight.grad.norm(), model, optimizer)  # not known after a write that was no factor
    optimizer.measure_gradients()
    assert 0.0 < float(model.a.weight.grad.norm()) < norm
    optimizer.close()
    assert grads(model) == [None] * 6


@STAGES
@world(2)
def test_gradients_have_the_words_of_dtensor(stage):
    model, optimizer = sharded(stage)
    backward(model)
    twin = Net()
    backward(twin)
    for param, plain in zip(model.parameters(), twin.parameters(), strict=True):
        grad = param.grad
        assert isinstance(grad, ds_zero.ShardedGradient) == (stage > 0)
        whole = grad.full_tensor() if stage else grad
        torch.testing.assert_close(whole, plain.grad)
        if stage:
            assert grad.to_local().numel() <= whole.numel()
            grad.to_local().zero_()
    optimizer.measure_gradients()
    assert all((float(grad.norm()) == 0.0) == (stage > 0) for grad in grads(model))
    optimizer.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
@world(2)
def test_a_gradient_that_somebody_keeps_is_never_that_of_another_step(stage):
    model, optimizer = sharded(stage)
    backward(model)
    first, kept = [id(grad) for grad in grads(model)], model.b.weight.grad
    doubled = kept * 2.0  # a value of its own
    norm = float(doubled.norm())
    optimizer.zero_grad()
    backward(model, seed=1)
    again = [id(grad) for grad in grads(model)]
    assert [one == two for one, two in zip(first, again, strict=True)] == [True, True, False, True, True, True]
    assert model.b.weight.grad is not kept
    assert float(doubled.norm()) == norm != float(model.b.weight.grad.norm())
    for read in (kept.norm, kept.to_local, kept.full_tensor):
        with pytest.raises(ShardedAccessError) as caught:
            read()
        assert caught.value.code == "sharded-gradient-dropped"
    finite = model.a.weight.grad.isfinite()
    assert bool(finite.all())
    optimizer.close()


@STAGES
@world(2)
def test_gradients_that_ranks_write_differently_raise(stage):
    for write in (
        lambda model: setattr(model.a.weight, "grad", None),
        lambda model: setattr(model.a.weight, "grad", torch.ones(4, 4)),
        *([lambda model: model.a.weight.grad.mul_(2.0)] if stage else []),
    ):
        for goes_on in (lambda m, o: o.step(), lambda m, o: backward(m, seed=1)):
            model, optimizer = sharded(stage)
            backward(model)
            if dist.get_rank() == 0:
                write(model)
            with pytest.raises(PlanError) as caught:
                goes_on(model, optimizer)
            assert caught.value.code == "sharded-gradient-ranks"
            optimizer.close()
            del caught, model, optimizer
            gc.collect()


@STAGES
@world(2)
def test_gradients_that_wait_for_their_sum_raise(stage):
    model, optimizer = sharded(stage)
    with optimizer.no_sync():
        backward(model)
        backward(model)
        refused(lambda m, o: nn.utils.clip_grad_norm_(m.parameters(), 0.1), model, optimizer, "sharded-gradient-waits")
        assert isinstance(ds_zero.safe_get_full_grad(model.a.weight), torch.Tensor)
    optimizer.reduce()
    assert float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)) > 0.0
    optimizer.step()
    optimizer.zero_grad()
    optimizer.replan()
    backward(model)
    assert float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)) > 0.0
    optimizer.close()
    assert grads(model) == [None] * 6


@STAGES
def test_hooks_on_accumulated_gradients_can_be_removed(stage):
    model, optimizer = sharded(stage)
    calls = []
    handle = model.a.weight.register_post_accumulate_grad_hook(lambda param: calls.append(float(param.grad.norm())))
    backward(model)
    assert calls == [float(model.a.weight.grad.norm())]
    handle.remove()
    backward(model)
    assert len(calls) == 1
    optimizer.close()


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
        assert isinstance(grad, ds_zero.ShardedGradient) == (stage > 0)
        assert isinstance(grad, torch.Tensor)
        assert (grad.shape, grad.dtype, grad.device) == (param.shape, param.dtype, param.device)
        assert (grad.numel(), grad.dim(), len(grad)) == (param.numel(), param.dim(), len(param))
        assert (grad.is_sparse, grad.requires_grad, grad.grad_fn, grad.is_leaf) == (False, False, None, True)
        assert (name in repr(grad)) == (stage > 0)
        assert (name in f"{grad}") == (stage > 0)
    first = grads(model)
    backward(model)
    assert stage == 0 or all(now is old for now, old in zip(grads(model), first, strict=True) if old is not None)
    twin = copy.deepcopy(model)
    assert grads(twin) == [None] * 6
    if stage < 3:
        pickle.loads(pickle.dumps(list(twin.children())))  # this file's own class is not one that can be imported
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
            assert all(isinstance(grad, torch.Tensor) for grad in grads(model))
        drop(model, optimizer, how)
        plain.zero_grad(set_to_none=how != "model to zeros")
        both("bc", next(seeds))
        both("ac", next(seeds))
        optimizer.step()
        plain.step()
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            whole = param.grad.full_tensor() if stage else param.grad
            torch.testing.assert_close(whole, other.grad)  # they stay, as torch's
        drop(model, optimizer, how)
        plain.zero_grad(set_to_none=how != "model to zeros")
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
def test_an_optimizer_that_was_not_told_to_shows_none(stage):
    """What the engine and the facade make."""
    model = Net()
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = ds_zero.ShardedOptimizer(model, made, ds_zero.ShardOptions(stage=stage, policy=CUT))
    backward(model)
    assert grads(model) == [None] * 6
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
@world(2)
def test_a_gradient_that_autograd_adds_to_is_taken_off_though_no_hook_says_so(stage):
    """As where the hooks on gradients are not called: all were dropped by way of the groups, or none."""
    for drops in (True, False):
        model, optimizer = sharded(stage)
        plain = Net()
        for handle in optimizer.sharding.runtime.reducing.attributes._first.values():
            handle.remove()
        for seed in (0, 1):
            if seed and drops:
                plain.zero_grad()
                for group in optimizer.param_groups:
                    for part in group["params"]:
                        part.grad = None
            backward(model, seed=seed)
            backward(plain, seed=seed)
        for expected, param in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(param.grad.norm(), expected.grad.norm(), rtol=1e-5, atol=1e-7)
        optimizer.close()


@STAGES
@world(2)
def test_norms_are_alike_however_many_ranks_measure_them(stage, monkeypatch):
    norms = []
    for limit in (8, 1):  # gathered, or summed
        monkeypatch.setattr("ds_zero.runtime.gradient_norms._GATHERED", limit)
        model, optimizer = sharded(stage)
        backward(model, "ab", seed=dist.get_rank())
        every = [p.grad for p in (*model.a.parameters(), *model.b.parameters())]
        norms.append([torch.linalg.vector_norm(grad, order) for grad in every for order in (2.0, float("inf"))])
        assert all(p.grad is None for p in model.c.parameters())
        del every
        optimizer.close()
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0.0)


@STAGES
@world(2)
def test_norms_follow_the_loss_scale_and_the_layers_of_each_backward(stage):
    """The places and factors of a measurement are kept for the next one, which may have others."""
    scale = ds_zero.LossScale(initial=4.0, window=1)
    model, optimizer = sharded(stage, precision=ds_zero.Precision(scale=scale, param=torch.float32))
    plain = Net()
    for step, order in enumerate(["abc", "abc", "ab", "bc", "abc"]):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        optimizer.scale(model(x, order).square().mean()).backward()
        plain(x, order).square().mean().backward()
        for expected, param in zip(plain.parameters(), model.parameters(), strict=True):
            assert (expected.grad is None) == (param.grad is None)
            if param.grad is not None:
                torch.testing.assert_close(param.grad.norm(), expected.grad.norm(), rtol=1e-5, atol=1e-7)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
    assert optimizer._scale.scale > 4.0
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
        assert isinstance(model.a.weight.grad, ds_zero.ShardedGradient) == (stage > 0)
    optimizer.step()
    optimizer.close()


FUSED = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True),
    "maximize": lambda params: torch.optim.Adam(params, lr=1e-2, fused=True, maximize=True),
    "plain": lambda params: torch.optim.AdamW(params, lr=1e-2),
}


@STAGES
@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("made", FUSED)
@world(2)
def test_after_a_step_gradients_are_what_was_stepped(stage, hook, made):
    """Averaged and clipped, with their norms, whoever multiplied them: torch's fused optimizers, or a pass before their step."""
    model, plain = Net(), Net()
    clip, seen = 1e-2, []
    optimizer = ds_zero.shard(model, FUSED[made](model.parameters()), stage=stage, policy=CUT, clip=clip)
    reference = FUSED[made](plain.parameters())
    if hook:
        optimizer.inner.register_step_pre_hook(
            lambda inner, args, kwargs: seen.append(
                sum(float(p.grad.square().sum()) for g in inner.param_groups for p in g["params"] if p.grad is not None)
            )
        )
    for step in range(3):
        backward(model, seed=step + 10 * dist.get_rank())
        losses = [plain(torch.randn(3, 4, generator=torch.Generator().manual_seed(step + 10 * r))) for r in range(2)]
        (sum(one.square().mean() for one in losses) / 2).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), clip)
        optimizer.step()
        reference.step()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            found = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
            torch.testing.assert_close(found, theirs.grad)
            torch.testing.assert_close(ours.grad.norm(), theirs.grad.norm())
            torch.testing.assert_close(ours.grad.norm(float("inf")), theirs.grad.norm(float("inf")))
        optimizer.zero_grad()
        reference.zero_grad()
    if hook:
        total = torch.tensor(seen)
        if stage > 0:
            dist.all_reduce(total)
        assert len(seen) == 3
        torch.testing.assert_close(total, torch.full((3,), clip**2), rtol=1e-3, atol=0)
    optimizer.close()
