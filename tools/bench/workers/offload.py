"""One engine of the offload benchmark on one rank: `offload.py ENGINE[@BACKEND] CONFIG FOLDER`. It takes turns, see `turns.py`.

`offload.py timeline CONFIG FOLDER` says instead when one step of stage 3 with a file computes, reads and writes.

ENGINE is `ours` or `deepspeed`, its ZeRO stage, where the optimizer's state is (`device`, `host`, `file`; `early` is the host, with updates
that begin during backward) and `bf16` for mixed precision, as `ours3-file-bf16`. The model and the data are those of `zero.py`. Gradients are clipped. The first line says the losses of four steps
and what the state's folder is asked to move.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from zero import CLIP, CONFIGS, Config, Step, adamw, burst, pss_bytes


def ours(config: Config, model: nn.Module, stage: int, where: str, bf16: bool, folder: str) -> Step:
    import ds_zero

    tier = {
        "device": "device",
        "host": ds_zero.OffloadPolicy(),
        "early": ds_zero.OffloadPolicy(overlap_ratio=1.0),
        "file": ds_zero.OffloadPolicy("file", folder) if where == "file" else None,
    }[where]
    made = adamw(model.parameters())
    if where == "early":  # torch's optimizers cannot be undone
        from ds_ops.optim import AdamW

        made = AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    optimizer = ds_zero.shard(
        model, made, stage=stage, clip=CLIP, offload_optimizer=tier, precision="bf16" if bf16 else None
    )

    def step(data: torch.Tensor) -> torch.Tensor:
        loss = config.loss(model, data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
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


def timeline(config: Config, folder: str, rank: int) -> dict[str, list[tuple[str, float, float]]]:
    """What one step did when, in milliseconds from its begin: (what, from, to)."""
    import ds_zero
    from ds_ops.scratch import Moving, ScratchFile

    model = config.model()
    place = ds_zero.OffloadPolicy("file", folder)
    optimizer = ds_zero.shard(model, adamw(model.parameters()), stage=3, clip=CLIP, offload_optimizer=place)
    under_way: list[list] = []  # (what, from, to, transfer)
    started = ScratchFile._moving

    def noted(self: ScratchFile, start: object) -> Moving:
        moving = started(self, start)
        under_way.append([kind[0], time.perf_counter(), None, moving])
        return moving

    kind = ["read"]
    read, write = ScratchFile.read, ScratchFile.write

    def named(name: str, act: object) -> object:
        def call(self: ScratchFile, *args: object) -> Moving:
            kind[0] = name
            return act(self, *args)

        return call

    ScratchFile._moving, ScratchFile.read, ScratchFile.write = noted, named("read", read), named("write", write)
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            for entry in under_way:
                if entry[2] is None and entry[3].done():
                    entry[2] = time.perf_counter()
            time.sleep(3e-4)

    for i in range(4):
        config.loss(model, config.data(i, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    dist.barrier()
    marks = [time.perf_counter()]
    for i in (4, 5):
        loss = config.loss(model, config.data(i, rank))
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        marks.append(time.perf_counter())
    time.sleep(0.2)
    over.set()
    watcher.join()
    names = ["forward", "backward", "update"] * 2
    spans = [(name, a, b) for name, a, b in zip(names, marks, marks[1:], strict=False)]
    moves = [(what, a, b) for what, a, b, _ in under_way if b is not None]
    shown = lambda rows: [(what, 1e3 * (a - marks[0]), 1e3 * (b - marks[0])) for what, a, b in rows if b > marks[0]]  # noqa: E731
    return {"computes": shown(spans), "moves": [row for row in shown(moves) if row[1] < 1e3 * (marks[-1] - marks[0])]}


def moved_bytes() -> tuple[int, int]:
    """Bytes that this process has read from and written to storage."""
    with open("/proc/self/io") as file:
        found = dict(line.split(": ") for line in file.read().splitlines())
    return int(found["read_bytes"]), int(found["write_bytes"])


def main(name: str, which: str, folder: str) -> None:
    torch.set_num_threads(1)
    name, _, backend = name.partition("@")
    engine, where, *more = name.split("-") if "-" in name else (name, "file")
    make = deepspeed if engine.startswith("deepspeed") else ours
    if not engine.startswith("deepspeed"):
        import ds_comm

        ds_comm.init_distributed(backend or "gloo")
    else:
        import deepspeed as peer

        with contextlib.redirect_stdout(sys.stderr):
            peer.init_distributed("gloo")
    config, rank, base = CONFIGS[which], dist.get_rank(), pss_bytes()
    if engine == "timeline":
        print(json.dumps(timeline(config, folder, rank)), flush=True)
        os._exit(0)
    with contextlib.redirect_stdout(sys.stderr):
        step = make(config, config.model(), int(engine[-1]), where, "bf16" in more, folder)
    losses = [step(config.data(i, rank)).item() for i in range(4)]
    before = moved_bytes()
    losses.append(step(config.data(4, rank)).item())
    moved = [after - was for after, was in zip(moved_bytes(), before, strict=True)]
    print(json.dumps({"ready": True, "losses": losses, "moved": moved, "mb": (pss_bytes() - base) / 1e6}), flush=True)
    for line in sys.stdin:
        first, count = map(int, line.split())
        batches = [config.data(5 + i, rank) for i in range(first, first + count)]
        dist.barrier()
        marks = [(time.perf_counter(), time.process_time())]
        with burst():
            for data in batches:
                step(data)
                marks.append((time.perf_counter(), time.process_time()))
        # A step lasts from the end of the one before, as in `zero.py`.
        pairs = list(itertools.pairwise(marks))[min(1, count - 1) :]
        times, used = ([(b[i] - a[i]) * 1e3 for a, b in pairs] for i in range(2))
        print(json.dumps({"ms": times, "cpu_ms": used}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
