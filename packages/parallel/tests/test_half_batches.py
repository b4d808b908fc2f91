"""The two lanes of a layer in one process: whose turn it is, under which state of torch, and what becomes of errors."""

from __future__ import annotations

import contextvars
import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ds_accel import streams
from ds_config.errors import PlanError, UnsupportedError
from ds_parallel._torch import saved_hooks
from ds_parallel.tensor.half_batches import HalfBatches, Turns, run_layers_in_halves
from ds_parallel.tensor.half_plan import forward_order
from ds_parallel.tensor.late_gradients import late_linear
from ds_testing.late_device import drawn_orders, late_device

CPU = torch.device("cpu")


class Coming:
    """A result that travels on a stream of its own."""

    def __init__(self, x: Tensor, line: Any = None) -> None:
        self.line = line
        if line is None:
            self.out = x * 2
            return
        line.wait_stream(streams.current_stream(x.device))
        with streams.on_stream(line, x.device):
            self.out = x.detach() * 2
        streams.record_use(x, line)
        streams.record_use(self.out, streams.current_stream(x.device))

    def wait(self) -> Tensor:
        if self.line is not None:
            streams.current_stream(self.out.device).wait_stream(self.line)
        return self.out

    def abandon(self, timeout: Any) -> None:
        pass


@pytest.fixture
def turns() -> Iterator[Turns]:
    turns = Turns()
    yield turns
    turns.close()


def test_the_order_is_the_planned_one(turns: Turns) -> None:
    seen: list[tuple[int, int]] = []

    def half(number: int) -> Callable[[], int]:
        def run() -> int:
            for part in range(3):
                seen.append((number, part))
                if part < 2:
                    turns.give(Coming(torch.ones(1)))
            return number

        return run

    for _ in range(3):
        assert turns.run((half(0), half(1)), CPU) == (0, 1)
        assert seen == list(forward_order(3))
        assert turns.lane is None
        seen.clear()


def test_halves_with_other_numbers_of_sums_end(turns: Turns) -> None:
    def half(sums: int) -> Callable[[], int]:
        def run() -> int:
            for _ in range(sums):
                turns.give(Coming(torch.ones(1)))
            return sums

        return run

    for pair in [(0, 0), (0, 3), (4, 0), (1, 3), (5, 2)]:
        assert turns.run((half(pair[0]), half(pair[1])), CPU) == pair


class Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.threads.add(threading.get_ident())
        return func(*args, **(kwargs or {}))


def state() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.empty(0).device,
        torch.get_num_threads(),
        saved_hooks(),
        WORD.get(),
    )


WORD = contextvars.ContextVar("word", default="")


def test_the_second_lane_has_the_callers_state(turns: Turns) -> None:
    plain = state()
    assert turns.run((state, state), CPU) == (plain, plain)
    token = WORD.set("said")
    with Counter() as counter, torch.device("meta"), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        first, second = turns.run((state, state), CPU)
    assert first == second != plain
    assert len(counter.threads) == 2
    with torch.autograd.graph.save_on_cpu(), torch.inference_mode():
        first, second = turns.run((state, state), CPU)
    WORD.reset(token)
    assert first == second != plain
    assert turns.run((state, state), CPU) == (plain, plain)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_of_one_half_ends_both(turns: Turns, failing: int, part: int, kind: type[BaseException]) -> None:
    unwound: list[int] = []

    def half(number: int) -> Callable[[], int]:
        def run() -> int:
            try:
                for at in range(3):
                    if (number, at) == (failing, part):
                        raise kind("here")
                    turns.give(Coming(torch.ones(1)))
            finally:
                unwound.append(number)
            return number

        return run

    with pytest.raises(kind, match="here"):
        turns.run((half(0), half(1)), CPU)
    assert failing in unwound
    assert len(unwound) == 2 or (failing, part) == (0, 0)  # the second had not begun
    assert turns.lane is None
    assert turns.run((lambda: 1, lambda: 2), CPU) == (1, 2)


def test_the_thread_ends_with_what_it_works_for() -> None:
    before = threading.active_count()
    turns = Turns()
    turns.run((lambda: 1, lambda: 2), CPU)
    assert threading.active_count() == before + 1
    others = [copy.deepcopy(turns), pickle.loads(pickle.dumps(turns))]
    assert [other.run((lambda: 1, lambda: 2), CPU) for other in others] == [(1, 2)] * 2
    threads = [thread for thread in threading.enumerate() if thread.name == "ds-parallel-halves"]
    del turns, others
    gc.collect()
    for thread in threads:
        thread.join(5)
    assert threading.active_count() == before


# ---- layers


