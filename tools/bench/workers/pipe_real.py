"""One engine on one of two stages, with a real model: `pipe_real.py ENGINE CONFIG`. It takes turns, see `turns.py`.

ENGINE is `ours[@shm]:SCHEDULE`, `torch:SCHEDULE`, `deepspeed`, or `alone`: what each rank has to compute, waiting for nobody. CONFIG is `gpt`
(that of `zero.py`, 1 x 32 tokens) or `small` (24 layers of 64 x 64: what a step costs beside its arithmetic). A step is eight microbatches, forward,
backward and update by AdamW; all have the same weights and data, and the first line says the losses of two steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from answering import answering
from process_memory import pss_bytes
from rank import connect, take_turns
from torch import Tensor, nn
from zero import CONFIGS, WIDTH, Config, Gpt, adamw

MICROBATCHES = 8


class First(nn.Module):
    def __init__(self, whole: Gpt) -> None:
        super().__init__()
        self.embed, self.position = whole.embed, whole.position

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + self.position.weight[: tokens.shape[1]]


class Last(nn.Module):
    def __init__(self, whole: Gpt) -> None:
        super().__init__()
        self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def loss_fn(out: Tensor, labels: Tensor) -> Tensor:
    if labels.is_floating_point():
        return (out - labels).square().mean()
    return nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())


def layers(config: Config) -> list[nn.Module]:
    whole = config.model()
    return [First(whole), *whole.blocks, Last(whole)] if isinstance(whole, Gpt) else list(whole.children())


def data(config: Config, step: int) -> list[tuple[Tensor, Tensor]]:
    found = [config.data(step * MICROBATCHES + i, 0) for i in range(MICROBATCHES)]
    return [(one, torch.zeros_like(one)) if config.small else (one[:, :-1], one[:, 1:].contiguous()) for one in found]


def half(config: Config, rank: int) -> nn.Sequential:
    """The layers of one stage."""
    made = layers(config)
    at = 5 if isinstance(made[0], First) else len(made) // 2
    return nn.Sequential(*(made[:at] if rank == 0 else made[at:]))


def hidden_of(config: Config, x: Tensor) -> Tensor:
    """What comes between the two stages."""
    return torch.zeros(4, 64, requires_grad=True) if config.small else torch.zeros(*x.shape, WIDTH, requires_grad=True)


Step = Callable[[list[tuple[Tensor, Tensor]]], float]


def ours(config: Config, schedule: str) -> Step:
    import ds_pipe

    # An embedding has many parameters and little to compute. Layers that are all alike need no measuring.
    (sample, _), *_ = data(config, 0)
    model = ds_pipe.PipelineModule(
        layers(config), num_stages=2, loss_fn=loss_fn, partition_method="parameters" if config.small else "profile",
        sample=sample, schedule=schedule,
    )  # fmt: skip
    run = ds_pipe.pipeline(model, MICROBATCHES)
    optimizer = adamw(model.parameters())

    def step(batches: list[tuple[Tensor, Tensor]]) -> float:
        loss = run(batches)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def torchs(config: Config, schedule: str) -> Step:
    from torch.distributed import pipelining

    rank, module = dist.get_rank(), half(config, dist.get_rank())
    (given, _), *_ = data(config, 0)
    hidden = hidden_of(config, given)
    first, last = (
        (given if rank == 0 else hidden),
        (hidden if rank == 0 or config.small else torch.zeros(*given.shape, 8192)),
    )
    stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"), input_args=first, output_args=last)
    engine = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}[schedule](
        stage, MICROBATCHES, loss_fn=loss_fn
    )
    optimizer = adamw(module.parameters())

    def step(batches: list[tuple[Tensor, Tensor]]) -> float:
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        losses: list[Tensor] = []
        engine.step(x) if rank == 0 else engine.step(target=y, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        total = torch.stack(losses).mean().reshape(1).detach() if losses else torch.zeros(1)
        dist.broadcast(total, 1)
        return float(total)

    return step


def alone(config: Config, _: str) -> Step:
    rank, module = dist.get_rank(), half(config, dist.get_rank())
    optimizer = adamw(module.parameters())

    def step(batches: list[tuple[Tensor, Tensor]]) -> float:
        total = 0.0
        for x, y in batches:
            if rank == 0:
                out = module(x)
                out.backward(torch.ones_like(out))
            else:
                loss = loss_fn(module(hidden_of(config, x)), y) / MICROBATCHES
                loss.backward()
                total += float(loss)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def deepspeed(config: Config, _: str) -> Step:
    import deepspeed as peer
    from deepspeed.pipe import PipelineModule

    model = PipelineModule(layers(config), num_stages=2, loss_fn=loss_fn, partition_method="parameters")
    settings = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": MICROBATCHES, "train_batch_size": MICROBATCHES,
        "steps_per_print": 10**9, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine, *_ = peer.initialize(model=model, optimizer=adamw(model.parameters()), config=settings)
    return lambda batches: float(engine.train_batch(iter(batches)))


def main(name: str, which: str) -> None:
    engine, _, schedule = name.partition(":")
    engine, _, backend = engine.partition("@")
    config, answer = CONFIGS["comm" if which == "gpt" else which], answering()
    connect(engine, backend)
    base = pss_bytes()
    step = {"ours": ours, "torch": torchs, "deepspeed": deepspeed, "alone": alone}[engine](config, schedule)
    losses = [step(data(config, i)) for i in range(2)]
    facts = {"losses": losses, "mb": (pss_bytes() - base) / 1e6}
    take_turns(answer, facts, step, lambda i: data(config, 2 + i), apart=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
