"""A small model with every kind of layer, and the sections of all techniques."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.num_heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.view(*y.shape[:2], self.num_heads, -1).transpose(1, 2)

        q, k, v = (split(layer(x)) for layer in (self.query, self.key, self.value))
        mixed = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(16, 20, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 3)
        self.last = nn.Linear(4 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.norm(self.first(x)))
        return self.last(nn.functional.adaptive_avg_pool2d(self.second(x).relu(), 2).flatten(1))


def technique(params: dict[str, Any], modules: list[str], related: Any = None, **shared: Any) -> dict[str, Any]:
    group = {"params": params, "modules": modules}
    if related is not None:
        group["related_modules"] = related
    return {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"some": group}}


def section(**techniques: Any) -> dict[str, Any]:
    return {"compression_training": techniques}


WEIGHTS = technique({"start_bits": 8, "target_bits": 4, "quantization_period": 1}, ["*"], quantize_groups=4)
SECTIONS: dict[str, dict[str, Any]] = {
    "weights": section(weight_quantization=WEIGHTS),
    "stochastic": section(weight_quantization=technique(
        {"start_bits": 4, "target_bits": 4}, ["blocks"], rounding="stochastic", quantization_type="asymmetric")),
    "mixed": section(weight_quantization=technique(
        {"start_bits": 6, "target_bits": 3, "quantization_period": 2}, ["blocks"], schedule_offset=1,
        fp16_mixed_quantize={"enabled": True, "quantize_change_ratio": 0.3})),
    "ternary": section(weight_quantization=technique({"start_bits": 2, "target_bits": 1}, ["up", "down"])),
    "inputs": section(activation_quantization=technique({"bits": 8}, ["blocks"], schedule_offset=1)),
    "static": section(activation_quantization=technique(
        {"bits": 8}, ["blocks"], schedule_offset=0, range_calibration="static", quantization_type="asymmetric")),
    "sparse": section(sparse_pruning=technique({"dense_ratio": 0.4}, ["up", "down"], schedule_offset=1, method="l1")),
    "learnt": section(sparse_pruning=technique({"dense_ratio": 0.4}, ["up", "down"], schedule_offset=0, method="topk")),
    "snip": section(sparse_pruning=technique(
        {"dense_ratio": 0.3}, ["up", "down"], schedule_offset=1, schedule_offset_end=4, schedule_offset_stride=1,
        method="snip_momentum", block_pattern="4x1")),
    "rows": section(row_pruning=technique(
        {"dense_ratio": 0.5}, ["up"], [["down"]], schedule_offset=1, method="l1")),
    "heads": section(head_pruning=technique(
        {"dense_ratio": 0.5}, ["attention.output"], [["attention.query", "attention.key", "attention.value"]],
        schedule_offset=0, method="topk", num_heads=4)),
}  # fmt: skip
ALL = section(**{name: part for key in ("weights", "inputs", "sparse", "rows", "heads")
                 for name, part in SECTIONS[key]["compression_training"].items()})  # fmt: skip
SECTIONS["all"] = ALL


@pytest.fixture
def small() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 20, (4, 7), generator=torch.Generator().manual_seed(3))
