"""Where models go, how large their caches are, products of codes, and faults of generation on devices."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_config.errors import PlanError, UnsupportedError
from ds_inference import (
    SamplingParams,
    SchedulerConfig,
    build_hf_engine,
    cache_size,
    init_inference,
    load,
    model_loader,
)
from ds_inference.blocks import block_hashes
from ds_inference.cache import Cache
from ds_inference.cache_size import cache_blocks, default_device, fit_blocks, trial_chunks
from ds_inference.cuda_graphs import CudaGraphRunner
from ds_inference.quantize import _grouped_product_triton, _product_triton, moved
from ds_ops.formats import FP4_E2M1, FP8_E4M3, INT4, INT8, QuantTensor
from ds_ops.quant_linear import quantize_weight, quantized_grouped_matmul, quantized_linear

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def product_of(seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kind, cols = draw.choice([INT8, INT4, FP8_E4M3]), draw.choice([16, 64, 200, 384])
    symmetric, group = kind is FP8_E4M3 or draw.random() < 0.5, draw.choice([16, 32, 64, 128, 512])
    rows, outputs = draw.choice([1, 3, 16, 17, 40, 65, 200]), draw.choice([1, 32, 50, 70])
    weight = torch.randn(outputs, cols, generator=generator).to(DEVICE)
    codes = quantize_weight(weight, kind, group=group, symmetric=symmetric)
    x = torch.randn(rows, cols, generator=generator).to(DEVICE)
    bias = draw.choice([None, torch.randn(outputs, generator=generator).to(DEVICE)])
    found, wanted = _product_triton(x, codes, bias), quantized_linear(x, codes, bias)
    assert torch.allclose(found, wanted, atol=1e-4, rtol=1e-4)


def grouped_product_of(seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kind, cols = draw.choice([INT8, INT4, FP8_E4M3, FP4_E2M1]), draw.choice([16, 64, 200, 384])
    symmetric, group = kind.is_float or draw.random() < 0.5, draw.choice([16, 32, 128, 512])
    experts, outputs = draw.choice([1, 3, 8]), draw.choice([1, 32, 50])
    codes = quantize_weight(
        torch.randn(experts, outputs, cols, generator=generator).to(DEVICE), kind, group=group, symmetric=symmetric
    )
    counts = torch.tensor([draw.choice([0, 0, 1, 5, 17, 40]) for _ in range(experts)])
    rows, ends = int(counts.sum()) + draw.choice([0, 3]), counts.cumsum(0).to(DEVICE)
    x = torch.randn(rows, cols, generator=generator).to(DEVICE)
    found, wanted = _grouped_product_triton(x, codes, ends), quantized_grouped_matmul(x, codes, ends)
    assert torch.allclose(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_grouped_products_of_drawn_shapes(seed: int) -> None:
    pytest.importorskip("triton")
    grouped_product_of(seed)


@pytest.mark.slow
def test_grouped_products_of_two_hundred_drawn_shapes() -> None:
    pytest.importorskip("triton")
    for seed in range(5, 200):
        grouped_product_of(seed)


@pytest.mark.parametrize("seed", range(5))
def test_products_of_drawn_shapes(seed: int) -> None:
    pytest.importorskip("triton")
    product_of(seed)


@pytest.mark.slow
def test_products_of_two_hundred_drawn_shapes() -> None:
    pytest.importorskip("triton")
    for seed in range(5, 200):
        product_of(seed)


def test_codes_move_as_codes() -> None:
    codes = quantize_weight(torch.randn(8, 64), INT4, group=32, symmetric=False)
    other = moved(codes, "meta")
    assert isinstance(other, QuantTensor)
    assert (other.wire.device.type, other.wire.shape, other.spec) == ("meta", codes.wire.shape, codes.spec)
    assert moved(codes, None) is codes


def test_a_folder_of_codes_goes_to_the_device_that_was_asked_for(tiny: Any, tmp_path: Any, monkeypatch: Any) -> None:
    """Codes stayed on the CPU; here every weight is asked to move, and codes are among them."""
    from ds_inference import model_loader

    places = []
    monkeypatch.setattr(model_loader, "moved", lambda w, device: (places.append((type(w), device)), moved(w, None))[1])
    model = tiny("llama")
    weights = {name: quantize_weight(w, INT8) if "proj" in name else w for name, w in model.state_dict().items()}
    load(model, weights=weights, device="cpu", native=False)  # type: ignore[arg-type]
    assert places
    assert set(places) == {(QuantTensor, torch.device("cpu"))}


def test_the_default_device_is_the_accelerator_or_the_cpu(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        assert default_device() == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert default_device() == torch.device("cuda", 3)


def test_a_cache_takes_what_is_left(tiny: Any) -> None:
    assert fit_blocks(10_500, 1000, 4096, 16) == 9
    assert fit_blocks(10**12, 1000, 64, 16) == 4096
    for room in (1500, -5):
        with pytest.raises(PlanError, match="bytes are left"):
            fit_blocks(room, 1000, 4096, 16)
    decoder = load(tiny("llama")).decoder
    with pytest.raises(PlanError, match=r"utilization=1\.5"):
        cache_blocks(decoder, 16, None, None, 1.5)
    if decoder.device.type == "cpu":
        assert cache_blocks(decoder, 16, None, None, 0.9) == 512
    assert cache_blocks(decoder, 16, None, 100, 0.9) == 7


def test_the_trial_step_is_as_large_as_the_budget_allows(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had 512 tokens and one row of logits whatever the budget was, so that the first full step found no memory."""
    for longest, budget, lengths, rows in (
        (4096, SchedulerConfig(), [512], [64]),
        (4096, SchedulerConfig(8192, 256), [4096, 4096], [256, 0]),
        (100, SchedulerConfig(250, 150), [100, 100, 50], [100, 50, 0]),
        (4096, SchedulerConfig(1024, 4, max_prefill_chunk=512, max_model_len=300), [300, 300, 300, 124], [4, 0, 0, 0]),
    ):
        chunks = trial_chunks(longest, 16, budget)
        assert ([len(c.tokens) for c in chunks], [c.outputs for c in chunks]) == (lengths, rows)
        assert {c.blocks[0] for c in chunks} == {0}
        assert all(len(c.blocks) == -(-len(c.tokens) // 16) for c in chunks)
    spec = load(tiny("llama")).decoder.spec
    decoder: Any = SimpleNamespace(device=torch.device("cuda"), spec=spec, dtype=torch.float32)
    monkeypatch.setattr(cache_size, "_step_bytes", lambda _decoder, _size, budget: 1000 * budget.max_num_batched_tokens)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (9 << 20, 10 << 20))
    few, many = (cache_blocks(decoder, 4, None, None, 1.0, SchedulerConfig(n)) for n in (512, 2048))
    assert (few - many) * Cache.bytes_of(spec, 4, torch.float32) == pytest.approx(1536 * 1000, rel=0.01)
    seen: list[Any] = []
    monkeypatch.setattr(model_loader, "cache_blocks", lambda *arguments: seen.append(arguments[-1]) or 16)
    load(tiny("llama"), budget=SchedulerConfig(2048))
    assert seen == [SchedulerConfig(2048)]


def test_salts_differ_beyond_their_first_64_bytes() -> None:
    """F13: adapters whose names share 64 bytes shared keys and values."""
    long = b"a" * 64
    first, second, third = (block_hashes([1, 2, 3, 4], 2, salt) for salt in (long, long + b"x", long + b"y"))
    assert len({first[0], second[0], third[0]}) == 3
    assert len({first[1], second[1], third[1]}) == 3


def test_generate_beside_submitted_requests(tiny: Any) -> None:
    """F10: KeyError. The others go on, and lose nothing."""
    engine, how = load(tiny("llama")), SamplingParams(max_new_tokens=9)
    alone = [load(tiny("llama")).generate([p], how)[0].tokens for p in ([5, 9, 2], [7, 7])]
    (identity,) = engine.submit([5, 9, 2], how)
    engine.step()
    first = engine.submit([1], SamplingParams(max_new_tokens=40))
    answer = engine.generate([[7, 7]], how)[0]
    assert answer.tokens == alone[1]
    rest = list(engine.stream())
    assert [e.token for e in rest if e.request == identity] == alone[0][1:]
    assert len([e for e in rest if e.request == first[0]]) == 40


def test_put_refuses_what_has_no_answer(tiny: Any) -> None:
    """F14: an empty tensor gave another sequence's logits, one sequence twice one row for both."""
    engine = build_hf_engine(tiny("llama"))
    for uids, tokens in (([1, 2], [[5], []]), ([3, 3], [[5], [6]])):
        with pytest.raises(PlanError, match="each is put once") as error:
            engine.put(uids, [torch.tensor(t, dtype=torch.int64) for t in tokens])
        assert error.value.code == "inference-batch"
    assert engine.put([1], [torch.tensor([5])]).shape[0] == 1


def test_a_forward_with_a_cache_is_not_captured(tiny: Any) -> None:
    """F5: the capture ran the forward three times, and the cache held 9 tokens after a forward of 3."""
    transformers = pytest.importorskip("transformers")
    calls = []

    def record(call: Any) -> Any:
        calls.append(1)
        for _ in range(2):
            call()
        return (lambda: None), call()

    engine = init_inference(tiny("llama"), dtype=torch.float32)
    engine._recorded = CudaGraphRunner(engine.module, record)
    past, ids = transformers.DynamicCache(), torch.tensor([[5, 9, 2]])
    engine(ids, past_key_values=past, use_cache=True)
    assert past.get_seq_length() == 3
    assert engine(ids).past_key_values.get_seq_length() == 3
    assert not calls
    engine(ids, use_cache=False)
    assert calls


@pytest.mark.parametrize("own_forward", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16])
def test_a_cache_of_fewer_bits_gives_nearly_the_same(dtype: torch.dtype, own_forward: bool, tiny: Any) -> None:
    """fp8 had no scales, and its products were torch's error; samples copy blocks of it, prefixes share them."""
    model, prompts = tiny("llama"), [[5, 9, 2] * 6, [7] * 11, [5, 9, 2] * 6]
    how = SamplingParams(9, n=2, temperature=0.7, seed=3, logprobs=5)
    options: dict[str, Any] = {"block_size": 4, "use_module_forward": own_forward}
    options |= {} if own_forward else {"native": False}
    wanted, found = (load(model, cache_dtype=d, **options).generate(prompts, how) for d in (None, dtype))
    for one, other in zip(wanted, found, strict=True):
        assert len(other.tokens) == 9
        assert other.logprobs[0] == pytest.approx(one.logprobs[0], abs=0.6)
    each = {d: Cache.bytes_of(load(model).decoder.spec, 4, d) for d in (torch.int8, torch.float8_e4m3fn)}
    assert each[torch.int8] == each[torch.float8_e4m3fn]


def test_a_cache_that_nobody_reads_is_refused(tiny: Any) -> None:
    for wrong, options in (
        (torch.int16, {}),
        (torch.float8_e5m2, {"native": False}),
        (torch.float8_e4m3fn, {"native": True}),
    ):
        with pytest.raises(UnsupportedError) as error:
            load(tiny("llama"), cache_dtype=wrong, **options)
        assert error.value.code == "inference-cache-dtype"
