"""Elementwise optimizer rules in plain torch.

Arithmetic is fp32 (fp64 for fp64 parameters) whatever the stored dtypes are, in the order of torch.optim's own loops. On
CPUs with FMA, torch's lerp, addcmul and add(alpha=) round once, and so do the native kernels, on every CPU. Results
agree to the last bit or two; what remains is torch's square root, which may be one ulp off the correctly rounded one.

Sources: Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019), Lion (Chen et al. 2023), Adagrad (Duchi et al.
2011), AMSGrad (Reddi et al. 2018), LAMB (You et al. 2020), SGD with momentum as torch.optim.SGD defines it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ds_ops.update_rules import SECOND_MOMENT, UpdateRule, UpdateSpec, UpdateTensors

__all__ = ["dithered", "lamb_apply", "lamb_moments", "update"]

Formula = Callable[[tuple[float, ...], Tensor, Tensor, list[Tensor]], Tensor]


def update(spec: UpdateSpec, tensors: UpdateTensors) -> None:
    """Apply the rule to every tensor in place, as `UpdateSpec` and `UpdateTensors` say."""
    formula = _FORMULAS[spec.rule]
    for i, param in enumerate(tensors.params):
        states = [s[i] for s in tensors.states]
        wide = [_wide(s) for s in states]
        p = formula(spec.coefficients, _wide(param), _wide(tensors.grads[i]) * spec.grad_scale, wide)
        if (second := SECOND_MOMENT.get(spec.rule)) is not None:
            wide[second] = dithered(wide[second], states[second].dtype, spec.dither)
        _finish(spec, tensors, i, p, wide)


def lamb_moments(spec: UpdateSpec, tensors: UpdateTensors) -> Tensor:
    """Advance m and v; return [count, 2] fp64: the sums of p^2 and of the direction's squares, per tensor."""
    device = tensors.params[0].device if tensors.params else None
    sums = torch.zeros(len(tensors.params), 2, dtype=torch.float64, device=device)
    for i, param in enumerate(tensors.params):
        p, m, v = _wide(param), _wide(tensors.states[0][i]), _wide(tensors.states[1][i])
        _moments(spec.coefficients, _wide(tensors.grads[i]) * spec.grad_scale, m, v)
        u = _lamb_direction(spec.coefficients, p, m, v)
        sums[i, 0], sums[i, 1] = p.double().square().sum(), u.double().square().sum()
        tensors.states[0][i].copy_(m)
        tensors.states[1][i].copy_(dithered(v, tensors.states[1][i].dtype, spec.dither))
    return sums


def lamb_apply(spec: UpdateSpec, tensors: UpdateTensors, ratios: Tensor) -> None:
    """Update p -= ratio * lr * u, with the direction u of the moments of `lamb_moments`. ratios: [count] fp32."""
    for i, param in enumerate(tensors.params):
        p, wide = _wide(param), [_wide(s[i]) for s in tensors.states]
        p = p.add(_lamb_direction(spec.coefficients, p, *wide) * (ratios[i] * -spec.coefficients[8]))
        _finish(spec, tensors, i, p, wide)


_SPACING = {
    torch.bfloat16: (2.0**-7, 0.0),
    torch.float16: (2.0**-10, 2.0**-24),
}  # relative to the power of two; at least


def dithered(x: Tensor, stored: torch.dtype, dither: float) -> Tensor:
    """x + dither * spacing of `stored` at x, for x >= 0 in fp32; `x` where nothing is rounded, infinite, or not a number."""
    if stored not in _SPACING or not dither:
        return x
    relative, least = _SPACING[stored]
    base = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    y = x + (base * relative).clamp_(min=least) * dither
    # Below its power of two the spacing is half as large: a number just above it would go down too often.
    return torch.where(base.isinf(), x, torch.maximum(y, base))


def _wide(t: Tensor) -> Tensor:
    """Copy a tensor to fp32 or wider, for arithmetic in place."""
    return t.detach().to(torch.promote_types(t.dtype, torch.float32), copy=True)


