"""Loops that users of PyTorch, Lightning, Hugging Face and DeepSpeed write around an optimizer, each written once for one process and for shards.

A loop gets a `Run`: in one process it trains a plain model on whole batches, on several ranks a sharded one on each rank's rows. It ends
with the same weights and numbers, or with a typed error. `docs/reference/loops.md` is made of this file.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import ds_zero

STEPS, ROWS, WIDTH = 4, 8, 6
CUT = ds_zero.UnitSizePolicy(max_numel=1, persist_numel=0)


class LoopNet(nn.Module):
    """Three layers, of which the last is a head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b, self.head = nn.Linear(WIDTH, 12), nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


@dataclass
class Run:
    """Where a loop runs.

    Attributes:
        stage: None for the plain loop of one process.
        rank, size: Of the ranks that share a batch.
        numbers: What the loop has logged, compared like weights.
        models: Compared when the loop is over.
    """

    stage: int | None = None
    rank: int = 0
    size: int = 1
    numbers: list[float] = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[ds_zero.ShardedOptimizer] = field(default_factory=list)

    def net(self, seed: int = 0) -> LoopNet:
        model = LoopNet(seed)
        self.models.append(model)
        return model

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if self.stage is None:
            return optimizer
        self.optimizers.append(ds_zero.shard(model, optimizer, stage=self.stage, policy=CUT))
        return self.optimizers[-1]

    def pair(self, lr: float = 0.1) -> tuple[LoopNet, torch.optim.Optimizer]:
        model = self.net()
        return model, self.wrap(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))

    def x(self, step: int) -> Tensor:
        whole = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        return whole.chunk(self.size)[self.rank]

    def tasks(self, step: int) -> list[Tensor]:
        """Return this rank's tasks of two, for loops that compute something of each task alone."""
        whole = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        return list(whole.chunk(2)[self.rank :: self.size])

    def loss(self, model: nn.Module, step: int) -> Tensor:
        return model(self.x(step)).square().mean() * 10.0

    def no_sync(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        return optimizer.no_sync() if isinstance(optimizer, ds_zero.ShardedOptimizer) else nullcontext()

    @contextmanager
    def whole(self, model: nn.Module, *, write: bool = False) -> Iterator[None]:
        """Gather what a rank has a part of, as the manual says."""
        with ds_zero.GatheredParameters(model, write=write) if self.stage is not None else nullcontext():
            yield

    def full(self, grad: Tensor) -> Tensor:
        return grad.full_tensor() if isinstance(grad, ds_zero.ShardedGradient) else grad

    def result(self) -> tuple[list[Tensor], list[float]]:
        for optimizer in self.optimizers:
            optimizer.close()
        return [p.detach().clone() for model in self.models for p in model.parameters()], self.numbers


@dataclass(frozen=True)
class Loop:
    """One loop, and what is expected of it.

    Attributes:
        refused: By stage the code of the error that ends it; equal to one process at the others.
        ranks: On how many ranks these errors come; elsewhere it is equal.
    """

    name: str
    title: str
    run: Callable[[Run], None]
    refused: dict[int, str]
    ranks: tuple[int, ...]

    def expected(self, stage: int, size: int) -> str:
        return self.refused.get(stage, "equal") if size in self.ranks else "equal"


LOOPS: dict[str, Loop] = {}


def loop(
    refused: dict[int, str] | None = None, ranks: tuple[int, ...] = (1, 2)
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    def register(function: Callable[[Run], None]) -> Callable[[Run], None]:
        title = (function.__doc__ or "").strip().rstrip(".")
        LOOPS[function.__name__] = Loop(function.__name__, title, function, refused or {}, ranks)
        return function

    return register


def everywhere(code: str) -> dict[int, str]:
    return dict.fromkeys(range(4), code)


def sharded(code: str) -> dict[int, str]:
    return dict.fromkeys((1, 2, 3), code)


def train(run: Run, before: Callable[[nn.Module, torch.optim.Optimizer], object]) -> None:
    """Train as usual, with a line between backward and step."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        run.loss(model, step).backward()
        before(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()


# ---- clipping and logging


@loop()
def plain(run: Run) -> None:
    """`backward`, `step`, `zero_grad`."""
    train(run, lambda model, optimizer: None)


@loop()
def clip_norm(run: Run) -> None:
    """`clip_grad_norm_`."""
    train(run, lambda m, o: run.numbers.append(float(nn.utils.clip_grad_norm_(m.parameters(), 0.1))))


@loop()
def clip_norm_foreach(run: Run) -> None:
    """`clip_grad_norm_(foreach=True)`."""
    train(run, lambda m, o: run.numbers.append(float(nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=True))))


@loop()
def clip_norm_inf(run: Run) -> None:
    """`clip_grad_norm_(norm_type=inf)`."""
    train(run, lambda m, o: run.numbers.append(float(nn.utils.clip_grad_norm_(m.parameters(), 0.01, math.inf))))


@loop(sharded("sharded-gradient"))
def clip_norm_one(run: Run) -> None:
    """`clip_grad_norm_(norm_type=1)`."""
    train(run, lambda m, o: run.numbers.append(float(nn.utils.clip_grad_norm_(m.parameters(), 0.1, 1.0))))


@loop()
def clip_norm_groups(run: Run) -> None:
    """`clip_grad_norm_` of the optimizer's groups."""

    def clip(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        run.numbers.append(float(nn.utils.clip_grad_norm_(params, 0.1)))

    train(run, clip)


@loop()
def clip_norm_per_layer(run: Run) -> None:
    """`clip_grad_norm_` of each layer apart."""

    def clip(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for child in model.children():
            run.numbers.append(float(nn.utils.clip_grad_norm_(child.parameters(), 0.05)))

    train(run, clip)


@loop()
def clip_value(run: Run) -> None:
    """`clip_grad_value_`."""
    train(run, lambda m, o: nn.utils.clip_grad_value_(m.parameters(), 0.01))


@loop()
def clip_value_foreach(run: Run) -> None:
    """`clip_grad_value_(foreach=True)`."""
    train(run, lambda m, o: nn.utils.clip_grad_value_(m.parameters(), 0.01, foreach=True))


@loop(sharded("sharded-gradient"))
def clip_value_then_norm(run: Run) -> None:
    """`clip_grad_value_`, then `clip_grad_norm_`."""

    def clip(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        run.numbers.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.02)))

    train(run, clip)


@loop()
def clip_value_measure_norm(run: Run) -> None:
    """`clip_grad_value_`, `measure_gradients`, then `clip_grad_norm_`."""

    def clip(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        if isinstance(optimizer, ds_zero.ShardedOptimizer):
            optimizer.measure_gradients()
        run.numbers.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.02)))

    train(run, clip)


