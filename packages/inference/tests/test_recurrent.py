"""Decoders with states run through their own forward: the same tokens, whatever is batched, cut, forked or pushed out."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

from ds_config.errors import UnsupportedError
from ds_inference import RaggedConfig, SamplingParams, SchedulerConfig, build_hf_engine, load
from ds_inference.cache import States
from ds_inference.hf_runner import HFModelRunner
from ds_inference.sampling import derive_seed

transformers = pytest.importorskip("transformers", minversion="5.24")

_BASE = {
    "hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 97,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 256}
_SCAN = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 4}
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MIXED = ["linear_attention", "full_attention", "linear_attention"]
_LATENT = {
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "layer_types": _MIXED, "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip

KINDS: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 8},
    "Mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 4},
    "FalconMamba": {"state_size": 8},
    "Jamba": {**_HEADS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "num_experts": 4},
    "Bamba": {**_HEADS, **_SCAN, "attn_layer_indices": [1]},
    "Zamba": {**_HEADS, "num_key_value_heads": 4, "mamba_d_state": 8, "layers_block_type": ["mamba", "hybrid", "hybrid"]},
    "Zamba2": {
        **_HEADS, "num_key_value_heads": 4, "mamba_d_state": 8, "n_mamba_heads": 4, "chunk_size": 4, "use_mem_rope": True,
        "layers_block_type": ["mamba", "hybrid", "hybrid"], "num_mem_blocks": 2,
    },
    "FalconH1": {**_HEADS, **_SCAN, "mamba_d_ssm": 64},
    "GraniteMoeHybrid": {**_HEADS, **_SCAN, "layer_types": _MIXED, "num_local_experts": 4, "shared_intermediate_size": 16},
    "NemotronH": {
        **_HEADS, "head_dim": 8, "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 4,
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"], "num_hidden_layers": 5, "n_routed_experts": 4,
        "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    },
    "RecurrentGemma": {**_HEADS, "attention_window_size": 6, "num_hidden_layers": 4},
    "Qwen3Next": {**_HEADS, **_DELTA, **_EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 16},
    "Qwen3_5": {**_HEADS, **_DELTA, "head_dim": 8},
    "Qwen3_5Moe": {**_HEADS, **_DELTA, **_EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 16},
    "Lfm2": {**_HEADS, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "Lfm2Moe": {**_HEADS, **_EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "Lfm3": {**_HEADS, "layer_types": ["conv", "sliding_attention", "full_attention"], "head_dim": 8, "sliding_window": 6},
    "OlmoHybrid": {**_HEADS, **_DELTA},
    "KimiLinear": {**_HEADS, **_LATENT, "linear_head_dim": 8, "linear_num_heads": 4},
    "BailingHybrid": {**_HEADS, **_LATENT, "head_dim": 8, "n_shared_experts": 1},
    "LaraMini": {
        **_HEADS, **_DELTA, **_EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 16, "sliding_window": 6,
        "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
    },
    "Zaya": {
        **_HEADS, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "router_hidden_size": 8,
        "tie_word_embeddings": False,
    },
    "Inkling": {
        **_HEADS, "head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
        "sliding_window_size": 6, "d_rel": 4, "rel_extent": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "moe_intermediate_size": 16, "local_layer_ids": [0, 1],
    },
    "xLSTM": {"hidden_size": 128, "num_heads": 4, "chunk_size": 4, "autocast_kernel_dtype": "float32"},
    "Rwkv": {"attention_hidden_size": 32, "context_length": 256, "num_hidden_layers": 7, "rescale_every": 3},
}  # fmt: skip
TOKENS = 12


@functools.cache
def made(kind: str) -> Any:
    name = f"{kind}TextConfig" if hasattr(transformers, f"{kind}TextConfig") else f"{kind}Config"
    torch.manual_seed(4)
    config = getattr(transformers, name)(**{**_BASE, **KINDS[kind]})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(0.0, 0.25)
            else:
                param.add_(torch.randn_like(param) * 0.1)
    return model


def own(model: Any, prompt: list[int], count: int) -> list[int]:
    for part in model.modules():  # RecurrentGemma begins a prompt of one token with what the last prompt left
        for name in ("conv1d_state", "recurrent_states"):
            if name in part.__dict__:
                setattr(part, name, None)
    out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


@functools.cache
def wanted(kind: str) -> tuple[list[list[int]], list[list[int]]]:
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in (1, 3, 17)]
    return prompts, [own(made(kind), p, TOKENS) for p in prompts]


@pytest.mark.parametrize("kind", list(KINDS))
def test_greedy_is_its_own(kind: str) -> None:
    prompts, answers = wanted(kind)
    assert len({tuple(a) for a in answers}) == 3, "the answers do not depend on the prompts"
    assert any(len(set(a)) > 2 for a in answers), "the answers hardly depend on what was said"
    engine = load(made(kind), block_size=4, budget=SchedulerConfig(64, 8, max_model_len=200))
    assert isinstance(engine.decoder, HFModelRunner)
    assert engine.decoder.stateful
    for _ in range(2):  # nothing of the first time is left
        assert [a.tokens for a in engine.generate(prompts, SamplingParams(TOKENS))] == answers
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.count


@pytest.mark.parametrize("kind", list(KINDS))
def test_prompts_that_are_cut_and_sequences_that_are_pushed_out(kind: str) -> None:
    prompts, answers = wanted(kind)
    engine = load(made(kind), cache_tokens=44, block_size=4, budget=SchedulerConfig(5, 3, max_model_len=200))
    requests, add = [], engine.scheduler.add
    engine.scheduler.add = lambda r: (requests.append(r), add(r))[1]  # type: ignore[method-assign, assignment, func-returns-value]
    assert [a.tokens for a in engine.generate(prompts, SamplingParams(TOKENS))] == answers
    assert sum(r.num_preemptions for r in requests) > 0, "the cache was not small enough to try it"
    engine.step()
    assert len(engine.cache.states) == 0, "states of sequences that are over are kept"


@pytest.mark.parametrize("kind", list(KINDS))
def test_from_a_folder_and_by_put(kind: str, tmp_path: Any) -> None:
    prompts, answers = wanted(kind)
    made.__wrapped__(kind).save_pretrained(tmp_path)  # a new one: RWKV changes its weights when it first answers
    assert [a.tokens for a in load(tmp_path).generate(prompts, SamplingParams(TOKENS))] == answers
    manager = {"memory_config": {"mode": "allocate", "size": 6}}
    engine = build_hf_engine(tmp_path, RaggedConfig(state_manager=manager))
    # The long prompt in parts, beside the others' answers; the short one is over early, and another takes its place.
    feeds = [[p] for p in prompts[:2]] + [[prompts[2][:6], prompts[2][6:7], prompts[2][7:]]]
    said: list[list[int]] = [[], [], []]
    for _ in range(TOKENS + 2):
        live = [i for i in range(3) if len(said[i]) < TOKENS]
        logits = engine.put(live, [torch.tensor(feeds[i][0]) for i in live])
        for row, i in zip(logits, live, strict=True):
            feeds[i].pop(0)
            if not feeds[i]:
                said[i].append(int(row.argmax()))
                feeds[i].append(said[i][-1:])
    assert said == answers
    assert engine.query(2, 500, 6)[0] > 0
    assert len(engine._cache.states) == 3
    for i in range(3):
        engine.flush(i)
    assert len(engine._cache.states) == 0
    again = engine.put([9, 0], [torch.tensor(prompts[1]), torch.tensor(prompts[0])])
    assert again.argmax(-1).tolist() == [answers[1][0], answers[0][0]]


def test_samples_are_those_of_their_seeds() -> None:
    prompts, _ = wanted("Bamba")
    first, second = load(made("Bamba")).generate([prompts[2]], SamplingParams(7, temperature=0.9, n=2, seed=3))
    for seed, answer in ((3, first), (derive_seed(3, "sample", 1), second)):
        alone = load(made("Bamba")).generate([prompts[2]], SamplingParams(7, temperature=0.9, seed=seed))[0]
        assert answer.tokens == alone.tokens


def test_a_request_that_is_cancelled_leaves_no_state() -> None:
    prompts, answers = wanted("Mamba2")
    engine = load(made("Mamba2"))
    (over,) = engine.submit(prompts[0], SamplingParams(TOKENS))
    (stays,) = engine.submit(prompts[1], SamplingParams(TOKENS))
    events = engine.step()
    assert engine.cancel(over)
    events += [e for e in engine.stream() if e.request == stays]
    assert [e.token for e in events if e.request == stays] == answers[1]
    engine.step()
    assert len(engine.cache.states) == 0


def test_a_module_that_holds_its_states_itself_is_left_without() -> None:
    prompts, answers = wanted("RecurrentGemma")
    load(made("RecurrentGemma")).generate(prompts[1:], SamplingParams(3))
    holders = [part for part in made("RecurrentGemma").modules() if "conv1d_state" in part.__dict__]
    assert holders
    assert all(part.conv1d_state is None and part.rg_lru.recurrent_states is None for part in holders)
    assert load(made("RecurrentGemma")).generate(prompts, SamplingParams(3))[0].tokens == answers[0][:3]


def test_in_another_dtype_the_states_are_the_models() -> None:
    prompts, _ = wanted("Mamba2")
    engine = load(made("Mamba2"), dtype=torch.bfloat16)
    own_half = own(copy.deepcopy(made("Mamba2")).to(torch.bfloat16), prompts[1], 3)
    assert engine.generate([prompts[1]], SamplingParams(3))[0].tokens == own_half


def test_what_a_state_cannot_do_is_refused() -> None:
    for options in ({"enable_prefix_caching": True}, {"num_speculative_tokens": 2}, {"cache_dtype": torch.int8}):
        with pytest.raises(UnsupportedError, match="mamba") as caught:
            load(made("Mamba"), **options)
        assert caught.value.code == "inference-states"
    with pytest.raises(UnsupportedError, match="no declaration"):
        load(made("Mamba"), quantize="int8")
    small = load(made("Jamba"), cache_dtype=torch.int8)  # its keys and values are small, its states are not touched
    assert small.generate([[5, 6, 7]], SamplingParams(2))[0].tokens


def test_a_memory_of_another_kind_is_refused() -> None:
    config = transformers.MiniMaxConfig(
        **{**_BASE, "hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2},
        num_local_experts=2,
    )
    with pytest.raises(UnsupportedError, match="minimax") as caught:
        load(transformers.MiniMaxForCausalLM(config))
    assert caught.value.code == "inference-foreign"


def test_rows_of_states_grow_and_are_used_again() -> None:
    states = States()
    for n in range(9):
        states.write([100 + n], [torch.full((1, 2), float(n)), torch.full((1, 3, 1), n, dtype=torch.int64)])
    a, b = states.read([108, 100, 103])
    assert a.tolist() == [[8.0, 8.0], [0.0, 0.0], [3.0, 3.0]]
    assert b.flatten().tolist() == [8] * 3 + [0] * 3 + [3] * 3
    a.zero_()
    assert states.read([108])[0].tolist() == [[8.0, 8.0]], "what was read is not a copy"
    states.forget([103, 77])
    assert len(states) == 8
    states.write([5, 100], [torch.tensor([[1.0, 1.0], [2.0, 2.0]]), torch.zeros(2, 3, 1, dtype=torch.int64)])
    assert states.read([100, 5])[0].tolist() == [[2.0, 2.0], [1.0, 1.0]]
    states.write([], [])
    assert len(states) == 9
