"""Two half batches of each layer in turn, through the engine: losses and weights of one process, at every ZeRO stage."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_engine
from ds_config.errors import PlanError, UnsupportedError, set_place
from ds_testing import world


class Attention(nn.Module):
    """Of both families: a fused projection in three parts, a row layer, and dropout after it."""

    def __init__(self, names: tuple[str, str], keys: int) -> None:
        super().__init__()
        self.names, self.num_heads, self.num_key_value_heads, self.head_dim = names, 4, keys, 4
        self.add_module(names[0], nn.Linear(16, 16 + 8 * keys))
        self.add_module(names[1], nn.Linear(16, 16))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        fused = getattr(self, self.names[0])(x)
        widths = [n * self.head_dim for n in (self.num_heads, self.num_key_value_heads, self.num_key_value_heads)]
        q, k, v = (t.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for t in fused.split(widths, -1))
        k, v = (t.repeat_interleave(self.num_heads // self.num_key_value_heads, 1) for t in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, mask)
        return self.dropout(getattr(self, self.names[1])(out.transpose(1, 2).flatten(2)))


class LlamaMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(16, 2 * 22), nn.Linear(22, 16)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(functional.silu(gate) * up)


class Gpt2Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj, self.dropout = nn.Linear(16, 44), nn.Linear(44, 16), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(functional.gelu(self.c_fc(x))))


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(16), nn.RMSNorm(16)
        self.self_attn, self.mlp = Attention(("qkv_proj", "o_proj"), 2), LlamaMlp()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Gpt2Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attn, self.mlp = Attention(("c_attn", "c_proj"), 4), Gpt2Mlp()

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, None]:
        x = x + self.attn(self.ln_1(x), mask=mask)
        return x + self.mlp(self.ln_2(x)), None


class Model(nn.Module):
    def __init__(self, family: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        name, block = {"llama": ("phi3", LlamaBlock), "gpt2": ("gpt2", Gpt2Block)}[family]
        self.config = SimpleNamespace(model_type=name, to_dict=lambda: {"model_type": name})
        self.embed_tokens = nn.Embedding(33, 16)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.lm_head = nn.Linear(16, 33, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        mask = torch.ones(ids.shape[0], 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        mask[:, :, :, 0] |= ids[:, None, None, 0] % 2 == 0  # another one for each sample
        for layer in self.layers:
            out = layer(x, mask)
            x = out[0] if isinstance(out, tuple) else out
        logits = self.lm_head(x)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def batches(steps: int) -> Tensor:
    return torch.randint(3, 33, (steps, 8, 7), generator=torch.Generator().manual_seed(5))


def alone(model: nn.Module, steps: int) -> tuple[list[float], dict[str, Tensor]]:
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


def configuration(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-3}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "tensor_parallel": {"autotp_size": 2, "half_batches": True},
        **more,
    }


def train(engine: Any, given: Tensor, micros_each: int) -> list[float]:
    data, losses = engine.mesh["data"], []
    for batch in given:
        mean = torch.zeros(())
        micros = batch.chunk(data.size)[data.rank].chunk(micros_each)
        for micro in micros:
            loss = engine(micro)
            engine.backward(loss)
            engine.step()
            mean += loss.detach() / len(micros)
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / torch.distributed.get_world_size())
    return losses


def check(family: str, config: dict[str, Any]) -> None:
    model = Model(family)
    wanted, state = alone(copy.deepcopy(model), 3)
    engine, *_ = ds_engine.initialize(model=model, config=config)
    seen: set[tuple[str, int]] = set()
    turns = engine.module.__dict__["_ds_cut_model"].turns
    turns.watch = lambda what, half: seen.add((what, half))
    torch.testing.assert_close(
        train(engine, batches(3), config.get("gradient_accumulation_steps", 1)), wanted, atol=1e-5, rtol=1e-5
    )
    assert len(seen) == 4  # sums and waits of both halves
    for name, value in engine.full_state_dict().items():
        torch.testing.assert_close(value, state[name], atol=2e-5, rtol=1e-4, msg=lambda said, n=name: f"{n}: {said}")
    engine.close()
    set_place("")


SOME = [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("stage", SOME)
@world(4)
def test_stages(family: str, stage: int) -> None:
    check(family, configuration(stage))


@pytest.mark.parametrize("stage", SOME)
@world(4)
def test_checkpointed_layers_and_micro_batches(stage: int) -> None:
    """Two micro batches of two samples a step, whose layers are computed again in backward: one sample in each half."""
    modules = {"modules": ["layers.*"]}
    more = {"gradient_accumulation_steps": 2, "activation_checkpointing": modules}
    check("llama", configuration(stage, **more))


@pytest.mark.parametrize("stage", [2, 3])
@world(4)
def test_units_smaller_than_a_layer(stage: int) -> None:
    """Each linear layer is gathered for its own forward: it stays while one half of the two is inside."""
    section = {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 300}
    check("llama", configuration(stage, zero_optimization=section))


@world(2)
def test_a_graph_cannot_say_it_and_other_conflicts_are_said_before() -> None:
    engine, *_ = ds_engine.initialize(model=Model("llama"), config=configuration(0))
    with pytest.raises(UnsupportedError, match="half_batches") as caught:
        engine.compile()
    assert caught.value.code == "tensor-halves"
    engine.close()
    section = {"autotp_size": 2, "half_batches": True, "megatron_layers": True}
    with pytest.raises(PlanError, match="half_batches with megatron_layers") as refused:
        ds_engine.initialize(model=Model("llama"), config=configuration(0, tensor_parallel=section))
    assert refused.value.code == "tensor-halves"
    config = configuration(0, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=8)
    with pytest.raises(PlanError, match="half_batches with train_micro_batch_size_per_gpu = 1, which has no halves"):
        ds_engine.initialize(model=Model("llama"), config=config)
    set_place("")


@world(2)
def test_gradients_of_weights_while_sums_travel() -> None:
    model = Model("gpt2")
    wanted, state = alone(copy.deepcopy(model), 3)
    section = {"autotp_size": 2, "tp_overlap_comm": True}
    engine, *_ = ds_engine.initialize(model=model, config=configuration(3, tensor_parallel=section))
    torch.testing.assert_close(train(engine, batches(3), 1), wanted, atol=1e-5, rtol=1e-5)
    for name, value in engine.full_state_dict().items():
        torch.testing.assert_close(value, state[name], atol=2e-5, rtol=1e-4)
    engine.close()
    set_place("")
