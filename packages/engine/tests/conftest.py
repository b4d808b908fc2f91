"""Small models and data that several test files train."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Regression(nn.Module):
    """Two linear layers; forward(x, y) is the mean squared error."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(width, 8)
        self.second = nn.Linear(8, 1)

    def predict(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.predict(x) - y).square().mean()


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """`count` samples (x [width], y [1]) from one seed."""

    def __init__(self, count: int = 48, width: int = 6) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, width, generator=generator)
        self.y = self.x.sum(1, keepdim=True).sin()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


@pytest.fixture
def make_model() -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(11)
        return Regression()

    return make


@pytest.fixture
def rows() -> Rows:
    return Rows()


@pytest.fixture
def config() -> Callable[..., dict[str, Any]]:
    def make(**changes: Any) -> dict[str, Any]:
        return {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        } | changes

    return make


@pytest.fixture
def written(tmp_path: Path) -> Callable[[Any], Path]:
    def write(content: Any) -> Path:
        path = tmp_path / "config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write
