"""Run by test_deepspeed.py in DeepSpeed's environment, on two ranks: a pipeline of two stages, or experts over two ranks.

usage: deepspeed_parts.py write|continue FOLDER pipeline|moe
`write` trains three steps, saves, and notes the losses of two more; `continue` loads that, or what we made of it, and does so, too.
"""

import json
import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import PipelineModule

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
}


class Mixture(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        expert = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 6))
        self.moe = MoE(6, expert, num_experts=4, ep_size=2, k=1, min_capacity=4, drop_tokens=False)
        self.last = MoE(6, torch.nn.Linear(6, 6), num_experts=2, ep_size=2, k=1, min_capacity=4, drop_tokens=False)

    def forward(self, x):
        return self.last(self.moe(torch.tanh(self.first(x)))[0])[0]


class Counted(torch.nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("count", torch.tensor([3.0]))


def _mixture():
    config = {**CONFIG, "zero_optimization": {"stage": 2}}
    net = Mixture()
    groups = split_params_into_different_moe_groups_for_optimizer([{"params": list(net.parameters()), "name": "all"}])
    engine, *_ = deepspeed.initialize(model=net, model_parameters=groups, config=config)
    data = torch.Generator().manual_seed(7 + engine.global_rank)

    def step(train=True):
        x = torch.randn(4, 6, generator=data)
        if not train:
            return None
        loss = (engine(x) - x).pow(2).mean()
        engine.backward(loss)
        engine.step()
        return loss.item()

    return engine, step


def _pipeline():
    config = {**CONFIG, "zero_optimization": {"stage": 1}}
    layers = [torch.nn.Linear(6, 7), torch.nn.Tanh(), Counted(7, 9), torch.nn.Linear(9, 6, bias=False)]
    net = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)
    data = torch.Generator().manual_seed(7)

    def step(train=True):
        x = torch.randn(4, 6, generator=data)
        return engine.train_batch(iter([(x, x)])).item() if train else None

    return engine, step


def main():
    action, folder, kind = sys.argv[1:]
    torch.manual_seed(0)
    deepspeed.init_distributed("gloo")
    engine, step = _mixture() if kind == "moe" else _pipeline()
    if action == "write":
        for _ in range(3):
            step()
        engine.save_checkpoint(folder, tag="step3", client_state={"note": "hello"})
    else:
        for _ in range(3):
            step(train=False)
        engine.load_checkpoint(folder)
    losses = [step() for _ in range(2)]
    gathered = [None, None]
    torch.distributed.all_gather_object(gathered, losses)
    if engine.global_rank == 0:
        with open(f"{folder}/losses-{action}.json", "w") as file:
            json.dump(gathered, file)
    torch.distributed.barrier()
    os._exit(0)


main()
