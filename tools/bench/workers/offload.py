"""One engine of the offload benchmark on one rank: `offload.py ENGINE[@BACKEND] CONFIG FOLDER`. It takes turns, see `turns.py`.

ENGINE is `ours` or `deepspeed`, its ZeRO stage, where the optimizer's state is (`device`, `host`, `file`; `early` is the host, with updates
that begin during backward) and `bf16` for mixed precision, as `ours3-file-bf16`. The model and the data are those of `zero.py`. Gradients are clipped. The first line says the losses of four steps
and what the state's folder is asked to move.
"""

from __future__ import annotations

import sys
from functools import partial

import torch.distributed as dist
from process_memory import pss_bytes
from rank import begin, take_turns
from steps import Step, engine_step, stepping
from torch import nn
from zero import CLIP, CONFIGS, Config, adamw


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
    return stepping(partial(config.loss, model), optimizer)


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
    return engine_step(engine, partial(config.loss, engine))


def moved_bytes() -> tuple[int, int]:
    """Bytes that this process has read from and written to storage."""
    with open("/proc/self/io") as file:
        found = dict(line.split(": ") for line in file.read().splitlines())
    return int(found["read_bytes"]), int(found["write_bytes"])


def main(name: str, which: str, folder: str) -> None:
    name, answer = begin(name)
    engine, where, *more = name.split("-")
    make = deepspeed if engine.startswith("deepspeed") else ours
    config, rank, base = CONFIGS[which], dist.get_rank(), pss_bytes()
    step = make(config, config.model(), int(engine[-1]), where, "bf16" in more, folder)
    losses = [step(config.data(i, rank)).item() for i in range(4)]
    before = moved_bytes()
    losses.append(step(config.data(4, rank)).item())
    moved = [after - was for after, was in zip(moved_bytes(), before, strict=True)]
    facts = {"losses": losses, "moved": moved, "mb": (pss_bytes() - base) / 1e6}
    take_turns(answer, facts, step, lambda i: config.data(5 + i, rank), apart=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
