"""Loops around an engine, by `ds_engine.initialize` and by the facade, as users write them: equal to plain torch at every stage."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import ds_engine
import ds_zero
from ds_testing import world

STEPS, ROWS = 4, 8


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b, self.head = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Plain:
    """What an engine is for a loop, made of a plain model and optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, accumulation: int) -> None:
        self.module, self.optimizer, self._micros, self._each = model, optimizer, 0, accumulation

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def backward(self, loss: Tensor) -> None:
        (loss / self._each).backward()

    def step(self) -> None:
        self._micros += 1
        if self._micros % self._each == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def get_global_grad_norm(self) -> float:
        return math.nan


@dataclass
class Site:
    """Where a loop runs.

    Attributes:
        way: "plain", "engine" or "facade".
        rank, size: Of the ranks that share a batch.
        numbers: What the loop has logged.
    """

    way: str
    stage: int = 0
    rank: int = 0
    size: int = 1
    numbers: list[float] = field(default_factory=list)
    engines: list[Any] = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)

    def start(
        self,
        model: nn.Module,
        make: Callable[[Any], torch.optim.Optimizer] | None = None,
        accumulation: int = 1,
        **config: Any,
    ) -> Any:
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(params, lr=1e-2) if make is None else make(params)
        self.models.append(model)
        if self.way == "plain":
            return Plain(model, optimizer, accumulation)
        settings = {
            "train_micro_batch_size_per_gpu": ROWS // self.size,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0},
            **config,
        }
        if self.way == "engine":
            settings.pop("zero_allow_untested_optimizer")
            self.engines.append(ds_engine.initialize(model=model, optimizer=optimizer, config=settings)[0])
        else:
            import deepspeed

            self.engines.append(deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0])
        return self.engines[-1]

    def x(self, step: int) -> Tensor:
        return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(step)).chunk(self.size)[self.rank]

    def loss(self, engine: Any, step: int) -> Tensor:
        return engine(self.x(step)).square().mean() * 10.0

    def gathered(self, params: Any, rank: int | None = None) -> Any:
        return ds_zero.GatheredParameters(params, rank) if self.way != "plain" else torch.enable_grad()

    def result(self) -> tuple[list[Tensor], list[float]]:
        for engine in self.engines:
            engine.close()
        return [p.detach().clone() for model in self.models for p in model.parameters()], self.numbers


LOOPS: dict[str, Callable[[Site], None]] = {}


def loop(function: Callable[[Site], None]) -> Callable[[Site], None]:
    LOOPS[function.__name__] = function
    return function


@loop
def three_calls(site: Site) -> None:
    engine = site.start(Net())
    for step in range(STEPS):
        engine.backward(site.loss(engine, step))
        engine.step()


@loop
def accumulated(site: Site) -> None:
    engine = site.start(Net(), accumulation=2)
    for micro in range(2 * STEPS):
        engine.backward(site.loss(engine, micro))
        engine.step()


@loop
def zero_grad_left_in(site: Site) -> None:
    """From plain torch: every kind of `zero_grad` before the backward."""
    model = Net()
    engine = site.start(model)
    for step in range(STEPS):
        engine.zero_grad(), engine.optimizer.zero_grad(), model.zero_grad()
        engine.backward(site.loss(engine, step))
        engine.step()


@loop
def rates_by_hand(site: Site) -> None:
    engine = site.start(
        Net(),
        lambda params: torch.optim.AdamW([{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "lr": 1e-3}]),
    )
    for step in range(STEPS):
        for group in engine.optimizer.param_groups:
            group["lr"] *= 0.8
        engine.backward(site.loss(engine, step))
        engine.step()
        site.numbers.extend(group["lr"] for group in engine.optimizer.param_groups)


@loop
def schedule_of_the_clients_optimizer(site: Site) -> None:
    kept: list[torch.optim.Optimizer] = []
    engine = site.start(Net(), lambda params: kept.append(torch.optim.AdamW(params, lr=1e-2)) or kept[-1])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(kept[0], 6)
    for step in range(STEPS):
        engine.backward(site.loss(engine, step))
        engine.step()
        scheduler.step()
        site.numbers.append(scheduler.get_last_lr()[0])


@loop
def evaluation_between(site: Site) -> None:
    engine = site.start(Net())
    for step in range(STEPS):
        engine.train()
        engine.backward(site.loss(engine, step))
        engine.step()
        engine.eval()
        with torch.no_grad():
            site.numbers.append(float(engine(torch.ones(2, 6)).sum()))


