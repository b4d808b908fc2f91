"""A small model with experts, batches of every kind, and the answer of a dense loop over experts in one process."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from ds_moe import GateRule, MoE, NoiseStream, gate

WIDTH, EXPERTS = 8, 8


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    """A linear, experts, a linear; the balance loss counts for a hundredth."""

    def __init__(self, ep_size: int, k: int, drop: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.moe = MoE(
            WIDTH, Mlp(), EXPERTS, ep_size, k, capacity_factor=0.7, min_capacity=1, drop_tokens=drop,
            use_rts=False, top2_2nd_expert_sampling=False,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out, loss, _ = self.moe(self.first(x))
        return self.last(out).square().sum() / 10 + 0.01 * loss


@dataclass(frozen=True)
class Bench:
    """`kind`: even, uneven (tokens of no common divisor), none (ranks without tokens), one (an expert takes all), few (most get nothing)."""

    dtype: torch.dtype = torch.float64

    def model(self, ep_size: int = 1, rank: int = 0, k: int = 1, drop: bool = False, kind: str = "even") -> Net:
        """The same logical model for every ep_size; `rank` in the expert group."""
        net = Net(ep_size, k, drop).to(self.dtype)
        local = EXPERTS // ep_size
        with torch.no_grad():
            for name, param in net.named_parameters():
                number = name.split("deepspeed_experts.")[1].split(".")[0] if "deepspeed_experts" in name else "0"
                logical = name.replace(f"deepspeed_experts.{number}.", f"{rank * local + int(number)}.")
                seed = sum(ord(c) * 31**i for i, c in enumerate(logical)) % 2**31
                param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)) * 0.4)
            if kind in ("one", "few"):
                net.first.bias.copy_(torch.eye(WIDTH)[0] * 30)  # tokens have one large feature, which chooses
                reach = 1 if kind == "one" else max(2, k)
                net.moe.deepspeed_moe.gate.wg.weight[:, 0] = torch.where(torch.arange(EXPERTS) < reach, 3.0, -3.0)
                if kind == "one":
                    net.moe.deepspeed_moe.gate.wg.weight[1:, 0] -= torch.arange(EXPERTS - 1)
        return net

    def batch(self, rank: int, kind: str = "even", step: int = 0) -> Tensor:
        tokens = {"even": 16, "uneven": 7 + 6 * rank, "none": 9 if rank == 0 else 0}.get(kind, 12)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return torch.randn(tokens, WIDTH, generator=generator, dtype=self.dtype)

    def dense(self, net: Net, x: Tensor) -> Tensor:
        """The loss of `net`, which has all experts, by a loop over them in which each sees every token."""
        layer, hidden = net.moe.deepspeed_moe, net.first(x)
        rule: GateRule = layer.gate.rule
        routed = gate(nn.functional.linear(hidden, layer.gate.wg.weight), rule, NoiseStream("dense"))
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(layer.experts.deepspeed_experts):
            weight = (routed.weights * (routed.experts == number)).sum(1)
            out = out + expert(hidden) * weight[:, None]
        return net.last(out).square().sum() / 10 + 0.01 * routed.loss

    def logical(self, named: dict[str, Tensor], rank: int, ep_size: int) -> dict[str, Tensor]:
        """Names with experts' numbers among all of them."""
        out, local = {}, EXPERTS // ep_size
        for name, value in named.items():
            parts = name.split(".")
            if "deepspeed_experts" in parts:
                at = parts.index("deepspeed_experts") + 1
                parts[at] = str(int(parts[at]) + rank * local)
            out[".".join(parts)] = value
        return out

    def close(self, found: dict[str, Tensor], wanted: dict[str, Tensor], bound: float = 1e-6) -> None:
        for name, value in found.items():
            error = float((value - wanted[name]).abs().max()) if value.numel() else 0.0
            assert error <= bound, f"{name} off by {error}"


@pytest.fixture
def bench() -> Bench:
    return Bench()
