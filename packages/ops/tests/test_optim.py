"""Lion, Adagrad, SGD, LAMB, Muon: against torch.optim where it has them, else against the formula in double precision."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_config.errors import ConfigError, KernelError
from ds_ops.optim import SGD, Adagrad, AdamW, FusedOps, Lamb, Lion, Muon, OpsOptimizer, orthogonalize

SHAPES = [(30, 17), (1,), (4097,), (0,), (3, 5, 7)]
EVERY: list[Callable[[Any], OpsOptimizer]] = [
    lambda p: AdamW(p, lr=0.1),
    lambda p: Lion(p, lr=0.1),
    lambda p: Adagrad(p, lr=0.1),
    lambda p: SGD(p, lr=0.1, momentum=0.9),
    lambda p: SGD(p, lr=0.1),
    lambda p: Lamb(p, lr=0.1),
    lambda p: Muon([{"params": list(p), "muon_matrices": "stack"}], lr=0.1),
]


def params(shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def gradients(lists: list[list[nn.Parameter]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for row in zip(*lists, strict=True):
        g = torch.randn(row[0].shape, generator=generator)
        for p in row:
            p.grad = g.to(p.dtype)


def train(optimizers: list[torch.optim.Optimizer], lists: list[list[nn.Parameter]], steps: int = 10) -> None:
    for i in range(steps):
        gradients(lists, i)
        for o in optimizers:
            o.step()


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (SGD, torch.optim.SGD, {"lr": 0.1}),
        (SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
        (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
        (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (Adagrad, torch.optim.Adagrad, {"lr": 0.1}),
        (
            Adagrad,
            torch.optim.Adagrad,
            {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5},
        ),
    ],
)
def test_ten_steps_equal_torch(
    backend: str, ours: Any, theirs: Any, options: dict[str, Any], ulps: Callable[[Tensor, Tensor], int]
) -> None:
    # Torch's loop over tensors takes a square root that may be one ulp off, which is many where a parameter is near zero;
    # its fused kernel takes the instruction, as ours does.
    exact = {"fused": True} if ours is Adagrad and backend == "native" else {"foreach": False}
    a, b = params(), params()
    train([ours(a, **options), theirs(b, **options, **exact)], [a, b])
    for p, q in zip(a, b, strict=True):
        assert ulps(p, q) <= 2


def test_lion_is_the_formula(backend: str) -> None:
    a = params()
    optimizer = Lion(a, lr=0.1, betas=(0.9, 0.99), weight_decay=0.1)
    expected = [p.detach().double() for p in a]
    moments = [torch.zeros_like(p) for p in expected]
    for i in range(10):
        gradients([a], i)
        for p, m, q in zip(expected, moments, a, strict=True):
            g = q.grad.double()
            p.mul_(1 - 0.1 * 0.1).sub_(0.1 * torch.sign(0.9 * m + 0.1 * g))
            m.mul_(0.99).add_(0.01 * g)
        optimizer.step()
    for p, q in zip(expected, a, strict=True):
        torch.testing.assert_close(q.double(), p, rtol=1e-5, atol=1e-5)


def test_lion_does_not_move_where_the_direction_is_zero(backend: str) -> None:
    p = nn.Parameter(torch.tensor([1.0, -1.0, 2.0]))
    p.grad = torch.tensor([0.0, -0.0, 1.0])
    Lion([p], lr=0.5).step()
    assert p.tolist() == [1.0, -1.0, 1.5]


def test_lion_passes_nan_on(backend: str) -> None:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.tensor([float("nan"), 1.0])
    Lion([p], lr=0.5).step()
    assert p.isnan().tolist() == [True, False]


@pytest.mark.parametrize("inside", [False, True])
def test_lamb_is_the_formula(backend: str, inside: bool) -> None:
    a = params()
    a[1].data.zero_()
    eps = 0.3 if inside else 1e-8
    optimizer = Lamb(a, lr=0.05, eps=eps, weight_decay=0.1, eps_inside_sqrt=inside)
    expected = [p.detach().double() for p in a]
    m, v = ([torch.zeros_like(p) for p in expected] for _ in range(2))
    for t in range(1, 11):
        gradients([a], t)
        for p, m1, v1, q in zip(expected, m, v, a, strict=True):
            g = q.grad.double()
            m1.mul_(0.9).add_(0.1 * g)
            v1.mul_(0.999).add_(0.001 * g * g)
            corrected = v1 / (1 - 0.999**t)
            root = (corrected + eps).sqrt() if inside else corrected.sqrt() + eps
            u = (m1 / (1 - 0.9**t)) / root + 0.1 * p
            norms = p.norm(), u.norm()
            ratio = 1.0 if 0.0 in norms else float(torch.clamp(norms[0] / norms[1], 0.01, 10.0))
            p.sub_(0.05 * ratio * u)
        optimizer.step()
    for p, q in zip(expected, a, strict=True):
        torch.testing.assert_close(q.double(), p, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(16, 16), (8, 64), (64, 8), (3, 10, 20), (1, 5)])
def test_orthogonalize(shape: tuple[int, ...], method: Any) -> None:
    x = torch.randn(shape)
    y = orthogonalize(x, method=method)
    s = torch.linalg.svdvals(y)
    assert float(s.max()) < 1.3
    large = torch.linalg.svdvals(x) > 0.05 * torch.linalg.matrix_norm(x).unsqueeze(-1)
    assert bool((s[large] > 0.6).all())
    # The singular vectors stay: x^T y is symmetric positive.
    inner = x.mT @ y
    torch.testing.assert_close(inner, inner.mT, rtol=1e-3, atol=1e-3)
    assert torch.equal(orthogonalize(torch.zeros(shape), method=method), torch.zeros(shape))


def test_gram_equals_standard() -> None:
    x = torch.randn(4, 24, 100)
    torch.testing.assert_close(orthogonalize(x, method="gram"), orthogonalize(x), rtol=1e-3, atol=1e-4)


def test_muon_equals_torch() -> None:
    shapes = [(20, 30), (20, 30), (40, 10), (16, 16)]
    a, b = params(shapes), params(shapes)
    ours = Muon(a, lr=0.02, weight_decay=0.1, ns_method="standard")
    theirs = torch.optim.Muon(b, lr=0.02, weight_decay=0.1, momentum=0.95)
    train([ours, theirs], [a, b], steps=5)
    for p, q in zip(a, b, strict=True):
        # torch iterates in bf16: directions agree to its precision.
        torch.testing.assert_close(p, q, rtol=0, atol=5 * 0.02 * 0.05)


def test_muon_sends_the_rest_to_adamw() -> None:
    shapes = [(20, 30), (5,), (7, 3)]
    a, b = params(shapes), params(shapes)
    muon = Muon([{"params": a[:2]}, {"params": a[2:], "use_muon": False, "lr": 0.1}], lr=0.02, adam_lr=0.3)
    adam = AdamW(
        [{"params": [b[1]], "lr": 0.3}, {"params": [b[2]], "lr": 0.1}], betas=(0.9, 0.95), eps=1e-10, weight_decay=0
    )
    train([muon, adam], [a, b], steps=3)
    assert torch.equal(a[1], b[1])
    assert torch.equal(a[2], b[2])
    assert set(muon.state[a[0]]) == {"step", "momentum_buffer"}
    assert set(muon.state[a[1]]) == {"step", "exp_avg", "exp_avg_sq"}
    groups = muon.param_groups
    assert [muon.needs_whole(groups[0], p) for p in a[:2]] == [True, False]
    assert not muon.needs_whole(groups[1], a[2])
    assert groups[1]["lr"] == 0.1


def test_muon_convolutions_and_expert_stacks() -> None:
    a = params([(8, 3, 3, 3), (4, 6, 10)])
    a[1].muon_matrices = "stack"
    before = [p.detach().clone() for p in a]
    train([Muon(a, lr=0.1)], [a], steps=1)
    conv = (a[0] - before[0]).detach().view(8, 27) / 0.1
    assert float(torch.linalg.svdvals(conv).max()) < 1.3
    stack = (a[1] - before[1]).detach() / 0.1
    assert stack.shape == (4, 6, 10)
    assert float(torch.linalg.svdvals(stack).max()) < 1.3
    assert float(torch.linalg.svdvals(stack).min()) > 0.3


@pytest.mark.parametrize("shape", [(64, 32, 3), (16, 8, 3, 3, 3), (24, 8, 3, 3)])
@pytest.mark.parametrize("by", ["parameter", "group"])
def test_muon_steps_a_convolution_as_one_matrix(shape: tuple[int, ...], by: str) -> None:
    """Weights of Conv1d and Conv3d were taken for stacks: their updates were up to nine times too large."""
    (p,) = params([shape])
    before = p.detach().clone()
    group: dict[str, Any] = {"params": [p]}
    if by == "parameter":
        p.muon_matrices = "flat"
    else:
        group["muon_matrices"] = "flat"
    train([Muon([group], lr=0.1)], [[p]], steps=1)
    values = torch.linalg.svdvals((p.detach() - before).flatten(1) / 0.1)
    scale = max(1.0, shape[0] / before[0].numel()) ** 0.5
    assert 0.5 * scale < float(values.min()) < float(values.max()) < 1.3 * scale


@pytest.mark.parametrize("shape", [(64, 32, 3), (16, 8, 3, 3, 3), (2, 3, 4, 5, 6, 7)])
def test_muon_asks_what_it_cannot_know(shape: tuple[int, ...]) -> None:
    (p,) = params([shape])
    with pytest.raises(ConfigError, match="expected 'flat' or 'stack'") as error:
        Muon([p])
    assert error.value.code == "optimizer-matrices"
    optimizer = Muon(params([(3, 4)]))
    with pytest.raises(ConfigError, match="found 'rows'"):
        optimizer.add_param_group({"params": [p], "muon_matrices": "rows"})
    assert len(optimizer.param_groups) == 1
    Muon([{"params": [p], "use_muon": False}])  # AdamW asks nothing
    Muon(params([(3, 4), (5, 2, 3, 3), (7,)]))  # no doubt


def test_muon_knows_matrices_of_tensors_that_stand_for_others() -> None:
    """A sharder steps tensors of the same shapes without the attributes; where two words were said of one shape it asks."""
    a, b = params([(8, 4, 3)])[0], params([(8, 4, 3)])[0]
    a.muon_matrices = "flat"
    ours, theirs = Muon([a], lr=0.1), Muon([{"params": [b], "muon_matrices": "flat"}], lr=0.1)
    ours = pickle.loads(pickle.dumps(ours))
    stand_in = nn.Parameter(a.detach().clone())
    ours.param_groups[0]["params"] = [stand_in]
    train([ours, theirs], [[stand_in], [b]], steps=2)
    assert torch.equal(stand_in, b)
    assert "muon_matrices" not in ours.param_groups[0]
    c, d = params([(8, 4, 3), (8, 4, 3)])
    c.muon_matrices, d.muon_matrices = "flat", "stack"
    both = Muon([c, d])
    both.param_groups[0]["params"] = [stand_in]
    with pytest.raises(ConfigError, match="found None"):
        train([both], [[stand_in]], steps=1)


def test_muon_makes_directions_before_they_are_clipped() -> None:
    shapes = [(8, 4), (4, 8), (5,), (6, 2, 3, 3)]
    a, b = params(shapes), params(shapes)
    ours, theirs = (Muon(p, lr=0.1, weight_decay=0.01, clip_directions=True) for p in (a, b))
    ours = pickle.loads(pickle.dumps(ours))
    assert ours.clip_directions
    ours.param_groups[0]["params"] = a
    for step in range(3):
        gradients([a, b], step)
        for p in a:
            p.grad = p.grad.clone()  # `direct` writes it
        plain = [p.grad for p in b]
        before = [p.detach().clone() for p in b]
        ours.direct(FusedOps(grad_scale=0.5))
        theirs.step(fusion=FusedOps(grad_scale=0.5))  # what makes its directions itself
        for p, q, old, g in zip(a, b, before, plain, strict=True):
            if p.ndim == 1:
                assert torch.equal(p.grad, g)
            else:
                torch.testing.assert_close(p.grad, (old * (1 - 0.1 * 0.01) - q) / 0.1, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(ours.state[p]["momentum_buffer"], theirs.state[q]["momentum_buffer"])
        expected = [old * (1 - 0.1 * 0.01) - 0.1 * 0.25 * p.grad for old, p in zip(before, a, strict=True)]
        ours.step(fusion=FusedOps(grad_scale=0.25))
        for p, q, e in zip(a, b, expected, strict=True):
            if p.ndim > 1:
                torch.testing.assert_close(p.detach(), e)
                assert ours.state[p]["step"] == theirs.state[q]["step"] == step + 1
            with torch.no_grad():
                q.copy_(p)
    gradients([a, b], 3)
    ours.step()  # not asked before: it makes them itself
    theirs.step()
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True) if p.ndim > 1)


def test_muon_vectors_follow_a_scheduler() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = Muon([p], lr=0.02, adam_lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
    p.grad = torch.ones(3)
    optimizer.step()
    assert p.tolist() == [0.5] * 3
    schedule.step()
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.25))


@pytest.mark.parametrize("make", EVERY)
def test_state_round_trips_and_resumes_exactly(make: Callable[[Any], OpsOptimizer]) -> None:
    a, b = params(), params()
    straight, first = make(a), make(b)
    train([straight, first], [a, b], steps=2)
    saved = copy.deepcopy(first.state_dict())
    resumed = make(b)
    resumed.load_state_dict(saved)
    train([straight, resumed], [a, b], steps=2)
    for p, q in zip(a, b, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("make", EVERY)
def test_fusion_equals_the_sequence_it_replaces(backend: str, make: Callable[[Any], OpsOptimizer]) -> None:
    a, b = params(), params()
    fused, plain = make(a), make(b)
    for i in range(2):
        gradients([a, b], i)
        grads = {p: p.grad.bfloat16() for p in a}
        for p, q in zip(a, b, strict=True):
            q.grad = grads[p].float() * 0.25
        copies = {p: torch.empty_like(p, dtype=torch.float16) for p in a}
        fused.step(fusion=FusedOps(0.25, True, grads, copies))
        plain.step()
        for p, q in zip(a, b, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
            assert torch.equal(copies[p], p.half())
            assert not bool(grads[p].any())


@pytest.mark.parametrize("make", EVERY)
def test_low_precision_parameters(backend: str, make: Callable[[Any], OpsOptimizer]) -> None:
    a, b = params(dtype=torch.bfloat16), params()
    train([make(a), make(b)], [a, b], steps=3)
    for p, q in zip(a, b, strict=True):
        assert p.dtype == torch.bfloat16
        torch.testing.assert_close(p.float(), q, rtol=0.1, atol=0.25)


@pytest.mark.parametrize("make", EVERY)
def test_a_refused_step_changes_nothing(make: Callable[[Any], OpsOptimizer]) -> None:
    a = params([(6,), (7,)])
    optimizer = make(a)
    train([optimizer], [a], steps=1)
    before = [p.detach().clone() for p in a]
    overlapping = a[0].grad
    assert overlapping is not None
    a[1].grad = torch.ones(7)
    with pytest.raises((KernelError, RuntimeError)):
        optimizer.step(fusion=FusedOps(copies={p: torch.zeros(3, dtype=torch.bfloat16) for p in a}))
    assert all(torch.equal(p, q) for p, q in zip(a, before, strict=True)) or not optimizer.elementwise
    if optimizer.elementwise:
        assert [optimizer.state[p]["step"] for p in a] == [1, 1]


def test_which_optimizers_may_be_cut_anywhere() -> None:
    assert [c.elementwise for c in (AdamW, Lion, Adagrad, SGD, Lamb, Muon)] == [True, True, True, True, False, False]


def test_wrong_values() -> None:
    p = [nn.Parameter(torch.ones(2, 2))]
    for make in (
        lambda: SGD(p, nesterov=True),
        lambda: Lamb(p, min_coeff=2.0, max_coeff=1.0),
        lambda: Muon(p, ns_method="newton"),
        lambda: Muon(p, momentum=1.0),
        lambda: Adagrad(p, eps=-1.0),
        lambda: Lion(p, betas=(1.0, 0.9)),
    ):
        with pytest.raises(ConfigError):
            make()


@pytest.mark.parametrize("make", EVERY)
def test_moved_memory_is_noticed(make: Callable[[Any], OpsOptimizer]) -> None:
    """Repeated steps are prepared once; a parameter, gradient or state that moves must not be written at its old place."""
    a, b = params(), params()
    quick, fresh = make(a), make(b)
    train([quick, fresh], [a, b], steps=3)
    old = a[0].data
    kept = old.clone()
    a[0].data = old.clone()
    for state in quick.state.values():
        for name in [n for n in state if isinstance(state[n], Tensor)]:
            state[name] = state[name].clone()
    train([quick, fresh], [a, b], steps=2)
    assert torch.equal(old, kept)
    for p, q in zip(a, b, strict=True):
        assert torch.equal(p, q)
    a[0].grad = None
    b[0].grad = None
    quick.step()
    fresh.step()
    for p, q in zip(a, b, strict=True):
        assert torch.equal(p, q)


def test_no_gradient_is_kept_alive() -> None:
    p = nn.Parameter(torch.ones(10))
    optimizer = AdamW([p])
    for _ in range(3):
        p.grad = torch.ones(10)
        gone = weakref.ref(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        assert gone() is None


def test_a_step_between_forward_and_backward_is_noticed(backend: str) -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = AdamW([p])
    p.grad = torch.ones(3)
    optimizer.step()
    loss = (p * p).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_states_without_a_number_begin_to_count():
    param = torch.nn.Parameter(torch.ones(8))
    optimizer = AdamW([param])
    for _ in range(3):
        param.grad = torch.ones(8)
        optimizer.step()
        optimizer.state[param].pop("step") if optimizer.state[param]["step"] == 2 else None
    assert optimizer.state[param]["step"] == 1
