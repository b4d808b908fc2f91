"""One rank that trains on a device: the same losses as a plain loop there, whatever is sharded, offloaded or saved.

On the CPU these run by default; with CUDA under `nox -s gpu`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_accel
import ds_engine

VOCABULARY, WIDTH, LENGTH = 96, 64, 32
HOST = {"device": "cpu", "pin_memory": True}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    kind: str = request.param
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    ds_accel.set_accelerator(ds_accel.detect({"DS_ACCELERATOR": kind}).accelerator)
    yield torch.device(kind)
    ds_accel.set_accelerator(None)


class Block(nn.Module):
    """Attention and a feed-forward part, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Language(nn.Module):
    """Three blocks; the head is the embedding. forward(tokens [B, T]) is the mean loss of the next tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x)).float()
        return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def make_model() -> Language:
    torch.manual_seed(3)
    return Language()


def tokens(step: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (4, 1), generator=generator)
    return ((start + torch.arange(LENGTH) * 5) % VOCABULARY).to(device)


def settings(stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-6, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, **zero},
    }


def run(engine: ds_engine.Engine, device: torch.device, first: int = 0, steps: int = 5) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        total = 0.0
        for part in range(2):
            loss = engine(tokens(2 * step + part, device))
            engine.backward(loss)
            engine.step()
            total += loss.item() / 2
        losses.append(total)
    return losses


def train(config: dict[str, Any], device: torch.device, steps: int = 5) -> list[float]:
    engine = ds_engine.initialize(model=make_model(), config=config)[0]
    losses = run(engine, device, steps=steps)
    engine.close()
    return losses


def plain(device: torch.device, steps: int = 5, dtype: torch.dtype = torch.float32) -> list[float]:
    """The loop that everyone knows; with another dtype, operations under autocast."""
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6, weight_decay=0.01)
    losses = []
    for step in range(steps):
        total = 0.0
        for part in range(2):
            with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
                loss = model(tokens(2 * step + part, device))
            (loss / 2).backward()
            total += loss.item() / 2
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_is_the_plain_loop(device: torch.device, stage: int) -> None:
    assert train(settings(stage), device) == pytest.approx(plain(device), rel=3e-6)


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 2, "offload_optimizer": HOST},
        {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
        {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
    ],
    ids=["optimizer", "weights", "files"],
)
def test_offloaded_training_is_the_plain_loop(device: torch.device, zero: dict[str, Any], tmp_path: Path) -> None:
    zero = copy.deepcopy(zero)
    for part in ("offload_optimizer", "offload_param"):
        if zero.get(part, {}).get("device") == "nvme":
            zero[part]["nvme_path"] = str(tmp_path)
    assert train(settings(**zero), device) == pytest.approx(plain(device), rel=3e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_low_precision_trains(device: torch.device, stage: int, kind: str) -> None:
    """Weights of two bytes on masters of four: near to a loop under autocast, and learning."""
    precision = {"enabled": True, **({"initial_scale_power": 10} if kind == "fp16" else {})}
    losses = train({**settings(stage), kind: precision}, device, steps=10)
    expected = plain(device, 10, torch.bfloat16 if kind == "bf16" else torch.float16)
    assert losses == pytest.approx(expected, rel=3e-2)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(("saved", "loaded"), [(1, 3), (3, 0)])
def test_training_goes_on_from_a_checkpoint(device: torch.device, tmp_path: Path, saved: int, loaded: int) -> None:
    first = ds_engine.initialize(model=make_model(), config=settings(saved))[0]
    run(first, device, steps=3)
    first.save_checkpoint(str(tmp_path))
    expected = run(first, device, first=3, steps=3)
    first.close()
    second = ds_engine.initialize(model=make_model(), config=settings(loaded))[0]
    second.load_checkpoint(str(tmp_path))
    assert run(second, device, first=3, steps=3) == pytest.approx(expected, rel=3e-6)
    second.close()
