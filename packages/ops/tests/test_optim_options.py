"""AMSGrad, Adafactor, and how steps run (foreach, fused, rounding, paged states): beside torch.optim, transformers and torchao."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_ops.foreach as foreach
from ds_config.errors import ConfigError, PlanError, UnsupportedError
from ds_ops.optim import SGD, Adafactor, Adagrad, Adam, AdamW, FusedOps, Lion, Muon, OpsOptimizer
from ds_ops.optim.step_options import kernel_of, round_stochastically
from ds_ops.reference import update as reference

SHAPES = [(30, 17), (5,), (3, 40, 20), (8, 4, 3, 3)]
KINDS: list[Callable[..., OpsOptimizer]] = [AdamW, Adam, SGD, Adagrad, Lion]


def params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def train(
    optimizer: torch.optim.Optimizer, steps: int, first: int = 0, dtype: torch.dtype | None = None
) -> list[Tensor]:
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    for i in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 + i)
        for p in stepped:
            # Gradients that shrink: then the largest second moment is not the latest.
            p.grad = (torch.randn(p.shape, generator=generator) / (1 + i)).to(dtype or p.dtype)
        optimizer.step()
    return [p.detach() for p in stepped]


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "maximize": True}], ids=str)
@pytest.mark.parametrize(("ours", "theirs"), [(AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam)])
def test_amsgrad_equals_torch(backend: str, ours: Any, theirs: Any, options: dict[str, Any]) -> None:
    a = train(ours(params(), lr=0.1, betas=(0.9, 0.8), amsgrad=True, **options), 10)
    b = train(theirs(params(), lr=0.1, betas=(0.9, 0.8), amsgrad=True, **options), 10)
    plain = train(ours(params(), lr=0.1, betas=(0.9, 0.8), **options), 10)
    for p, q, r in zip(a, b, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
        assert not torch.allclose(p, r, atol=1e-3)


def test_amsgrad_resumes_from_torch_and_back() -> None:
    theirs, ours = torch.optim.AdamW(params(), lr=0.1, amsgrad=True), AdamW(params(), lr=0.1)
    b = train(theirs, 4)
    for p, q in zip(ours.param_groups[0]["params"], b, strict=True):
        p.data.copy_(q)
    ours.load_state_dict(theirs.state_dict())
    assert set(ours.state[ours.param_groups[0]["params"][0]]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    again = torch.optim.AdamW([nn.Parameter(p.clone()) for p in b], lr=0.1, amsgrad=True)
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    expected = train(theirs, 4, first=4)
    for found in (train(ours, 4, first=4), train(again, 4, first=4)):
        for p, q in zip(found, expected, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_undo_refuses_amsgrad() -> None:
    optimizer = AdamW(params(), amsgrad=True)
    train(optimizer, 1)
    with pytest.raises(UnsupportedError, match="optimizer-undo"):
        optimizer.undo()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "expected"),
    [({"foreach": True}, "foreach"), ({"fused": False}, "foreach"), ({"foreach": False, "fused": False}, "loop")],
    ids=str,
)
def test_the_named_kernel_steps(
    kind: Any, options: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name, module in (("foreach", foreach), ("loop", reference)):
        run = module.update

        def spy(spec: Any, tensors: Any, name: str = name, run: Any = run) -> Any:
            calls.append(name)
            return run(spec, tensors)

        monkeypatch.setattr(module, "update", spy)
    found = train(kind(params(), lr=0.1, **options), 3)
    assert set(calls) == {expected}
    for p, q in zip(found, train(kind(params(), lr=0.1), 3), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_fused_is_one_pass_or_an_error(native: None, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = kind(params(), lr=0.1, fused=True)
    for p, q in zip(train(fused, 3), train(kind(params(), lr=0.1), 3), strict=True):
        assert torch.equal(p, q)
    with pytest.raises(UnsupportedError, match="optimizer-fused"):
        train(kind([nn.Parameter(torch.randn(4, 6).T)], lr=0.1, fused=True), 1)
    monkeypatch.setenv("DS_OPS", "reference")
    with pytest.raises(UnsupportedError, match="optimizer-fused"):
        train(kind(params(), lr=0.1, fused=True), 1)


def test_fused_amsgrad_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="optimizer-fused"):
        train(AdamW(params(), amsgrad=True, fused=True), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_options_without_a_meaning_here_are_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match="optimizer-value"):
        kind(params(), foreach=True, fused=True)
    for name in ("capturable", "differentiable"):
        assert kind(params(), **{name: False}).step_options == {name: False}
        with pytest.raises(UnsupportedError, match="optimizer-option"):
            kind(params(), **{name: True})
    with pytest.raises(TypeError, match="wait_free"):
        kind(params(), wait_free=True)


def test_kernels_are_chosen_as_torch_does() -> None:
    assert [kernel_of(o) for o in ({}, {"foreach": False}, {"fused": True}, {"fused": False})] == [
        "best",
        "best",
        "fused",
        "foreach",
    ]


# ---- stochastic rounding ---------------------------------------------------------------------------------------------


def test_rounding_is_right_on_average() -> None:
    x = torch.full((100_000,), 1.0 + 2.0**-10)  # an eighth of the way to the next bf16
    p = torch.empty_like(x, dtype=torch.bfloat16)
    round_stochastically([p], [x], (1, 0))
    assert set(p.float().unique().tolist()) == {1.0, 1.0 + 2.0**-7}
    assert abs(p.float().mean().item() - x[0].item()) < 1e-4


@pytest.mark.slow
def test_rounding_equals_torchao() -> None:
    quant_utils = pytest.importorskip("torchao.optim.quant_utils")
    y = torch.randn(4096)
    ours, step = torch.empty_like(y, dtype=torch.bfloat16), (3, 5)
    round_stochastically([ours], [y], step)
    theirs = quant_utils._fp32_to_bf16_sr(y)
    spacing = 2.0**-7 * y.abs()
    assert bool(((ours.float() - theirs.float()).abs() <= spacing).all())
    assert bool(((ours.float() - y).abs() < spacing).all())


def test_rounding_keeps_what_is_no_number() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    p = torch.empty_like(x, dtype=torch.bfloat16)
    round_stochastically([p], [x], (1, 0))
    assert p[:2].tolist() == [torch.inf, -torch.inf]
    assert bool(p[2].isnan())
    assert p[3:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", [AdamW, SGD, Lion])
def test_small_updates_of_bf16_parameters_add_up(backend: str, kind: Any) -> None:
    """An update of 1e-4 beside a weight of 1 is a hundredth of bf16's spacing: rounded to nearest nothing ever moves."""

    def move(**options: Any) -> float:
        p = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = kind([p], lr=1e-4, weight_decay=0.0, **options)
        for _ in range(50):
            p.grad = torch.ones_like(p)
            optimizer.step()
        return 1.0 - p.detach().float().mean().item()

    assert move() == 0.0
    assert move(stochastic_rounding=True) == pytest.approx(5e-3, rel=0.1)


