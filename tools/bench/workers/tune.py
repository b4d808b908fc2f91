"""A training script like any other, for the bench of ds tune: models of four forms, and data drawn from a seed.

python workers/tune.py --form deep --deepspeed_config FILE
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from steps import engine_step
from torch import Tensor, nn
from torch.nn import functional as F

import ds_engine

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "docs" / "examples" / "train_gpt"))
from model import GPT, GPTConfig

from ds_moe import MoE


class Routed(nn.Module):
    """Attention-free layers with experts: what routing costs, and parameters that few tokens use."""

    def __init__(self, layers: int, width: int, experts: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(
            MoE(width, nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)), experts, k=2)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, data: Tensor) -> Tensor:
        x = self.tokens(data[:, :-1])
        for block in self.blocks:
            x = x + block(x)[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), data[:, 1:].flatten())


FORMS = {
    "quickstart": lambda: GPT(GPTConfig()),
    "deep": lambda: GPT(GPTConfig(layers=12, heads=4, width=128)),
    "wide": lambda: GPT(GPTConfig(layers=2, heads=8, width=768)),
    "experts": lambda: Routed(2, 128, 8),
}


def main() -> None:
    parser = ds_engine.add_config_arguments(argparse.ArgumentParser(description=__doc__))
    parser.add_argument("--form", choices=FORMS, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    engine, *_ = ds_engine.initialize(args=args, model=FORMS[args.form]())
    generator = torch.Generator().manual_seed(engine.mesh.rank)
    step = engine_step(engine)
    while True:
        step(torch.randint(256, (engine.plan.batch.micro, 129), generator=generator))


if __name__ == "__main__":
    main()
