"""One engine of the experts benchmark on one rank: `moe.py ENGINE[@BACKEND] CONFIG`. It takes turns, see `turns.py`.

A step is the forward and backward of one layer. All engines have the same weights and tokens; the first line says the loss.
"""

from __future__ import annotations

import importlib
import math
import sys

import torch
import torch.distributed as dist
from rank import begin, take_turns
from torch import Tensor, nn

# tokens of a rank, width, inner width, experts, choices, skewed
CONFIGS = {
    "zipf": (1024, 256, 128, 64, 2, True),
    "balanced": (1024, 512, 1024, 8, 2, False),
    "small": (256, 256, 128, 64, 2, True),
}


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


def fill(model: nn.Module, config: tuple, rank: int, size: int) -> None:
    """The same logical weights for every engine and cut; the router prefers experts as Zipf's law says, or none."""
    experts, skewed = config[3], config[5]
    local = experts // size
    with torch.no_grad():
        for name, param in model.named_parameters():
            parts = name.split(".")
            if "deepspeed_experts" in parts:
                at = parts.index("deepspeed_experts") + 1
                parts[at] = str(int(parts[at]) + rank * local)
            seed = sum(ord(c) * 31**i for i, c in enumerate(".".join(parts[-4:]))) % 2**31
            scale = 1 / math.sqrt(param.shape[-1])
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)) * scale)
            if name.endswith("wg.weight"):
                param[:, 0] = -torch.log(torch.arange(1.0, experts + 1)) if skewed else 0.0


def batch(config: tuple, rank: int, step: int) -> Tensor:
    tokens, width, *_ = config
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(97 * step + rank))
    x[:, 0] = 1.0
    return x.requires_grad_()


def layer_of(config: tuple, engine: str) -> nn.Module:
    """Our layer or DeepSpeed's, in its place."""
    _, width, inner, experts, k, _ = config
    rank, size = dist.get_rank(), dist.get_world_size()
    theirs = engine.startswith("deepspeed")
    kind = importlib.import_module("deepspeed.moe.layer" if theirs else "ds_moe").MoE
    drop = engine.endswith("_drop")
    layer = kind(width, Mlp(width, inner), experts, size, k, drop_tokens=drop, top2_2nd_expert_sampling=False)
    fill(layer, config, rank, size)
    if theirs:
        layer.set_deepspeed_parallelism()
    else:
        importlib.import_module("ds_moe").place_experts(layer)
    return layer


class Loop(nn.Module):
    """What one would write by hand for one rank: sort, a slice for each expert, gather back, weigh and add."""

    def __init__(self, layer: nn.Module, experts: int) -> None:
        super().__init__()
        self.gate, self.experts, self.count = (
            layer.deepspeed_moe.gate.wg,
            layer.deepspeed_moe.experts.deepspeed_experts,
            experts,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.gate(x).softmax(-1)
        top, chosen = scores.topk(2)
        weights = top / top.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.count)
        outs = [expert(part) for expert, part in zip(self.experts, x[order // 2].split(counts.tolist()), strict=True)]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel())
        out = (torch.cat(outs)[back].view(*chosen.shape, -1) * weights[..., None]).sum(1)
        first = nn.functional.one_hot(chosen[:, 0], self.count).float()
        return out, (scores.mean(0) * first.mean(0)).sum() * self.count, counts


class Moving(nn.Module):
    """Dispatch and combine of our layer alone: experts that give back what they get."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.deepspeed_moe

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from ds_moe.dispatch import through_experts

        with torch.no_grad():
            routed = self.layer.gate(x)
            out = through_experts(x, routed, lambda rows, at: rows, self.layer.places)
        return out, routed.loss, routed.counts


class Least(nn.Module):
    """What ranks that share memory must do, had they known before which row goes where: gate, tokens to the peer, rows out of both
    ranks' memory, results to the peer, weighted sums out of both."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.gate, self.places = layer.deepspeed_moe.gate, layer.deepspeed_moe.places

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from ds_moe.shm_dispatch import make_reducer
        from ds_ops.moe_routing import sort_slots
        from ds_ops.row_ops import gather_sum

        with torch.no_grad():
            routed = self.gate(x)
            if not hasattr(self, "way"):
                choices = sort_slots(routed.experts, routed.num_experts)
                self.way = make_reducer(x, choices, self.places.expert, self.places.windows, is_sorted=False)
                self.home = self.way.home_of_choices()
            rows = self.way.of_tokens(self.way.publish(x, "least tokens")[0])
            window, _ = self.way.publish(rows, "least results")
            out = gather_sum(window.everyone, self.home, routed.weights)
        return out, routed.loss, routed.counts


class Copies(nn.Module):
    """The copies that cannot be avoided: every chosen row once to its expert, and once back, in one pass each."""

    def __init__(self, config: tuple) -> None:
        super().__init__()
        tokens, width, _, experts, k, _ = config
        self.gate = nn.Linear(width, experts, bias=False)
        self.there, self.back = torch.empty(tokens * k, width), torch.empty(tokens * k, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            scores = self.gate(x).softmax(-1)
            scores.topk(2)
            half = x.shape[0]
            for i in range(self.there.shape[0] // half):
                self.there[i * half : (i + 1) * half].copy_(x)
            self.back.copy_(self.there)
        return self.back[: x.shape[0]], scores.sum() * 0, scores


def main(name: str, which: str) -> None:
    engine, answer = begin(name)
    config, rank = CONFIGS[which], dist.get_rank()
    layer = layer_of(config, engine)
    model = {
        "loop": lambda: Loop(layer, config[3]), "moving": lambda: Moving(layer), "least": lambda: Least(layer),
        "copies": lambda: Copies(config),
    }.get(engine, lambda: layer)()  # fmt: skip

    def step(x: Tensor) -> Tensor:
        out, balance, _ = model(x)
        loss = out.square().mean() + 0.01 * balance
        if loss.requires_grad:
            loss.backward()
            model.zero_grad()
        return loss.detach()

    def tokens(i: int) -> Tensor:
        x = batches[i % 4]
        x.grad = None
        return x

    batches = [batch(config, rank, i) for i in range(4)]
    total = step(tokens(0))
    dist.all_reduce(total)
    take_turns(answer, {"losses": [float(total) / dist.get_world_size()]}, step, tokens, apart=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
