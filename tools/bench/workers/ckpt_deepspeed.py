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
from answering import answering, serve

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
    answer, folder = answering(), Path(sys.argv[1])
    model = Model(int(sys.argv[2]), int(sys.argv[3]))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=CONFIG)
    engine.backward(engine())
    engine.step()
    answer("ready")

    def run(order: str) -> float:
        gc.collect()
        start = time.perf_counter()
        if order == "save":
            engine.save_checkpoint(str(folder), tag="state")
            synced(folder)
        else:
            engine.load_checkpoint(str(folder), tag="state")
        return time.perf_counter() - start

    serve(answer, run)


main()
