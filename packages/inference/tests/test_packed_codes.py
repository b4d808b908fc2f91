"""Products that torch ships, with codes in their layouts: the numbers of the reference, and the same codes back.

On the CPU torch has three of them; of the others it checks shapes and strides on tensors of a device without data.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_config.errors import PlanError, UnsupportedError
from ds_inference import QuantizationOptions, SamplingParams, load, model_loader, packed_codes, quantize
from ds_inference.model_loader import read_decoder, refresh_weights
from ds_inference.packed_codes import (
    PackedCodes,
    holds_bf16_params,
    pack_codes,
    product_of_groups,
    product_of_packed,
    round_to_fp8,
)
from ds_inference.quantize import chosen_product, dequantised, laid_out, linear, moved
from ds_ops.formats import FP8_E4M3, INT4, INT8, Format, QuantSpec, QuantTensor
from ds_ops.product_choice import CodeLayout, DeviceTraits, ProductFacts
from ds_ops.quant import dequantize
from ds_ops.quant_linear import quantize_weight

SHIPPED = frozenset({"_weight_int8pack_mm", "_weight_int4pack_mm", "_scaled_mm", "_scaled_grouped_mm", "_grouped_mm"})
WITHOUT_TRITON = DeviceTraits("cuda", (9, 0), cuda=(13, 0), shipped=SHIPPED, triton="there is no C compiler")


def coded(kind: Format, group: int, *, symmetric: bool = True, shape: tuple[int, ...] = (64, 256)) -> QuantTensor:
    """Codes whose scales bf16 holds; zero points are 8 plus or minus powers of two, so that bf16 holds their products, too."""
    torch.manual_seed(len(shape) + group)
    codes = quantize_weight(torch.randn(shape), kind, group=group, symmetric=symmetric)
    codes.params[..., 0] = codes.params[..., 0].bfloat16().float()
    if not symmetric:
        codes.params[..., 1] = 8 - 2.0 ** torch.randint(0, 3, codes.params.shape[:-1])
    return replace(codes, dtype=torch.bfloat16)


def assert_same(found: QuantTensor, wanted: QuantTensor) -> None:
    assert (found.spec, found.shape, found.dtype) == (wanted.spec, wanted.shape, wanted.dtype)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.params, wanted.params)


@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_as_tinygemm_reads_it(group: int, symmetric: bool) -> None:
    codes = coded(INT4, group, symmetric=symmetric)
    assert holds_bf16_params(codes)
    packed = pack_codes(codes, CodeLayout.TINYGEMM)
    x = torch.randn(7, 256).bfloat16()
    wanted = x.float() @ dequantize(codes, dtype=torch.float32).t()
    found = product_of_packed("int4pack_mm", x, packed)
    assert found.dtype == torch.bfloat16
    assert (found.float() - wanted).abs().max() < 0.02 * wanted.abs().max()
    # The weights are the reference's to the bit: products with one input at a time are its bf16 numbers.
    eye = torch.eye(256).bfloat16()
    assert torch.equal(product_of_packed("int4pack_mm", eye, packed).t(), dequantize(codes, dtype=torch.bfloat16))
    assert_same(packed.unpacked(), codes)
    assert packed.codes.nbytes == codes.codes.nbytes
    assert torch.equal(product_of_packed("numbers", x.float(), packed), wanted)


def test_scales_that_bf16_rounds_are_seen() -> None:
    assert not holds_bf16_params(quantize_weight(torch.randn(64, 256), INT4, group=32))
    odd = coded(INT4, 32, symmetric=False)
    odd.params[..., 1], odd.params[..., 0] = 3, 1 + 2.0**-7  # 5 times 129 / 128 has ten bits
    assert not holds_bf16_params(odd)
    nothing = coded(INT4, 32, symmetric=False)
    nothing.params[3, 2] = 0
    assert not holds_bf16_params(nothing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "name"), [(INT8, "int8pack_mm"), (INT8, "numbers"), (FP8_E4M3, "numbers")])
def test_rows_of_codes(kind: Format, name: str, dtype: torch.dtype) -> None:
    codes = quantize_weight(torch.randn(50, 72), kind, group=72)
    packed, x = pack_codes(codes, CodeLayout.ROWS), torch.randn(5, 72).to(dtype)
    found = product_of_packed(name, x, packed)
    wanted = x.float() @ dequantised(codes).float().t()
    assert found.dtype == dtype
    assert (found.float() - wanted).abs().max() < (1e-4 if dtype == torch.float32 else 0.02) * wanted.abs().max()
    assert_same(packed.unpacked(), codes)
    assert packed.codes.is_contiguous()


@pytest.mark.parametrize("shape", [(1, 32), (5, 64), (40, 128)])
def test_scaled_mm_by_row(shape: tuple[int, int]) -> None:
    rows, inputs = shape
    codes = quantize_weight(torch.randn(48, inputs), FP8_E4M3, group=inputs)
    packed, x = pack_codes(codes, CodeLayout.ROWS, rounded=True), torch.randn(rows, inputs).bfloat16()
    found, wanted = (product_of_packed(name, x, packed) for name in ("scaled_mm by row", "numbers"))
    assert torch.allclose(found.float(), wanted.float(), atol=1e-2, rtol=1e-2)
    exact = x.float() @ dequantised(codes).float().t()
    assert 0 < (found.float() - exact).norm() / exact.norm() < 0.05


def blocks(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`torch._scaled_mm` with scales for 1 x 128, as its checks say: both scales are contiguous over rows."""
    (m, k), n = a.shape, b.shape[1]
    assert (k % 16, n % 16, m % 16, b.stride(0)) == (0, 0, 0, 1)
    assert (scale_a.shape, scale_a.stride(0)) == ((m, k // 128), 1)
    assert (scale_b.shape, scale_b.t().stride(0)) == ((k // 128, n), 1)
    wide_a = a.float() * scale_a.repeat_interleave(128, 1)
    wide_b = b.float() * scale_b.repeat_interleave(128, 0)
    return (wide_a @ wide_b).to(out_dtype)


@pytest.mark.parametrize("rows", [1, 16, 33])
def test_scaled_mm_by_block(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", blocks)
    codes = quantize_weight(torch.randn(48, 384), FP8_E4M3, group=128)
    packed, x = pack_codes(codes, CodeLayout.ROWS, rounded=True), torch.randn(rows, 384).bfloat16()
    found, wanted = (product_of_packed(name, x, packed) for name in ("scaled_mm by block", "numbers"))
    assert found.shape == (rows, 48)
    assert torch.allclose(found.float(), wanted.float(), atol=1e-2, rtol=1e-2)


def grouped(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    offs: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """`torch._scaled_grouped_mm` of rows, as its checks say; what is past the last offset is whatever there was."""
    assert not use_fast_accum
    assert (b.stride(1), offs.dtype, scale_a.shape, scale_b.shape) == (
        1,
        torch.int32,
        a.shape[:1],
        (len(b), b.shape[2]),
    )
    out, start = torch.full((len(a), b.shape[2]), torch.nan), 0
    for expert, end in enumerate(offs.tolist()):
        rows = slice(start, end)
        out[rows] = (a[rows].float() * scale_a[rows, None]) @ (b[expert].float() * scale_b[expert])
        start = end
    return out.to(out_dtype)


def test_groups_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_grouped_mm", grouped)
    codes = quantize_weight(torch.randn(3, 32, 64), FP8_E4M3, group=64)
    packed, x, ends = (
        pack_codes(codes, CodeLayout.ROWS, rounded=True),
        torch.randn(9, 64).bfloat16(),
        torch.tensor([4, 4, 7]),
    )
    found, wanted = (product_of_groups(name, x, packed, ends) for name in ("scaled_grouped_mm", "numbers"))
    assert torch.allclose(found.float(), wanted.float(), atol=1e-2, rtol=1e-2)
    assert not found[7:].any()
    assert_same(packed.unpacked(), codes)


def test_torchs_own_checks_take_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors of a device without data: shapes, dtypes and strides are those that torch's kernels want."""

    def rounded(x: Tensor, group: int) -> tuple[Tensor, Tensor]:  # a torch without CUDA copies no such tensor
        codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device="cuda")
        return codes, torch.empty_strided((len(x), x.shape[1] // group), (1, len(x)), device="cuda")

    real, _ = round_to_fp8(torch.randn(32, 256), 128)
    assert real.is_contiguous()
    assert round_to_fp8(torch.randn(32, 256), 128)[1].stride() == (1, 32)
    monkeypatch.setattr(packed_codes, "round_to_fp8", rounded)
    with FakeTensorMode():

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, device="cuda", dtype=dtype)

        x, eight = empty(32, 256, dtype=torch.bfloat16), torch.float8_e4m3fn
        int4 = torch._convert_weight_to_int4pack(empty(64, 128, dtype=torch.uint8), 8)
        for kind, group, codes, params, name in (
            (FP8_E4M3, 256, empty(64, 256, dtype=eight), empty(1, 64), "scaled_mm by row"),
            (FP8_E4M3, 128, empty(64, 256, dtype=eight), empty(2, 64), "scaled_mm by block"),
            (INT4, 64, int4, empty(4, 64, 2, dtype=torch.bfloat16), "int4pack_mm"),
        ):
            layout = CodeLayout.TINYGEMM if kind == INT4 else CodeLayout.ROWS
            packed = PackedCodes(
                codes, params, QuantSpec(kind, group), 256, (64, 256), torch.bfloat16, layout, kind != INT4
            )
            y = product_of_packed(name, x, packed)
            assert (y.shape, y.dtype, y.device.type) == ((32, 64), torch.bfloat16, "cuda")


def test_rounding_to_fp8() -> None:
    x = torch.randn(3, 100) * 50
    x[1] = 0
    for group in (100, 32):
        codes, scales = round_to_fp8(x, group)
        assert (codes.dtype, codes.is_contiguous(), scales.shape) == (torch.float8_e4m3fn, True, (3, -(-100 // group)))
        back = codes.float() * scales.repeat_interleave(group, 1)[:, :100]
        assert torch.allclose(back, x, rtol=0.07, atol=0.3)


# ---- from a model to its weights


@pytest.fixture
def as_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for a Hopper without a C compiler."""
    real = quantize._facts_of

    def facts(spec: Any, shape: Any, dtype: Any, params: Any, *_: Any) -> ProductFacts:
        return replace(real(spec, shape, dtype, params, torch.device("cpu"), "", False), device=WITHOUT_TRITON)

    monkeypatch.setattr(quantize, "_facts_of", facts)


@pytest.mark.usefixtures("as_cuda")
def test_a_weight_is_laid_out_once_and_multiplied_as_the_table_says() -> None:
    x = torch.randn(3, 256).bfloat16()
    for codes, layout, name in (
        (coded(INT4, 64), CodeLayout.TINYGEMM, "int4pack_mm"),
        (coded(INT8, 256), CodeLayout.ROWS, "int8pack_mm"),
    ):
        packed = laid_out(codes, torch.bfloat16)
        assert isinstance(packed, PackedCodes)
        assert packed.layout is layout
        assert chosen_product(packed, torch.bfloat16, 3).entry.name == name
        bias = torch.randn(64).bfloat16()
        wanted = x.float() @ dequantised(codes).float().t() + bias.float()
        assert (linear(x, packed, bias).float() - wanted).abs().max() < 0.02 * wanted.abs().max()
        assert linear(x.view(1, 3, 256), packed).shape == (1, 3, 64)
        assert torch.equal(dequantised(packed), dequantised(codes))
        assert torch.equal(dequantised(moved(packed, "cpu")), dequantised(codes))
    rounds = replace(coded(INT4, 64), dtype=torch.bfloat16)
    rounds.params.mul_(1.001)
    assert laid_out(rounds, torch.bfloat16) is rounds


@pytest.mark.usefixtures("as_cuda")
def test_a_model_of_packed_codes(tiny: Any, prompts_of: Any) -> None:
    model, prompts, how = tiny("llama"), prompts_of([1, 9]), SamplingParams(6)
    engine = load(model, quantize=QuantizationOptions("int8", 0), native=False)
    packed = [w for w in engine.decoder.weights.values() if isinstance(w, PackedCodes)]
    assert len(packed) == 9
    assert not any(isinstance(w, QuantTensor) for w in engine.decoder.weights.values())
    numbers = load(model, native=False)
    numbers.decoder.weights.update({r: dequantised(w) for r, w in engine.decoder.weights.items()})
    assert [a.tokens for a in engine.generate(prompts, how)] == [a.tokens for a in numbers.generate(prompts, how)]
    refresh_weights(engine.decoder, model, model.state_dict())
    assert [a.tokens for a in engine.generate(prompts, how)] == [a.tokens for a in numbers.generate(prompts, how)]


@pytest.mark.usefixtures("as_cuda")
def test_new_values_for_int4_are_refused_by_name(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    monkeypatch.setattr(quantize, "holds_bf16_params", lambda _: True)
    decoder = read_decoder(model.bfloat16(), quantize=QuantizationOptions("int4", 32), native=False)
    assert any(isinstance(w, PackedCodes) for w in decoder.weights.values())
    with pytest.raises(UnsupportedError, match="int4 product") as error:
        refresh_weights(decoder, model, model.state_dict())
    assert error.value.code == "inference-quantize"


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_rounded_inputs_on_any_device(name: str, group: int, tiny: Any, prompts_of: Any) -> None:
    """`activations="fp8"` rounds where no `scaled_mm` runs, too."""
    model, (prompt,) = tiny(name), prompts_of([9])
    how = SamplingParams(1, logprobs=97)

    def logits(**options: Any) -> Tensor:
        (answer,) = load(model, native=False, **options).generate([prompt], how)
        return torch.tensor([answer.tops[0][i] for i in range(97)])

    whole = logits()
    codes = logits(quantize=QuantizationOptions("fp8", group))
    both = logits(quantize=QuantizationOptions("fp8", group, activations="fp8"))
    assert 0 < (codes - both).abs().max() < (whole - whole.mean()).abs().max()
    engine = load(model, quantize=QuantizationOptions("fp8", group, activations="fp8"))
    assert engine.decoder.obstacle
    assert all(w.rounded for w in engine.decoder.weights.values() if isinstance(w, PackedCodes))


def test_codes_of_a_folder_that_are_what_was_asked_for_stay(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loader, "keeps_codes", lambda *_: True)
    model = tiny("llama")
    weights = {
        n: quantize_weight(w, FP8_E4M3, group=128) if "o_proj" in n else w for n, w in model.state_dict().items()
    }
    how = QuantizationOptions("fp8", 128, activations="fp8")
    decoder = read_decoder(model, weights=weights, quantize=how, native=False)  # type: ignore[arg-type]
    found, given = decoder.weights["layers.0.attention.out.weight"], weights["model.layers.0.self_attn.o_proj.weight"]
    assert isinstance(found, PackedCodes)
    assert found.rounded
    assert torch.equal(found.unpacked().wire, given.wire)  # type: ignore[union-attr]


def test_what_cannot_be_rounded_is_said() -> None:
    for options in ({"format": "int8"}, {"format": "fp8", "group": 64}, {"format": "fp6"}):
        with pytest.raises(PlanError, match="fp8"):
            QuantizationOptions(**options, activations="fp8")  # type: ignore[arg-type]
    assert packed_codes.__all__
