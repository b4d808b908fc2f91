"""Helpers of this package's tests: layouts of a small model over any number of ranks."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ds_ckpt.coordinator import Coordinator
from ds_comm.placement import Box, Interval, TensorShard

SHAPES = {
    "param/scalar": ((), "float32"),
    "param/empty": ((0, 4), "float32"),
    "param/prime": ((17, 31), "float32"),
    "param/vector": ((97,), "bfloat16"),
    "param/cube": ((6, 5, 8), "float32"),
    "optim/prime/exp_avg": ((17, 31), "float32"),
    "count": ((3,), "int64"),
}


@dataclass(frozen=True)
class Shard:
    shard: TensorShard
    data: torch.Tensor


def reference(name):
    shape, dtype = SHAPES[name]
    g = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randint(-100, 100, shape, generator=g).to(getattr(torch, dtype))


def boxes(shape, tensor):
    """Grid of `tensor` boxes along the last dim (uneven where it does not divide); whole where there is none."""
    if not shape or tensor == 1:
        return [Box.whole(shape)] * tensor
    edges = [shape[-1] * i // tensor for i in range(tensor + 1)]
    lead = (0,) * (len(shape) - 1)
    return [Box((*lead, a), (*shape[:-1], b - a)) for a, b in itertools.pairwise(edges)]


def layout(rank, data, tensor, style):
    """Shards of `rank` in a mesh data x tensor. style: "flat" (ZeRO), "replica", "mixed" (only optimizer sharded)."""
    d, t = divmod(rank, tensor)
    out = []
    for name, (shape, dtype) in SHAPES.items():
        box = boxes(shape, tensor)[t]
        flat = style == "flat" or (style == "mixed" and name.startswith("optim/"))
        # Uneven on purpose: rank d owns n*d^2/data^2 .. n*(d+1)^2/data^2.
        cut = [box.numel * i * i // (data * data) for i in range(data + 1)]
        part = Interval(cut[d], cut[d + 1]) if flat else Interval(0, box.numel)
        out.append(TensorShard(name, shape, dtype, box, part))
    return out


def local(shard, *, fill):
    if not fill:
        return Shard(shard, torch.zeros(shard.numel, dtype=getattr(torch, shard.dtype)))
    return Shard(shard, expected(shard))


def expected(shard):
    whole = reference(shard.name)
    part = whole[tuple(slice(o, o + n) for o, n in zip(shard.box.offset, shard.box.shape, strict=True))]
    return part.reshape(-1)[shard.interval.start : shard.interval.stop].clone()


class ThreadRanks(Coordinator):
    """Ranks that are threads of this process: properties over many layouts without processes."""

    def __init__(self, rank, size, slots, barrier):
        self.rank, self.size, self._slots, self._barrier = rank, size, slots, barrier

    def swap(self, data, to, source):
        return bytes.fromhex(self.exchange(data.hex())[source])

    def exchange(self, value):
        self._slots[self.rank] = json.loads(json.dumps(value))
        self._barrier.wait(30)
        out = list(self._slots)
        self._barrier.wait(30)
        return out


def together(size, body):
    """Run `body(ranks)` on `size` threads; their results, or the first error that is not another rank's."""
    slots, barrier = [None] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(body, ThreadRanks(r, size, slots, barrier)) for r in range(size)]
    return [f.result() for f in futures]


class Model:
    """The functions above, as the fixture `model` (test modules do not import each other)."""

    SHAPES = SHAPES
    together = staticmethod(together)
    Shard = Shard
    reference = staticmethod(reference)
    layout = staticmethod(layout)
    local = staticmethod(local)
    expected = staticmethod(expected)
    nbytes = sum(math.prod(s) * getattr(torch, d).itemsize for s, d in SHAPES.values())


@pytest.fixture(scope="session")
def model():
    return Model


class CrashServer:
    """A process that has imported torch and forks a child per trial (crash_server.py)."""

    def __init__(self):
        script = Path(__file__).with_name("crash_server.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def trial(self, root, **order):
        log = root.parent / f"{root.name}.log"
        log.unlink(missing_ok=True)
        self._process.stdin.write(json.dumps({"root": str(root), "log": str(log), **order}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return answer, set(log.read_text().split("\n")) if log.exists() else set()

    def close(self):
        self._process.stdin.close()
        self._process.kill()  # it has nothing to lose, and torch takes its time to go
        self._process.wait(10)
        self._process.stdout.close()


@pytest.fixture(scope="session")
def crash():
    server = CrashServer()
    yield server
    server.close()
