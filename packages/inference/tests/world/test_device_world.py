"""Each layer over ranks with everything on a device: the tokens of one rank. In `nox -s gpu` between ranks on a card, with NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ds_comm
from ds_inference import RaggedConfig, SamplingParams, SchedulerConfig, build_hf_engine, init_inference, load
from ds_inference.rank_worker import follow, leading
from ds_testing.device_worlds import device_world

pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 512, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL),
    "qwen2": ("Qwen2", SMALL),
    "mixtral": ("Mixtral", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("Gemma", SMALL | {"head_dim": 8}),
    "phi3": ("Phi3", SMALL | {"sliding_window": None}),
}
OPTIONS: dict[str, Any] = {"cache_tokens": 128, "block_size": 4, "native": False}


def tiny(name: str, device: torch.device) -> Any:
    import transformers

    kind, sizes = FAMILIES[name]
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
    return model.eval().to(device)


def prompts(*lengths: int) -> list[list[int]]:
    made = torch.Generator().manual_seed(2)
    return [torch.randint(1, 97, (length,), generator=made).tolist() for length in lengths]


def budget() -> SchedulerConfig:
    return SchedulerConfig(16, 4, max_model_len=400)


@pytest.mark.parametrize("name", list(FAMILIES))
@device_world(2, host="cpu")
def test_layers_over_two_ranks(name: str, device: torch.device) -> None:
    model, texts, how = tiny(name, device), prompts(1, 5, 23, 12), SamplingParams(8)
    wanted = load(model, budget=budget(), **OPTIONS).generate(texts, how)
    ours = load(model, budget=budget(), group=ds_comm.world_group(), **OPTIONS)
    assert ours.decoder.device.type == device.type
    assert [a.tokens for a in ours.generate(texts, how)] == [a.tokens for a in wanted]


@device_world(2, host="cpu")
def test_experts_are_given_to_ranks_whole(device: torch.device) -> None:
    model, texts, how = tiny("mixtral", device), prompts(3, 9), SamplingParams(6)
    wanted = load(model, budget=budget(), **OPTIONS).generate(texts, how)
    ours = load(model, budget=budget(), group=ds_comm.world_group(), enable_expert_parallel=True, **OPTIONS)
    assert [a.tokens for a in ours.generate(texts, how)] == [a.tokens for a in wanted]


@device_world(2, host="cpu")
def test_one_leads(device: torch.device) -> None:
    model, texts = tiny("llama", device), prompts(1, 5, 23)
    engine = load(model, budget=budget(), group=ds_comm.world_group(), **OPTIONS)
    if torch.distributed.get_rank() == 1:
        follow(engine)
        assert engine.idle
        return
    how = SamplingParams(8, temperature=0.7, n=2, seed=0)
    with leading(engine):
        found = [a.tokens for a in engine.generate(texts, how)]
    alone = load(model, budget=budget(), **OPTIONS)
    assert found == [a.tokens for a in alone.generate(texts, how)]


@pytest.mark.parametrize("inject", [True, False])
@device_world(2, host="cpu")
def test_deepspeed_s_calls(inject: bool, device: torch.device) -> None:
    ids = torch.tensor(prompts(9, 9), device=device)
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    wanted = tiny("llama", device).generate(ids, **how)
    cut = init_inference(
        tiny("llama", device), dtype="fp32", tensor_parallel={"tp_size": 2}, replace_with_kernel_inject=inject
    )
    assert torch.equal(cut.generate(ids, **how), wanted)


@device_world(2, host="cpu")
def test_ragged_batches(device: torch.device) -> None:
    model, (text,) = tiny("qwen2", device), prompts(9)
    manager = {"memory_config": {"mode": "allocate", "size": 4}}
    ragged = build_hf_engine(model, RaggedConfig(tensor_parallel={"tp_size": 2}, state_manager=manager))
    logits = ragged.put([1], [torch.tensor(text)])
    with torch.no_grad():
        wanted = model(torch.tensor([text], device=device)).logits[0, -1]
    torch.testing.assert_close(logits[0].to(device), wanted, atol=1e-4, rtol=1e-3)
