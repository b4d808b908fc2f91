"""Engines in a row, closed or dropped: connections, threads, shared memory and mappings are given back. `slow` makes 200 of each kind."""

from __future__ import annotations

import collections
import gc
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_comm
import ds_engine
from ds_engine.pipelining import PipelineEngine
from ds_moe import MoE
from ds_pipe import LayerSpec, PipelineModule, TiedLayerSpec
from ds_testing import world

WIDTH = 8
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(WIDTH, 16), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(nn.functional.silu(gate) * up)


class Decoder(nn.Module):
    """Named as a family of transformers, so that its rules for tensor parallelism are known."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="phi3", to_dict=lambda: {"model_type": "phi3"})
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": Block()}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["mlp"](x)
        return x


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(WIDTH, Line(), 4, 2, k=1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.moe(x)[0]
        return output


def start(model: nn.Module, **more: Any) -> Any:
    return ds_engine.initialize(model=model, config=CONFIG | more)[0]


def stage3(folder: Path) -> Any:
    del folder
    return start(nn.Sequential(Line(), Line()), zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})


def on_disk(folder: Path) -> Any:
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)},
        "offload_param": {"device": "cpu"},
    }
    return start(nn.Sequential(Line(), Line()), zero_optimization=zero)


def saved_behind(folder: Path) -> Any:
    engine = start(
        nn.Sequential(Line(), Line()), zero_optimization={"stage": 2}, checkpoint={"saving": {"asynchronous": True}}
    )
    engine.save_checkpoint(folder, tag="one")
    return engine


def tensor(folder: Path) -> Any:
    del folder
    return start(Decoder(), zero_optimization={"stage": 1}, tensor_parallel={"autotp_size": 2})


def experts(folder: Path) -> Any:
    del folder
    return start(Experts(), zero_optimization={"stage": 2})


def experts_in_pieces(folder: Path) -> Any:
    del folder
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    return start(nn.Sequential(Line(), Experts(), Line()), zero_optimization=zero)


def pipeline(folder: Path) -> Any:
    del folder
    layers = [TiedLayerSpec("tied", Line), LayerSpec(Line), LayerSpec(Line), TiedLayerSpec("tied", Line)]
    model = PipelineModule(
        layers, num_stages=2, partition_method="uniform", loss_fn=lambda out, label: (out - label).square().mean()
    )
    return start(model, zero_optimization={"stage": 1})


def step(engine: Any) -> None:
    batch = torch.randn(2, WIDTH)
    if isinstance(engine, PipelineEngine):
        engine.train_batch(iter([(batch, batch)]))
        return
    engine.backward(engine(batch).square().mean())
    engine.step()


def in_use() -> collections.Counter[str]:
    """Count this process's descriptors and threads by kind, and the host's shared memory files, after a collection of garbage on all ranks."""
    gc.collect()
    until = time.monotonic() + 150  # a dropped engine's save goes on behind; its threads end with it
    while any(thread.name.startswith("ds-ckpt") for thread in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.01)
        gc.collect()
    dist.barrier()
    gc.collect()
    counts: collections.Counter[str] = collections.Counter(threads=len(os.listdir("/proc/self/task")))
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # that of the listing itself
            continue
        counts[re.sub(r"\d+", "N", target)] += 1
    return counts


def resident() -> int:
    """Return the resident memory of this process in KiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * (os.sysconf("SC_PAGE_SIZE") >> 10)


def in_a_row(backend: str, make: Callable[[Path], Any], ending: str, count: int, folder: Path) -> None:
    ds_comm.init_distributed(backend)
    before, memory = in_use(), 0
    for number in range(count + 2):
        if number == 2:  # the first ones make what is kept for all
            before, memory = in_use(), resident()
        engine = make(folder)
        step(engine)
        if ending == "closed":
            engine.close()
        del engine
    # one engine's leak comes `count` times; a pool that grew once, or a thread that has not ended yet, does not
    leaked = {name: grown for name, grown in (in_use() - before).items() if grown > min(count // 2, 5)}
    assert not leaked, leaked
    assert resident() - memory < 32 << 10
    dist.barrier()


KINDS = [stage3, on_disk, saved_behind, tensor, experts, experts_in_pieces, pipeline]
CASES = [
    (kind, backend, ending) for kind in KINDS for backend in ("gloo", "cpu:shm") for ending in ("closed", "dropped")
]
SAMPLE = [
    (stage3, "gloo", "dropped"),
    (saved_behind, "gloo", "dropped"),
    (experts, "gloo", "dropped"),
    (experts_in_pieces, "gloo", "dropped"),
    (tensor, "gloo", "closed"),
]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="descriptors are counted in /proc")
@pytest.mark.parametrize(("kind", "backend", "ending"), SAMPLE)
@world(4, backend=None)
def test_a_few_give_back_what_they_had(kind: Any, backend: str, ending: str, tmp_path: Path) -> None:
    in_a_row(backend, kind, ending, 3, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="descriptors are counted in /proc")
@pytest.mark.parametrize(("kind", "backend", "ending"), CASES)
@world(4, backend=None, timeout=600)
def test_two_hundred_give_back_what_they_had(kind: Any, backend: str, ending: str, tmp_path: Path) -> None:
    in_a_row(backend, kind, ending, 200, tmp_path)
