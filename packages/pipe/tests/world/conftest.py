"""Small models as lists of layers, and what one process makes of each."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import ds_pipe
from ds_pipe import LayerSpec, PipelineModule, TiedLayerSpec

VOCAB, WIDTH, LAYERS = 13, 8, 9


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(16, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.place.weight[: tokens.shape[1]]


class Block(nn.Module):
    """With a parameter that no submodule owns, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH, bias=False)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain + self.down(F.gelu(self.up(self.norm(x))))
        return x + torch.tanh(self.twice(self.twice(x)))


class Attention(nn.Module):
    """torch's attention uses the weights of a submodule without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x, x, x, need_weights=False)[0]


class Carry(nn.Module):
    """Makes a value of many kinds: the first activation goes to the last layer, past all others."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        mask = torch.ones(x.shape[1], dtype=torch.bool)
        return {"x": x, "first": x, "rest": [None, True, 3, 0.5, "word"], "mask": mask, "none": ()}


class InCarry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        assert value["rest"] == [None, True, 3, 0.5, "word"]
        assert value["mask"].dtype == torch.bool
        x = torch.where(value["mask"][None, :, None], self.block(value["x"]), value["x"])
        return {**value, "x": x}


class Land(nn.Module):
    def forward(self, value: dict[str, Any]) -> Tensor:
        return value["x"] * value["rest"][3] + value["first"]


class Aside(nn.Module):
    """Returns a scalar beside its output, which the next layer ignores: an auxiliary loss that nobody adds."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, value: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x = self.block(value[0] if isinstance(value, tuple) else value)
        return x, x.pow(2).mean()


class WithoutAside(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[0]


class InPlace(nn.Module):
    """Begins by changing its input, which the layer before it did not keep for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.linear = nn.LeakyReLU(0.3, inplace=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor | dict[str, Any]) -> Any:
        if isinstance(x, dict):
            return {**x, "x": self.linear(self.act(x["x"]))}
        return self.linear(self.act(x.mul_(1.5)))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.3), nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Wrapped(nn.Module):
    """Shares a parameter of its child by a property, as Megatron's embedding does."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Words()

    @property
    def weight(self) -> nn.Parameter:
        return self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens)


def as_head(words: Words | Wrapped, x: Tensor) -> Tensor:
    return F.linear(x, words.weight)


def layers(kind: str) -> list[Any]:
    """LAYERS layers or so; every one of them is seeded by its place when it is built."""
    blocks: list[Any] = [LayerSpec(Block) if i % 2 else LayerSpec(Attention) for i in range(LAYERS - 2)]
    head = LayerSpec(nn.Linear, WIDTH, VOCAB, bias=False)
    if kind == "plain":
        return [LayerSpec(Embed), *blocks, head]
    if kind == "aside":
        return [LayerSpec(Embed), *(LayerSpec(Aside) for _ in blocks), WithoutAside(), head]
    if kind == "inplace":
        return [LayerSpec(Embed), *(LayerSpec(InPlace) for _ in blocks), head]
    if kind == "inplace shared":
        return [LayerSpec(Embed), LayerSpec(nn.Linear, WIDTH, WIDTH), Carry(), LayerSpec(InPlace), Land(), head]
    if kind == "tied":
        first = TiedLayerSpec("words", Words)
        return [first, *blocks, TiedLayerSpec("words", Words, forward_fn=as_head)]
    if kind in ("tied by property", "tied unlike"):
        last = Wrapped if kind == "tied by property" else Words
        return [TiedLayerSpec("words", Wrapped), *blocks, TiedLayerSpec("words", last, forward_fn=as_head)]
    return [LayerSpec(Embed), Carry(), *(LayerSpec(InCarry) for _ in blocks[2:]), Land(), head]


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches(count: int, *, seed: int = 0, ragged: bool = False) -> list[tuple[Tensor, Tensor]]:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        shape = (rng.randint(1, 4), rng.randint(2, 9)) if ragged else (3, 6)
        found.append(tuple(torch.randint(VOCAB, shape, generator=generator) for _ in range(2)))
    return found


class Single:
    """The same layers in one process, in a plain loop."""

    def __init__(self, kind: str, device: torch.device | None = None) -> None:
        self.modules = nn.ModuleDict()
        self.tied = nn.ModuleDict()
        self.uses: list[Callable[[Any], Any]] = []
        for index, layer in enumerate(layers(kind)):
            torch.manual_seed(1234 + index)
            if isinstance(layer, TiedLayerSpec):
                if layer.key not in self.tied:
                    self.tied[layer.key] = layer.build()
                module, forward = self.tied[layer.key], layer.forward_fn
                self.uses.append(module if forward is None else lambda x, m=module, f=forward: f(m, x))
            else:
                self.modules[str(index)] = layer.build() if isinstance(layer, LayerSpec) else layer
                self.uses.append(self.modules[str(index)])
        self.modules.to(device)
        self.tied.to(device)

    def named(self) -> dict[str, nn.Parameter]:
        found = dict(self.modules.named_parameters())
        return found | {f"tied_modules.{name}": p for name, p in self.tied.named_parameters()}

    def __call__(self, x: Any) -> Any:
        for use in self.uses:
            x = use(x)
        return x

    def step(self, data: Sequence[tuple[Tensor, Tensor]]) -> float:
        total = 0.0
        for tokens, labels in data:
            loss = loss_fn(self(tokens), labels)
            (loss / len(data)).backward()
            total += float(loss.detach())
        return total / len(data)


class Bench:
    """What the tests share."""

    batches = staticmethod(batches)
    layers = staticmethod(layers)
    loss_fn = staticmethod(loss_fn)
    Single = Single

    @staticmethod
    def cut(kind: str, **options: Any) -> PipelineModule:
        options = {"num_stages": dist.get_world_size(), "seed_layers": True, "partition_method": "uniform"} | options
        return PipelineModule(layers(kind), loss_fn=loss_fn, **options)

    @staticmethod
    def check(
        kind: str,
        micros: int,
        *,
        ragged: bool = False,
        steps: int = 2,
        costs: ds_pipe.Costs | None = None,
        device: torch.device | None = None,
        **options: Any,
    ) -> None:
        """Losses and gradients of some steps are those of one process. With costs, of the schedule that is made from them."""
        single, cut = Single(kind, device), Bench.cut(kind, **options).to(device)
        bound = 1e-5 if device is not None and device.type != "cpu" else 1e-6
        step = ds_pipe.pipeline(cut, micros, costs=costs)
        copies = cut.places.data
        for number in range(steps):
            data = [batches(micros, seed=10 * number + d, ragged=ragged) for d in range(copies.size)]
            data = [[(tokens.to(device), labels.to(device)) for tokens, labels in part] for part in data]
            for p in single.named().values():
                p.grad = None
            cut.zero_grad()
            expected = sum(single.step(part) for part in data) / copies.size
            found = step(data[copies.rank])
            assert abs(found.item() - expected) <= bound * expected, (found, expected)
            named = single.named()
            for name, param in cut.staged.named_logical():
                if name not in named or named[name].grad is None:  # the second use of a tied layer has its own `scale`
                    assert param.grad is None or not param.grad.any()
                    continue
                wanted = named[name].grad
                wanted = wanted / copies.size
                error = (param.grad - wanted).norm() / wanted.norm().clamp_min(1e-12)
                assert error <= bound, f"{kind} {options} {name}: {error}"
        step.close()


@pytest.fixture
def bench() -> type[Bench]:
    return Bench
