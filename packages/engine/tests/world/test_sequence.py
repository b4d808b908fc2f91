"""Sequence parallelism through the engine: losses and weights of one process at every ZeRO stage, beside tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_engine
from ds_config.errors import UnsupportedError, set_place
from ds_engine import SumLoss
from ds_parallel.sequence import DistributedAttention, check_parts, sequence_part
from ds_testing import world

WIDTH, LENGTH = 16, 12


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.num_key_value_groups = 4, 2
        self.q_proj, self.o_proj = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.core: Any = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).view(*x.shape[:2], -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.core(q, k, v).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.self_attn = nn.LayerNorm(WIDTH), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.self_attn(self.norm(x))


class Config:
    model_type = "llama"

    def to_dict(self) -> dict[str, str]:
        return {}


class Decoder(nn.Module):
    """The loss is a sum over the labels that count, and how many those are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.config = Config()
        self.embed_tokens = nn.Embedding(33, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, 33, bias=False)

    def forward(self, input_ids: Tensor, shift_labels: Tensor, position_ids: Tensor | None = None) -> Any:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(x).flatten(0, 1)
        total = functional.cross_entropy(logits, shift_labels.flatten(), reduction="sum")
        return SumLoss(total, (shift_labels != -100).sum())


def batches(steps: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(steps):
        ids = torch.randint(0, 33, (4, LENGTH), generator=generator)
        labels = ids.clone()
        labels[:, : LENGTH // 2 + 2] = -100  # nearly all that count are on the last ranks
        labels[2] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def alone(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = Decoder(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.0)
    for batch in batches(steps):
        part = sequence_part(batch, 0, 1)
        found = model(**part)
        loss = found.total / found.count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


@pytest.mark.parametrize(
    ("stage", "sequence", "tensor"), [(0, 2, 1), (1, 4, 1), (2, 2, 2), (3, 2, 1), (3, 2, 2)], ids=str
)
@world(4)
def test_five_steps(stage: int, sequence: int, tensor: int) -> None:
    wanted, state = alone(5)
    model = Decoder()
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "sequence_parallel_size": sequence,
        "tensor_parallel": {"autotp_size": tensor},
    }
    for layer in model.layers:
        layer.self_attn.core = DistributedAttention(attend, _sequence_group(sequence, tensor), 2, 1)
    engine, *_ = ds_engine.initialize(model=model, config=config)
    data, shared = engine.mesh["data"], engine.mesh["sequence"]
    assert (shared.size, engine.mesh["tensor"].size) == (sequence, tensor)
    for batch, mean in zip(batches(5), wanted, strict=True):
        mine = {key: value.chunk(data.size)[data.rank] for key, value in batch.items()}
        loss = engine(**sequence_part(mine, shared.rank, shared.size))
        sums = torch.stack([loss.total.detach(), torch.as_tensor(loss.count).float()])
        torch.distributed.all_reduce(sums)  # ranks of a tensor group count alike
        torch.testing.assert_close((sums[0] / sums[1]).item(), mean, atol=1e-5, rtol=1e-5)
        engine.backward(loss)
        engine.step()
    engine.close()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, state[name], atol=1e-5, rtol=1e-4, msg=lambda said, n=name: f"{n}: {said}")
    set_place("")


def _sequence_group(sequence: int, tensor: int) -> Any:
    from ds_comm import Mesh, MeshSpec

    return Mesh.build(MeshSpec.fit(4, sequence=sequence, tensor=tensor))["sequence"]


@world(2)
def test_a_model_that_shares_nothing_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="nothing in the model exchanges over a sequence"):
        ds_engine.initialize(model=Decoder(), config={"train_batch_size": 2, "sequence_parallel_size": 2})
    set_place("")


def _hugging_face(name: str, **more: Any) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(3)
    sizes = {"vocab_size": 40, "num_attention_heads": 4, "max_position_embeddings": 64, "attn_implementation": "sdpa"}
    model = getattr(transformers, f"{name}ForCausalLM")
    return model(getattr(transformers, f"{name}Config")(**sizes, **more))


_DECODER = {"hidden_size": 32, "num_hidden_layers": 2}
_MODELS: dict[str, dict[str, Any]] = {
    "Bart": {
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
    },  # positions from 0
    "Falcon": _DECODER,  # an attention of its own
    "Llama": _DECODER | {"intermediate_size": 48},
}


@pytest.mark.parametrize("bits", [32, 16])
@pytest.mark.parametrize("name", list(_MODELS))
@world(2)
def test_a_model_that_looks_at_other_tokens_without_an_exchange_is_refused(name: str, bits: int) -> None:
    model = _hugging_face(name, **_MODELS[name])
    config = {
        "train_batch_size": 2,
        "sequence_parallel_size": 2,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": bits == 16},
    }
    engine, *_ = ds_engine.initialize(
        model=model, config=config | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    )
    ids = torch.randint(0, 40, (2, 32), generator=torch.Generator().manual_seed(5))
    part = sequence_part({"input_ids": ids}, engine.mesh["sequence"].rank, 2)
    args = (part.pop("input_ids"),) if bits == 16 else ()
    if name == "Llama":
        error = check_parts(engine.module, part, engine.mesh["sequence"], args)
        assert error is not None
        assert error < (1e-5 if bits == 32 else 0.05)
        engine(*args, **part, use_cache=False).logits.float().sum().backward()
        assert all(module.training for module in model.modules())
    else:
        with pytest.raises(UnsupportedError, match="looks at other tokens") as caught:
            engine(*args, **part, use_cache=False)
        assert caught.value.code == "sequence-parts"
    engine.close()
    set_place("")
