"""One stage of three, of which the second is killed within a step: `ranks_of_killed.py BACKEND DEADLINE_S NOTE`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import ds_comm
import ds_pipe


class Layer(nn.Module):
    """A linear layer that ends its process the `fatal`-th time it is called; never with 0."""

    def __init__(self, fatal: int, note: Path) -> None:
        super().__init__()
        self.linear, self.fatal, self.note, self.calls = nn.Linear(8, 8), fatal, note, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.fatal:
            self.note.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return self.linear(x)


def main(backend: str, deadline_s: float, note: Path) -> None:
    ds_comm.init_distributed(backend, deadline_s=deadline_s)
    steps, microbatches = 3, 4
    fatal = microbatches + 3  # the third microbatch of the second step: others are under way
    layers = [Layer(fatal if number == 1 else 0, note) for number in range(3)]
    model = ds_pipe.PipelineModule(layers, num_stages=3, partition_method="uniform", loss_fn=nn.functional.mse_loss)
    step = ds_pipe.pipeline(model, microbatches, "zb-h1")
    with ds_comm.extend_timeout(60):  # the first step makes connections, which a busy machine may take long for
        step([(torch.randn(2, 8), torch.randn(2, 8)) for _ in range(microbatches)])
    for _ in range(steps - 1):
        step([(torch.randn(2, 8), torch.randn(2, 8)) for _ in range(microbatches)])


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
