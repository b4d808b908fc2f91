"""A fake CUDA module that records what it is asked, and a fake device that a third party installs."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_accel import set_accelerator


class FakeEvent:
    """Happens when it is synchronized; elapsed time is the difference of record order."""

    clock = 0

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing, self.done, self.at = enable_timing, False, -1

    def record(self, stream: Any = None) -> None:
        FakeEvent.clock += 1
        self.at = FakeEvent.clock

    def synchronize(self) -> None:
        self.done = True

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.enable_timing
        assert end.done
        return float(end.at - self.at)


class FakeCuda:
    """Looks like torch.cuda with two devices of one compute capability. Every call is in `calls`."""

    __name__ = "fake.cuda"
    Event = FakeEvent
    Stream = type("Stream", (), {})

    class CUDAGraph:
        replays = 0

        def replay(self) -> None:
            self.replays += 1

    def __init__(self, capability: tuple[int, int] = (9, 0), count: int = 2) -> None:
        self.capability, self.count, self.index = capability, count, 0
        self.calls: list[tuple[Any, ...]] = []
        self.nvtx = SimpleNamespace(
            range_push=lambda name: self.calls.append(("push", name)), range_pop=lambda: self.calls.append(("pop",))
        )

    def device_count(self) -> int:
        return self.count

    def current_device(self) -> int:
        return self.index

    def set_device(self, index: int) -> None:
        self.calls.append(("set_device", index))
        self.index = index

    def synchronize(self, *index: int) -> None:
        self.calls.append(("synchronize", *index))

    def get_device_capability(self, index: int) -> tuple[int, int]:
        return self.capability

    def current_stream(self) -> str:
        return "default stream"

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.calls.append(("stream", stream))
        yield
        self.calls.append(("end of stream",))

    @contextmanager
    def graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Iterator[None]:
        self.calls.append(("graph", pool, stream))
        yield

    def memory_allocated(self, index: int) -> int:
        return 100 + index

    def max_memory_allocated(self, index: int) -> int:
        return 200 + index

    def memory_reserved(self, index: int) -> int:
        return 300 + index

    def max_memory_reserved(self, index: int) -> int:
        return 400 + index

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 500 + index, 1000

    def reset_peak_memory_stats(self, index: int) -> None:
        self.calls.append(("reset peak", index))

    def empty_cache(self) -> None:
        self.calls.append(("empty cache",))

    def manual_seed_all(self, seed: int) -> None:
        self.calls.append(("seed", seed))


@pytest.fixture
def fake_cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def make_cuda() -> type[FakeCuda]:
    return FakeCuda


@pytest.fixture(autouse=True)
def fresh_accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    set_accelerator(None)
    yield
    set_accelerator(None)


ACME_DEVICE = """
import torch

def device_count(): return 2
_index = [0]
def current_device(): return _index[0]
def set_device(index): _index[0] = index
def synchronize(index=None): pass
def get_rng_state(index): return torch.get_rng_state()
def set_rng_state(state, index): torch.set_rng_state(state)
_peak = [0]
def memory_allocated(index): return 1 << 20
def mem_get_info(index): return 6 << 20, 8 << 20
"""

ACME_FACTS = """
from ds_accel import CommBackend, DeviceFacts

FACTS = DeviceFacts(
    name="acme",
    torch_type="cpu",  # its tensors live in host memory, so that the test needs no compiled backend
    module="acme_accel.device",
    backends=(CommBackend("gloo"),),
    visible_env="ACME_VISIBLE_DEVICES",
    pinned=False,
    host_timers=True,
)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """install(name, entry, files): put a distribution with one entry point on the path, the way pip would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    packages: list[str] = []

    def do(name: str, entry: str, files: dict[str, str]) -> None:
        package = f"{name}_accel"
        packages.append(package)
        (tmp_path / package).mkdir()
        for file, text in {"__init__.py": "", **files}.items():
            (tmp_path / package / file).write_text(textwrap.dedent(text))
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[ds_accel.devices]\n{name} = {entry}\n")
        importlib.invalidate_caches()

    yield do
    for module in [m for m in sys.modules if m.split(".")[0] in packages]:
        del sys.modules[module]


@pytest.fixture
def acme(install: Any) -> str:
    install("acme", "acme_accel.facts:FACTS", {"device.py": ACME_DEVICE, "facts.py": ACME_FACTS})
    return "acme"
