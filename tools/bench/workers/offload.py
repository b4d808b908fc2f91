"""One engine of the offload benchmark on one rank: `offload.py ENGINE[@BACKEND] CONFIG FOLDER`. It takes turns, see `turns.py`.

ENGINE is `ours` or `deepspeed`, its ZeRO stage, where the optimizer's state is (`device`, `host`, `file`) and `bf16` for mixed precision,
as `ours3-file-bf16`. The model and the data are those of `zero.py`. Gradients are clipped. The first line says the losses of four steps
and what the state's folder is asked to move.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from zero import CLIP, CONFIGS, Config, Step, adamw, burst, pss_bytes


def ours(config: Config, model: nn.Module, stage: int, where: str, bf16: bool, folder: str) -> Step:
    import ds_zero

    tier = {
        "device": "device",
        "host": ds_zero.Placement(),
        "file": ds_zero.Placement("file", folder) if where == "file" else None,
    }[where]
    optimizer = ds_zero.shard(
        model, adamw(model.parameters()), stage=stage, clip=CLIP, tier=tier, precision="bf16" if bf16 else None
    )

    def step(data: torch.Tensor) -> torch.Tensor:
        loss = config.loss(model, data)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def deepspeed(config: Config, model: nn.Module, stage: int, where: str, bf16: bool, folder: str) -> Step:
    import deepspeed as peer

    zero: dict[str, object] = {"stage": stage}
    if where != "device":
        zero["offload_optimizer"] = {"device": "nvme" if where == "file" else "cpu", "nvme_path": folder}
    settings = {
        "train_micro_batch_size_per_gpu": config.batch, "gradient_clipping": CLIP, "zero_optimization": zero,
        "bf16": {"enabled": bf16}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "overlap_events": True, "single_submit": False},
    }  # fmt: skip
    engine, *_ = peer.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def step(data: torch.Tensor) -> torch.Tensor:
        loss = config.loss(engine, data)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def moved_bytes() -> tuple[int, int]:
    """Bytes that this process has read from and written to storage."""
    with open("/proc/self/io") as file:
        found = dict(line.split(": ") for line in file.read().splitlines())
    return int(found["read_bytes"]), int(found["write_bytes"])


def main(name: str, which: str, folder: str) -> None:
    torch.set_num_threads(1)
    name, _, backend = name.partition("@")
    engine, where, *more = name.split("-")
    make = {"ours": ours, "deepspeed": deepspeed}[engine[:-1]]
    if engine.startswith("ours"):
        import ds_comm

        ds_comm.init_distributed(backend or "gloo")
    else:
        import deepspeed as peer

        with contextlib.redirect_stdout(sys.stderr):
            peer.init_distributed("gloo")
    config, rank, base = CONFIGS[which], dist.get_rank(), pss_bytes()
    with contextlib.redirect_stdout(sys.stderr):
        step = make(config, config.model(), int(engine[-1]), where, "bf16" in more, folder)
    losses = [step(config.data(i, rank)).item() for i in range(4)]
    before = moved_bytes()
    losses.append(step(config.data(4, rank)).item())
    moved = [after - was for after, was in zip(moved_bytes(), before, strict=True)]
    print(json.dumps({"ready": True, "losses": losses, "moved": moved, "mb": (pss_bytes() - base) / 1e6}), flush=True)
    for line in sys.stdin:
        first, count = map(int, line.split())
        times, used = [], []
        with burst():
            for i in range(first, first + count):
                data = config.data(5 + i, rank)
                dist.barrier()
                began, busy = time.perf_counter(), time.process_time()
                step(data)
                times.append((time.perf_counter() - began) * 1e3)
                used.append((time.process_time() - busy) * 1e3)
        print(json.dumps({"ms": times, "cpu_ms": used}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
