"""What `param.grad` is around an engine: the gradient at stage 0, also of tensor shards; None from stage 1 on. Hooks on accumulated gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_engine
from ds_testing import world

SLOW = pytest.mark.slow


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


def settings(stage: int, micro: int = 4, accumulation: int = 1, **changes: object) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **changes,
    }


def rows(step: int, size: int = 1, rank: int = 0) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).chunk(size)[rank]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def plain(write=None, micros: int = 1, steps: int = 2) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The loop of one process: weights at the end, and the gradients of every step; `write` is called after each backward."""
    model, seen = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        for micro in range(micros):
            (loss_of(model, rows(10 * step + micro)) / micros).backward()
            seen.append([p.grad.clone() for p in model.parameters()])
            if write is not None:
                write(model)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], seen


def run(stage: int, micros: int = 1, write=None, prepare=None, shown: bool = False, **changes: object):
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    model = Net()
    engine, *_ = ds_engine.initialize(model=model, config=settings(stage, 8 // size, micros, **changes))
    if prepare is not None:
        prepare(model)
    if shown:
        engine.optimizer.show_gradients()
    grads = []
    for step in range(2):
        for micro in range(micros):
            engine.backward(loss_of(engine, rows(10 * step + micro, size, rank)))
            if not shown:  # those that wait for their sum over the ranks are only there at stage 0
                grads.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            if write is not None:
                write(model)
            engine.step()
        assert all(p.grad is None for p in model.parameters())
    engine.close()
    return [p.detach().clone() for p in model.parameters()], grads


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def halve(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = param.grad * 0.5


def drop(model: nn.Module) -> None:
    for param in model.a.parameters():
        param.grad = None


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3])
@world(2)
def test_gradients_are_shown_at_stage_0_and_none_above(stage: int) -> None:
    weights, seen = plain()
    found, grads = run(stage)
    torch.testing.assert_close(found, weights)
    if stage == 0:
        torch.testing.assert_close(grads, seen)
    else:
        assert all(grad is None for step in grads for grad in step)


@pytest.mark.parametrize("write", [clip, halve, drop], ids=lambda f: f.__name__)
@pytest.mark.parametrize("micros", [1, 2])
@world(2)
def test_what_is_written_at_stage_0_is_stepped(write, micros: int) -> None:
    def last(model: nn.Module, calls=[0]) -> None:  # noqa: B006  counts microbatches
        calls[0] += 1
        if calls[0] % micros == 0:
            write(model)

    weights, _ = plain(lambda model, calls=[0]: last(model), micros)
    found, _ = run(0, micros, last)
    torch.testing.assert_close(found, weights)


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=SLOW), 2, 3])
@pytest.mark.parametrize("micros", [1, 2])
@world(2)
def test_gradients_that_are_asked_for_are_clipped_stepped_and_dropped(stage: int, micros: int) -> None:
    """They were added to those of the next step: ds-zero's optimizer leaves them for `zero_grad`, as torch's do."""

    def last(model: nn.Module, calls: list[int]) -> None:
        calls.append(1)
        if len(calls) % micros == 0:
            clip(model)

    weights, _ = plain(lambda model, calls=[]: last(model, calls), micros)
    found, _ = run(stage, micros, lambda model, calls=[]: last(model, calls), shown=True)
    torch.testing.assert_close(found, weights)


def test_gradients_of_waiting_microbatches_are_shown_and_written() -> None:
    weights, seen = plain(halve, 3)
    found, grads = run(0, 3, halve)
    torch.testing.assert_close(grads, seen)
    torch.testing.assert_close(found, weights)
    weights, seen = plain(drop, 3)
    found, grads = run(0, 3, drop)
    torch.testing.assert_close(found, weights)


def test_a_gradient_that_is_kept_is_not_written_by_the_next_step() -> None:
    kept: list[Tensor] = []
    copies: list[Tensor] = []

    def keep(model: nn.Module) -> None:
        kept.extend(p.grad for p in model.parameters())
        copies.extend(p.grad.clone() for p in model.parameters())

    run(0, 1, keep)
    torch.testing.assert_close(kept, copies)


def clamp(param: Tensor) -> None:
    param.grad.clamp_(-0.002, 0.002)


@pytest.mark.parametrize("micros", [1, pytest.param(2, marks=SLOW)])
@pytest.mark.parametrize("stage", range(4))
def test_hooks_on_accumulated_gradients_act(stage: int, micros: int) -> None:
    def hooked(model: nn.Module) -> None:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(clamp)

    def clamps(model: nn.Module) -> None:
        for param in model.parameters():
            param.grad.clamp_(-0.002, 0.002)

    found, _ = run(stage, micros, prepare=hooked)
    if micros == 1 or stage == 0:
        weights, _ = plain(clamps, micros)
        torch.testing.assert_close(found, weights)


@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=SLOW), 3])
@world(2)
def test_hooks_that_only_look_find_a_gradient_of_every_parameter(stage: int) -> None:
    called: list[int] = []

    def hooked(model: nn.Module) -> None:
        for i, param in enumerate(model.parameters()):
            param.register_post_accumulate_grad_hook(lambda p, i=i: called.append(i if p.grad is not None else -1))

    weights, _ = plain()
    found, _ = run(stage, prepare=hooked)
    torch.testing.assert_close(found, weights)
    assert sorted(called) == [0, 0, 1, 1, 2, 2, 3, 3]


@world(2)
def test_gradients_of_tensor_shards_are_shown_at_stage_0() -> None:
    rank, whole = dist.get_rank(), Net()
    loss_of(whole, rows(0)).backward()
    model = Net()
    config = settings(0, 8, tensor_parallel={"autotp_size": 2})
    engine, *_ = ds_engine.initialize(model=model, config=config)
    engine.backward(loss_of(engine, rows(0)))
    torch.testing.assert_close(model.a.weight.grad, whole.a.weight.grad.chunk(2)[rank])
    torch.testing.assert_close(model.b.weight.grad, whole.b.weight.grad.chunk(2, 1)[rank])
    torch.testing.assert_close(model.b.bias.grad, whole.b.bias.grad)
    engine.step()
    assert model.a.weight.grad is None
    engine.close()
