"""Each layer over two ranks: the tokens of one rank, for every family; one rank leads, the others follow."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ds_comm
from ds_config.errors import PlanError
from ds_inference import (
    QuantizationOptions,
    RaggedConfig,
    SamplingParams,
    SchedulerConfig,
    build_hf_engine,
    init_inference,
    load,
)
from ds_inference.rank_worker import follow, leading
from ds_testing import world

pytest.importorskip("transformers")

_where = importlib.util.spec_from_file_location("inference_families", Path(__file__).parents[1] / "conftest.py")
assert _where is not None
assert _where.loader is not None
families: Any = importlib.util.module_from_spec(_where)
_where.loader.exec_module(families)
families.FAMILIES |= {
    "llama of three key heads": ("Llama", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "llama of odd units": ("Llama", {"intermediate_size": 37, "vocab_size": 97, "num_key_value_heads": 1}),
}
GROUPS = [list(families.FAMILIES)[i::4] for i in range(4)]
EXPERTS = ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "deepseek-v2", "deepseek-v3", "gpt-oss"]


def same(name: str, **options: Any) -> None:
    model, prompts = families._tiny(name), families._prompts_of([1, 5, 23, 12])
    budget, how = SchedulerConfig(16, 4, max_model_len=400), SamplingParams(8)
    alone = load(model, cache_tokens=128, block_size=4, budget=budget, native=False)
    ours = load(model, cache_tokens=128, block_size=4, budget=budget, group=ds_comm.world_group(), **options)
    assert ours.decoder.group.size == 2
    wanted = [a.tokens for a in alone.generate(prompts, how)]
    assert [a.tokens for a in ours.generate(prompts, how)] == wanted, name
    mine = sum(w.numel() for r, w in ours.decoder.weights.items() if r.startswith("layers.") and w.dim() > 1)
    all_ = sum(w.numel() for r, w in alone.decoder.weights.items() if r.startswith("layers.") and w.dim() > 1)
    assert mine < 0.75 * all_, (name, mine, all_)


@world(2)
@pytest.mark.parametrize("group", range(4))
def test_every_family(group: int) -> None:
    for name in GROUPS[group]:
        same(name)


@world(2)
def test_experts_given_to_ranks_whole() -> None:
    for name in EXPERTS:
        same(name, enable_expert_parallel=True)


NATIVE = [
    "llama",
    "llama tied",
    "llama of three key heads",
    "llama of odd units",
    "gpt2",
    "bloom",
    "gemma2",
    "falcon new",
]


@world(2, backend="shm")
def test_the_native_loop_sums_over_ranks() -> None:
    prompts, how = families._prompts_of([1, 5, 23, 12]), SamplingParams(8)
    for name in NATIVE:
        model = families._tiny(name)
        ours = load(model, native=True, group=ds_comm.world_group())
        assert not ours.decoder.obstacle
        wanted = load(model, native=False).generate(prompts, how)
        assert [a.tokens for a in ours.generate(prompts, how)] == [a.tokens for a in wanted], name


@pytest.mark.parametrize("by_expert", [False, True])
@world(2, backend="shm")
def test_experts_of_the_native_loop_are_cut_or_given_to_ranks(by_expert: bool) -> None:
    prompts, how = families._prompts_of([1, 5, 23, 12]), SamplingParams(8)
    for name in ("mixtral", "qwen2-moe", "deepseek-v3", "gpt-oss"):
        model = families._tiny(name)
        ours = load(model, native=True, group=ds_comm.world_group(), enable_expert_parallel=by_expert)
        assert not ours.decoder.obstacle, name
        wanted = load(model, native=False).generate(prompts, how)
        assert [a.tokens for a in ours.generate(prompts, how)] == [a.tokens for a in wanted], name


@world(2, backend="shm")
def test_over_shared_memory_with_codes() -> None:
    model, prompts = families._tiny("llama"), families._prompts_of([1, 30, 9])
    how, few = SamplingParams(1, logprobs=97), QuantizationOptions("int8", 8)
    alone = load(model, quantize=few, native=False).generate(prompts, how)
    ours = load(model, quantize=few, group=ds_comm.world_group()).generate(prompts, how)
    for a, b in zip(ours, alone, strict=True):
        assert max(abs(a.tops[0][i] - b.tops[0][i]) for i in range(97)) < 1e-3


@world(2)
def test_one_leads() -> None:
    model, prompts = families._tiny("llama"), families._prompts_of([1, 5, 23, 12])
    engine = load(model, cache_tokens=64, block_size=4, budget=SchedulerConfig(16, 4), group=ds_comm.world_group())
    if torch.distributed.get_rank() == 1:
        follow(engine)
        assert engine.idle
        return
    how = SamplingParams(8, temperature=0.7, n=2, seed=0)
    with leading(engine):
        found = [a.tokens for a in engine.generate(prompts, how)]
        again = [a.tokens for a in engine.generate(prompts[:1], how)]
    alone = load(model, cache_tokens=64, block_size=4, budget=SchedulerConfig(16, 4), native=False)
    assert found == [a.tokens for a in alone.generate(prompts, how)]
    assert again == found[:2]


@world(2)
def test_ranks_that_call_alike_draw_alike_without_a_seed() -> None:
    """Each rank's own entropy, and generators that differ, lead to the same tokens: else the sums are of different sequences."""
    torch.manual_seed(torch.distributed.get_rank())
    model, prompts = families._tiny("gpt2"), families._prompts_of([5, 5])
    how = SamplingParams(6, temperature=1.0, n=2)
    engine = load(model, cache_tokens=128, block_size=4, group=ds_comm.world_group())
    said = [[a.tokens for a in engine.generate(prompts, how)] for _ in range(2)]
    drawn = []
    for inject in (True, False):
        cut = init_inference(
            families._tiny("gpt2"), dtype="fp32", tensor_parallel={"tp_size": 2}, replace_with_kernel_inject=inject
        )
        rows = [cut.generate(torch.tensor(prompts), max_new_tokens=6, do_sample=True, pad_token_id=0) for _ in range(2)]
        assert not torch.equal(*rows)
        drawn.append([each.tolist() for each in rows])
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, (said, drawn))
    assert everyone[0] == everyone[1]
    assert said[0] != said[1]


