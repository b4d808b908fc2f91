"""What the ranks of a benchmark have in common: how they meet, and how they take turns (`turns.py`)."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from answering import Answer, answering, serve
from process_memory import status_bytes
from zero import burst, clocks


def begin(name: str) -> tuple[str, Answer]:
    """Join the other ranks for `ENGINE[@BACKEND]`: the engine, and what answers."""
    engine, _, backend = name.partition("@")
    answer = answering()
    connect(engine.partition("-")[0], backend)
    return engine, answer


def connect(engine: str, backend: str) -> None:
    """Join the other ranks: through DeepSpeed, through ds-comm for what is ours or names a backend, else through torch; over gloo by default."""
    torch.set_num_threads(1)
    if engine.startswith("deepspeed"):
        import deepspeed

        deepspeed.init_distributed(backend or "gloo")
    elif backend or engine.startswith("ours"):
        import ds_comm

        ds_comm.init_distributed(backend or "gloo")
    else:
        dist.init_process_group("gloo")


def take_turns(
    answer: Answer, facts: dict[str, Any], step: Callable[[Any], object], data: Callable[[int], Any], *, apart: bool
) -> None:
    """Say the facts, then answer `FIRST COUNT` with the milliseconds of so many steps on `data(FIRST)` and so on.

    Steps that stand `apart` begin when all ranks are ready. Others follow each other as in training: a step lasts from the end of the one before, and the
    first of a turn is left out, because nothing is on its way then.
    """
    answer({"ready": True, **facts})

    def turn(line: str) -> dict[str, list[float]]:
        first, count = map(int, line.split())
        given = [data(i) for i in range(first, first + count)]
        dist.barrier()
        with burst():
            began, took = clocks(), []
            for one in given:
                if apart:
                    dist.barrier()
                    began = clocks()
                step(one)
                ended = clocks()
                took.append([1e3 * (b - a) for a, b in zip(began, ended, strict=True)])
                began = ended
        counted = took if apart else took[min(1, count - 1) :]
        return {"ms": [wall for wall, _ in counted], "cpu_ms": [cpu for _, cpu in counted]}

    serve(answer, turn)


def passing_bytes(step: Callable[[], object]) -> int:
    """Bytes that a step has beyond what is there before and after it: the least of three, since memory that was freed may stay."""
    found = []
    for _ in range(3):
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = status_bytes("VmRSS")
        step()
        found.append(status_bytes("VmHWM") - before)
    return min(found)
