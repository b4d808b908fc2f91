"""A small GPT over bytes, in plain PyTorch: nothing here knows that it may be trained on many ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "GPTConfig", "generate"]

BYTES = 256


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of the model; the defaults give 6.3 million parameters."""

    layers: int = 5
    heads: int = 5
    width: int = 320
    context: int = 128


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then a feed-forward layer four times as wide."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Predicts the next byte. Input and output embeddings are tied."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(BYTES, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, BYTES, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5 if residual else 0.02)

    def forward(self, data: Tensor, loss: bool = True) -> Tensor:
        """Predict the next byte.

        Args:
            data: [batch, time], int64. With `loss` the last byte is only a target, so time is context + 1.
            loss: Whether to return the mean loss in nats per byte (scalar), or logits ([batch, time, 256]).
        """
        given = data[:, :-1] if loss else data
        x = self.tokens(given) + self.positions(torch.arange(given.shape[1], device=data.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), data[:, 1:].flatten()) if loss else logits


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, count: int, *, context: int = 128, seed: int = 0) -> bytes:
    """Continue `prompt` by `count` bytes. With several ranks, call it on all of them: sharded models gather."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.tensor([list(prompt)], dtype=torch.long)
    for _ in range(count):
        last = model(data[:, -context:], loss=False)[0, -1].float().cpu() / 0.7  # a little sharper than the model is
        drawn = torch.multinomial(last.softmax(0), 1, generator=generator)
        data = torch.cat([data, drawn[None]], dim=1)
    return bytes(data[0].tolist())