def test_rounding_is_the_same_on_every_replica_and_after_a_resume() -> None:
    first = AdamW(params(torch.bfloat16), stochastic_rounding=True)
    torch.manual_seed(1)
    a = train(first, 4)
    second = AdamW(params(torch.bfloat16), stochastic_rounding=True)
    torch.manual_seed(2)
    train(second, 2)
    third = copy.deepcopy(second)
    assert third.step_options == {"stochastic_rounding": True}
    for p, q in zip(a, train(third, 2, first=2), strict=True):
        assert torch.equal(p, q)


def test_rounded_copies_are_those_of_the_stored_parameter() -> None:
    p = nn.Parameter(torch.ones(512, dtype=torch.bfloat16))
    copied = torch.zeros(512)
    optimizer = AdamW([p], lr=1e-3, stochastic_rounding=True)
    optimizer.step(fusion=FusedOps(grads={p: torch.ones(512)}, copies={p: copied}))
    assert torch.equal(copied, p.detach().float())
    assert p.unique().numel() == 2


# ---- paged states ----------------------------------------------------------------------------------------------------


def mapped_file(t: Tensor) -> str:
    """Return the file behind a tensor's memory, as /proc/self/maps names it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *rest = line.split(maxsplit=5)
        low, high = (int(x, 16) for x in span.split("-"))
        if low <= t.data_ptr() < high:
            return rest[4] if len(rest) > 4 else ""
    return ""


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="reads Linux's list of mappings")
def test_paged_states_lie_in_a_file_and_step_the_same(backend: str, tmp_path: Path) -> None:
    optimizer = AdamW(params(), paged=str(tmp_path))
    for p, q in zip(train(optimizer, 3), train(AdamW(params()), 3), strict=True):
        assert torch.equal(p, q)
    for p in optimizer.param_groups[0]["params"]:
        for name in ("exp_avg", "exp_avg_sq"):
            assert mapped_file(optimizer.state[p][name]).startswith(str(tmp_path))
    again = AdamW(params(), paged=True)
    again.load_state_dict(optimizer.state_dict())
    state = again.state[again.param_groups[0]["params"][0]]
    assert torch.equal(state["exp_avg"], optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"])
    assert "deleted" in mapped_file(state["exp_avg"])
    assert not list(tmp_path.iterdir())


def test_paged_states_need_a_folder_and_the_host(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="offload-folder"):
        train(AdamW(params(), paged=str(tmp_path / "none")), 1)
    p = nn.Parameter(torch.ones(3, device="meta"))
    p.grad = torch.ones(3, device="meta")
    with pytest.raises(UnsupportedError, match="optimizer-paged"):
        AdamW([p], paged=True).step()


# ---- Adafactor -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1, "maximize": True},
        {"lr": 0.5, "d": 2.0, "beta2_decay": -0.5, "eps": (1e-6, 1e-2)},
    ],
    ids=str,
)
def test_adafactor_equals_torch(options: dict[str, Any]) -> None:
    a, b = train(Adafactor(params(), **options), 10), train(torch.optim.Adafactor(params(), **options), 10)
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("beta1", [None, 0.9])
@pytest.mark.parametrize("scale", [False, True])
def test_adafactor_equals_transformers(beta1: float | None, scale: bool) -> None:
    optimization = pytest.importorskip("transformers.optimization")
    common = {"lr": 0.01, "beta1": beta1, "scale_parameter": scale, "relative_step": False}
    a = train(Adafactor(params(), eps=(1e-15, 1e-3), **common), 10)
    b = train(optimization.Adafactor(params(), eps=(1e-30, 1e-3), **common), 10)
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


def test_adafactor_takes_states_of_torch_and_the_fused_pass() -> None:
    theirs = torch.optim.Adafactor(params(), lr=0.1)
    b = train(theirs, 3)
    ours = Adafactor([nn.Parameter(p.clone()) for p in b], lr=0.1)
    ours.load_state_dict(theirs.state_dict())
    for p, q in zip(train(ours, 3, first=3), train(theirs, 3, first=3), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)
    scaled, plain = Adafactor(params()), Adafactor(params())
    train(plain, 1)
    stepped = scaled.param_groups[0]["params"]
    generator = torch.Generator().manual_seed(100)
    grads = {p: torch.randn(p.shape, generator=generator) * 8 for p in stepped}
    copies = {p: torch.empty_like(p, dtype=torch.bfloat16) for p in stepped}
    scaled.step(fusion=FusedOps(grad_scale=1 / 8, zero_grads=True, grads=grads, copies=copies))
    for p, q in zip(stepped, plain.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(p, q)
        assert torch.equal(copies[p], p.detach().bfloat16())
        assert not grads[p].any()
    assert not Adafactor.elementwise


@pytest.mark.parametrize("keys", [{"adam_betas": (float("nan"), 0.9)}, {"adam_betas": (0.9, 1.0)}, {"ns_steps": 0}])
def test_values_of_muon_that_say_nothing_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(keys))):
        Muon(params(), **keys)
