"""Every way into tensor parallelism gives one process's numbers, whole weights under their own names, and a run that goes on without it.

Two ranks that share every layer, batch 8 of microbatches of 4: one data rank, two accumulation steps.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_config.errors import set_place
from ds_testing import world

WIDTH, HEADS, KEYS, WORDS = 16, 4, 2, 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.num_heads, self.num_key_value_heads = WIDTH // HEADS, HEADS, KEYS
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, KEYS * self.head_dim) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        return self.o_proj(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(WIDTH, 2 * 22), nn.Linear(22, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(functional.silu(gate) * up)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.self_attn, self.mlp = nn.LayerNorm(WIDTH), Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x + self.self_attn(self.norm(x)))


OWN = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {"layers.*.self_attn.o_proj": "rowwise"}


class Decoder(nn.Module):
    """Of a known family (GLM's: separate heads, gate and up in one weight), or of none with a plan of its own."""

    def __init__(self, plan: dict[str, str] | None = None) -> None:
        super().__init__()
        torch.manual_seed(11)
        kind = "glm" if plan is None else "of_ours"
        self.config = SimpleNamespace(model_type=kind, to_dict=lambda: {"model_type": kind}, base_model_tp_plan=plan)
        self.embed_tokens, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.lm_head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


SECTION = {"tensor_parallel": {"autotp_size": 2}}


def mpu() -> SimpleNamespace:
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    alone = [torch.distributed.new_group([other]) for other in range(2)][rank]
    of_model = {"world_size": 2, "rank": rank, "group": group}
    of_data = {"world_size": 1, "rank": 0, "group": alone}
    found = {f"get_model_parallel_{key}": value for key, value in of_model.items()}
    found |= {f"get_data_parallel_{key}": value for key, value in of_data.items()}
    return SimpleNamespace(**{name: lambda value=value: value for name, value in found.items()})


def noted(model: nn.Module) -> nn.Module:
    return deepspeed.tp_model_init(model, tp_size=2, dtype=torch.float32)


PATHS: dict[str, Callable[[dict[str, Any]], tuple[nn.Module, dict[str, Any], Any]]] = {
    "section": lambda config: (Decoder(), config | SECTION, None),
    "tp_model_init": lambda config: (noted(Decoder()), config, None),
    "both": lambda config: (noted(Decoder()), config | SECTION, None),
    "mpu": lambda config: (Decoder(), config | SECTION, mpu()),
    "mpu and nothing to cut": lambda config: (Decoder(), config, mpu()),
    "plan": lambda config: (Decoder(OWN), config | SECTION, None),
}
ROWS = list(itertools.product(PATHS, range(4), (0.0, 0.3)))
QUICK = {
    ("section", 1, 0.3),
    ("tp_model_init", 3, 0.3),
    ("both", 2, 0.0),
    ("mpu", 0, 0.3),
    ("mpu and nothing to cut", 1, 0.0),
    ("plan", 3, 0.0),
}
TABLE = [pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow) for row in ROWS]


def batches() -> Tensor:
    """[6 microbatches, 4 samples, 7 words]."""
    return torch.randint(0, WORDS, (6, 4, 7), generator=torch.Generator().manual_seed(5))


def alone(clip: float) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Losses by microbatch, weights after each of the three steps."""
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.01)
    losses, states = [], []
    for number, batch in enumerate(batches()):
        loss = model(batch)
        (loss / 2).backward()
        losses.append(loss.item())
        if number % 2:
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            states.append(copy.deepcopy(dict(model.state_dict())))
    return losses, states


def configuration(stage: int, clip: float) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-3, "weight_decay": 0.01}},
        "gradient_clipping": clip,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 20,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4, msg=lambda said, n=name: f"{n}: {said}")


@pytest.mark.parametrize(("path", "stage", "clip"), TABLE)
@world(2)
def test_ways_into_tensor_parallelism(path: str, stage: int, clip: float, tmp_path: Path) -> None:
    losses, states = alone(clip)
    model, config, groups = PATHS[path](configuration(stage, clip))
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=groups)
    assert "tensor 2" in str(engine.plan)
    assert (engine.mp_world_size, engine.dp_world_size, engine.gradient_accumulation_steps()) == (2, 1, 2)
    held = sum(param.numel() for param in model.parameters())
    total = sum(param.numel() for param in Decoder().parameters())
    assert (held == total) == (path == "mpu and nothing to cut")
    found = []
    for batch in batches()[:4]:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    rank = torch.distributed.get_rank()
    whole = engine._consolidated_16bit_state_dict()
    if rank == 0:
        same(whole, states[1])
    assert (whole is None) == (rank == 1)
    engine.save_16bit_model(str(tmp_path), "whole.bin")
    same(torch.load(tmp_path / "whole.bin", weights_only=True), states[1])
    whole = engine.module_state_dict()
    if rank == 0:
        same(whole, states[1])
    engine.save_checkpoint(str(tmp_path), "two")
    engine.destroy()

    model = Decoder()
    other, *_ = deepspeed.initialize(model=model, config=configuration((stage + 1) % 4, clip))
    assert (other.mp_world_size, other.dp_world_size) == (1, 2)
    other.load_checkpoint(str(tmp_path), "two")
    loss = other(batches()[4 + rank])
    other.backward(loss)
    other.step()
    torch.distributed.all_reduce(mean := loss.detach().clone())
    torch.testing.assert_close([*found, mean.item() / 2], [*losses[:4], sum(losses[4:]) / 2], atol=1e-5, rtol=1e-5)
    other.destroy()
    same(dict(model.state_dict()), states[2])
    set_place("")


@world(2)
def test_a_batch_that_counts_ranks_which_share_it() -> None:
    """What DeepSpeed's own arithmetic says, 8 = 4 x 1 x 2 ranks: one update a microbatch, as asked, and one line about it."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("DeepSpeed").addHandler(handler)
    for more, wanted in (({"gradient_accumulation_steps": 1}, (4, 4, 1)), ({}, (8, 4, 2))):
        told.clear()
        engine, *_ = deepspeed.initialize(model=Decoder(), config=configuration(1, 0.0) | SECTION | more)
        assert engine.get_batch_info() == wanted
        lines = sum("tensor-parallel ranks share their samples" in line for line in told)
        assert lines == (torch.distributed.get_rank() == 0)
        engine.destroy()
    logging.getLogger("DeepSpeed").removeHandler(handler)
    set_place("")
