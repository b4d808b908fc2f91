"""Tensor parallelism through the engine: losses and weights of one process, at every ZeRO stage."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_engine
import ds_zero
from ds_config.errors import UnsupportedError, set_place
from ds_testing import world


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.num_heads, self.num_key_value_heads = 4, 4, 2
        self.qkv_proj, self.o_proj = nn.Linear(16, 16 + 2 * 8), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        widths = [n * self.head_dim for n in (self.num_heads, self.num_key_value_heads, self.num_key_value_heads)]
        q, k, v = (t.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for t in self.qkv_proj(x).split(widths, -1))
        k, v = (t.repeat_interleave(self.num_heads // self.num_key_value_heads, 1) for t in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(16, 2 * 22), nn.Linear(22, 16)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(functional.silu(gate) * up)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.self_attn, self.mlp = nn.LayerNorm(16), Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x + self.self_attn(self.norm(x)))


class Decoder(nn.Module):
    """Phi-3's names: fused weights in unequal parts, two key-value heads, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.config = SimpleNamespace(model_type="phi3", to_dict=lambda: {"model_type": "phi3"})
        self.embed_tokens = nn.Embedding(33, 16)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(16, 33, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(x)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def configuration(stage: int, tensor: int, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-3}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "tensor_parallel": {"autotp_size": tensor},
        **more,
    }


def batches(steps: int) -> Tensor:
    return torch.randint(0, 33, (steps, 4, 7), generator=torch.Generator().manual_seed(5))


def alone(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.0)
    losses = []
    for batch in batches(steps):
        loss = model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


def train(engine: Any, given: Tensor) -> list[float]:
    data = engine.mesh["data"]
    losses = []
    for batch in given:
        loss = engine(batch.chunk(data.size)[data.rank])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / torch.distributed.get_world_size())
    return losses


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize(("stage", "inside"), [(0, False), (1, False), (2, False), (3, False), (3, True)])
@world(4)
def test_five_steps(stage: int, inside: bool, tensor: int) -> None:
    wanted, state = alone(5)
    with ds_zero.Init(enabled=inside):
        model = Decoder()
    engine, *_ = ds_engine.initialize(model=model, config=configuration(stage, tensor))
    assert engine.mesh["tensor"].size == tensor
    found = train(engine, batches(5))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    whole = engine.full_state_dict()
    assert list(whole) == (list(state) if torch.distributed.get_rank() == 0 else [])
    for name, value in whole.items():
        torch.testing.assert_close(value, state[name], atol=1e-5, rtol=1e-4, msg=lambda said, n=name: f"{n}: {said}")
    if whole:
        assert whole["lm_head.weight"] is whole["embed_tokens.weight"]
    engine.load_full_state_dict(state)
    again = engine.full_state_dict()
    assert all(torch.equal(value, state[name]) for name, value in again.items())
    engine.load_full_state_dict({name: value.fill_(1.0) for name, value in again.items()})  # which the first rank has
    assert all(value.eq(1.0).all() for value in engine.full_state_dict().values())
    engine.load_full_state_dict(state)
    engine.close()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, state[name], atol=1e-5, rtol=1e-4, msg=lambda said, n=name: f"{n}: {said}")
    set_place("")


@world(4)
def test_a_model_that_each_rank_began_with_other_numbers_is_that_of_the_first() -> None:
    model, rank = Decoder(), torch.distributed.get_rank()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(rank)  # as without a seed
    engine, *_ = ds_engine.initialize(model=model, config=configuration(1, 4))
    torch.testing.assert_close(train(engine, batches(3)), alone(3)[0], atol=1e-5, rtol=1e-5)
    engine.close()
    set_place("")


@world(4)
def test_saved_at_one_degree_and_loaded_at_another(tmp_path: Path) -> None:
    """Tensor 2, stage 1 -> tensor 4, stage 3 -> tensor 1, stage 2: the next steps are those of one run."""
    wanted, _ = alone(6)
    given, found = batches(6), []
    for number, (stage, tensor) in enumerate([(1, 2), (3, 4), (2, 1)]):
        engine, *_ = ds_engine.initialize(model=Decoder(), config=configuration(stage, tensor))
        if number:
            engine.load_checkpoint(str(tmp_path), tag=f"at{number}")
        found += train(engine, given[2 * number : 2 * number + 2])
        engine.save_checkpoint(str(tmp_path), tag=f"at{number + 1}")
        engine.close()
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    set_place("")


class Headed(Decoder):
    """A head of its own and a loss function that can be replaced, as transformers' models have."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(16, 33, bias=False)
        self.loss_function = whole_loss
        self.widths: list[int] = []

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(x)
        self.widths.append(logits.shape[-1])
        loss: Tensor = self.loss_function(logits, ids, vocab_size=33)
        return loss


def whole_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
@world(2)
def test_a_head_that_stays_cut_by_vocabulary(stage: int) -> None:
    losses = []
    for asked in (False, True):
        model = Headed()
        section = {"autotp_size": 2, "vocab_parallel_lm_head": asked}
        engine, *_ = ds_engine.initialize(model=model, config=configuration(stage, 2, tensor_parallel=section))
        losses.append(train(engine, batches(4)))
        assert set(model.widths) == ({17, 16} & {engine.module.widths[0]} if asked else {33})
        engine.close()
        assert model.loss_function is whole_loss
    torch.testing.assert_close(losses[1], losses[0], atol=1e-5, rtol=1e-5)


@world(2)
def test_a_loss_that_nobody_can_replace_is_said_before_anything_changed() -> None:
    model = Decoder()
    names = list(model.state_dict())
    section = {"autotp_size": 2, "vocab_parallel_lm_head": True}
    with pytest.raises(UnsupportedError, match="vocab_parallel_lm_head: the loss of Decoder") as caught:
        ds_engine.initialize(model=model, config=configuration(0, 2, tensor_parallel=section))
    assert caught.value.code == "tensor-vocabulary"
    assert list(model.state_dict()) == names
    assert model.lm_head.weight.shape == (33, 16)
    more = {"autotp_size": 2, "vocab_parallel_ce_backend": "liger"}
    with pytest.raises(UnsupportedError, match="liger"):
        ds_engine.initialize(model=Decoder(), config=configuration(0, 2, tensor_parallel=more))


@pytest.mark.parametrize("stage", [0, 3])
@world(2)
def test_an_optimizer_of_whole_tensors_that_gets_parts_is_told(stage: int) -> None:
    """LAMB took the norm of each tensor rank's part, which is not what one process computes, with no word."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ds_zero.update.wrapped_optimizer")
    log.addHandler(handler)
    try:
        for kind, tensor in (("AdamW", 2), ("Lamb", 1), ("Lamb", 2)):
            optimizer = {"type": kind, "params": {"lr": 0.01}}
            config = configuration(stage, tensor, optimizer=optimizer)
            ds_engine.initialize(model=Decoder(), config=config)[0].close()
            assert len(said) == (kind == "Lamb" and tensor == 2)
    finally:
        log.removeHandler(handler)
    assert said[0].startswith("Lamb steps whole parameters, and ")
    assert "layers.0." in said[0]
