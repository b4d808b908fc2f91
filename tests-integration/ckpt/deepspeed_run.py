"""Runs in DeepSpeed's own environment, on two gloo ranks: write real checkpoints, or resume from ones we wrote.

    torchrun --nproc_per_node 2 deepspeed_run.py write  DIR STAGE DTYPE
    torchrun --nproc_per_node 2 deepspeed_run.py resume DIR STAGE DTYPE

`write` trains three steps, saves, notes the full fp32 parameters (truth.pt), and then the losses
of two more steps (losses.json). `resume` loads the universal checkpoint in DIR and notes its next two losses; `continue` does so
with a checkpoint in the regular layout.
"""

import json
import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(17, 31)
        self.frozen = torch.nn.Linear(31, 31)
        self.second = torch.nn.Linear(31, 17, bias=False)
        self.register_buffer("scale", torch.tensor([0.5, 2.0, 1.0]))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.second(torch.tanh(self.frozen(torch.tanh(self.first(x))))) * self.scale[1]


def main():
    action, folder, stage, dtype = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}},
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16", "initial_scale_power": 4},
        "checkpoint": {"load_universal": action == "resume"},
    }
    net = Net()
    decay = [p for n, p in net.named_parameters() if p.requires_grad and p.dim() > 1]
    rest = [p for n, p in net.named_parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": decay}, {"params": rest, "weight_decay": 0.0}]
    if stage == 3:
        # Its stage-3 loader of universal checkpoints (0.19.8) gives every group the settings of the first, and one step
        # counter, which torch's Adam then advances once per group: only one group resumes right.
        groups = [{"params": decay + rest}]
    engine, *_ = deepspeed.initialize(model=net, model_parameters=groups, config=config)
    data = torch.Generator().manual_seed(7 + engine.global_rank)

    def batch():
        return torch.randn(4, 17, generator=data).to(getattr(torch, dtype))

    def step():
        x = batch()
        loss = (engine(x) - x).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        return loss.item()

    if action == "write":
        for _ in range(3):
            step()
        engine.save_checkpoint(folder, tag="step3", client_state={"note": "hello"})
        truth = {}
        for name, param in net.named_parameters():
            if not param.requires_grad:
                continue
            truth[f"param/{name}"] = safe_get_full_fp32_param(param).clone().contiguous()
        if engine.global_rank == 0:
            torch.save(truth, f"{folder}/truth.pt")
    else:
        for _ in range(3):
            batch()
        engine.load_checkpoint(folder)
    losses = [step() for _ in range(2)]
    gathered = [None, None]
    torch.distributed.all_gather_object(gathered, losses)
    if engine.global_rank == 0:
        with open(f"{folder}/losses-{action}.json", "w") as file:
            json.dump(gathered, file)
    torch.distributed.barrier()
    os._exit(
        0
    )  # tearing its CPU communication down aborts now and then ("terminate called without an active exception")


main()
