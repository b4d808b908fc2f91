"""Tiles give the numbers and the gradients of the whole, for sums, means and losses that are parts of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_config.errors import PlanError
from ds_parallel.tiling import sequence_tiled_compute, tiled, tiled_cross_entropy, tiled_loss, tiled_mlp


def make(rows: int = 13, masked: bool = True) -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(2)
    hidden = torch.randn(2, rows, 6, dtype=torch.float64, requires_grad=True)
    head = nn.Linear(6, 11).double()
    labels = torch.randint(0, 11, (2, rows))
    if masked:
        labels[0, : rows - 2] = -100  # whole tiles without a label
    return hidden, head, labels


def gradients(loss: Tensor, *tensors: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, tensors))


@pytest.mark.parametrize("factor", [1.0, -2.5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("tiles", [1, 3, 8, 100])
def test_cross_entropy(tiles: int, reduction: Any, factor: float) -> None:
    hidden, head, labels = make()
    plain = functional.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), reduction=reduction)
    found = tiled_cross_entropy(hidden, head.weight, labels, bias=head.bias, tiles=tiles, reduction=reduction)
    torch.testing.assert_close(found, plain)
    wanted = gradients(plain * factor + hidden.sum(), hidden, head.weight, head.bias)
    got = gradients(found * factor + hidden.sum(), hidden, head.weight, head.bias)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_what_is_frozen_gets_no_gradient_and_no_memory() -> None:
    hidden, head, labels = make()
    head.requires_grad_(False)
    loss = tiled_cross_entropy(hidden, head.weight, labels, tiles=4)
    assert len(loss.grad_fn.next_functions[0][0].saved_tensors) == 1
    (wanted,) = gradients(
        functional.cross_entropy(functional.linear(hidden, head.weight).flatten(0, 1), labels.flatten()), hidden
    )
    torch.testing.assert_close(gradients(loss, hidden)[0], wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_any_loss(reduction: Any) -> None:
    hidden, head, labels = make()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(head(x), y, reduction=reduction)

    plain = loss_of(hidden.flatten(0, 1), labels.flatten())
    found = tiled_loss(loss_of, hidden, [labels], list(head.parameters()), tiles=5, reduction=reduction)
    torch.testing.assert_close(found, plain)
    wanted = gradients(plain * 3, hidden, head.weight, head.bias)
    got = gradients(found * 3, hidden, head.weight, head.bias)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_a_loss_of_few_bits_comes_back_in_its_format_and_its_tiles_weigh_exactly() -> None:
    hidden, head, labels = make()
    low, head = hidden.detach().bfloat16().requires_grad_(), head.bfloat16()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(head(x), y)

    plain = loss_of(low.flatten(0, 1), labels.flatten())
    found = tiled_loss(loss_of, low, [labels], list(head.parameters()), tiles=3)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, plain, rtol=8e-3, atol=0)
    wanted = gradients(plain, low, head.weight, head.bias)
    got = gradients(found, low, head.weight, head.bias)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=1.6e-2)


@pytest.mark.parametrize("tiles", [1, 4, 50])
def test_an_mlp(tiles: int) -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6))
    x = torch.randn(2, 13, 6, requires_grad=True)
    calls = []
    hooks = [p.register_post_accumulate_grad_hook(lambda p: calls.append(p)) for p in mlp.parameters()]
    mlp(x).square().sum().backward()
    wanted = [x.grad.clone(), *(p.grad.clone() for p in mlp.parameters())]
    x.grad = None
    mlp.zero_grad()
    calls.clear()
    out = tiled_mlp(mlp, tiles)(x)
    torch.testing.assert_close(out, mlp(x))
    out.square().sum().backward()
    for a, b in zip([x.grad, *(p.grad for p in mlp.parameters())], wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    assert len(calls) == len(hooks)  # every parameter's gradient came once, whatever the tiles


def test_memory_of_tiles(live: Callable[[], Any]) -> None:
    hidden, labels = torch.randn(1, 512, 8, requires_grad=True), torch.randint(0, 4000, (1, 512))
    weight = torch.randn(4000, 8, requires_grad=True)
    with live() as plain:
        functional.cross_entropy(functional.linear(hidden, weight).flatten(0, 1), labels.flatten()).backward()
    with live() as ours:
        tiled_cross_entropy(hidden, weight, labels, tiles=32).backward()
    assert ours.peak < plain.peak / 10


@pytest.mark.parametrize(("reduction", "dim"), [("mean", 1), ("sum", 1), (None, 1)])
def test_sequence_tiles(reduction: Any, dim: int) -> None:
    torch.manual_seed(1)
    x, scale = torch.randn(2, 7, 3, requires_grad=True), torch.tensor(2.0, requires_grad=True)

    def compute(x: Tensor, scale: Tensor) -> Tensor:
        out = (x * scale).tanh()
        return out if reduction is None else out.mean() if reduction == "mean" else out.sum()

    plain = compute(x, scale)
    found = sequence_tiled_compute(compute, 7, 3, {"x": x}, {"scale": scale}, "x", None, dim, reduction)
    torch.testing.assert_close(found, plain)
    for a, b in zip(gradients(found.sum(), x, scale), gradients(plain.sum(), x, scale), strict=True):
        torch.testing.assert_close(a, b)


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(PlanError, match="labels of shape"):
        tiled_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(5, 4), torch.zeros(3, 2, dtype=torch.long))
    with pytest.raises(PlanError, match="seqlen = 5"):
        sequence_tiled_compute(lambda x: x, 5, 2, {"x": torch.zeros(1, 4)}, {}, "x")


def test_tiles_without_gradients() -> None:
    with torch.no_grad():
        x = torch.randn(5, 3)
        assert torch.equal(tiled(torch.sin, x, 2), x.sin())


def _head(dtype):
    torch.manual_seed(0)
    hidden = torch.randn(1024, 32).to(dtype).requires_grad_()
    weight = (torch.randn(50, 32) * 0.2).requires_grad_()
    return hidden, weight, torch.randint(0, 50, (1024,))


def test_the_weight_gradient_of_many_tiles_adds_up_in_fp32():
    hidden, weight, labels = _head(torch.bfloat16)
    weight = weight.detach().bfloat16().requires_grad_()
    exact = weight.detach().double().requires_grad_()
    torch.nn.functional.cross_entropy(hidden.detach().double() @ exact.T, labels).backward()
    errors = []
    for tiles in (1, 512):
        weight.grad = None
        tiled_cross_entropy(hidden, weight, labels, tiles=tiles).backward()
        errors.append(float((weight.grad.double() - exact.grad).norm() / exact.grad.norm()))
    assert errors[1] < 0.005  # it was 0.03: each of 512 sums was rounded to 8 bits


def test_tiles_work_under_autocast_and_on_no_tokens():
    hidden, weight, labels = _head(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        loss = tiled_cross_entropy(hidden, weight, labels)
        expected = torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, weight).float(), labels)
    loss.backward()
    assert (loss.dtype, weight.grad.dtype) == (torch.float32, torch.float32)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
    assert float(tiled_cross_entropy(hidden[:0], weight, labels[:0], reduction="sum").detach()) == 0.0
