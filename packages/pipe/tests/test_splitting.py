"""Backwards in two come to what one comes to, whatever modules return: drawn graphs of calls with several outputs, nested and shared."""

import random

import pytest
import torch
from torch import nn

from ds_pipe.splitting import Capture, WeightGradRecorder, run_jobs, split_backward

WIDTH = 4


class Router(nn.Module):
    """Returns what it computes its other output from, as routers of mixtures do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        logits = nn.functional.linear(x, self.weight)
        return logits, logits.softmax(-1)


class Twice(nn.Module):
    """Returns one tensor under two names, and its input."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        y = torch.tanh(x * self.scale)
        return {"a": y, "b": y, "c": x}


class Nested(nn.Module):
    """Has parameters of its own before and after those of a module inside."""

    def __init__(self):
        super().__init__()
        self.inner, self.before, self.after = (
            Router(),
            nn.Parameter(torch.randn(WIDTH)),
            nn.Parameter(torch.randn(WIDTH)),
        )

    def forward(self, x):
        logits, scores = self.inner(x * self.before)
        return logits * self.after, [scores, logits]


class Drawn(nn.Module):
    def __init__(self, seed):
        super().__init__()
        rng = random.Random(seed)
        kinds = [Router, Twice, Nested, lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.LayerNorm(WIDTH)]
        self.blocks = nn.ModuleList(rng.choice(kinds)() for _ in range(rng.randint(1, 4)))
        self.order = [rng.randrange(len(self.blocks)) for _ in range(rng.randint(1, 6))]
        self.picks = [rng.random() for _ in range(64)]

    def forward(self, x):
        known, picks = [x], iter(self.picks)
        for number in self.order:
            out = self.blocks[number](known[int(next(picks) * len(known))])
            found = torch.utils._pytree.tree_leaves(out)
            known += [t for t in found if next(picks) < 0.8] or found[:1]
        return known[-1] + known[int(next(picks) * len(known))], known[int(next(picks) * len(known))] * 2


def gradients(seed, split):
    torch.manual_seed(seed)
    model = Drawn(seed).double()
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    recorder, capture = WeightGradRecorder(model), Capture()
    with recorder.into(capture if split else None):
        outputs = [t for t in model(x) if t.requires_grad]
    grads = [torch.randn_like(t) for t in outputs]
    if split:
        (of_input,), jobs = split_backward(outputs, grads, [x], capture)
        assert all(p.grad is None for p in model.parameters())
        run_jobs(jobs)
    else:
        torch.autograd.backward(outputs, grads)
        of_input = x.grad
    recorder.close()
    return [of_input, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("seed", range(60))
def test_the_gradients_are_those_of_one_backward(seed):
    for one, other in zip(gradients(seed, True), gradients(seed, False), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
