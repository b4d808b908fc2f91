"""A training run for test_kill_and_resume.py.

usage: python resumed_run.py FOLDER CHECKPOINTS STOP      with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set

Goes on from the newest checkpoint of CHECKPOINTS, if any, until step 20; saves at step 7. With STOP = kill every rank kills
itself in the middle of step 8. Writes what each rank trained on to FOLDER/ids-RANK.txt, and the end to FOLDER/end.pt.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import ds_engine

STEPS, SAVED, SAMPLES = 20, 7, 50  # an epoch ends within the eighth step


class Rows(torch.utils.data.Dataset[tuple[int, Tensor, Tensor]]):
    """(index, x [5], y [1])."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(SAMPLES, 5, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.x[index].sum(0, keepdim=True).sin()


def die_together(folder: Path, rank: int, ranks: int) -> None:
    """Kill this process once every rank has come here: nobody is left waiting for the dead."""
    (folder / f"dying-{rank}").touch()
    while len(list(folder.glob("dying-*"))) < ranks:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, checkpoints: str, stop: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    config = {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 4, "total_num_steps": 20}},
        "zero_optimization": {"stage": 2},
    }  # fmt: skip
    engine, _, loader, _ = ds_engine.initialize(model=model, config=config, training_data=Rows())
    assert loader is not None
    Path(checkpoints).mkdir(exist_ok=True)
    engine.load_checkpoint(checkpoints)
    rank = engine.mesh.rank
    with open(folder / f"ids-{rank}.txt", "a") as log:
        rates = []
        while engine.global_steps < STEPS:
            for ids, x, y in loader:
                log.write("".join(f"{engine.global_steps} {int(i)}\n" for i in ids))
                log.flush()
                engine.backward((engine(x) - y).square().mean())
                if stop == "kill" and engine.global_steps == SAVED:
                    die_together(folder, rank, engine.mesh["world"].size)
                result = engine.step()
                if result.applied:
                    rates.append((result.step, result.lr[0]))
                    if result.step == SAVED:
                        engine.save_checkpoint(checkpoints)
                    if result.step == STEPS:
                        break
    values = engine.full_state_dict()
    if rank == 0:
        torch.save({"values": values, "rates": rates}, folder / "end.pt")
    engine.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
