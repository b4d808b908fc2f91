"""Noise for routers, drawn so that a recomputed forward draws it again.

A stream has a name. Each draw takes 63 bits from the CPU's global generator, which activation checkpointing puts back before it
computes a block again, and mixes them with the name: so two layers never share numbers, and a block that runs twice routes alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_accel import derive_seed

__all__ = ["NoiseStream", "gumbel", "jitter"]


class NoiseStream:
    """A named source of random numbers.

    Args:
        name: What the numbers are for (`"layers.3.moe.gate"`).
        generator: Draw from this one instead, and take nothing from the global generator: for tests and replays.
    """

    def __init__(self, name: str, generator: torch.Generator | None = None) -> None:
        self.name, self._generator = name, generator

    def uniform(self, shape: torch.Size | tuple[int, ...], device: torch.device) -> Tensor:
        """Draw fp32 numbers in [0, 1).

        Takes one integer from the CPU's global generator; waits for no device.
        """
        generator = self._generator
        if generator is None:
            base = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
            generator = torch.Generator(device=device)
            generator.manual_seed(derive_seed(base, self.name))
        return torch.rand(shape, generator=generator, device=generator.device).to(device)


def jitter(x: Tensor, stream: NoiseStream, epsilon: float = 1e-2) -> Tensor:
    """Multiply x by numbers from U(1 - epsilon, 1 + epsilon) (Fedus et al. 2021). Float32."""
    x = x.float()
    return x if epsilon == 0 else x * stream.uniform(x.shape, x.device).mul_(2 * epsilon).add_(1 - epsilon)


def gumbel(shape: torch.Size | tuple[int, ...], stream: NoiseStream, device: torch.device) -> Tensor:
    """Draw Gumbel(0, 1) noise in fp32: -log(-log(u)).

    An argmax of logits plus this noise is a draw from their softmax.
    """
    tiny = torch.finfo(torch.float32).tiny
    waiting = -torch.log(stream.uniform(shape, device).clamp_(min=tiny))
    return -torch.log(waiting.clamp_(min=tiny))
