"""Folders of codes: every packing gives the numbers that its definition says, and answers are those of these numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ds_config.errors import UnsupportedError
from ds_inference import SamplingParams, load, model_loader
from ds_inference.model_loader import read_decoder
from ds_inference.packed_checkpoints import PackedCheckpoint
from ds_inference.quantize import dequantised
from ds_ops.formats import FP4_E2M1, QuantTensor
from ds_ops.quant import dequantize
from ds_ops.quant_linear import quantize_weight

transformers = pytest.importorskip("transformers")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: Tensor, bits: int) -> Tensor:
    """int [rows, n] to int32 [rows, n * bits / 32]: written bit by bit, not as the reader does."""
    each = 32 // bits
    out = torch.zeros(codes.shape[0], codes.shape[1] // each, dtype=torch.int64)
    for i in range(each):
        out |= codes[:, i::each].long() << (bits * i)
    return torch.where(out >= 2**31, out - 2**32, out).int()


def coded(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], fp32 scales and zero points [N, groups]."""
    parts = weight.view(weight.shape[0], -1, group)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = (-low / scales).round()
    codes = ((parts / scales[..., None]).round() + zeros[..., None]).clamp(0, 2**bits - 1)
    return codes.flatten(1).int(), scales, zeros.int()


def packed(kind: str, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a matrix `name`, and what it is worth."""
    bits, group = (8 if kind.endswith("8") else 4), 16
    codes, scales, zeros = coded(weight, bits, group)
    worth = ((codes.view(len(codes), -1, group) - zeros[..., None]) * scales[..., None]).flatten(1)
    if kind.startswith("gptq"):
        order = torch.arange(weight.shape[1]) // group
        if kind == "gptq reordered":  # inputs of a group lie apart
            order = order.flip(0)
            codes, worth = codes.flip(1), worth.flip(1)
        less = 0 if kind == "gptq v2" else 1
        return {
            f"{name}.qweight": words(codes, bits).t().contiguous(),
            f"{name}.qzeros": words((zeros.t() - less) % 2**bits, bits),
            f"{name}.scales": scales.t().half().contiguous(),
            f"{name}.g_idx": order.int(),
        }, worth
    if kind == "awq":

        def columns(x: Tensor) -> Tensor:  # [rows, n], each eight in AWQ's order
            return words(x.view(x.shape[0], -1, 8)[..., list(ORDER)].flatten(1), 4)

        return {
            f"{name}.qweight": columns(codes.t().contiguous()),
            f"{name}.qzeros": columns(zeros.t().contiguous()),
            f"{name}.scales": scales.t().half().contiguous(),
        }, worth
    return {
        f"{name}.weight_packed": words(codes, bits),
        f"{name}.weight_scale": scales,
        f"{name}.weight_zero_point": words(zeros.t().contiguous(), bits).t().contiguous(),
        f"{name}.weight_shape": torch.tensor(weight.shape),
    }, worth


SECTIONS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4},
    "gptq v2": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    "gptq reordered": {"quant_method": "gptq", "bits": 4, "desc_act": True},
    "gptq8": {"quant_method": "gptq", "bits": 8},
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm"},
    "compressed": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "compressed8": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
}


@pytest.mark.parametrize("kind", list(SECTIONS))
def test_codes_of_a_folder(kind: str, tiny: Any, prompts_of: Any, tmp_path: Any) -> None:
    model, prompts = tiny("llama"), prompts_of([1, 12, 30])
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    plain = dict(state)
    for name in [n for n in state if "_proj" in n]:
        more, worth = packed(kind, name.removesuffix(".weight"), state.pop(name))
        state |= more
        plain[name] = worth
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": SECTIONS[kind]}))
    decoder = read_decoder(tmp_path, native=False)
    model.load_state_dict(plain)
    wanted = read_decoder(model)
    for role in ("layers.1.attention.qkv.weight", "layers.0.feed.down.weight"):
        found = decoder.weights[role]
        assert isinstance(found, QuantTensor) == (kind != "gptq reordered")
        numbers = dequantize(found, dtype=torch.float32) if isinstance(found, QuantTensor) else found
        assert torch.allclose(numbers, wanted.weights[role], atol=2e-3 if kind == "gptq reordered" else 1e-6)
    if kind == "gptq reordered":  # numbers, rounded to the scales' 16 bits
        return
    how = SamplingParams(6)
    expected = [a.tokens for a in load(model).generate(prompts, how)]
    for native in (False, True):
        assert [a.tokens for a in load(tmp_path, native=native).generate(prompts, how)] == expected
    assert not load(tmp_path, quantize="int8").decoder.obstacle  # other codes, where somebody asks


def test_blocks_of_fp8_and_of_mxfp4() -> None:
    torch.manual_seed(1)
    weight, scales = torch.randn(200, 300).to(torch.float8_e4m3fn), torch.rand(2, 3)
    found = PackedCheckpoint({"a.weight": weight, "a.weight_scale_inv": scales}, {"quant_method": "fp8"})
    large = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert list(found) == ["a.weight"]
    assert isinstance(found["a.weight"], QuantTensor)
    assert torch.equal(dequantised(found["a.weight"]), (weight.float() * large).bfloat16())
    blocks, exponents = (
        torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8),
        torch.randint(120, 130, (2, 6, 3)).byte(),
    )
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes = PackedCheckpoint({"e_blocks": blocks, "e_scales": exponents}, {"quant_method": "mxfp4"})["e"]
    assert isinstance(codes, QuantTensor)
    values = dequantised(codes)
    assert (values.shape, values.dtype) == ((2, 6, 96), torch.bfloat16)
    for expert, row, at in ((0, 0, 0), (1, 5, 95), (0, 3, 34), (1, 2, 65)):
        byte = int(blocks[expert, row, at // 32, at % 32 // 2])
        code = byte >> 4 if at % 2 else byte & 15
        worth = table[code & 7] * (-1 if code & 8 else 1) * 2.0 ** (int(exponents[expert, row, at // 32]) - 127)
        assert float(values[expert, row, at]) == worth


def mxfp4(weight: Tensor) -> dict[str, Tensor]:
    """Experts [E, in, out] as GPT-OSS's folders have them."""
    codes = quantize_weight(weight.transpose(1, 2).contiguous(), FP4_E2M1, group=32)
    powers = codes.params[..., 0].log2().ceil().int() + 127
    experts, inputs, outputs = weight.shape
    return {
        "_blocks": codes.codes.reshape(experts, outputs, inputs // 32, 16).clone(),
        "_scales": powers.to(torch.uint8).view(experts, outputs, -1),
    }


def blocks_of_fp8(weight: Tensor) -> dict[str, Tensor]:
    scale = torch.full([-(-n // 32) for n in weight.shape], 0.01)
    return {".weight": (weight * 100).clamp(-448, 448).to(torch.float8_e4m3fn), ".weight_scale_inv": scale}


@pytest.mark.parametrize(("family", "method"), [("gpt-oss", "mxfp4"), ("deepseek-v3", "fp8")])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_codes_of_experts_stay_codes_on_a_device(
    family: str, method: str, backend: str, tiny: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They became bf16 numbers, four times as large; here the CPU stands for the device."""
    if backend == "triton":
        pytest.importorskip("triton")
    model, prompts, how = tiny(family), [[5, 9, 2]], SamplingParams(2)
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    wanted = [n for n in state if (n.endswith(("gate_up_proj", "down_proj")) if method == "mxfp4" else ".mlp." in n)]
    wanted = [n for n in wanted if state[n].dim() > 1 and not n.endswith("gate.weight") and state[n].shape[1] % 8 == 0]
    if method == "mxfp4":
        wanted = [n for n in wanted if state[n].shape[1] % 32 == 0]
    for name in wanted:
        weight = state.pop(name)
        parts = mxfp4(weight) if method == "mxfp4" else blocks_of_fp8(weight)
        state |= {name.removesuffix(".weight") + tail: part.contiguous() for tail, part in parts.items()}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    numbers = load(tmp_path, native=False, device="cpu")
    assert not any(isinstance(w, QuantTensor) for w in numbers.decoder.weights.values())
    expected = [a.tokens for a in numbers.generate(prompts, how)]
    monkeypatch.setattr(model_loader, "keeps_codes", lambda weight, device: True)
    monkeypatch.setenv("DS_OPS", backend)
    engine = load(tmp_path, native=False, device="cpu")
    role = "layers.1.feed.experts.up"
    codes = engine.decoder.weights[role]
    assert isinstance(codes, QuantTensor)
    assert torch.equal(dequantised(codes).float(), numbers.decoder.weights[role].float())
    assert [a.tokens for a in engine.generate(prompts, how)] == expected


def test_another_packing_is_told() -> None:
    with pytest.raises(UnsupportedError, match="bitsandbytes"):
        PackedCheckpoint({}, {"quant_method": "bitsandbytes", "bits": 4})
    with pytest.raises(UnsupportedError, match="bits 3"):
        PackedCheckpoint({}, {"quant_method": "gptq", "bits": 3})
