"""Moments of 8 bits: codes beside torchao's, states of bitsandbytes, torchao and torch.optim read, training beside AdamW."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_config.errors import CheckpointError, ConfigError, UnsupportedError
from ds_ops.dynamic_codes import dequantize_dynamic, dynamic_map, quantize_dynamic
from ds_ops.optim import Adam, Adam8bit, AdamW, AdamW8bit, FusedOps

NESTED = "__bnb_optimizer_quant_state__"
SHAPES = [(64, 72), (5,), (3, 40, 41), (64, 64)]


def params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def train(optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[Tensor]:
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    for i in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 + i)
        for p in stepped:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
    return [p.detach() for p in stepped]


def spread(n: int, signed: bool) -> Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(2)) * torch.logspace(-4, 3, n)
    return x if signed else x.square()


# ---- codes -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("signed", [False, True])
def test_codes_equal_torchao(signed: bool) -> None:
    theirs = pytest.importorskip("torchao.optim.quant_utils")
    assert torch.equal(dynamic_map(signed), torch.tensor(theirs.create_dynamic_map(signed)))
    x = spread(1 << 14, signed)
    scaled, scale = theirs.scale_tensor(x, 256)
    codes, largest = quantize_dynamic(x, signed=signed)
    assert torch.equal(largest, scale)
    differ = codes != theirs.quantize_8bit_with_qmap(scaled, dynamic_map(signed))
    # A positive number is no zero here.
    assert not differ.any() if signed else bool((codes[differ] == 1).all())


@pytest.mark.parametrize("dither", [0.0, -0.5, 0.3])
@pytest.mark.parametrize("signed", [False, True])
def test_codes_are_the_nearest_of_moved_borders(signed: bool, dither: float) -> None:
    x, values = spread(3000, signed), dynamic_map(signed)
    codes, largest = quantize_dynamic(x, signed=signed, dither=dither)
    borders = values[:-1] + (values[1:] - values[:-1]) * (0.5 - dither)
    if not signed:
        borders[0] = 0.0
    scaled = x / largest.repeat_interleave(256)[:3000]
    assert torch.equal(codes, torch.bucketize(scaled, borders).to(torch.uint8))
    found = dequantize_dynamic(codes, largest, signed=signed)
    assert torch.equal(found, values[codes.int()] * largest.repeat_interleave(256)[:3000])


def test_zeros_and_what_is_no_number() -> None:
    x = torch.zeros(600)
    x[300] = torch.nan
    codes, largest = quantize_dynamic(x, signed=True)
    found = dequantize_dynamic(codes, largest, signed=True)
    assert found.isnan().nonzero().flatten().tolist() == list(range(256, 512))
    assert not found[:256].any()
    assert quantize_dynamic(torch.zeros(0), signed=True)[0].shape == (0,)


# ---- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "plain"), [(AdamW8bit, AdamW), (Adam8bit, Adam)])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_steps_follow_those_of_fp32_moments(backend: str, ours: Any, plain: Any, amsgrad: bool) -> None:
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": amsgrad}
    eight, wide = ours(params(), **options), plain(params(), **options)
    start, a, b = params(), train(eight, 20), train(wide, 20)
    for s, p, q in zip(start, a, b, strict=True):
        moved = (q - s).norm()
        assert (p - q).norm() < 0.04 * moved
    p = eight.param_groups[0]["params"]
    assert eight.state[p[0]]["exp_avg_8bit"].dtype is torch.uint8
    assert eight.state[p[0]]["exp_avg_absmax"].shape == (18,)
    assert torch.equal(a[1], b[1])  # a small parameter has moments in fp32


@pytest.mark.slow
def test_steps_equal_torchao() -> None:
    """One step is the same to the bit but for the rounding of sums; later ones differ by the dither of the second moment."""
    theirs = pytest.importorskip("torchao.optim.adam")
    optim = pytest.importorskip("torchao.optim")
    (a,), (b,) = params()[:1], params()[:1]
    ours, reference = AdamW8bit([a], lr=1e-2), optim.AdamW8bit([b], lr=1e-2)
    m, v = (reference._new_buffer(b, signed) for signed in (True, False))
    distances = []
    for i in range(10):
        a.grad = torch.randn(b.shape, generator=torch.Generator().manual_seed(i))
        ours.step()
        rate = torch.tensor(1e-2)
        step = torch.tensor(float(i + 1))
        with torch.no_grad():  # what torchao compiles; the compiler would take a minute
            theirs.single_param_adam(b, a.grad, step, m, v, None, rate, 0.9, 0.999, 1e-2, 1e-8, True, False)
        distances.append((a - b).abs().max().item())
    assert distances[0] < 1e-6
    assert max(distances) < 0.05 * 1e-2 * 10
    differ = (ours.state[a]["exp_avg_8bit"] != m.codes).float().mean()
    assert differ < 0.01


def test_the_second_moment_follows_falling_gradients(backend: str) -> None:
    """Rounded to nearest it would stay where it is: 0.001 of it is a seventh of the distance of two codes."""
    p = nn.Parameter(torch.zeros(1024))
    optimizer = AdamW8bit([p], lr=0.0, min_8bit_size=0)
    size = torch.linspace(0.2, 1.0, 1024)
    for i in range(400):
        p.grad = size * (1.0 if i < 100 else 0.0)
        p.grad[::256] = 1.0  # the largest of each block, which has a code that is exact, stays
        optimizer.step()
    state = optimizer.state[p]
    found = dequantize_dynamic(state["exp_avg_sq_8bit"], state["exp_avg_sq_absmax"], signed=False)
    expected = size.square() * (1 - 0.999**100) * 0.999**300
    inner = torch.arange(1024) % 256 != 0
    assert (found / expected)[inner].mean().item() == pytest.approx(1.0, abs=0.03)


def test_memory_order_dtypes_fusion_and_rounding(backend: str) -> None:
    plain = nn.Parameter(torch.randn(64, 80))
    turned = nn.Parameter(plain.detach().T.contiguous().T)
    grads = torch.randn(64, 80)
    copied = torch.empty(64, 80, dtype=torch.bfloat16)
    a, b = AdamW8bit([plain], lr=0.1), AdamW8bit([turned], lr=0.1)
    given = grads.clone() * 4
    a.step(fusion=FusedOps(grads={plain: given}, grad_scale=0.25, zero_grads=True, copies={plain: copied}))
    assert not given.any()
    assert torch.equal(copied, plain.detach().bfloat16())
    turned.grad = grads.T.contiguous().T
    b.step(fusion=FusedOps(zero_grads=True))
    assert torch.equal(plain, turned)
    assert not turned.grad.any()
    low = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = AdamW8bit([low], lr=1e-4, weight_decay=0.0, stochastic_rounding=True)
    for _ in range(50):
        low.grad = torch.ones_like(low)
        optimizer.step()
    assert 1 - low.detach().float().mean().item() == pytest.approx(5e-3, rel=0.15)
    wide = nn.Parameter(torch.ones(4096, dtype=torch.float64))
    double = AdamW8bit([wide])
    wide.grad = torch.ones_like(wide)
    double.step()
    assert double.state[wide]["exp_avg"].dtype is torch.float64


def test_a_resume_is_exact_and_pickles() -> None:
    whole = AdamW8bit(params(), lr=0.1)
    expected = train(whole, 6)
    first = AdamW8bit(params(), lr=0.1)
    train(first, 3)
    second = AdamW8bit([nn.Parameter(p.detach().clone()) for p in first.param_groups[0]["params"]], lr=0.3)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    for found in (train(second, 3, first=3), train(copy.deepcopy(first), 3, first=3)):
        for p, q in zip(found, expected, strict=True):
            assert torch.equal(p, q)


def test_paged_codes(tmp_path: Any) -> None:
    for p, q in zip(train(AdamW8bit(params(), paged=str(tmp_path)), 3), train(AdamW8bit(params()), 3), strict=True):
        assert torch.equal(p, q)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="min_8bit_size"):
        AdamW8bit(params(), min_8bit_size=-1)
    p = nn.Parameter(torch.zeros(64, 72))
    p.grad = torch.zeros(64, 72).to_sparse()
    with pytest.raises(UnsupportedError, match="optimizer-sparse"):
        AdamW8bit([p]).step()
    with pytest.raises(UnsupportedError, match="optimizer-undo"):
        AdamW8bit([p]).undo()
    assert not AdamW8bit.elementwise


# ---- states of others ------------------------------------------------------------------------------------------------


def test_states_of_torch_are_read() -> None:
    theirs = torch.optim.AdamW(params(), lr=0.1)
    train(theirs, 3)
    ours = AdamW8bit(params(), lr=0.1)
    ours.load_state_dict(theirs.state_dict())
    p, q = ours.param_groups[0]["params"][0], theirs.param_groups[0]["params"][0]
    codes, largest = quantize_dynamic(theirs.state[q]["exp_avg"].reshape(-1), signed=True)
    assert torch.equal(ours.state[p]["exp_avg_8bit"].reshape(-1), codes)
    assert torch.equal(ours.state[p]["exp_avg_absmax"], largest)
    assert ours.state[p]["step"] == 3


@pytest.mark.slow
def test_states_of_torchao_are_read() -> None:
    subclass = pytest.importorskip("torchao.optim.subclass_8bit")
    theirs = torch.optim.AdamW(params(), lr=0.1)
    train(theirs, 3)
    saved = theirs.state_dict()
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        coded = subclass.OptimState8bit.zeros((64, 72), signed)
        coded.copy_(saved["state"][0][name])
        saved["state"][0][name] = coded
    again = AdamW8bit(params(), lr=0.1)
    again.load_state_dict(saved)
    state = again.state[again.param_groups[0]["params"][0]]
    found = dequantize_dynamic(state["exp_avg_8bit"].view(-1), state["exp_avg_absmax"], signed=True)
    assert torch.equal(found.view(64, 72), saved["state"][0]["exp_avg"].dequantize())


def as_bitsandbytes(state: dict[str, Any], values: dict[bool, Tensor]) -> dict[str, Any]:
    """Return a parameter's state as bitsandbytes saves it: `state1`, `qmap1`, `absmax1`, and so for the second moment."""
    if "exp_avg" in state:
        return {"step": 3, NESTED: {"state1": state["exp_avg"], "state2": state["exp_avg_sq"]}}
    out: dict[str, Any] = {}
    for place, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
        out |= {f"state{place}": state[f"{name}_8bit"], f"absmax{place}": state[f"{name}_absmax"]}
        out[f"qmap{place}"] = values[place == 1]
    return {"step": 3, NESTED: out}


