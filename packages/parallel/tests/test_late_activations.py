"""On a device whose work comes late: activations that go to the host and come back have the values they had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_accel import streams
from ds_parallel import ActivationCheckpointing, ActivationPolicy
from ds_parallel.sequence import Chunking, chunked_attention
from ds_testing.current_device import follow_current_device
from ds_testing.late_device import LateDevice, LateEvent, drawn_orders, late_device

POLICIES = [ActivationPolicy(host=True), ActivationPolicy(host=True, slots=4), ActivationPolicy(slots=4)]


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native kernels would run at once on memory of the device."""
    monkeypatch.setenv("DS_OPS", "reference")


def checkpointed(policy: ActivationPolicy) -> list[Tensor]:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
    checkpointing, found = ActivationCheckpointing(policy), []
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()
        hidden: Any = x * 1
        for layer in layers:
            hidden = checkpointing.checkpoint(layer, hidden)
        hidden.square().mean().backward()
        found += [x.grad, *(p.grad.clone() for p in layers.parameters())]
        layers.zero_grad()
    return found


def chunked() -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(12, 2, 16, requires_grad=True)
    weight = torch.randn(64, 16, requires_grad=True)

    def project(part: Tensor, index: int) -> tuple[Tensor, Tensor, Tensor]:
        both = nn.functional.linear(part, weight).transpose(0, 1).unflatten(-1, (-1, 8))
        q, k, v = both.split([4, 2, 2], 2)
        return q, k, v

    out = chunked_attention(x, project, [weight], Chunking(4))
    out.square().sum().backward()
    return [out.detach(), x.grad, weight.grad]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@drawn_orders
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_checkpointed_inputs(policy: ActivationPolicy, order: int) -> None:
    expected = checkpointed(ActivationPolicy())
    with late_device(order) as device:
        found = checkpointed(policy)
    assert (device.copies > 0) == policy.host
    assert same(found, expected)


@drawn_orders
def test_chunks_of_a_sequence(order: int) -> None:
    expected = chunked()
    with late_device(order) as device:
        found = chunked()
    assert device.copies > 0
    assert same(found, expected)


@pytest.mark.parametrize("left_out", ["wait for the event", "use on the side stream"])
def test_without_its_events_the_values_are_wrong(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = checkpointed(ActivationPolicy())
    if left_out == "wait for the event":
        monkeypatch.setattr(LateEvent, "wait", lambda self, stream=None: None)
    else:
        monkeypatch.setattr(LateDevice, "record_use", lambda self, tensor, stream: None)
    wrong = 0
    for order in range(5):
        with late_device(order):
            wrong += not same(checkpointed(ActivationPolicy(host=True)), expected)
    assert wrong > 0
    assert streams.backend() is not None


@pytest.mark.parametrize("run", [lambda: checkpointed(POLICIES[0]), lambda: checkpointed(POLICIES[1]), chunked])
def test_streams_are_of_the_device_that_the_tensors_are_on(
    run: Callable[[], list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were of the device that was current: of a model on another one, copies were ordered by nothing."""
    current, made = follow_current_device(monkeypatch), list[torch.device | None]()
    plain = LateDevice.new_stream

    def new_stream(device: LateDevice, module: Any) -> Any:
        made.append(current())
        return plain(device, module)

    monkeypatch.setattr(LateDevice, "new_stream", new_stream)
    with late_device(0):
        run()
    in_backward = 2 if run is chunked else 0  # autograd's own thread is on its device
    assert len(made) > in_backward
    assert made[: len(made) - in_backward] == [torch.device("cpu")] * (len(made) - in_backward)
