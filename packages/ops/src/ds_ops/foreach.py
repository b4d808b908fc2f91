"""Optimizer steps by torch's own kernels for lists of tensors: what a device has before `ds ops build cuda`.

Formulas: `ds_ops/reference/update.py`. Where all tensors of an Adam step have one dtype, torch's fused
Adam makes one pass; else a handful of launches for the whole list, whatever its length. Nothing is read from the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import ds_ops._torch as _torch
from ds_ops.reference import update as reference
from ds_ops.update_rules import SECOND_MOMENT, UpdateRule, UpdateSpec, UpdateTensors

__all__ = ["lamb_apply", "lamb_moments", "update"]

Tensors = list[Tensor]
Formula = Callable[[tuple[float, ...], Tensors, Tensors, list[Tensors]], Tensors]


def update(spec: UpdateSpec, tensors: UpdateTensors) -> None:
    """Update the parameters as `reference.update` does, with torch's foreach operations.

    Cost: up to 12 passes and fp32 copies of 16-bit streams; fused Adam: one pass.
    """
    if spec.rule is UpdateRule.ADAM and _fusable(spec, tensors):
        _fused_adam(spec, tensors)
        return _leave(spec, tensors)
    if spec.rule not in _FORMULAS:  # AdamW's step taken back: rarely called
        return reference.update(spec, tensors)
    p, g, states = _wide(tensors.params), _gradients(spec, tensors), [_wide(s) for s in tensors.states]
    _store(tensors.params, _FORMULAS[spec.rule](spec.coefficients, p, g, states))
    if (second := SECOND_MOMENT.get(spec.rule)) is not None:
        states[second] = _dithered(spec, states[second], tensors.states[second])
    for old, new in zip(tensors.states, states, strict=True):
        _store(old, new)
    return _leave(spec, tensors)


def lamb_moments(spec: UpdateSpec, tensors: UpdateTensors) -> Tensor:
    """Update LAMB's moments as `reference.lamb_moments` does.

    Sums of squares are torch's norms, squared, on the device.
    """
    p, g, (m, v) = _wide(tensors.params), _gradients(spec, tensors), [_wide(s) for s in tensors.states]
    _moments(spec.coefficients, g, m, v)
    u = _lamb_direction(spec.coefficients, p, m, v)
    for old, new in zip(tensors.states, (m, _dithered(spec, v, tensors.states[1])), strict=True):
        _store(old, new)
    if spec.zero_grad:
        _torch.foreach_zero_(list(tensors.grads))
    norms = [torch.stack(_torch.foreach_norm(some, 2, dtype=torch.float64)) for some in (p, u)]
    return torch.stack(norms, dim=1).square()


def lamb_apply(spec: UpdateSpec, tensors: UpdateTensors, ratios: Tensor) -> None:
    """Apply LAMB's step as `reference.lamb_apply` does; ratios [count] stay on the device."""
    p, states = _wide(tensors.params), [_wide(s) for s in tensors.states]
    u = _lamb_direction(spec.coefficients, p, *states)
    _torch.foreach_mul_(u, list((ratios.to(p[0].dtype) * -spec.coefficients[8]).unbind()))
    _torch.foreach_add_(p, u)
    _store(tensors.params, p)
    _leave(spec, tensors)


# ---- streams ---------------------------------------------------------------------------------------------------------


def _wide(stream: Sequence[Tensor]) -> Tensors:
    """Return the stream in fp32 or wider, without a copy if the dtype is wide enough."""
    tensors = [t.detach() for t in stream]
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    if tensors[0].dtype is wide:
        return tensors
    copies = [torch.empty_like(t, dtype=wide) for t in tensors]
    _torch.foreach_copy_(copies, tensors)
    return copies


def _gradients(spec: UpdateSpec, tensors: UpdateTensors) -> Tensors:
    """Return the gradients times their scale; never changes the gradients themselves."""
    g = _wide(tensors.grads)
    plain = isinstance(spec.grad_scale, float | int) and spec.grad_scale == 1.0
    return g if plain else list(_torch.foreach_mul(g, spec.grad_scale))


