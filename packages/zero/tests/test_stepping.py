"""The factor on gradients is applied once, whoever applies it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parameter import Parameter

import ds_ops.optim
from ds_zero.update.apply_step import step_with

MAKERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "mixed": lambda p: torch.optim.AdamW([{"params": p[:1], "fused": True}, {"params": p[1:], "fused": False}], lr=0.1),
    "ops-adamw": lambda p: ds_ops.optim.AdamW(p, lr=0.1),
    "ops-muon": lambda p: ds_ops.optim.Muon(p, lr=0.1),
}


def stepped(name, factor, *, dtype=torch.float32, scaled_before):
    torch.manual_seed(0)
    params = [Parameter(torch.randn(6, 4, dtype=dtype)), Parameter(torch.randn(24, dtype=dtype))]
    optimizer = MAKERS[name](params)
    for _ in range(3):
        for param in params:
            grad = torch.randn_like(param)
            param.grad = grad * factor if scaled_before else grad
        step_with(optimizer, [p.grad for p in params], 1.0 if scaled_before else factor)
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")
    return params


@pytest.mark.parametrize("factor", [0.5, 0.0371, 1e-33, 0.0])
@pytest.mark.parametrize("name", MAKERS)
def test_stepping_with_a_factor_is_stepping_scaled_gradients(name, factor):
    before, with_it = (stepped(name, factor, scaled_before=on) for on in (True, False))
    for a, b in zip(before, with_it, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "adamw-fused", "sgd-fused"])
def test_wide_gradients_keep_their_precision(name):
    before, with_it = (stepped(name, 0.0371, dtype=torch.float64, scaled_before=on) for on in (True, False))
    for a, b in zip(before, with_it, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-15)


def test_a_subclass_that_ignores_the_attribute_gets_scaled_gradients():
    class Own(torch.optim.AdamW):
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    param.data.sub_(param.grad)

    param = Parameter(torch.zeros(3))
    param.grad = torch.full((3,), 4.0)
    step_with(Own([param], fused=True), [param.grad], 0.25)
    assert param.tolist() == [-1.0] * 3