class Layer(nn.Module):
    """A sum after each of two products, as two row layers have."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.turns, self.calls = turns, []

    def forward(self, x: Tensor, scale: Any = None, **given: Any) -> Any:
        self.calls.append((x.shape[0], None if scale is None else tuple(scale.shape)))
        x = x + self.turns.give(Coming(self.first(x)))
        x = x + self.turns.give(Coming(self.second(x.tanh())))
        return (x if scale is None else x * scale, None)


def in_halves(turns: Turns, layer: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    layer = Layer(turns) if layer is None else layer
    run_layers_in_halves({"layers.0": layer}, HalfBatches(turns))
    return layer


def check_layer(layer: Any, *args: Any, **kwargs: Any) -> None:
    layer.zero_grad()
    kind, wanted = type(layer), copy.deepcopy(layer)
    wanted.__class__ = kind.__mro__[2]
    out, expected = layer(*args, **kwargs)[0], wanted(*args, **kwargs)[0]
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    for mine, other in zip(layer.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_arguments_of_each_sample_are_cut_and_others_are_not(turns: Turns) -> None:
    layer = in_halves(turns)
    x = torch.randn(5, 3, 8)
    check_layer(layer, x, torch.randn(5, 1, 1))
    check_layer(layer, x, scale=torch.randn(1, 3, 1))
    check_layer(layer, x=x, scale=torch.randn(3, 1))
    check_layer(layer, x, nothing=None, flags={"a": [1, 2.0, "b", torch.float32, len]})
    check_layer(layer, x[:1])  # a batch of one has no halves
    assert layer.calls == [
        *((3, (3, 1, 1)), (2, (2, 1, 1))),
        *((3, (1, 3, 1)), (2, (1, 3, 1))),
        *((3, (3, 1)), (2, (3, 1))),
        *((3, None), (2, None)),
        (1, None),
    ]


def test_as_many_samples_as_places_leave_it_open_what_a_matrix_is(turns: Turns) -> None:
    layer = in_halves(turns)
    check_layer(layer, torch.randn(3, 3, 8), torch.randn(3, 1))
    check_layer(layer, torch.randn(3, 3, 8), torch.randn(3, 1, 1))
    assert [samples for samples, _ in layer.calls] == [3, 2, 1]


class Cache:
    pass


def test_what_cannot_be_cut_is_refused(turns: Turns) -> None:
    layer = in_halves(turns)
    with pytest.raises(UnsupportedError, match="Layer is given a Cache") as caught:
        layer(torch.randn(4, 3, 8), past=Cache())
    assert caught.value.code == "tensor-halves"
    with torch.no_grad():
        layer(torch.randn(4, 3, 8), past=Cache())
    assert layer.calls == [(4, None)]
    with pytest.raises(UnsupportedError, match="a checkpointed call is around Layer"):
        checkpoint(layer, torch.randn(4, 3, 8), use_reentrant=False)

    class Loses(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[0].mean()

    with pytest.raises(UnsupportedError, match="Loses returns tensors of") as caught:
        in_halves(turns, Loses(turns))(torch.randn(4, 3, 8))
    assert caught.value.code == "tensor-halves"
    with pytest.raises(PlanError, match=r"layers\.0\.1 normalizes over all samples"):
        in_halves(turns, nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))


def test_a_reentrant_checkpoint_around_computes_again_at_once(turns: Turns) -> None:
    layer = in_halves(turns)
    x = torch.randn(4, 3, 8, requires_grad=True)
    checkpoint(layer, x, use_reentrant=True)[0].sum().backward()
    assert [samples for samples, _ in layer.calls] == [2, 2, 4]
    check_layer(layer, x)


@drawn_orders
@pytest.mark.parametrize("aside", [False, True])
def test_sums_that_come_late(turns: Turns, order: int, aside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both lanes queue on the caller's stream, whichever that is, and wait for the stream of the sums where they use one."""
    monkeypatch.setenv("DS_OPS", "reference")
    weights = [torch.randn(8, 8, generator=torch.Generator().manual_seed(at)) for at in range(3)]

    def run(line: Any, stream: Any) -> Tensor:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(9))

        def half(number: int) -> Callable[[], Tensor]:
            part = x[number::2]

            def compute() -> Tensor:
                mine = part
                for weight in weights:
                    mine = turns.give(Coming(mine @ weight, line)).tanh()
                return mine

            return compute

        with torch.no_grad(), streams.on_stream(stream, CPU):
            outs = turns.run((half(0), half(1)), CPU)
            result = torch.cat(outs)
        if stream is not None:
            streams.current_stream(CPU).wait_stream(stream)
        return result

    expected = run(None, None)
    turns.close()
    with late_device(order):
        given = [weight.clone() for weight in weights]
        weights[:] = given
        stream = streams.new_stream(CPU) if aside else None
        if stream is not None:
            stream.wait_stream(streams.current_stream(CPU))
        found = run(streams.new_stream(CPU), stream)
        values = found.tolist()
        turns.close()
    assert torch.equal(torch.tensor(values), expected)


# ---- gradients of weights


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_late_gradients_are_those_of_linear(bias: bool, autocast: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if autocast else torch.float64
    x, weight = (torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((2, 5, 8), (6, 8)))
    tensors = [x, weight, *([torch.randn(6, dtype=dtype, requires_grad=True)] if bias else [])]
    results = []
    for call in (lambda: nn.functional.linear(*tensors), lambda: late_linear(x, weight, *(tensors[2:] or [None]), 40)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = call()
        results.append(
            [out, *torch.autograd.grad(out.float().square().sum() if autocast else out.square().sum(), tensors)]
        )
    for mine, other in zip(*results, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other)


def test_late_gradients_have_gradients() -> None:
    x, weight, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 4), (5, 4), (5,)))

    def call(*tensors: Tensor) -> Tensor:
        return late_linear(*tensors, 40).tanh()

    assert torch.autograd.gradcheck(call, (x, weight, bias))
    assert torch.autograd.gradgradcheck(call, (x, weight, bias))
    late_linear(x, weight, bias, 40).sum().backward(retain_graph=True)


def test_frozen_weights_have_no_node() -> None:
    x, weight = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4)
    assert "Linear" not in type(late_linear(x, weight, None, 40).grad_fn).__name__


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_late_gradient_is_that_of_linear(shape: tuple[int, ...], with_bias: bool) -> None:
    torch.manual_seed(0)
    found, expected = [], []
    values = torch.randn(shape), torch.randn(4, 6), torch.randn(4) if with_bias else None
    for results, linear in ((found, lambda *args: late_linear(*args, 1)), (expected, functional.linear)):
        x, weight, bias = (value if value is None else value.clone().requires_grad_() for value in values)
        y = linear(x, weight, bias)
        y.square().sum().backward()
        results += [y, x.grad, weight.grad, *([bias.grad] if with_bias else [])]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
