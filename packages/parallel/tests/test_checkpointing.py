"""Checkpointed calls: the same numbers in every form, what is kept meanwhile, and what is refused."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ds_monitor
from ds_config.errors import PlanError
from ds_monitor import MemorySink
from ds_parallel import (
    ActivationCheckpointing,
    ActivationPolicy,
    checkpoint,
    checkpoint_modules,
    checkpoint_reentrant,
    current_checkpointing,
)
from ds_parallel.trees import flatten

FORMS = ("checkpoint", "checkpoint_reentrant")
KEEPINGS = [
    ActivationPolicy(),
    ActivationPolicy(slots=4),
    ActivationPolicy(host=True),
    ActivationPolicy(host=True, slots=4),
    ActivationPolicy(synchronize=True, profile=True),
]


class Pair(NamedTuple):
    first: Tensor
    second: Any


def gradients(model: nn.Module, forward: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    loss = forward()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("form", "keeping"), list(itertools.product(FORMS, KEEPINGS)), ids=str)
def test_loss_and_gradients_are_those_without_it(
    stack: Any, elsewhere: Any, form: str, keeping: ActivationPolicy
) -> None:
    """With dropout, keywords and nested arguments, over several iterations (buffers are used again)."""
    model = stack(dropout=0.4)
    scale, shift = torch.full((8,), 1.5, requires_grad=True), torch.ones(6, 8, requires_grad=True)
    policy = ActivationCheckpointing(keeping, accelerator=elsewhere)
    run = getattr(policy, form)

    def forward(call: Any) -> Tensor:
        x = torch.ones(6, 8, requires_grad=True) * 1
        for layer in model.layers:
            x = call(layer, x, extra={"shift": [shift]}, scale=scale)
        return model.head(x).square().mean()

    for _ in range(3):
        scale.grad = shift.grad = None
        plain = [*gradients(model, lambda: forward(lambda f, *a, **k: f(*a, **k))), scale.grad, shift.grad]
        scale.grad = shift.grad = None
        assert same(plain, [*gradients(model, lambda: forward(run)), scale.grad, shift.grad])
    assert policy.calls == 12
    assert policy.account.device == policy.account.host == 0  # every graph is gone
    kept, piece = (policy.account.peak_host, policy.account.peak_device), 6 * 8 * 4
    own = 4 * piece + piece + 8 * 4  # four inputs; shift and scale are the same in all calls, and kept once
    assert kept == ((own, 0) if keeping.host else (0, own) if keeping.slots else (0, 0))
    assert (elsewhere.synchronized > 0) == keeping.synchronize


@pytest.mark.slow
def test_a_checkpointed_model_keeps_fewer_bytes(stack: Any, live: Any) -> None:
    model, x = stack(width=32), torch.ones(64, 32)

    def alive_after_forward() -> int:
        gc.collect()
        with live() as seen:
            loss = model(x)
            kept = seen.bytes
            loss.backward()
        model.zero_grad()
        return kept

    plain = alive_after_forward()
    done = checkpoint_modules(model, ["layers.*"])
    checkpointed = alive_after_forward()
    inputs = 3 * 64 * 32 * 4  # of the first call the caller holds it
    assert checkpointed < inputs + 64 * 32 * 4 + 4096
    assert checkpointed * 3 < plain
    done.remove()
    assert alive_after_forward() == plain


def test_moved_inputs_free_the_originals(live: Any, elsewhere: Any) -> None:
    """What is on the host is not on the device: of the originals none is alive when the forward is done."""
    policy = ActivationCheckpointing(ActivationPolicy(host=True), accelerator=elsewhere)
    weight = torch.ones(32, requires_grad=True)
    with live() as seen:
        x = torch.ones(64, 32) * weight
        for _ in range(4):
            x = policy.checkpoint(lambda t: (t * 2).tanh(), x)
        assert seen.bytes <= 2 * 64 * 32 * 4  # the last result, and the product's own
        assert policy.account.host == 4 * 64 * 32 * 4
        x.sum().backward()
    assert policy.account.host == 0
    assert weight.grad is not None
    assert bool(weight.grad.isfinite().all())


def test_results_of_chosen_operations_are_kept() -> None:
    ran: list[str] = []

    class Noting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)

    def products(save_ops: tuple[Any, ...]) -> int:
        ran.clear()
        with Noting():
            ActivationCheckpointing(save_ops=save_ops).checkpoint(
                lambda t: (t @ weight).sin().cos(), x
            ).sum().backward()
        return ran.count("aten.mm.default")

    assert products(()) - products((torch.ops.aten.mm.default,)) == 1
    with pytest.raises(PlanError) as caught:
        ActivationCheckpointing(save_ops=[torch.ops.aten.mm.default]).checkpoint_reentrant(torch.sin, x)
    assert caught.value.code == "activations-form"


def test_inputs_that_stay_as_they_are(elsewhere: Any) -> None:
    """Integers, marked tensors, parameters and expanded views are held; a late write to one is an error."""
    policy = ActivationCheckpointing(ActivationPolicy(host=True), accelerator=elsewhere)
    marked = torch.ones(4)
    marked.no_checkpointing = True
    table, ids = nn.Parameter(torch.randn(5, 4)), torch.tensor([1, 2, 2, 4])
    wide = torch.ones(1, 4).expand(4, 4)
    out = policy.checkpoint(lambda a, b, c, d: (a[b] * c * d).sin(), table, ids, marked, wide)
    assert policy.account.host == 0
    marked.add_(1)
    with pytest.raises(PlanError, match="written in place") as caught:
        out.sum().backward()
    assert caught.value.code == "activations-written"


def test_a_layout_that_is_not_rowmajor_comes_back(elsewhere: Any) -> None:
    policy = ActivationCheckpointing(ActivationPolicy(host=True), accelerator=elsewhere)
    strides: list[tuple[int, ...]] = []
    x = torch.randn(6, 4, requires_grad=True)

    def note(t: Tensor) -> Tensor:
        strides.append(t.stride())
        return t.exp()

    policy.checkpoint(note, (x * 2).t()).sum().backward()
    assert strides == [(1, 4), (1, 4)]
    assert torch.allclose(x.grad, 2 * (2 * x).exp())


def test_buffers_run_out_grow_and_are_made_once(elsewhere: Any) -> None:
    policy = ActivationCheckpointing(ActivationPolicy(host=True, slots=2), accelerator=elsewhere)
    weight = torch.ones((), requires_grad=True)

    def chain(count: int, rows: int) -> Tensor:
        x = torch.ones(rows, 4) * weight
        for _ in range(count):
            x = policy.checkpoint(torch.sin, x)
        return x.sum()

    with pytest.raises(PlanError) as caught:
        chain(3, 5)
    assert caught.value.code == "activations-buffers-full"
    assert "number_checkpoints = 2" in str(caught.value)
    caught = None  # its traceback holds the graph
    gc.collect()
    for rows in (5, 3, 5):
        chain(2, rows).backward()
    pool = elsewhere.pools[0]
    assert len(elsewhere.pools) == 1
    assert pool.stats().num_in_use == 1
    chain(2, 5000).backward()  # none in use: longer ones are made
    open_graph = chain(1, 4)
    with pytest.raises(PlanError) as size:
        chain(1, 6000)
    assert size.value.code == "activations-size"
    assert pool.stats().num_in_use == 1
    open_graph.backward()


def test_graphs_that_are_dropped_give_their_memory_back(elsewhere: Any) -> None:
    policy = ActivationCheckpointing(ActivationPolicy(host=True), accelerator=elsewhere)
    x = torch.ones(100, requires_grad=True)
    out = policy.checkpoint(torch.sin, x * 1)
    assert policy.account.host == 400
    del out
    gc.collect()
    assert policy.account.host == 0
    with torch.no_grad():
        policy.checkpoint(torch.sin, x)
    assert policy.account.peak_host == 400


def test_profile_tells_of_every_call() -> None:
    sink = MemorySink()
    ds_monitor.attach([sink])
    try:
        for form in FORMS:
            policy = ActivationCheckpointing(ActivationPolicy(profile=True))
            x = torch.ones(3, requires_grad=True)
            getattr(policy, form)(torch.sin, getattr(policy, form)(torch.cos, x)).sum().backward()
            with torch.no_grad():
                policy.checkpoint(torch.sin, x)
    finally:
        ds_monitor.detach([sink])
    names = [record.name for record in sink.records if record.name.startswith("activations/")]
    each = {name: names.count(f"activations/{name}") for name in ("forward", "recompute", "backward")}
    assert each == {"forward": 6, "recompute": 4, "backward": 4}


def test_which_policy_a_forward_means() -> None:
    first, second = ActivationCheckpointing(ActivationPolicy(slots=3)), ActivationCheckpointing()
    x = torch.ones(3, requires_grad=True)

    def nested(t: Tensor) -> Tensor:
        return checkpoint(torch.sin, t) * 2

    with first.active():
        assert current_checkpointing() is first
        out = checkpoint_reentrant(nested, x)
        with second.active():
            checkpoint_reentrant(torch.sin, x)
        assert current_checkpointing() is first
    assert current_checkpointing() is not first
    assert (first.calls, second.calls) == (2, 1)
    out.sum().backward()  # outside: the recomputation still means the first
    assert (first.calls, second.calls) == (3, 1)


def test_a_policy_that_nothing_asks_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ds_parallel"):
        idle = ActivationCheckpointing(ActivationPolicy(host=True, slices=True))
        for _ in range(2):
            with idle.active():
                torch.ones(3).sin()
        used = ActivationCheckpointing(ActivationPolicy(host=True))
        x = torch.ones(3, requires_grad=True)
        used.checkpoint(torch.sin, x * 1).sum().backward()
        used.checkpoint(torch.sin, x * 1)
        for policy in (used, ActivationCheckpointing()):
            with policy.active():
                torch.ones(3).sin()
        with torch.no_grad(), ActivationCheckpointing(ActivationPolicy(host=True)).active():
            torch.ones(3).sin()
    said = [record.getMessage() for record in caplog.records]
    assert [text.split()[0] for text in said] == [
        "partition_activations",
        "activation_checkpointing",
        "cpu_checkpointing",
    ]
    assert "1/N on each tensor-parallel rank, on the host" in said[1]


def test_trees_come_apart_and_together() -> None:
    a, b = torch.ones(1), torch.zeros(2)
    tensors, rebuild = flatten(({"x": [a, 3]}, Pair(b, None), "text"))
    assert tensors[0] is a
    assert tensors[1] is b
    again = rebuild([b, a])
    assert again[0]["x"][0] is b
    assert again[0]["x"][1] == 3
    assert again[2] == "text"
    assert isinstance(again[1], Pair)
    assert again[1].first is a


def test_a_policy_survives_a_copy_of_the_model(stack: Any) -> None:
    model = stack()
    policy = ActivationCheckpointing()
    done = checkpoint_modules(model, ["layers.*"], policy)
    twin = copy.deepcopy(model)
    x = torch.ones(2, 8)
    assert same(gradients(model, lambda: model(x)), gradients(twin, lambda: twin(x)))
    assert policy.calls == 8
    done.remove()
    model(x)
    assert policy.calls == 8


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shape",
    [lambda a, b: [a, b], lambda a, b: {"a": a, "b": (b,)}, lambda a, b: ((a, 3), [b])],
    ids=["list", "dict", "nested"],
)
def test_outputs_in_any_shape_have_gradients(form: str, shape: Callable[[Tensor, Tensor], Any]) -> None:
    """Torch's reentrant form gives none to tensors outside a plain tuple, and says nothing."""
    weight, x = torch.full((3,), 2.0, requires_grad=True), torch.ones(3, requires_grad=True)
    outputs = getattr(ActivationCheckpointing(), form)(lambda t: shape(t * weight, t + weight), x)
    plain = shape(x * weight, x + weight)
    assert str(flatten(outputs)[1]([0, 1])) == str(flatten(plain)[1]([0, 1]))  # type: ignore[list-item]
    sum((t * (i + 2)).sum() for i, t in enumerate(flatten(outputs)[0])).backward()  # type: ignore[union-attr]
    assert x.grad is not None
    assert x.grad.tolist() == [7.0] * 3
    assert weight.grad is not None
    assert weight.grad.tolist() == [5.0] * 3


@pytest.mark.parametrize("form", FORMS)
def test_what_is_trained_has_a_gradient_where_no_input_needs_one(form: str) -> None:
    """Torch's reentrant form gives none, of which it warns once."""
    table = nn.Embedding(5, 2)
    getattr(ActivationCheckpointing(), form)(table, torch.tensor([1, 3])).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.sum(1).tolist() == [0.0, 2.0, 0.0, 2.0, 0.0]
    table.requires_grad_(False)
    assert not getattr(ActivationCheckpointing(), form)(table, torch.tensor([1, 3])).requires_grad
