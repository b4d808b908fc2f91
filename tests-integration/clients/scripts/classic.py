"""The classic DeepSpeed script: argparse, add_config_arguments, initialize(args=...), three calls a step, save, go on from the save."""

import argparse
import json
import os

import deepspeed
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 1)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.down(torch.tanh(self.up(x))), y)


def batches(first, last, rank):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(4, 6, generator=generator)
        yield x, x.sum(1, keepdim=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out")
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(3)
    net = Net()
    engine, _, _, _ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters())
    assert engine.local_rank == args.local_rank
    path, client = engine.load_checkpoint(args.out)
    first = client["step"] if path is not None else 0
    losses = []
    for x, y in batches(first, args.steps, engine.global_rank):
        loss = engine(x.to(engine.device), y.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.save_checkpoint(args.out, client_state={"step": args.steps})
    if engine.global_rank == 0:
        told = {"first": first, "losses": losses, "lr": engine.get_lr(), "world": deepspeed.comm.get_world_size()}
        with open(os.path.join(args.out, f"losses_{first}.json"), "w") as file:
            json.dump(told, file)
    engine.destroy()


if __name__ == "__main__":
    main()
