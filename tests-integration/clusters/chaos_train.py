"""The training of chaos.py: small, from its newest checkpoint on, until the file `last` in FOLDER says which step is the last one.

usage: python chaos_train.py FOLDER [PAUSE]      under any launcher

Each rank writes a line of JSON a finished step: which attempt, step, world, samples and loss, and when. An *attempt* is the life of
these processes between two starts; its number is the time at which its rank 0 began.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from chaos import BATCH, SAMPLES, SAVE_EVERY
from torch import Tensor, nn

import ds_comm
import ds_engine

CONFIG = {
    "train_batch_size": BATCH,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
    "zero_optimization": {"stage": 2},
    "checkpoint": {"saving": {"keep": 3}},
}


class Rows(torch.utils.data.Dataset[tuple[int, Tensor, Tensor]]):
    """(index, x [32], y [1])."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 32, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.x[index].sum(0, keepdim=True).sin()


def last_step(folder: Path) -> int:
    """Which step is the last one, as rank 0 reads it, or a large number; the same on every rank."""
    told = torch.tensor([0])
    if ds_comm.world_group().rank == 0:
        file = folder / "last"
        told[0] = int(file.read_text()) if file.exists() else 10**9
    ds_comm.all_reduce(told)
    return int(told)


def main(folder: Path, pause_s: float) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    engine, _, loader, _ = ds_engine.initialize(model=model, config=CONFIG, training_data=Rows())
    assert loader is not None
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    engine.load_checkpoint(str(checkpoints))
    world = engine.mesh["world"].size
    begun = ds_comm.all_gather_json(time.time())[0]
    with open(folder / f"steps-{begun:.6f}-{engine.mesh.rank}-{os.getpid()}.jsonl", "a") as log:
        end = last_step(folder)
        while engine.global_steps < end:
            for ids, x, y in loader:
                engine.backward((engine(x) - y).square().mean())
                result = engine.step()
                line = {"attempt": begun, "step": result.step, "world": world, "ids": ids.tolist(), "loss": result.loss}
                log.write(json.dumps({**line, "time": time.time()}) + "\n")
                log.flush()
                if result.step % SAVE_EVERY == 0:
                    engine.save_checkpoint(str(checkpoints))
                end = last_step(folder)
                if result.step >= end:
                    break
                time.sleep(pause_s)
    engine.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
