"""Adam and AdamW against torch.optim: the same numbers, the same interface."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_config.errors import ConfigError, KernelError, UnsupportedError
from ds_ops.optim import Adagrad, Adam, AdamW, FusedOps, Lamb

SHAPES = [(300, 17), (1,), (4097,), (0,), (3, 5, 7)]


def params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def train(optimizers: list[torch.optim.Optimizer], lists: list[list[nn.Parameter]], steps: int = 10) -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for row in zip(*lists, strict=True):
            g = torch.randn(row[0].shape, generator=generator)
            for p in row:
                p.grad = g.to(p.dtype)
        for o in optimizers:
            o.step()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1, "lr": 0.05},
        {"maximize": True},
        {"betas": (0.8, 0.95), "eps": 1e-3},
    ],
)
@pytest.mark.parametrize(("ours", "theirs"), [(AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam)])
def test_ten_steps_equal_torch(
    backend: str, ours: Any, theirs: Any, options: dict[str, Any], ulps: Callable[[Tensor, Tensor], int]
) -> None:
    """2 ulp of the implementation of torch that runs the same operations: native against fused, reference against loop.

    (torch's own two differ by more near zero, because its vectorised square root is not correctly rounded.)
    """
    a, b = params(), params()
    kind = {"fused": True} if backend == "native" else {"fused": False, "foreach": False}
    pair = [ours(a, **options), theirs(b, **options, **kind)]
    train(pair, [a, b])
    for p, q in zip(a, b, strict=True):
        assert ulps(p, q) <= 2
        for name in ("exp_avg", "exp_avg_sq"):
            if p.numel():
                assert ulps(pair[0].state[p][name], pair[1].state[q][name]) <= 2


def test_construction_imports_no_compiler() -> None:
    program = (
        "import sys, torch, ds_ops.optim as o; p = torch.nn.Parameter(torch.ones(3)); a = o.AdamW([p]);"
        "p.grad = torch.ones(3); a.step(); a.zero_grad(); a.load_state_dict(a.state_dict());"
        "print('torch._dynamo' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_fused_pass_equals_the_sequence_it_replaces(backend: str) -> None:
    """Unscale, clip, step, cast, zero: bf16 gradients beside fp32 parameters, bf16 copies."""
    a, b = params(), params()
    grads = [torch.randn_like(p).bfloat16() for p in a]
    copies = {p: torch.empty_like(p, dtype=torch.bfloat16) for p in a}
    for p, g in zip(b, grads, strict=True):
        p.grad = g.float() * 0.25
    plain = AdamW(b, lr=0.1)
    plain.step()
    fused = AdamW(a, lr=0.1)
    fused.step(fusion=FusedOps(0.25, True, dict(zip(a, grads, strict=True)), copies))
    for p, q, g in zip(a, b, grads, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(copies[p], q.bfloat16())
        assert not bool(g.any())


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_state_and_parameter_dtypes(backend: str, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    a = params(dtype)
    optimizer = AdamW(a, lr=0.1, state_dtype=state_dtype)
    train([optimizer], [a], steps=3)
    exact = params(torch.float64)
    train([torch.optim.AdamW(exact, lr=0.1)], [exact], steps=3)
    for p, q in zip(a, exact, strict=True):
        assert optimizer.state[p]["exp_avg"].dtype == (torch.float64 if dtype == torch.float64 else state_dtype)
        # bf16 keeps 8 bits of m and v (1-b2 is below its spacing near 1): a loose bound says it still steps rightly.
        torch.testing.assert_close(p.double(), q, rtol=0.1, atol=0.12)


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Adam, AdamW, Lamb])
def test_second_moment_in_16_bits_follows_the_gradients(backend: str, kind: Any, state_dtype: torch.dtype) -> None:
    """It stayed where it was: at b2 = 0.999 every change is below half the spacing of bf16."""
    narrow, wide = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64))
    optimizers = [kind([narrow], lr=1e-3, state_dtype=state_dtype), kind([wide], lr=1e-3)]
    for step in range(1200):
        for p, optimizer in zip((narrow, wide), optimizers, strict=True):
            p.grad = torch.linspace(0.5, 1.0, 64) * (1.0 if step < 400 else 0.1)
            optimizer.step()
        if step in (399, 1199):
            found, exact = (o.state[p]["exp_avg_sq"].float() for o, p in zip(optimizers, (narrow, wide), strict=True))
            torch.testing.assert_close(found, exact, rtol=0.05, atol=0.0)
    assert optimizers[0].state[narrow]["exp_avg_sq"].dtype == state_dtype
    torch.testing.assert_close(1 - narrow, 1 - wide, rtol=0.02, atol=0.0)


def test_sum_of_adagrad_in_16_bits_grows(backend: str) -> None:
    narrow, wide = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64))
    optimizers = [Adagrad([narrow], state_dtype=torch.bfloat16), Adagrad([wide])]
    for _ in range(1500):
        for p, optimizer in zip((narrow, wide), optimizers, strict=True):
            p.grad = torch.linspace(0.5, 1.0, 64)
            optimizer.step()
    found, exact = (o.state[p]["sum"].float() for o, p in zip(optimizers, (narrow, wide), strict=True))
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0.0)


def test_torch_state_loads_and_keeps_its_precision() -> None:
    a, b, c = params(torch.bfloat16), params(torch.bfloat16), params(torch.bfloat16)
    source = AdamW(a, lr=0.1)
    train([source], [a], steps=2)
    copied = AdamW(b, lr=0.5)
    copied.load_state_dict(source.state_dict())
    assert copied.param_groups[0]["lr"] == 0.1
    for p, q in zip(a, b, strict=True):
        assert copied.state[q]["exp_avg"].dtype == torch.float32
        assert torch.equal(copied.state[q]["exp_avg_sq"], source.state[p]["exp_avg_sq"])
        assert copied.state[q]["exp_avg"].data_ptr() != source.state[p]["exp_avg"].data_ptr() or not p.numel()
    theirs = torch.optim.AdamW(c, lr=0.1)
    train([theirs], [c], steps=2)
    copied.load_state_dict(theirs.state_dict())
    assert all(copied.state[q]["step"] == 2 for q in b)


def test_resume_is_exact() -> None:
    a, b = params(), params()
    straight = AdamW(a, lr=0.1)
    train([straight], [a], steps=4)
    first = AdamW(b, lr=0.1)
    train([first], [b], steps=4)
    for p, q in zip(a, b, strict=True):
        assert torch.equal(p, q)
    resumed = AdamW(b, lr=0.1)
    resumed.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    train([straight, resumed], [a, b], steps=2)
    for p, q in zip(a, b, strict=True):
        assert torch.equal(p, q)


def test_deepcopy_steps_alone() -> None:
    a = params()
    optimizer = AdamW(a)
    train([optimizer], [a], steps=1)
    twin = copy.deepcopy(optimizer)
    before = [p.clone() for p in a]
    for group in twin.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    twin.step()
    assert all(torch.equal(p, q) for p, q in zip(a, before, strict=True))


def test_undo_gives_the_parameters_back() -> None:
    a = params()
    optimizer = AdamW(a, lr=0.01)
    train([optimizer], [a], steps=3)
    before = [p.detach().clone() for p in a]
    optimizer.step()
    optimizer.undo()
    assert all(optimizer.state[p]["step"] == 3 for p in a)
    for p, q in zip(a, before, strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-5, atol=1e-6)
    with pytest.raises(UnsupportedError, match="decoupled"):
        Adam(a, weight_decay=0.1).undo()


def test_non_contiguous_parameters_and_gradients(backend: str, ulps: Callable[[Tensor, Tensor], int]) -> None:
    x = torch.randn(40, 30)
    a, b = nn.Parameter(x.clone().t()), nn.Parameter(x.clone().t())
    c, d = nn.Parameter(x.clone()), nn.Parameter(x.clone())
    a.grad = b.grad = torch.randn(30, 40)
    c.grad = d.grad = torch.randn(1, 30).expand(40, 30)
    AdamW([a, c]).step()
    torch.optim.AdamW([b, d], foreach=False).step()
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(c, d, rtol=1e-6, atol=1e-7)


def test_parameters_without_gradients_and_new_groups() -> None:
    p, q, r = (nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = AdamW([{"params": [p], "lr": 0.1}, {"params": [q]}], lr=0.5)
    p.grad = torch.ones(3)
    optimizer.step()
    assert q not in optimizer.state
    assert torch.equal(q, torch.ones(3))
    optimizer.add_param_group({"params": [r], "lr": 1.0})
    r.grad = torch.ones(3)
    optimizer.step()
    assert (optimizer.state[p]["step"], optimizer.state[r]["step"]) == (2, 1)
    optimizer.zero_grad()
    assert p.grad is None


def test_schedulers_and_closures() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = AdamW([p], lr=1.0, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    torch.testing.assert_close(p.detach(), torch.zeros(3), atol=1e-6, rtol=0)


def test_wrong_values_are_named() -> None:
    p = nn.Parameter(torch.ones(3))
    for options, says in [
        ({"lr": -1.0}, "lr"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]"),
        ({"eps": float("nan")}, "eps"),
        ({"state_dtype": torch.int8}, "state_dtype"),
    ]:
        with pytest.raises(ConfigError, match=says):
            AdamW([p], **options)


def test_wrong_tensors_are_typed_errors() -> None:
    p = nn.Parameter(torch.ones(3, 2))
    optimizer = AdamW([p])
    p.grad = torch.eye(3)[:, :2].to_sparse()
    with pytest.raises(UnsupportedError, match="dense"):
        optimizer.step()
    p.grad = torch.ones(3, 2)
    with pytest.raises(KernelError, match="copy"):
        optimizer.step(fusion=FusedOps(copies={p: torch.ones(5, dtype=torch.bfloat16)}))
    assert AdamW.elementwise is True