def test_states_of_bitsandbytes_are_read() -> None:
    """Its format is codes, values of codes and magnitudes."""
    values = {signed: dynamic_map(signed) for signed in (True, False)}
    source = AdamW8bit(params(), lr=0.1)
    train(source, 3)
    saved = source.state_dict()
    saved["state"] = {i: as_bitsandbytes(s, values) for i, s in saved["state"].items()}
    target = AdamW8bit([nn.Parameter(p.detach().clone()) for p in source.param_groups[0]["params"]], lr=0.1)
    target.load_state_dict(saved)
    for p, q in zip(source.param_groups[0]["params"], target.param_groups[0]["params"], strict=True):
        for name, value in source.state[p].items():
            found = target.state[q][name]
            assert torch.equal(found, value) if isinstance(value, Tensor) else found == value
    wide = AdamW([nn.Parameter(p.detach().clone()) for p in source.param_groups[0]["params"]], lr=0.1)
    with pytest.raises(CheckpointError, match="optimizer-state"):
        wide.load_state_dict(saved)


@pytest.mark.slow
def test_what_bitsandbytes_trained_is_read() -> None:
    """Runs where bitsandbytes is installed; it is no requirement of the tests."""
    theirs = pytest.importorskip("bitsandbytes.optim").AdamW8bit(params(), lr=0.1)
    b = [p.clone() for p in train(theirs, 3)]
    ours = AdamW8bit([nn.Parameter(p.clone()) for p in b], lr=0.1)
    ours.load_state_dict(theirs.state_dict())
    for p, q in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        state, other = ours.state[p], theirs.state[q]
        assert state["step"] == 3
        if ours.coded(p):
            assert torch.equal(state["exp_avg_8bit"], other["state1"].view(p.shape))
            assert torch.equal(state["exp_avg_sq_absmax"], other["absmax2"])
        else:
            assert torch.equal(state["exp_avg"], other["state1"])
    for p, q, start in zip(train(ours, 3, first=3), train(theirs, 3, first=3), b, strict=True):
        assert (p - q).norm() <= 0.05 * (q - start).norm()
