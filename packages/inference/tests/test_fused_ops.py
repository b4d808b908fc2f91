"""The fused pieces of a layer equal plain torch for drawn shapes, and a decoder on kernels gives the tokens of a decoder without."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_inference import SamplingParams, load
from ds_inference import fused_ops as fused
from ds_inference.paged_attention import make_batch
from ds_inference.requests import ScheduledChunk
from ds_inference.rope import Rotation
from ds_inference.spec import AttentionSpec, RopeSpec
from ds_ops.triton_kernels.kernel_arguments import GATES, NormWeights

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MANY = 200
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDED = (
    DTYPES if DEVICE.type == "cuda" else (torch.float32, torch.float16)
)  # the interpreter cuts bf16 where a device rounds


def near(found: Tensor, wanted: Tensor) -> bool:
    """Equal but for another order of sums, and the roundings that follow from it."""
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}.get(wanted.dtype, 0.0)
    return found.dtype == wanted.dtype and torch.allclose(found.float(), wanted.float(), atol=tolerance, rtol=tolerance)


def norms_of(seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype, n, rows = draw.choice(DTYPES), draw.choice([1, 16, 48, 100, 513]), draw.randint(1, 5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    def norm() -> NormWeights | None:
        kind = draw.choice(["none", "rms", "offset", "layer"])
        bias = normal(n) if kind == "layer" and draw.random() < 0.7 else None
        return None if kind == "none" else NormWeights(normal(n), bias, 1e-5, float(kind == "offset"), kind == "layer")

    x, delta = normal(rows, n), draw.choice([None, normal(rows, n)])
    post, pre = (None if delta is None else norm()), norm()
    wanted, found = (run(x, delta, post, pre) for run in (fused._residual_norm_torch, fused._residual_norm_triton))
    assert near(found[0], wanted[0])
    assert (found[1] is None) == (wanted[1] is None)
    assert wanted[1] is None or near(found[1], wanted[1])


def gates_of(seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype, activation = draw.choice(DTYPES), draw.choice(sorted(GATES))
    both = torch.randn(draw.randint(1, 4), 2 * draw.choice([1, 24, 1024, 1100]), generator=generator).to(DEVICE, dtype)
    assert near(fused._gate_triton(both, activation), fused._gate_torch(both, activation))


def heads_of(seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype, heads, kv_heads = draw.choice(ROUNDED), draw.choice([1, 4, 7]), draw.choice([1, 2, 3])
    width, value_width = draw.choice([8, 64, 80]), draw.choice([8, 64, 80])
    dim = draw.choice([0, width, width // 2])
    interleaved, codes = draw.random() < 0.3, draw.choice([None, torch.int8, torch.float8_e4m3fn])

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    rope = RopeSpec(dim, interleaved=interleaved, parameters={"max_position_embeddings": 512})
    count, size = draw.randint(1, 4), 4
    rotation = Rotation(rope, 512, DEVICE) if dim else None
    positions = torch.randint(0, 500, (count,), generator=generator).to(DEVICE)
    tables = None if rotation is None else rotation.tables(positions, dtype)
    norms = None
    if draw.random() < 0.5:
        offset = draw.choice([0.0, 1.0])
        norms = NormWeights(normal(width), None, 1e-6, offset), NormWeights(normal(width), None, 1e-6, offset)
    spec = AttentionSpec(heads, kv_heads, width, value_width, 1.0, rope=rope if dim else None)
    slots = torch.randperm(5 * size, generator=generator)[:count].int().to(DEVICE)
    qkv = normal(count, (heads + kv_heads) * width + kv_heads * value_width)

    def run(op: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        tensors = [torch.zeros(5, size, kv_heads, w, device=DEVICE).to(codes or dtype) for w in (width, value_width)]
        scales = [torch.zeros(5, size, kv_heads, device=DEVICE) for _ in tensors] if codes else []
        q = op(qkv, fused.Heads(spec, rotation, tables, norms, None), slots, (*tensors, *scales))
        stored = [t.float() * s[..., None] for t, s in zip(tensors, scales, strict=True)] if codes else tensors
        return q, *stored

    wanted, found = run(fused._write_heads_torch), run(fused._write_heads_triton)
    if interleaved and dim:  # the kernel leaves pairs where they are; scores do not see it
        back = torch.cat([torch.arange(0, dim, 2), torch.arange(1, dim, 2), torch.arange(dim, width)]).to(DEVICE)
        found = found[0][..., back], found[1][..., back], found[2]
    step = (
        0.13 if codes == torch.float8_e4m3fn else 0.04
    )  # of codes: an eighth of an e4m3 value, a 127th of the largest
    for mine, reference, limit in zip(found, wanted, (0.0, step, step), strict=True):
        if codes and limit:  # a code may fall to the other side of a tie, and be its neighbour
            assert torch.allclose(mine, reference, atol=limit, rtol=limit)
        else:
            assert near(mine, reference)


@pytest.mark.parametrize("check", [norms_of, gates_of, heads_of])
@pytest.mark.parametrize("seed", range(5))
def test_drawn_shapes(check: Callable[[int], None], seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("check", [norms_of, gates_of, heads_of])
def test_two_hundred_drawn_shapes(check: Callable[[int], None]) -> None:
    for seed in range(5, MANY):
        check(seed)


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_OPS", "triton")


FAMILIES = ("llama", "gemma2", "qwen3", "gptj", "bloom")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_decoder_on_kernels_gives_the_same_tokens(name: str, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, how = [[5, 9, 2], [7] * 11], SamplingParams(max_new_tokens=2)
    model = tiny(name).to(DEVICE)
    monkeypatch.setenv("DS_OPS", "reference")
    expected = [a.tokens for a in load(model, native=False, cache_tokens=128).generate(prompts, how)]
    monkeypatch.setenv("DS_OPS", "triton")
    found = [a.tokens for a in load(model, native=False, cache_tokens=128).generate(prompts, how)]
    assert found == expected


class Launches(TorchDispatchMode):
    """Counts what a device would launch or wait for: operations that compute, and reads by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "item", "nonzero"):
            self.waits[name] += 1
        elif not func.is_view and name not in (
            "empty",
            "new_empty",
            "empty_like",
            "_unsafe_view",
            "detach",
            "lift_fresh",
        ):
            self.kernels[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral windowed", "llama tied", "gemma2", "phi3"])
def test_a_layer_is_ten_kernels(name: str, tiny: Any, on_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of decode rows: at most 10 kernels a layer, none of which the host waits for."""
    from ds_ops.triton_kernels import triton_attention, triton_gate, triton_norm, triton_rotary

    launches = Launches()

    def count(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        launches.kernels[kernel.__name__] += 1

    for module in (triton_attention, triton_gate, triton_norm, triton_rotary):
        monkeypatch.setattr(module, "launch", count)
    monkeypatch.setattr(triton_attention, "multiprocessors", lambda _: 132)
    decoder = load(tiny(name).to(DEVICE), native=False, cache_tokens=64)
    batch, _ = make_batch([ScheduledChunk(i, (3,), 5, (i,), 1) for i in range(2)], 16, DEVICE)
    per_layer = []
    for layers in (1, 2):
        spec = decoder.decoder.spec
        from dataclasses import replace

        decoder.decoder.spec = replace(spec, layers=spec.layers[:layers])
        launches.kernels.clear()
        with torch.inference_mode(), launches:
            decoder.decoder.forward(batch, decoder.cache)
        per_layer.append(launches.kernels.total())
        decoder.decoder.spec = spec
    assert per_layer[1] - per_layer[0] <= 10, launches.kernels
    assert not launches.waits