@loop
def average_of_weights(site: Site) -> None:
    model, average = Net(), Net(3)
    engine = site.start(model)
    for step in range(STEPS):
        engine.backward(site.loss(engine, step))
        engine.step()
        with site.gathered(list(model.parameters())), torch.no_grad():
            for mean, param in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(param, 0.2)
    site.models.append(average)


@loop
def edited_by_rank_0(site: Site) -> None:
    model = Net()
    engine = site.start(model)
    for step in range(STEPS):
        engine.backward(site.loss(engine, step))
        engine.step()
        with site.gathered(list(model.b.parameters()), 0), torch.no_grad():
            if site.rank == 0:
                model.b.weight.clamp_(-0.2, 0.2)


@loop
def two_engines(site: Site) -> None:
    maker, critic = site.start(Net(0)), site.start(Net(1))
    for step in range(STEPS):
        fake = maker(site.x(step))
        critic.backward(critic(site.x(step + 10)).square().mean() - critic(fake.detach()).sigmoid().mean())
        critic.step()
        maker.backward(critic(maker(site.x(step))).sigmoid().mean() + fake.square().mean())
        maker.step()
        critic.zero_grad()


@loop
def frozen_body(site: Site) -> None:
    model = Net()
    model.a.requires_grad_(False)
    engine = site.start(model)
    for step in range(STEPS):
        engine.backward(site.loss(engine, step))
        engine.step()


@loop
def module_called(site: Site) -> None:
    """The model itself is called, and the engine gets the loss."""
    model = Net()
    engine = site.start(model)
    for step in range(STEPS):
        out = engine.module(site.x(step)) if site.way != "facade" or site.stage else engine(site.x(step))
        engine.backward(out.square().mean())
        engine.step()


@loop
def policy_epochs(site: Site) -> None:
    engine = site.start(Net())
    for step in range(2):
        x = site.x(step)
        with torch.no_grad():
            old = engine(x).log_softmax(1)
        for _ in range(3):
            ratio = (engine(x).log_softmax(1) - old).exp()[:, 0]
            engine.backward(-torch.min(ratio * x[:, 0], ratio.clamp(0.8, 1.2) * x[:, 0]).mean())
            engine.step()


@loop
def preference(site: Site) -> None:
    model = Net()
    reference = copy.deepcopy(model).requires_grad_(False)
    engine = site.start(model, lambda params: torch.optim.AdamW(params, lr=1e-6))
    for step in range(STEPS):
        good, bad = site.x(step), site.x(step + 50)
        margin = engine(good)[:, 0] - reference(good)[:, 0] - (engine(bad)[:, 0] - reference(bad)[:, 0])
        engine.backward(-functional.logsigmoid(0.1 * margin).mean() * 100)
        engine.step()


@loop
def penalty_on_the_input(site: Site) -> None:
    engine = site.start(Net(), accumulation=2)
    for step in range(STEPS):
        x = site.x(step).requires_grad_()
        out = engine(x)
        (grad,) = torch.autograd.grad(out.tanh().sum(), x, create_graph=True)
        engine.backward(out.square().mean() + grad.square().mean())
        engine.step()


CASES = [(name, way, stage) for name in LOOPS for way in ("engine", "facade") for stage in range(4)]
DRAWN = set(random.Random(55).sample(CASES, 4))
MARKED = [
    pytest.param(*case, marks=() if case in DRAWN else pytest.mark.slow, id="-".join(map(str, case))) for case in CASES
]


def check(name: str, way: str, stage: int, rank: int = 0, size: int = 1) -> None:
    plain, site = Site("plain"), Site(way, stage, rank, size)
    LOOPS[name](plain)
    expected, numbers = plain.result()
    LOOPS[name](site)
    found, logged = site.result()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=3e-6)
    assert logged == pytest.approx(numbers, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("name", "way", "stage"), MARKED)
def test_loops_around_an_engine_on_one_rank(name: str, way: str, stage: int) -> None:
    check(name, way, stage)


@pytest.mark.parametrize(("name", "way", "stage"), MARKED)
@world(2)
def test_loops_around_an_engine_on_two_ranks(name: str, way: str, stage: int) -> None:
    check(name, way, stage, dist.get_rank(), 2)
