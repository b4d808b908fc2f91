"""LoRA adapters as PEFT writes them: what a request wears is what a model with the adapter merged says; several in one batch."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ds_config.errors import CheckpointError, PlanError, UnsupportedError
from ds_inference import QuantizationOptions, SamplingParams, SchedulerConfig, load
from ds_inference.sampling import derive_seed

pytest.importorskip("transformers")

TARGETS = {
    "llama": ("q_proj", "v_proj", "down_proj", "gate_proj"),
    "phi3": ("qkv_proj", "gate_up_proj"),
    "gpt2": ("c_attn", "c_proj"),
    "bloom": ("query_key_value", "dense_4h_to_h"),
    "falcon new": ("query_key_value",),
    "qwen2-moe": ("q_proj", "o_proj"),
    "deepseek-v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"),
}


def adapt(model: Any, folder: Path, targets: tuple[str, ...], seed: int, **config: Any) -> Any:
    """Write an adapter for the modules of these names; the model with it merged."""
    torch.manual_seed(seed)
    merged, state, rank = copy.deepcopy(model), {}, 3
    scale = 6 / (rank**0.5 if config.get("use_rslora") else rank)
    for name, module in merged.named_modules():
        if name.split(".")[-1] in targets and hasattr(module, "weight") and "expert" not in name:
            weight = module.weight.data
            swapped = type(module).__name__ == "Conv1D"
            out, inputs = weight.shape[::-1] if swapped else weight.shape
            a, b = 0.3 * torch.randn(rank, inputs), 0.3 * torch.randn(out, rank)
            state[f"base_model.model.{name}.lora_A.weight"], state[f"base_model.model.{name}.lora_B.weight"] = a, b
            weight += scale * ((b @ a).t() if swapped else b @ a)
    assert state
    folder.mkdir()
    save_file(state, folder / "adapter_model.safetensors")
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "target_modules": list(targets), "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    return merged


@pytest.mark.parametrize("family", list(TARGETS))
def test_several_in_one_batch(family: str, tiny: Any, prompts_of: Any, tmp_path: Path) -> None:
    model, prompts, how = tiny(family), prompts_of([12, 12, 12, 5]), SamplingParams(8)
    prompts[1] = prompts[2] = prompts[0]  # the same prompt for all: blocks must not be shared between adapters
    merged = [
        adapt(model, tmp_path / "one", TARGETS[family], 1),
        adapt(model, tmp_path / "two", TARGETS[family][:1], 2, use_rslora=True),
    ]
    worn = [None, "one", "two", "one"]
    engine = load(
        model,
        cache_tokens=96,
        block_size=4,
        budget=SchedulerConfig(9, 3, max_model_len=400),
        adapters={"one": tmp_path / "one", "two": tmp_path / "two"},
    )
    found = [a.tokens for a in engine.generate(prompts, how, adapters=worn)]
    for prompt, who, tokens in zip(prompts, worn, found, strict=True):
        alone = load(model if who is None else merged[who == "two"], native=False)
        assert tokens == alone.generate([prompt], how)[0].tokens, who
    assert found[0] != found[1]
    assert found[1] != found[2]


def test_above_codes_with_samples_and_in_a_folder(tiny: Any, prompts_of: Any, tmp_path: Path) -> None:
    model, (prompt,) = tiny("llama"), prompts_of([12])
    adapt(model, tmp_path / "one", TARGETS["llama"], 1)
    model.save_pretrained(tmp_path / "base")
    engine = load(tmp_path / "base", quantize=QuantizationOptions("int8", 8), adapters={"one": tmp_path / "one"})
    how = SamplingParams(4, temperature=1.0, n=2, seed=5)
    several = engine.generate([prompt], how, adapters=["one"])
    for n in range(2):
        seed = derive_seed(5, "sample", n)
        (one,) = engine.generate([prompt], SamplingParams(4, temperature=1.0, seed=seed), adapters=["one"])
        assert several[n].tokens == one.tokens


def test_what_cannot_be_is_said(tiny: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(CheckpointError, match="adapter_config"):
        load(model, adapters={"x": tmp_path})
    adapt(model, tmp_path / "dora", ("q_proj",), 1, use_dora=True)
    with pytest.raises(UnsupportedError, match="use_dora"):
        load(model, adapters={"x": tmp_path / "dora"})
    adapt(model, tmp_path / "head", ("lm_head",), 1)
    with pytest.raises(CheckpointError, match="lm_head"):
        load(model, adapters={"x": tmp_path / "head"})
    with pytest.raises(PlanError, match="no adapter 'y'"):
        load(model).submit([1], adapter="y")
    with pytest.raises(UnsupportedError, match="native"):
        load(model, native=True, adapters={"x": tmp_path / "head"})


LORA_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
LORA_B = LORA_A.replace("lora_A", "lora_B")


@pytest.mark.parametrize(
    "change",
    [
        {LORA_A: None},
        {LORA_B: None},
        {LORA_A: [3, 31]},
        {LORA_B: [30, 3]},
        {LORA_A: [4, 32]},
        {LORA_A: [32]},
        {LORA_A: [0, 32], LORA_B: [32, 0]},
        {"lora_alpha": "much"},
        {"lora_alpha": None},
        {"alpha_pattern": {"(": 3}},
        {"alpha_pattern": 5},
        [],
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_when_it_is_read(change: Any, tiny: Any, tmp_path: Path) -> None:
    """Sizes were seen in the first step of a request that wore it; a B alone was nothing."""
    model = tiny("llama")
    adapt(model, tmp_path / "one", ("q_proj", "down_proj"), 1)
    config, weights = tmp_path / "one" / "adapter_config.json", tmp_path / "one" / "adapter_model.safetensors"
    state = load_file(weights)
    for name, shape in change.items() if isinstance(change, dict) else ():
        state.pop(name, None)
        if isinstance(shape, list):
            state[name] = torch.ones(shape)
    save_file(state, weights)
    others = {k: v for k, v in change.items() if "." not in k} if isinstance(change, dict) else {}
    config.write_text(json.dumps(json.loads(config.read_text()) | others if isinstance(change, dict) else change))
    with pytest.raises(CheckpointError, match="one"):
        load(model, adapters={"x": tmp_path / "one"})


def test_no_list_goes_to_the_device_by_a_copy_that_waits(
    tiny: Any, prompts_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.tensor(list, device=...)` blocks the host until the device is done with all before; a step waits for its tokens only."""
    model, prompts, plain, waiting = tiny("llama"), prompts_of([12, 9, 5]), torch.tensor, list[object]()
    adapt(model, tmp_path / "one", TARGETS["llama"], 1)
    how = SamplingParams(6, temperature=0.8, seed=1, n=3, top_k=5, logprobs=2, repetition_penalty=1.2)

    def made(*values: Any, **options: Any) -> torch.Tensor:
        caller = sys._getframe(1).f_code.co_filename
        if isinstance(options.get("device"), torch.device) and "ds_inference" in caller:
            waiting.append((caller, values))
        return plain(*values, **options)

    from transformers import MambaConfig, MambaForCausalLM

    states = MambaForCausalLM(
        MambaConfig(vocab_size=97, hidden_size=32, state_size=8, num_hidden_layers=2, eos_token_id=None)
    ).eval()
    for source, adapters in ((model, {"one": tmp_path / "one"}), (states, None)):
        engine = load(source, adapters=adapters, native=False if adapters else None, block_size=4)
        monkeypatch.setattr(torch, "tensor", made)
        engine.generate(prompts, how, adapters=["one", None, "one"] if adapters else None)
        engine.generate(prompts, SamplingParams(4))
        monkeypatch.setattr(torch, "tensor", plain)
    assert waiting == []