@world(2)
def test_more_ranks_than_heads_is_told() -> None:
    families.FAMILIES["small"] = ("Llama", {"num_attention_heads": 1, "num_key_value_heads": 1})
    with pytest.raises(PlanError, match="heads"):
        load(families._tiny("small"), group=ds_comm.world_group())


@world(2)
def test_deepspeed_s_calls() -> None:
    model, prompts = families._tiny("gpt2"), families._prompts_of([9, 9])
    ids = torch.tensor(prompts)
    wanted = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    for inject in (True, False):
        engine = init_inference(
            families._tiny("gpt2"),
            dtype="fp32",
            tensor_parallel={"tp_size": 2},
            replace_with_kernel_inject=inject,
        )
        assert torch.equal(engine.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0), wanted), inject
    cut = families._tiny("gpt2")
    policy = {type(cut.transformer.h[0]): ("attn.c_proj", "mlp.c_proj")}
    engine = init_inference(cut, dtype="fp32", mp_size=2, injection_policy=policy)
    assert torch.equal(engine.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0), wanted)
    states = SimpleNamespace(get_model_parallel_group=lambda: torch.distributed.group.WORLD)  # as Megatron's mpu
    for given in (
        {"mpu": states},
        {"mp_size": 2, "tensor_parallel": {"mpu": states}},
        {"mp_size": 2, "tp": {"enabled": True}},
    ):
        engine = init_inference(families._tiny("gpt2"), dtype="fp32", **given)
        assert engine.inference_config.tensor_parallel.tp_size == 2
        assert (
            engine.module.transformer.h[0].mlp.c_proj.weight.numel() == cut.transformer.h[0].mlp.c_proj.weight.numel()
        )
        assert torch.equal(engine.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0), wanted)
    manager = {"memory_config": {"mode": "allocate", "size": 4}}
    ragged = build_hf_engine(model, RaggedConfig(tensor_parallel={"tp_size": 2}, state_manager=manager))
    logits = ragged.put([1], [torch.tensor(prompts[0])])
    with torch.no_grad():
        assert (logits[0] - model(ids[:1]).logits[0, -1]).abs().max() < 1e-4
    with pytest.raises(PlanError, match="3 ranks"):
        init_inference(families._tiny("gpt2"), dtype="fp32", tensor_parallel={"tp_size": 3})


@world(2, backend=None)
def test_ranks_that_did_not_meet_yet_do() -> None:
    engine = init_inference(families._tiny("gpt2"), dtype="fp32", tensor_parallel={"tp_size": 2})
    assert torch.distributed.get_world_size() == 2
    assert engine.generate(torch.tensor([[3, 4]]), max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (1, 4)
