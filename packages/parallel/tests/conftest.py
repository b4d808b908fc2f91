"""A small model of blocks, an observer of live memory, and a device that is not the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_accel import PinnedPool


class Block(nn.Module):
    """Keeps 9 times its input for backward; drops out, takes a keyword and a nested argument."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor, extra: dict[str, Any] | None = None, scale: Tensor | None = None) -> Tensor:
        if extra is not None:
            x = x + extra["shift"][0]
        if scale is not None:
            x = x * scale
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


class Stack(nn.Module):
    """Blocks under the name `layers`, and a head."""

    def __init__(self, width: int = 8, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


class Live(TorchDispatchMode):
    """Bytes of the storages that operations made inside, and of those that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in args:
            if isinstance(given, Tensor):
                self._note(given, 0)  # what was there before, unless it is ours
        result = func(*args, **(kwargs or {}))
        for out in result if isinstance(result, tuple | list) else (result,):
            if isinstance(out, Tensor):
                self._note(out, out.untyped_storage().nbytes())
        self.peak = max(self.peak, self.bytes)
        return result

    def _note(self, tensor: Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self._seen:
            self._seen.add(id(storage))
            self.bytes += nbytes
            weakref.finalize(storage, self._gone, id(storage), nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.bytes -= nbytes


class Elsewhere:
    """Stands for a device whose memory is not the host's. Copies are noted, and done at once."""

    def __init__(self) -> None:
        self.facts = SimpleNamespace(torch_type="elsewhere")
        self.module = torch.cpu
        self.synchronized = 0
        self.pools: list[PinnedPool] = []

    def holds(self, tensor: Tensor) -> bool:
        return True

    def device(self) -> torch.device:
        return torch.device("cpu")

    def new_stream(self) -> None:
        return None

    current_stream = new_stream

    def on_stream(self, stream: None) -> Any:
        return nullcontext()

    def new_event(self) -> Any:
        return SimpleNamespace(record=lambda stream: None, wait=lambda stream: None, query=lambda: True)

    def synchronize(self) -> None:
        self.synchronized += 1

    def pinned(self, limit: int, *, name: str) -> PinnedPool:
        self.pools.append(PinnedPool(limit, pinned=False, name=name))
        return self.pools[-1]


@pytest.fixture
def stack() -> Callable[..., Stack]:
    return Stack


@pytest.fixture
def elsewhere() -> Elsewhere:
    return Elsewhere()


@pytest.fixture
def live() -> Callable[[], Any]:
    @contextmanager
    def watching() -> Iterator[Live]:
        with Live() as found:
            yield found

    return watching
