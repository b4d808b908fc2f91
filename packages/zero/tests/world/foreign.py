"""Optimizers as people write them, plainly: some treat elements apart, most do not."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer


class Foreign(Optimizer):
    """One rule: `update(p, grad, state, lr)` gives what is subtracted."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.update(p, p.grad, self.state[p], group["lr"]))

    def update(self, p, grad, state, lr):
        raise NotImplementedError


def adam(grad, state):
    """m / (sqrt(v) + eps)."""
    state.setdefault("m", torch.zeros_like(grad)).lerp_(grad, 0.1)
    state.setdefault("v", torch.zeros_like(grad)).lerp_(grad * grad, 0.01)
    return state["m"] / (state["v"].sqrt() + 1e-8)


class Lamb(Foreign):
    def update(self, p, grad, state, lr):
        step = adam(grad, state)
        return lr * p.norm() / step.norm() * step


class Lars(Foreign):
    def update(self, p, grad, state, lr):
        return lr * 0.01 * p.norm() / grad.norm() * grad


class Larc(Foreign):
    """Clips: at most the rate itself."""

    def update(self, p, grad, state, lr):
        return lr * min(float(p.norm() / grad.norm()) / lr, 1.0) * grad


class Cautious(Foreign):
    """Adam where update and gradient agree in sign, scaled by how many do (Liang et al. 2024)."""

    def update(self, p, grad, state, lr):
        step = adam(grad, state)
        mask = (step * grad > 0).to(grad.dtype)
        return lr * step * mask / mask.mean().clamp_min(1e-3)


class Centred(Foreign):
    """Gradients without their mean over all dimensions but the first."""

    def update(self, p, grad, state, lr):
        return lr * (grad - grad.mean(tuple(range(1, grad.dim())), keepdim=True) if grad.dim() > 1 else grad)


class Factored(Foreign):
    """Adafactor whose second moment is factored from `least` rows and columns on; without clipping."""

    least = 16

    def update(self, p, grad, state, lr):
        square = grad * grad + 1e-30
        if grad.dim() < 2 or min(grad.shape[-2:]) < self.least:
            return lr * grad / state.setdefault("v", torch.zeros_like(grad)).lerp_(square, 0.1).sqrt()
        rows = state.setdefault("rows", torch.zeros_like(grad[..., :1])).lerp_(square.mean(-1, True), 0.1)
        columns = state.setdefault("columns", torch.zeros_like(grad[..., :1, :])).lerp_(square.mean(-2, True), 0.1)
        return lr * grad / (rows * columns / rows.mean(-2, True)).sqrt()


class Factored128(Factored):
    least = 128


class Blockwise(Foreign):
    """Keeps a moment in codes of blocks, as 8-bit optimizers do, of tensors of at least 4096 elements."""

    def update(self, p, grad, state, lr):
        moment = state.setdefault("m", torch.zeros_like(grad)).lerp_(grad, 0.1)
        if moment.numel() >= 4096:
            flat = torch.nn.functional.pad(moment.flatten(), (0, -moment.numel() % 256)).view(-1, 256)
            scale = flat.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
            moment.copy_(((flat / scale).round() * scale).flatten()[: moment.numel()].view_as(moment))
        return lr * moment


class Normed(Foreign):
    """One norm for all parameters."""

    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.norm = torch.stack([grad.norm() for grad in grads]).norm()
        super().step()

    def update(self, p, grad, state, lr):
        return lr * grad / self.norm


class Found(Foreign):
    """Its rate grows with what all parameters have moved, and is kept in the groups (D-Adaptation, Prodigy)."""

    @torch.no_grad()
    def step(self, closure=None):
        moved = size = 0.0
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            moved += float((p.grad * (state.setdefault("first", p.detach().clone()) - p)).sum())
            size += float(state.setdefault("sum", torch.zeros_like(p)).mul_(0.9).add_(p.grad).abs().sum())
        for group in self.param_groups:
            group["found"] = max(group.get("found", 0.0), 0.1 + abs(moved) / (size + 1e-12))
        super().step()

    def update(self, p, grad, state, lr):
        return lr * self.param_groups[0]["found"] * state["sum"]


class Noisy(Foreign):
    def update(self, p, grad, state, lr):
        return lr * (grad + torch.randn_like(grad))


class Still(Foreign):
    """Never moves anything."""

    def update(self, p, grad, state, lr):
        return torch.zeros_like(grad)


class Adamish(Foreign):
    def update(self, p, grad, state, lr):
        return lr * adam(grad, state)


class Signed(Foreign):
    """Lion."""

    def update(self, p, grad, state, lr):
        moment = state.setdefault("m", torch.zeros_like(grad))
        step = moment.lerp(grad, 0.1).sign_()
        moment.lerp_(grad, 0.01)
        return lr * step


class Relative(Foreign):
    """Has no rate of its own."""

    def __init__(self, params, lr=None):
        super().__init__(params, None)

    def update(self, p, grad, state, lr):
        return 1e-6 * adam(grad, state)


class Timid(Adamish):
    """Knows rates below 0.1, and fp32."""

    def update(self, p, grad, state, lr):
        if lr > 0.1 or grad.dtype != torch.float32:
            raise ValueError("not with me")
        return super().update(p, grad, state, lr)


class Slow(Optimizer):
    """Lookahead: wraps another optimizer, and shares its groups (Zhang et al. 2019)."""

    def __init__(self, params, lr=1e-3, inner: Callable[..., Optimizer] = Adamish):
        self.inner = inner(params, lr)
        self.param_groups, self.defaults = self.inner.param_groups, self.inner.defaults
        self.state: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        self.counts = [0]
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.counts[0] += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                if self.counts[0] % 3 == 0:
                    p.copy_(slow.lerp_(p, 0.5))


class SlowLamb(Slow):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr, Lamb)


WHOLE = [Lamb, Lars, Larc, Cautious, Centred, Factored, SlowLamb, torch.optim.Adafactor]
"""Need whole tensors, of 20 x 20 at least."""
ELEMENTWISE = [Adamish, Signed, Relative, Slow]
COUPLED = [Normed, Found]
"""Need all tensors of the model at once."""
