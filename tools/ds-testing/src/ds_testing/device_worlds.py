"""Tests whose body runs on a device: `@device_world(2)`.

The body takes `device`. By default that is `ds_testing.device_only.DEVICE`, in a world whose groups take tensors of it alone; in `nox -s gpu` it
is this rank's CUDA device, with NCCL between the ranks. So a body makes every tensor on `device`, and holds on both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar

import pytest
import torch

from ds_accel import TABLE, Accelerator, detect, get_accelerator, set_accelerator
from ds_testing.device_only import DEVICE, device_only
from ds_testing.spec import world

__all__ = ["device_world", "on_place"]

F = TypeVar("F", bound=Callable[..., Any])


def device_world(
    size: int, *, host: Literal["device-only", "cpu"] = "device-only", timeout: float = 180.0
) -> Callable[[F], F]:
    """Mark a test so that its body runs on `size` ranks, on the device that stands for a card and on a card.

    Args:
        host: Where it runs without a card: in a world of a fake device, or plainly on the CPU.
    """

    def mark(function: F) -> F:
        @functools.wraps(function)
        def run(*args: Any, device: str, **kwargs: Any) -> Any:
            with on_place(device) as there:
                return function(*args, device=there, **kwargs)

        cases = pytest.mark.parametrize("device", [host, pytest.param("cuda", marks=pytest.mark.gpu)])
        marked: F = pytest.mark.device_world(cases(world(size, timeout=timeout)(run)))
        return marked

    return mark


@contextmanager
def on_place(name: str) -> Iterator[torch.device]:
    """Make `device-only`, `device-and-host` (groups take both), `cpu` or `cuda` the device of this process, while inside; yield the device."""
    if name.startswith("device-"):
        with device_only(host_too=name == "device-and-host"), _accelerator(_OnlyAccelerator()):
            yield DEVICE
        return
    with _accelerator(detect({"DS_ACCELERATOR": name}).accelerator):
        yield torch.device("cpu") if name == "cpu" else torch.device(name, torch.cuda.current_device())


@contextmanager
def _accelerator(accelerator: Accelerator) -> Iterator[None]:
    before = get_accelerator()
    set_accelerator(accelerator)
    try:
        yield
    finally:
        set_accelerator(before)


class _OnlyAccelerator(Accelerator):
    """The accelerator of `DEVICE`, for who asks where a model belongs."""

    def __init__(self) -> None:
        super().__init__(replace(TABLE["cpu"]), torch.cpu)

    def device(self, index: int | None = None) -> torch.device:
        return DEVICE

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == DEVICE
