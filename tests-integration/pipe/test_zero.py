"""Pipelines and ZeRO together: losses, norms and parameters are those of one process, at every stage of both."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import ds_pipe
import ds_zero
from ds_pipe import LayerSpec, TiedLayerSpec
from ds_testing import world

VOCAB, WIDTH = 11, 8
CLIP = 0.05


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.3)

    def forward(self, tokens):
        return F.embedding(tokens, self.weight)


def layers(tied):
    blocks = [LayerSpec(Block) for _ in range(6)]
    if not tied:
        return [LayerSpec(Words), *blocks, LayerSpec(nn.Linear, WIDTH, VOCAB, bias=False)]
    head = TiedLayerSpec("words", Words, forward_fn=lambda words, x: F.linear(x, words.weight))
    return [TiedLayerSpec("words", Words), *blocks, head]


def loss_fn(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def data(step, copy, micros):
    generator = torch.Generator().manual_seed(100 * step + copy)
    return [tuple(torch.randint(VOCAB, (2, 5), generator=generator) for _ in range(2)) for _ in range(micros)]


def single(tied, copies, micros, steps):
    """Parameters by name, norms and losses of one process on all the data."""
    uses, named, words = [], {}, None
    for index, layer in enumerate(layers(tied)):
        torch.manual_seed(1234 + index)
        module = words if words is not None and isinstance(layer, TiedLayerSpec) else layer.build()
        forward = getattr(layer, "forward_fn", None)
        if isinstance(layer, TiedLayerSpec):
            words = module
        prefix = f"tied_modules.{layer.key}" if isinstance(layer, TiedLayerSpec) else str(index)
        named |= {f"{prefix}.{n}": p for n, p in module.named_parameters()}
        uses.append(module if forward is None else lambda x, m=module, f=forward: f(m, x))
    optimizer = torch.optim.AdamW(list(named.values()), lr=1e-2)
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for copy in range(copies):
            for tokens, labels in data(step, copy, micros):
                x = tokens
                for use in uses:
                    x = use(x)
                loss = loss_fn(x, labels) / (copies * micros)
                loss.backward()
                total += float(loss.detach())
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(list(named.values()), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return named, losses, norms


def check(stage, *, tied=False, schedule="1f1b", stages=2, micros=4, every=0, steps=3):
    model = ds_pipe.PipelineModule(
        layers(tied),
        num_stages=stages,
        loss_fn=loss_fn,
        seed_layers=True,
        partition_method="uniform",
        schedule=schedule,
        activation_checkpoint_interval=every,
    )
    places = model.places
    optimizer = ds_zero.shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        stage=stage,
        group=places.data,
        norm=places.world,
        clip=CLIP,
    )
    step = ds_pipe.pipeline(model, micros)
    step.reduce_with(optimizer, every_backward=stage >= 2)
    named, losses, norms = single(tied, places.data.size, micros, steps)
    for number in range(steps):
        loss = step(data(number, places.data.rank, micros))
        optimizer.step()
        optimizer.zero_grad()
        assert abs(float(loss) - losses[number]) <= 1e-6 * losses[number]
        assert abs(optimizer.last.norm - norms[number]) <= 1e-5 * norms[number]
    step.close()
    optimizer.close()
    for name, param in model.staged.named_logical():
        wanted = named[name].detach()
        error = (param.detach() - wanted).norm() / wanted.norm()
        assert error <= 1e-5, f"{name} at stage {stage}, {schedule}, tied {tied}: {error}"


SCHEDULES = ["1f1b", "interleaved", "zb-h1", "zbv", "dualpipe-v"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2)
def test_two_stages(stage):
    for tied, schedule in ((False, "1f1b"), (True, "1f1b"), (True, "zb-h1"), (False, "zbv")):
        check(stage, tied=tied, schedule=schedule)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(4)
def test_two_stages_on_four_ranks(stage):
    for tied, schedule, every in ((True, "1f1b", 0), (True, "zb-h1", 2), (True, "interleaved", 0), (True, "zbv", 0)):
        check(stage, tied=tied, schedule=schedule, every=every)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
@world(4, timeout=600)
def test_grid(stage, schedule):
    assert dist.get_world_size() == 4
    for tied, micros, every in itertools.product((False, True), (2, 4, 5), (0, 1)):
        check(stage, tied=tied, schedule=schedule, micros=micros, every=every)