@loop()
def log_norms(run: Run) -> None:
    """`p.grad.norm()`, `p.grad.abs().max()`, `get_total_norm`, logged."""

    def log(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        grads = [p.grad for p in model.parameters()]
        run.numbers.extend(float(grad.norm()) for grad in grads)
        run.numbers.extend(float(grad.detach().abs().max()) for grad in grads)
        run.numbers.append(float(nn.utils.get_total_norm(grads)))
        run.numbers.append(sum(p.grad.data.norm(2).item() ** 2 for p in model.parameters()) ** 0.5)

    train(run, log)


@loop(sharded("sharded-gradient"))
def log_histogram(run: Run) -> None:
    """`p.grad.mean()` and `p.grad.cpu().numpy()`, logged."""
    train(run, lambda m, o: run.numbers.extend(float(p.grad.cpu().numpy().std()) for p in m.parameters()))


@loop()
def log_full(run: Run) -> None:
    """`p.grad.full_tensor().mean()`, logged."""
    train(run, lambda m, o: run.numbers.extend(float(run.full(p.grad).std()) for p in m.parameters()))


@loop()
def skip_nonfinite(run: Run) -> None:
    """`isfinite(p.grad).all()` decides whether to step."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        (run.loss(model, step) * (math.inf if step == 1 else 1.0)).backward()
        if all(bool(torch.isfinite(p.grad).all()) for p in model.parameters()):
            optimizer.step()
        run.numbers.append(float(any(torch.isnan(p.grad).any() for p in model.parameters())))
        optimizer.zero_grad()


# ---- writing gradients


@loop()
def scale_gradients(run: Run) -> None:
    """`p.grad *= 0.5`, `p.grad.div_(2)`."""

    def scale(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for param in model.parameters():
            param.grad *= 0.5
            param.grad.div_(2.0)
            run.numbers.append(float(param.grad.norm()))

    train(run, scale)


@loop({3: "sharded-gradient"}, ranks=(2,))
def add_decay(run: Run) -> None:
    """`p.grad.add_(p, alpha=0.01)`: a weight decay by hand."""

    def decay(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.grad.add_(param, alpha=0.01)

    train(run, decay)


@loop()
def assign_gradients(run: Run) -> None:
    """`p.grad = p.grad * 0.3 + 0.001`."""

    def assign(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for param in model.parameters():
            param.grad = param.grad * 0.3 + 0.001

    train(run, assign)


@loop()
def assign_whole_gradients(run: Run) -> None:
    """`p.grad = torch.ones_like(p)`, after a backward and without one."""
    model, optimizer = run.pair()
    shapes = [(p, p.shape) for p in model.parameters()]
    for step in range(STEPS):
        if step % 2 == 0:
            run.loss(model, step).backward()
        for i, (param, shape) in enumerate(shapes):
            param.grad = torch.full(shape, 0.1 * (i + 1))
        optimizer.step()
        optimizer.zero_grad()


@loop()
def drop_some_gradients(run: Run) -> None:
    """`p.grad = None` for some parameters: they are not stepped."""
    train(run, lambda m, o: [setattr(p, "grad", None) for p in m.a.parameters()])


@loop()
def drop_all_gradients(run: Run) -> None:
    """`p.grad = None` in the place of `zero_grad`."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        for param in model.parameters():
            param.grad = None
        run.loss(model, step).backward()
        optimizer.step()


@loop()
def gradient_noise(run: Run) -> None:
    """`p.grad.add_(noise)`, the same noise on every rank."""
    noise = torch.Generator().manual_seed(7)
    shapes = [p.shape for p in LoopNet().parameters()]

    def add(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for param, shape in zip(model.parameters(), shapes, strict=True):
            param.grad.add_(torch.randn(shape, generator=noise), alpha=0.01)

    train(run, add)


@loop()
def gradient_surgery(run: Run) -> None:
    """Two tasks, whose gradients are copied and mixed (PCGrad and its kind)."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        run.loss(model, step).backward()
        first = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        run.loss(model, step + 10).backward()
        for param, other in zip(model.parameters(), first, strict=True):
            param.grad.mul_(0.7).add_(other, alpha=0.3)
        optimizer.step()
        optimizer.zero_grad()


@loop(sharded("sharded-gradient-dropped"))
def gradients_held(run: Run) -> None:
    """`[p.grad for p in params]` used after `zero_grad`, without a copy."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        run.loss(model, step).backward()
        first = [p.grad for p in model.parameters()]
        optimizer.zero_grad()
        run.loss(model, step + 10).backward()
        for param, other in zip(model.parameters(), first, strict=True):
            param.grad.add_(other)
        optimizer.step()
        optimizer.zero_grad()


# ---- when gradients are dropped


@loop()
def never_zero_grad(run: Run) -> None:
    """No `zero_grad` at all: gradients add up over the steps."""
    model, optimizer = run.pair(lr=0.01)
    for step in range(STEPS):
        run.loss(model, step).backward()
        optimizer.step()


@loop()
def zero_to_zeros(run: Run) -> None:
    """`zero_grad(set_to_none=False)`; a layer that is left out is stepped with zeros."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        x = torch.tanh(model.a(run.x(step)))
        model.head(x if step % 2 else torch.tanh(model.b(x))).square().mean().backward()
        optimizer.step()


@loop()
def model_zero_grad(run: Run) -> None:
    """`model.zero_grad()`."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        model.zero_grad()
        run.loss(model, step).backward()
        optimizer.step()


@loop()
def zero_part_of_the_model(run: Run) -> None:
    """`model.head.zero_grad()`: only the head's gradients are dropped."""
    model, optimizer = run.pair(lr=0.01)
    for step in range(STEPS):
        model.head.zero_grad()
        run.loss(model, step).backward()
        optimizer.step()


@loop()
def step_twice(run: Run) -> None:
    """Two steps with the same gradients."""
    model, optimizer = run.pair(lr=0.01)
    for step in range(STEPS):
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


# ---- several backwards


@loop()
def accumulate(run: Run) -> None:
    """Accumulation by hand, then `clip_grad_norm_`."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        for part in range(2):
            (run.loss(model, 10 * step + part) / 2).backward()
        run.numbers.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()


@loop()
def accumulate_no_sync(run: Run) -> None:
    """Accumulation with `no_sync` for all but the last backward."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        with run.no_sync(optimizer):
            (run.loss(model, 10 * step) / 2).backward()
        (run.loss(model, 10 * step + 1) / 2).backward()
        run.numbers.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()


@loop(sharded("sharded-gradient-waits") | {0: "sharded-gradient-waits"})
def clip_in_no_sync(run: Run) -> None:
    """`clip_grad_norm_` after a backward in `no_sync`."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        with run.no_sync(optimizer):
            run.loss(model, step).backward()
            run.loss(model, step + 10).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


@loop()
def retain_graph(run: Run) -> None:
    """`backward(retain_graph=True)`, then another one of the same graph."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        loss = run.loss(model, step)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@loop()
def gradient_penalty(run: Run) -> None:
    """A penalty on the gradient of the input (WGAN-GP): double backward."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        x = run.x(step).requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.square().mean() + grad.norm(dim=1).sub(1).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


@loop()
def gan(run: Run) -> None:
    """Two models with an optimizer each, in turns."""
    maker, critic = run.net(1), run.net(2)
    ways = [run.wrap(m, torch.optim.Adam(m.parameters(), lr=0.01)) for m in (maker, critic)]
    widen = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(3))
    for step in range(STEPS):
        fake = maker(run.x(step)) @ widen
        ways[1].zero_grad()
        (critic(run.x(step + 10)).square().mean() + critic(fake.detach()).sub(1).square().mean()).backward()
        ways[1].step()
        ways[0].zero_grad()
        critic(fake).square().mean().backward()
        ways[0].step()


@loop({1: "sharded-gradient", 2: "sharded-gradient", 3: "sharded-gradient or sharded-access"})
def sam(run: Run) -> None:
    """SAM by hand: `p.add_(p.grad * scale)`, a second backward, back, step."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        run.loss(model, step).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moved = []
            for param in model.parameters():
                ascent = param.grad * (0.05 / (norm + 1e-12))
                param.add_(ascent)
                moved.append(ascent)
        optimizer.zero_grad()
        run.loss(model, step).backward()
        with torch.no_grad():
            for param, ascent in zip(model.parameters(), moved, strict=True):
                param.sub_(ascent)
        optimizer.step()
        optimizer.zero_grad()


@loop()
def sam_whole(run: Run) -> None:
    """SAM with `full_tensor()` and `GatheredParameters(write=True)`."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        run.loss(model, step).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moved = [run.full(p.grad) * (0.05 / (norm + 1e-12)) for p in model.parameters()]
        with run.whole(model, write=True), torch.no_grad():
            for param, ascent in zip(model.parameters(), moved, strict=True):
                param.add_(ascent)
        optimizer.zero_grad()
        run.loss(model, step).backward()
        with run.whole(model, write=True), torch.no_grad():
            for param, ascent in zip(model.parameters(), moved, strict=True):
                param.sub_(ascent)
        optimizer.step()
        optimizer.zero_grad()


# ---- optimizers and schedules


@loop()
def closure(run: Run) -> None:
    """`step(closure)`."""
    model, optimizer = run.pair()

    def evaluate(step: int) -> Tensor:
        optimizer.zero_grad()
        loss = run.loss(model, step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss

    for step in range(STEPS):
        optimizer.step(lambda step=step: evaluate(step))


@loop(everywhere("zero-optimizer"))
def lbfgs(run: Run) -> None:
    """L-BFGS, which needs all gradients at once."""
    model = run.net()
    optimizer = run.wrap(model, torch.optim.LBFGS(model.parameters()))

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = run.loss(model, 0)
        loss.backward()
        return loss

    optimizer.step(evaluate)


def schedule(run: Run, make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]) -> None:
    model, optimizer = run.pair()
    scheduler = make(optimizer)
    for step in range(STEPS):
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        run.numbers.extend(scheduler.get_last_lr())


_S = torch.optim.lr_scheduler
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], _S.LRScheduler]] = {
    "LambdaLR": lambda o: _S.LambdaLR(o, lambda n: 0.9**n),
    "MultiplicativeLR": lambda o: _S.MultiplicativeLR(o, lambda n: 0.9),
    "StepLR": lambda o: _S.StepLR(o, 2),
    "MultiStepLR": lambda o: _S.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: _S.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: _S.LinearLR(o, 0.5, 1.0, 3),
    "ExponentialLR": lambda o: _S.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: _S.PolynomialLR(o, 6),
    "CosineAnnealingLR": lambda o: _S.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: _S.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: _S.CyclicLR(o, 0.01, 0.1, 2),
    "OneCycleLR": lambda o: _S.OneCycleLR(o, 0.1, total_steps=8),
    "SequentialLR": lambda o: _S.SequentialLR(o, [_S.ConstantLR(o, 0.5, 2), _S.ExponentialLR(o, 0.8)], [2]),
    "ChainedScheduler": lambda o: _S.ChainedScheduler([_S.ConstantLR(o, 0.5, 2), _S.ExponentialLR(o, 0.8)]),
}


@loop()
def schedules(run: Run) -> None:
    """Every `torch.optim.lr_scheduler`."""
    for make in SCHEDULES.values():
        schedule(run, make)


@loop()
def plateau(run: Run) -> None:
    """`ReduceLROnPlateau`."""
    model, optimizer = run.pair()
    scheduler = _S.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(STEPS):
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(1.0)
        run.numbers.append(optimizer.param_groups[0]["lr"])


@loop()
def rates_by_hand(run: Run) -> None:
    """`param_groups[i]["lr"] = ...` between steps, another rate for the head."""
    model = run.net()
    groups = [
        {"params": [*model.a.parameters(), *model.b.parameters()]},
        {"params": model.head.parameters(), "lr": 0.01},
    ]
    optimizer = run.wrap(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    for step in range(STEPS):
        optimizer.param_groups[1]["lr"] *= 0.5
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@loop()
def add_group(run: Run) -> None:
    """`add_param_group` after the model is sharded."""
    model = run.net()
    model.head.requires_grad_(False)
    optimizer = run.wrap(model, torch.optim.SGD([*model.a.parameters(), *model.b.parameters()], lr=0.1))
    run.loss(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.head.requires_grad_(True)
    optimizer.add_param_group({"params": model.head.parameters(), "lr": 0.01})
    for step in range(1, STEPS):
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@loop()
def freeze_and_thaw(run: Run) -> None:
    """`requires_grad_(False)` for some steps, with `replan`."""
    model = run.net()
    optimizer = run.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        model.a.requires_grad_(step % 2 == 0)
        if isinstance(optimizer, ds_zero.ShardedOptimizer):
            optimizer.replan()
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@loop(everywhere("zero-requires-grad-changed"))
def thaw_without_replan(run: Run) -> None:
    """A layer that was frozen when the model was sharded is thawed, and nobody says so."""
    model = run.net()
    model.a.requires_grad_(False)
    optimizer = run.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        model.a.requires_grad_(step > 1)
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@loop()
def some_layers(run: Run) -> None:
    """An optimizer of some layers, while the others require gradients, too."""
    model = run.net()
    optimizer = run.wrap(model, torch.optim.SGD(model.b.parameters(), lr=0.1))
    for step in range(STEPS):
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@loop()
def grad_scaler(run: Run) -> None:
    """`GradScaler`: `scale`, `unscale_`, clipping, `step`, `update`; one overflow."""
    model, optimizer = run.pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        scaler.scale(run.loss(model, step) * (1e38 if step == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        run.numbers.append(norm if math.isfinite(norm) else -1.0)
        scaler.step(optimizer)
        scaler.update()
        run.numbers.append(scaler.get_scale())
        optimizer.zero_grad()


@loop()
def autocast(run: Run) -> None:
    """`torch.autocast` around the forward."""
    model, optimizer = run.pair(lr=0.01)
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = run.loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- weights


@loop()
def moving_average(run: Run) -> None:
    """An exponential moving average of the weights, read inside `GatheredParameters`."""
    model, optimizer = run.pair()
    average = LoopNet()
    for step in range(STEPS):
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with run.whole(model), torch.no_grad():
            for mean, param in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(param, 0.1)
    run.models.append(average)


@loop({3: "sharded-access"}, ranks=(2,))
def averaged_model(run: Run) -> None:
    """`torch.optim.swa_utils.AveragedModel.update_parameters(model)` as it is."""
    model, optimizer = run.pair()
    average = torch.optim.swa_utils.AveragedModel(LoopNet())
    for step in range(STEPS):
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    run.models.append(average)


@loop({3: "sharded-access"}, ranks=(2,))
def edit_weights(run: Run) -> None:
    """`p.clamp_(-0.2, 0.2)` between steps, as it is."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param in model.parameters():
                param.clamp_(-0.2, 0.2)


@loop()
def edit_gathered_weights(run: Run) -> None:
    """`p.clamp_(-0.2, 0.2)` between steps, inside `GatheredParameters(write=True)`."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with run.whole(model, write=True), torch.no_grad():
            for param in model.parameters():
                param.clamp_(-0.2, 0.2)


@loop()
def checkpoint_by_hand(run: Run) -> None:
    """`copy.deepcopy(optimizer.state_dict())` and weights, taken and put back."""
    model, optimizer = run.pair()

    def train(steps: range) -> None:
        for step in steps:
            run.loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(range(2))
    with run.whole(model):
        weights = copy.deepcopy([p.detach() for p in model.parameters()])
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] *= 2.0
    train(range(2, 4))
    with run.whole(model, write=True), torch.no_grad():
        for param, value in zip(model.parameters(), weights, strict=True):
            param.copy_(value)
    optimizer.load_state_dict(state)
    train(range(4, 6))


# ---- hooks


@loop()
def tensor_hooks(run: Run) -> None:
    """`p.register_hook(lambda grad: grad * 0.5)`."""
    model, optimizer = run.pair()
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 0.5)
    for step in range(STEPS):
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@loop()
def accumulated_hooks(run: Run) -> None:
    """`p.register_post_accumulate_grad_hook`, which clamps `p.grad`."""
    model, optimizer = run.pair()

    def clamp(param: Tensor) -> None:
        param.grad.clamp_(-0.01, 0.01)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(clamp)
    for step in range(STEPS):
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@loop()
def module_hooks(run: Run) -> None:
    """Forward hooks and full backward hooks of modules."""
    model, optimizer = run.pair()
    model.b.register_forward_hook(lambda module, args, out: out * 2.0)
    model.b.register_full_backward_hook(lambda module, grads, outs: (grads[0] * 0.5,))
    for step in range(STEPS):
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@loop()
def step_hooks(run: Run) -> None:
    """`register_step_pre_hook` that clips, `register_step_post_hook` that counts."""
    model, optimizer = run.pair()
    optimizer.register_step_pre_hook(lambda o, args, kwargs: nn.utils.clip_grad_norm_(model.parameters(), 0.1) and None)
    optimizer.register_step_post_hook(lambda o, args, kwargs: run.numbers.append(1.0))
    for step in range(STEPS):
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@loop()
def functional_gradient(run: Run) -> None:
    """`torch.autograd.grad` for the parameters, and `p.grad` set to that: at stage 3 of released parameters, too."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        params = list(model.parameters())
        grads = torch.autograd.grad(run.loss(model, step), params)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
        optimizer.zero_grad()


# ---- torch.func and detached weights


@loop()
def functional_call(run: Run) -> None:
    """`torch.func.functional_call(model, {**dict(model.named_parameters())}, x)`, then backward."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        with run.whole(model):
            params = dict(model.named_parameters())
            out = torch.func.functional_call(model, params, (run.x(step),))
            (out.square().mean() * 10.0).backward()
        optimizer.step()
        optimizer.zero_grad()


def func_gradients(run: Run, gathered: bool) -> None:
    """Train with the gradients that `torch.func.grad` gives of copies of the weights, averaged by hand."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        with run.whole(model) if gathered else nullcontext():
            params = {name: p.detach().clone() for name, p in model.named_parameters()}

        def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
            hidden = torch.tanh(nn.functional.linear(x, params["a.weight"], params["a.bias"]))
            hidden = torch.tanh(nn.functional.linear(hidden, params["b.weight"], params["b.bias"]))
            return nn.functional.linear(hidden, params["head.weight"], params["head.bias"]).square().mean()

        grads = torch.func.grad(loss)(params, run.x(step))
        for name, param in model.named_parameters():
            if run.size > 1:
                torch.distributed.all_reduce(grads[name])
            param.grad = grads[name] / run.size
        optimizer.step()
        optimizer.zero_grad()


@loop()
def func_grad(run: Run) -> None:
    """`torch.func.grad` of a function of copied weights, `p.grad` set to its result."""
    func_gradients(run, True)


@loop()
def func_jvp(run: Run) -> None:
    """A loss with `torch.func.jvp` of the model by its input (MeanFlow, physics losses)."""
    model, optimizer = run.pair(lr=0.01)
    for step in range(STEPS):
        x = run.x(step)
        out, along = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        (out.square().mean() + along.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


@loop()
def func_vmap(run: Run) -> None:
    """`torch.func.vmap` of the model over rows, then backward."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        (torch.func.vmap(model)(run.x(step)).square().mean() * 10.0).backward()
        optimizer.step()
        optimizer.zero_grad()


@loop()
def detached_target(run: Run) -> None:
    """A target network: `model(x).detach()`, and `out.detach_()` in a second term."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        target = model(run.x(step + 5)).detach()
        other = model(run.x(step + 7)) * 1.0
        other.detach_()
        ((model(run.x(step)) - 0.5 * target - 0.1 * other).square().mean() * 10.0).backward()
        optimizer.step()
        optimizer.zero_grad()


@loop()
def detached_gradients(run: Run) -> None:
    """`p.grad.detach_()`, `p.grad.zero_()` in the place of `zero_grad`, as torch's older `zero_grad` did it."""
    model, optimizer = run.pair()
    for step in range(STEPS):
        for param in model.parameters():
            if param.grad is not None:
                param.grad.detach_()
                param.grad.zero_()
        run.loss(model, step).backward()
        optimizer.step()


def outcome(name: str, run: Run) -> str:
    """Run a loop, compare it with one process, and say how it ended."""
    from ds_config.errors import DsError

    plain_run = Run()
    LOOPS[name].run(plain_run)
    weights, numbers = plain_run.result()
    try:
        LOOPS[name].run(run)
        found, logged = run.result()
    except DsError as error:
        code = error.code
        error.__traceback__ = None  # its frames hold the model
        for optimizer in run.optimizers:
            optimizer.close()
        gc.collect()
        return code
    except RuntimeError as error:
        if "size mismatch" not in str(error):  # torch's own words, after a warning that names what gives whole values
            raise
        for optimizer in run.optimizers:
            optimizer.close()
        return "torch: size mismatch"
    worst = max((float((a - b).abs().max()) for a, b in zip(weights, found, strict=True)), default=0.0)
    off = max((abs(a - b) / (abs(a) + 1e-6) for a, b in zip(numbers, logged, strict=True)), default=0.0)
    limit = 2e-3 if name == "autocast" else 2e-6
    return "equal" if worst < limit and off < max(limit, 1e-4) else f"off by {worst:.2g}, logged by {off:.2g}"


def _load_more() -> None:
    """Load the loops of the second file into the same table."""
    sys.modules["zero_loops"] = sys.modules[__name__]
    spec = importlib.util.spec_from_file_location("zero_loops_of_users", Path(__file__).with_name("loops_of_users.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


_load_more()
