"""Nothing of a step waits for a device: reads of values on the host are counted where torch dispatches them.

Run on the CPU by the backends that a device without our kernels has (torch, reference): the same calls with other tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_ops import optim
from ds_ops.capacity import within_capacity
from ds_ops.grouped import _GroupedProduct, _torch_matmul, _torch_outer
from ds_ops.moe_routing import permute, regroup, sort_slots, top_k_gating, unpermute
from ds_ops.optim import FusedOps
from ds_ops.partial_attention import View, merge_partial, partial_attention
from ds_ops.stream import clip_scale, grad_norm, total_squares

READING = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"}


class Reads(TorchDispatchMode):
    """Counts ops whose result depends on values, in shape or as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name in READING:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_the_counter_counts() -> None:
    x = torch.arange(3.0)
    for read in (lambda: float(x[0]), lambda: x.nonzero(), lambda: bool(x.sum() > 0)):
        with Reads() as reads:
            read()
        assert reads.found


OPTIMIZERS: dict[str, Callable[[list[Tensor]], Any]] = {
    "adam": lambda p: optim.Adam(p, weight_decay=0.1),
    "adamw": lambda p: optim.AdamW(p),
    "adamw maximize": lambda p: optim.AdamW(p, maximize=True),
    "lion": lambda p: optim.Lion(p, lr=1e-3),
    "adagrad": lambda p: optim.Adagrad(p),
    "lamb": lambda p: optim.Lamb(p),
    "sgd": lambda p: optim.SGD(p, lr=1e-3),
    "sgd momentum": lambda p: optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True),
    "muon": lambda p: optim.Muon([{"params": p, "use_muon": True}]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", ["none", "clipped", "clipped and zeroed"])
@pytest.mark.parametrize("forced", ["torch", "reference"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_no_read_in_an_optimizer_step(
    name: str, forced: str, clip: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_OPS", forced)
    params = [torch.randn(4, 6).to(dtype).requires_grad_() for _ in range(3)]
    optimizer = OPTIMIZERS[name](params)
    for _ in range(2):  # the second step repeats the first
        for p in params:
            p.grad = torch.randn_like(p)
        before = [p.detach().clone() for p in params]
        with Reads() as reads:
            fusion = FusedOps()
            if clip != "none":
                squares = total_squares([p.grad for p in params if p.grad is not None])
                fusion = FusedOps(clip_scale(squares, 0.5), zero_grads=clip.endswith("zeroed"))
            optimizer.step(fusion=fusion)
        assert reads.found == []
        if dtype is torch.float32:  # 16 bits do not hold every small step
            assert not any(torch.equal(p, b) for p, b in zip(params, before, strict=True))


def test_no_read_in_routing_and_grouped_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_OPS", "reference")
    x, logits = torch.randn(16, 16, dtype=torch.bfloat16), torch.randn(16, 4)
    w = torch.randn(4, 16, 16, dtype=torch.bfloat16)
    counts = torch.tensor([[3, 5], [2, 6]])
    with Reads() as reads:
        gating = top_k_gating(logits, 2)
        keep = within_capacity(gating.experts, 4, 6, scores=gating.weights)
        p = sort_slots(gating.experts, 4, keep=keep)
        rows = permute(x, p)
        unpermute(rows, p, gating.weights)
        permute(x, regroup(counts, 16))
        q = x.float().view(1, 2, 16, 8)
        merge_partial(*partial_attention(q, q, q, View(causal=True)), *partial_attention(q, q, q))
    # What CUDA runs; torch's loop in place of its kernel, which is what reads here.
    monkeypatch.setattr(torch, "_grouped_mm", lambda a, b, offs: _multiplied(a, b))
    with Reads() as more:
        _torch_matmul(rows, w, p.ends, torch.randn(4, 16, dtype=torch.bfloat16), None, _GroupedProduct(False))
        _torch_outer(rows, rows, p.ends, None, False)
    assert reads.found + more.found == []


def _multiplied(a: Tensor, b: Tensor) -> Tensor:
    """The shape of a grouped product."""
    return a.new_zeros(a.shape[0], b.shape[2]) if b.dim() == 3 else a.new_zeros(4, a.shape[0], b.shape[1])


@pytest.mark.parametrize("forced", ["", "torch", "reference"])
def test_clipping_on_the_device_is_clipping(forced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_OPS", forced)
    grads = [torch.randn(5, 7), torch.randn(3) * 10]
    torch.testing.assert_close(float(total_squares(grads).sqrt()), grad_norm(grads))
    for most in (1e-3, 1e6):
        expected = 0.25 * min(1.0, most / (0.25 * grad_norm(grads) + 1e-6))
        assert float(clip_scale(total_squares(grads), most, scale=0.25)) == pytest.approx(expected, rel=1e-6)