def _store(targets: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    if any(a.data_ptr() != b.data_ptr() for a, b in zip(targets, new, strict=True)):
        _torch.foreach_copy_([t.detach() for t in targets], list(new))


def _dithered(spec: UpdateSpec, new: Tensors, old_moments: Sequence[Tensor]) -> Tensors:
    return [reference.dithered(x, old.dtype, spec.dither) for x, old in zip(new, old_moments, strict=True)]


def _leave(spec: UpdateSpec, tensors: UpdateTensors) -> None:
    if tensors.copies:
        _torch.foreach_copy_(list(tensors.copies), [t.detach() for t in tensors.params])
    if spec.zero_grad:
        _torch.foreach_zero_([t.detach() for t in tensors.grads])


def _fusable(spec: UpdateSpec, tensors: UpdateTensors) -> bool:
    """Return whether torch's fused Adam can run: streams of one dtype, and a gradient scale of 1.

    Torch would write scaled gradients back.
    """
    streams = (tensors.params, tensors.grads, *tensors.states)
    kinds = {t.dtype for s in streams for t in s}
    unscaled = isinstance(spec.grad_scale, float | int) and spec.grad_scale == 1.0
    unscaled = unscaled and (
        not spec.dither or not any(t.dtype in (torch.bfloat16, torch.float16) for t in tensors.states[1])
    )
    return unscaled and len(kinds) == 1 and tensors.params[0].device.type in ("cpu", "cuda")


def _fused_adam(spec: UpdateSpec, tensors: UpdateTensors) -> None:
    """Run torch's fused Adam with the coefficients of `spec`.

    p -= c5 m / (sqrt(v) / c6 + eps) is Adam without bias correction of learning rate c5 c6 and epsilon eps c6.
    """
    decay, l2, omb1, b2, _, step_size, root, eps = spec.coefficients
    run = _torch.fused_adamw_ if decay != 1.0 else _torch.fused_adam_
    lr = step_size * root
    params = [t.detach() for t in tensors.params]
    run(
        params,
        [t.detach() for t in tensors.grads],
        list(tensors.states[0]),
        list(tensors.states[1]),
        [],
        [_endless(params[0].device)] * len(params),
        lr=lr,
        beta1=1 - omb1,
        beta2=b2,
        weight_decay=(1 - decay) / lr if decay != 1.0 else l2,
        eps=eps * root,
        amsgrad=False,
        maximize=False,
    )


@functools.cache
def _endless(device: torch.device) -> Tensor:
    """Return a step number so large that Adam's bias correction has no effect."""
    return torch.full((), 1e12, device=device)


# ---- formulas --------------------------------------------------------------------------------------------------------


def _plus(g: Tensors, p: Tensors, factor: float) -> Tensors:
    return list(_torch.foreach_add(g, p, alpha=factor)) if factor else g


def _moments(c: tuple[float, ...], g: Tensors, m: Tensors, v: Tensors) -> None:
    _torch.foreach_lerp_(m, g, c[2])
    _torch.foreach_mul_(v, c[3])
    _torch.foreach_addcmul_(v, g, g, value=c[4])


def _denominator(c: tuple[float, ...], v: Tensors) -> Tensors:
    root = list(_torch.foreach_sqrt(v))
    _torch.foreach_div_(root, c[6])
    _torch.foreach_add_(root, c[7])
    return root


def _adam(c: tuple[float, ...], p: Tensors, g: Tensors, s: list[Tensors]) -> Tensors:
    _torch.foreach_mul_(p, c[0])
    _moments(c, _plus(g, p, c[1]), s[0], s[1])
    _torch.foreach_addcdiv_(p, s[0], _denominator(c, s[1]), value=-c[5])
    return p


def _amsgrad(c: tuple[float, ...], p: Tensors, g: Tensors, s: list[Tensors]) -> Tensors:
    _torch.foreach_mul_(p, c[0])
    _moments(c, _plus(g, p, c[1]), s[0], s[1])
    _torch.foreach_maximum_(s[2], s[1])
    _torch.foreach_addcdiv_(p, s[0], _denominator(c, s[2]), value=-c[5])
    return p


def _lion(c: tuple[float, ...], p: Tensors, g: Tensors, s: list[Tensors]) -> Tensors:
    u = list(_torch.foreach_mul(s[0], c[1]))
    _torch.foreach_add_(u, g, alpha=c[2])
    # sign(u) that keeps NaN: the smallest number, made larger twice, is beyond 1; zero stays zero.
    for _ in range(2):
        _torch.foreach_mul_(u, 2.0**120)
    _torch.foreach_clamp_min_(u, -1.0)
    _torch.foreach_clamp_max_(u, 1.0)
    _torch.foreach_mul_(s[0], c[3])
    _torch.foreach_add_(s[0], g, alpha=c[4])
    _torch.foreach_mul_(p, c[0])
    _torch.foreach_add_(p, u, alpha=-c[5])
    return p


def _adagrad(c: tuple[float, ...], p: Tensors, g: Tensors, s: list[Tensors]) -> Tensors:
    g = _plus(g, p, c[0])
    _torch.foreach_addcmul_(s[0], g, g, value=1.0)
    root = list(_torch.foreach_sqrt(s[0]))
    _torch.foreach_add_(root, c[2])
    _torch.foreach_addcdiv_(p, g, root, value=-c[1])
    return p


def _sgd(c: tuple[float, ...], p: Tensors, g: Tensors, s: list[Tensors]) -> Tensors:
    _torch.foreach_mul_(p, c[0])
    g = _plus(g, p, c[1])
    _torch.foreach_mul_(s[0], c[2])
    _torch.foreach_add_(s[0], g, alpha=c[3])
    move = _torch.foreach_add(g, s[0], alpha=c[2]) if c[4] else s[0]
    _torch.foreach_add_(p, list(move), alpha=-c[5])
    return p


def _sgd_plain(c: tuple[float, ...], p: Tensors, g: Tensors, s: list[Tensors]) -> Tensors:
    _torch.foreach_mul_(p, c[0])
    _torch.foreach_add_(p, _plus(g, p, c[1]), alpha=-c[2])
    return p


def _lamb_direction(c: tuple[float, ...], p: Tensors, m: Tensors, v: Tensors) -> Tensors:
    if c[9]:
        below = list(_torch.foreach_mul(v, c[10]))
        _torch.foreach_add_(below, c[9])
        _torch.foreach_sqrt_(below)
    else:
        below = _denominator(c, v)
    u = list(_torch.foreach_mul(m, c[5]))
    _torch.foreach_div_(u, below)
    _torch.foreach_add_(u, p, alpha=c[0])
    return u


_FORMULAS: dict[UpdateRule, Formula] = {
    UpdateRule.ADAM: _adam,
    UpdateRule.AMSGRAD: _amsgrad,
    UpdateRule.LION: _lion,
    UpdateRule.ADAGRAD: _adagrad,
    UpdateRule.SGD: _sgd,
    UpdateRule.SGD_PLAIN: _sgd_plain,
}
