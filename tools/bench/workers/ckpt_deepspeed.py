"""Run by ckpt.py in DeepSpeed's environment: saves and loads its training state when told to.

usage: ckpt_deepspeed.py FOLDER PARAMETERS NUMEL
One line in, one line out: `save` and `load` answer with seconds. The state is fp32 parameters and Adam's moments at ZeRO stage 2.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
}


class Model(torch.nn.Module):
    def __init__(self, parameters: int, numel: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.full((1000, numel // 1000), float(i)) for i in range(parameters))

    def forward(self) -> torch.Tensor:
        return torch.stack([weight.mean() for weight in self.weights]).sum()


def synced(path: Path) -> None:
    for file in [path, *path.rglob("*")]:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the libraries print is not an answer
    folder = Path(sys.argv[1])
    model = Model(int(sys.argv[2]), int(sys.argv[3]))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=CONFIG)
    engine.backward(engine())
    engine.step()
    answers.write("ready\n")
    for order in sys.stdin:
        gc.collect()
        start = time.perf_counter()
        if order.strip() == "save":
            engine.save_checkpoint(str(folder), tag="state")
            synced(folder)
        else:
            engine.load_checkpoint(str(folder), tag="state")
        answers.write(f"{time.perf_counter() - start}\n")
    os._exit(0)  # tearing its CPU communication down aborts now and then


main()
