"""Engines with everything on a device: losses and weights of one process. In `nox -s gpu` between ranks on a card, with NCCL."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import ds_comm
import ds_engine
from ds_accel import get_accelerator
from ds_comm import Mesh, MeshSpec
from ds_config.errors import set_place
from ds_moe import MoE
from ds_parallel.sequence import DistributedAttention
from ds_pipe import LayerSpec, PipelineModule, TiedLayerSpec
from ds_testing.device_worlds import device_world

WIDTH, WORDS, BATCH, LENGTH = 16, 33, 4, 8
HOST = {"device": "cpu", "pin_memory": True}


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


class Decoder(nn.Module):
    """Llama's names; `forward(tokens, labels)` is the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.config = SimpleNamespace(model_type="llama", to_dict=lambda: {"model_type": "llama"})
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.lm_head(x).flatten(0, 1), labels.flatten())


class Routed(Decoder):
    """A decoder with a layer of experts."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 20), nn.Tanh(), nn.Linear(20, WIDTH))
        self.experts = MoE(
            WIDTH, expert, 4, ep_size, 2, drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False
        )
        rank = dist.get_rank() % ep_size
        with torch.no_grad():
            for name, param in self.experts.named_parameters():
                parts = name.split("deepspeed_experts.")
                number = int(parts[1].split(".")[0]) + rank * (4 // ep_size) if len(parts) > 1 else 9
                made = torch.Generator().manual_seed(100 * number + len(name) + param.numel())
                param.copy_(torch.randn(param.shape, generator=made) * 0.3)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        x = x + self.experts(x)[0]
        return functional.cross_entropy(self.lm_head(x).flatten(0, 1), labels.flatten())


def batches(steps: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(5)
    whole = [torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=made) for _ in range(steps)]
    return [(tokens[:, :-1].to(device), tokens[:, 1:].to(device)) for tokens in whole]


def settings(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 20} | more.pop("zero", {})
    return {
        "train_batch_size": BATCH,
        # ds-ops asks tensors for their memory, which is the host's for the device that stands for a card
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.01, "eps": 1e-3, "torch_adam": get_accelerator().name == "cpu"},
        },
        "gradient_clipping": 0.3,
        "zero_optimization": zero,
        **more,
    }


def alone(model: nn.Module, steps: int, device: torch.device) -> tuple[list[float], dict[str, Tensor]]:
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.0)
    losses = []
    for tokens, labels in batches(steps, device):
        loss = model(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach().cpu() for name, value in model.named_parameters()}


def run(engine: Any, device: torch.device, first: int = 0, last: int = 3, micro: int = 1) -> list[float]:
    """Losses, which are means over all ranks."""
    data, losses = engine.mesh["data"], []
    for whole in batches(last, device)[first:]:
        parts = [tensor.chunk(data.size * micro)[data.rank * micro : (data.rank + 1) * micro] for tensor in whole]
        total = torch.zeros((), device=device)
        for tokens, labels in zip(*parts, strict=True):
            loss = engine(tokens, labels)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / micro
        ds_comm.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def check(found: list[float], wanted: list[float], model: nn.Module, state: dict[str, Tensor]) -> None:
    assert found == pytest.approx(wanted, rel=1e-4)
    for name, value in model.named_parameters():
        if name in state and value.shape == state[name].shape:
            torch.testing.assert_close(value.detach().cpu(), state[name], atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@device_world(2)
def test_every_stage(stage: int, micro: int, device: torch.device) -> None:
    wanted, state = alone(Decoder(), 3, device)
    model = Decoder()
    engine, *_ = ds_engine.initialize(model=model, config=settings(stage, gradient_accumulation_steps=micro))
    assert engine.device == device
    found = run(engine, device, micro=micro)
    engine.close()
    check(found, wanted, model, state)


@pytest.mark.parametrize("place", ["host", "file"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@device_world(2)
def test_state_elsewhere(stage: int, place: str, tmp_path: Path, device: torch.device) -> None:
    where = HOST if place == "host" else {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"offload_optimizer": where} | ({"offload_param": where} if stage == 3 else {})
    wanted, state = alone(Decoder(), 3, device)
    model = Decoder()
    engine, *_ = ds_engine.initialize(model=model, config=settings(stage, zero=zero))
    found = run(engine, device)
    engine.close()
    check(found, wanted, model, state)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@device_world(2)
def test_experts_over_ranks(stage: int, device: torch.device) -> None:
    wanted, state = alone(Routed(1), 3, device)
    model = Routed(2)
    engine, *_ = ds_engine.initialize(model=model, config=settings(stage))
    found = run(engine, device)
    engine.close()
    check(found, wanted, model, {name: value for name, value in state.items() if "deepspeed_experts" not in name})


@pytest.mark.parametrize("stage", [0, 2, 3])
@device_world(4)
def test_tensor_parallelism_and_a_checkpoint_for_another_degree(
    stage: int, tmp_path: Path, device: torch.device
) -> None:
    wanted, state = alone(Decoder(), 4, device)
    engine, *_ = ds_engine.initialize(model=Decoder(), config=settings(stage, tensor_parallel={"autotp_size": 2}))
    found = run(engine, device, 0, 2)
    engine.save_checkpoint(str(tmp_path))
    engine.close()
    set_place("")
    model = Decoder()
    engine, *_ = ds_engine.initialize(model=model, config=settings(3 - stage))
    engine.load_checkpoint(str(tmp_path))
    found += run(engine, device, 2, 4)
    engine.close()
    set_place("")
    check(found, wanted, model, state)


@pytest.mark.parametrize("stage", [0, 3])
@device_world(2)
def test_a_sequence_over_ranks(stage: int, device: torch.device) -> None:
    wanted, state = alone(Decoder(), 3, device)
    model, group = Decoder(), Mesh.build(MeshSpec.fit(2, sequence=2))["sequence"]
    set_place("")
    for layer in model.layers:
        layer.self_attn.core = DistributedAttention(attend, group, 2, 1)
    engine, *_ = ds_engine.initialize(model=model, config=settings(stage, sequence_parallel_size=2))
    losses = []
    for tokens, labels in batches(3, device):
        loss = engine(*(t.chunk(2, 1)[group.rank] for t in (tokens, labels)))
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        ds_comm.all_reduce(total)
        losses.append(total.item() / 2)
    engine.close()
    set_place("")
    check(losses, wanted, model, state)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH) * 0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weight)


def head(words: Words, x: Tensor) -> Tensor:
    return functional.linear(x, words.weight)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@device_world(2)
def test_stages_of_a_pipeline(stage: int, device: torch.device) -> None:
    layers = [
        TiedLayerSpec("w", Words),
        *(LayerSpec(Block) for _ in range(4)),
        TiedLayerSpec("w", Words, forward_fn=head),
    ]
    options: dict[str, Any] = {"seed_layers": True, "partition_method": "uniform", "loss_fn": loss_of}
    cut = PipelineModule(layers, num_stages=2, **options)
    config = settings(stage, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=2)
    engine, *_ = ds_engine.initialize(model=cut, config=config)
    named = {}
    for index in range(5):
        torch.manual_seed(1234 + index)
        named[index] = (Words() if index == 0 else Block()).to(device)
    whole = nn.ModuleList(named.values())
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01, eps=1e-3, weight_decay=0.0)
    for tokens, labels in batches(2, device):
        micros = list(zip(tokens.chunk(2), labels.chunk(2), strict=True))
        data = iter(micros) if engine.is_first_stage() or engine.is_last_stage() else None
        found = engine.train_batch(data)
        total = 0.0
        for inputs, targets in micros:
            x = whole[0](inputs)
            for block in whole[1:]:
                x = block(x)
            loss = loss_of(head(whole[0], x), targets) / 2
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        assert float(found.loss) == pytest.approx(total, rel=1e-4)
    engine.close()
    set_place("")


@pytest.mark.parametrize("stage", [1, 3])
@device_world(2)
def test_a_model_on_meta_lies_on_the_device(stage: int, device: torch.device) -> None:
    """Its shards were made on the host."""
    with torch.device("meta"):
        model = Decoder()
    engine, *_ = ds_engine.initialize(model=model, config=settings(stage))
    assert {unit.device for unit in engine.optimizer.sharding.units} == {device}
    engine.close()