def _finish(spec: UpdateSpec, tensors: UpdateTensors, i: int, p: Tensor, wide: list[Tensor]) -> None:
    tensors.params[i].copy_(p)
    for stored, new in zip(tensors.states, wide, strict=True):
        stored[i].copy_(new)
    if tensors.copies:
        # From the stored parameter, so that the copy is the same whether or not `params` is fp32.
        tensors.copies[i].copy_(p)
    if spec.zero_grad:
        tensors.grads[i].zero_()


def _moments(c: tuple[float, ...], g: Tensor, m: Tensor, v: Tensor) -> None:
    m.copy_(torch.lerp(m, g, c[2]) if c[2] < 0.5 else m.add(g - m, alpha=c[2]))
    v.mul_(c[3]).addcmul_(g, g, value=c[4])


def _denominator(c: tuple[float, ...], v: Tensor) -> Tensor:
    return v.sqrt() / c[6] + c[7]


def _adam(c: tuple[float, ...], p: Tensor, g: Tensor, s: list[Tensor]) -> Tensor:
    p = p * c[0]
    g = g.add(p, alpha=c[1]) if c[1] else g
    _moments(c, g, s[0], s[1])
    return p.addcdiv(s[0], _denominator(c, s[1]), value=-c[5])


def _amsgrad(c: tuple[float, ...], p: Tensor, g: Tensor, s: list[Tensor]) -> Tensor:
    p = p * c[0]
    g = g.add(p, alpha=c[1]) if c[1] else g
    _moments(c, g, s[0], s[1])
    torch.maximum(s[2], s[1], out=s[2])
    return p.addcdiv(s[0], _denominator(c, s[2]), value=-c[5])


def _adam_undo(c: tuple[float, ...], p: Tensor, g: Tensor, s: list[Tensor]) -> Tensor:
    p = _finite((p + (s[0] * c[5]) / _denominator(c, s[1])) * c[10])
    s[0].copy_(_finite((s[0] - g * c[2]) * c[8]))
    s[1].copy_(_finite((s[1] - (g * c[4]) * g) * c[9]).clamp_(min=0))
    return p


def _finite(x: Tensor) -> Tensor:
    return torch.where(torch.isfinite(x), x, torch.zeros_like(x))


def _lion(c: tuple[float, ...], p: Tensor, g: Tensor, s: list[Tensor]) -> Tensor:
    u = (s[0] * c[1]).add(g, alpha=c[2])
    direction = torch.where(u.isnan(), u, u.sign())  # sign(0) is 0; torch's sign(nan) is 0 too, which would hide it
    s[0].mul_(c[3]).add_(g, alpha=c[4])
    return p * c[0] - direction * c[5]


def _adagrad(c: tuple[float, ...], p: Tensor, g: Tensor, s: list[Tensor]) -> Tensor:
    g = g.add(p, alpha=c[0]) if c[0] else g
    s[0].addcmul_(g, g, value=1.0)
    return p.addcdiv(g, s[0].sqrt() + c[2], value=-c[1])


def _sgd(c: tuple[float, ...], p: Tensor, g: Tensor, s: list[Tensor]) -> Tensor:
    p = p * c[0]
    g = g.add(p, alpha=c[1]) if c[1] else g
    s[0].mul_(c[2]).add_(g, alpha=c[3])
    return p.add(g.add(s[0], alpha=c[2]) if c[4] else s[0], alpha=-c[5])


def _sgd_plain(c: tuple[float, ...], p: Tensor, g: Tensor, s: list[Tensor]) -> Tensor:
    p = p * c[0]
    return p.add(g.add(p, alpha=c[1]), alpha=-c[2])


def _lamb_direction(c: tuple[float, ...], p: Tensor, m: Tensor, v: Tensor) -> Tensor:
    denominator = (v * c[10] + c[9]).sqrt() if c[9] else _denominator(c, v)
    return ((m * c[5]) / denominator).add(p, alpha=c[0])


_FORMULAS: dict[UpdateRule, Formula] = {
    UpdateRule.ADAM: _adam,
    UpdateRule.AMSGRAD: _amsgrad,
    UpdateRule.ADAM_UNDO: _adam_undo,
    UpdateRule.LION: _lion,
    UpdateRule.ADAGRAD: _adagrad,
    UpdateRule.SGD: _sgd,
    UpdateRule.SGD_PLAIN: _sgd_plain,
}
