"""One engine on one rank: train for a few steps, time them, print one line of JSON.

usage: python zero.py ENGINE[@BACKEND] CONFIG STEPS      with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set
       python zero.py ENGINE[@BACKEND] CONFIG 0          so many steps as a line of standard input says, line by line

Runs under our interpreter or under a peer's, so it imports no more than torch before it knows the engine. BACKEND is gloo
(default) or shm. After the timed steps, three more are run while a thread samples this rank's proportional memory.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from process_memory import pss_bytes, status_bytes
from steps import Step, engine_step, stepping
from torch import Tensor, nn

WIDTH, LAYERS, HEADS, VOCAB, CLIP = 384, 6, 6, 8192, 1.0


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        return self.out(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, WIDTH)
        )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    """17.0 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Config:
    batch: int
    tokens: int
    small: bool = False
    bf16: bool = False  # computed in bf16, masters and state in fp32: each engine's own way to say so

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        if self.small:
            return nn.Sequential(*(nn.Linear(64, 64) for _ in range(24)))
        return Gpt()

    def data(self, step: int, rank: int) -> Tensor:
        made = torch.Generator().manual_seed(1000 * step + rank)
        if self.small:
            return torch.randn(4, 64, generator=made)
        return torch.randint(0, VOCAB, (self.batch, self.tokens + 1), generator=made)

    def loss(self, model: nn.Module, data: Tensor) -> Tensor:
        if self.small:
            return model(data).square().mean()
        if self.bf16:
            return nn.functional.cross_entropy(model(data[:, :-1]).flatten(0, 1).float(), data[:, 1:].flatten())
        return nn.functional.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())


CONFIGS = {
    "compute": Config(2, 128),
    "comm": Config(1, 32),
    "small": Config(0, 0, small=True),
    "bf16": Config(2, 128, bf16=True),
    "comm_bf16": Config(1, 32, bf16=True),
}


def adamw(params: object, **keys: object) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-4, weight_decay=0.01, **{"fused": True, **keys})


def plain(config: Config, model: nn.Module, *, update: bool) -> Step:
    model = model.bfloat16() if config.bf16 else model
    clipped = model if update else None
    return stepping(partial(config.loss, model), adamw(model.parameters()), clipped=clipped, update=update)


def ours(config: Config, model: nn.Module, stage: int, codes: str = "") -> Step:
    import ds_zero

    precision = "bf16" if config.bf16 else None
    gradients = ds_zero.QGZ if codes == "weights, gradients" else None
    sent = {"quantized_comm": ds_zero.QuantizedComm(weights=ds_zero.QWZ, gradients=gradients)} if codes else {}
    memory = os.environ.get("BENCH_MEMORY", "auto")  # a rehearsal has no host whose ranks could share theirs
    optimizer = ds_zero.shard(
        model, adamw(model.parameters()), stage=stage, clip=CLIP, precision=precision, memory=memory, **sent
    )
    return stepping(partial(config.loss, model), optimizer)


def ddp(config: Config, model: nn.Module, *, redundant: bool) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if redundant:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-4, weight_decay=0.01, fused=True
        )
    else:
        optimizer = adamw(model.parameters())

    def loss_of(data: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=config.bf16):
            return config.loss(wrapped, data)

    return stepping(loss_of, optimizer, clipped=model)


def fsdp2(config: Config, model: nn.Module, *, reshard: bool) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    formats = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if config.bf16 else MixedPrecisionPolicy()
    for block in getattr(model, "blocks", [] if config.small else model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=formats)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=formats)
    return stepping(partial(config.loss, model), adamw(model.parameters()), clipped=model)


def deepspeed(config: Config, model: nn.Module, stage: int, *, tuned: bool) -> Step:
    import deepspeed as peer

    zero: dict[str, object] = {"stage": stage}
    if tuned:
        zero |= {"overlap_comm": False, "reduce_bucket_size": 4_000_000, "allgather_bucket_size": 20_000_000}
        zero |= {"stage3_prefetch_bucket_size": 4_000_000} if stage == 3 else {}
    settings = {
        "train_micro_batch_size_per_gpu": max(config.batch, 1), "gradient_clipping": CLIP, "zero_optimization": zero,
        "bf16": {"enabled": config.bf16}, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    engine, *_ = peer.initialize(model=model, optimizer=adamw(model.parameters()), config=settings)
    return engine_step(engine, partial(config.loss, engine))


ENGINES: dict[str, Callable[[Config, nn.Module], Step]] = {
    "fwdbwd": lambda c, m: plain(c, m, update=False),
    "local": lambda c, m: plain(c, m, update=True),
    "ddp": lambda c, m: ddp(c, m, redundant=False),
    "zero_redundancy": lambda c, m: ddp(c, m, redundant=True),
    "fsdp2": lambda c, m: fsdp2(c, m, reshard=True),
    "fsdp2_keep": lambda c, m: fsdp2(c, m, reshard=False),
    **{f"ours{s}": lambda c, m, s=s: ours(c, m, s) for s in range(4)},
    "ours3_int8": lambda c, m: ours(c, m, 3, "weights"),
    "ours3_int8_int4": lambda c, m: ours(c, m, 3, "weights, gradients"),
    **{f"deepspeed{s}": lambda c, m, s=s: deepspeed(c, m, s, tuned=False) for s in range(1, 4)},
    **{f"deepspeed{s}_tuned": lambda c, m, s=s: deepspeed(c, m, s, tuned=True) for s in range(1, 4)},
}


_PACKAGE = {"deep": "deepspeed", "ours": "ds_zero"}


@contextlib.contextmanager
def burst() -> Iterator[None]:
    """Inside, this session goes before others of the machine, where the kernel groups by sessions and lets us say so."""
    group = Path("/proc/self/autogroup")

    def nice(value: str) -> None:
        with contextlib.suppress(OSError):
            group.write_text(value)

    nice("-15")
    try:
        yield
    finally:
        nice("0")


class Sampler(threading.Thread):
    """Largest proportional memory of this process while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ended, self.most = threading.Event(), 0

    def run(self) -> None:
        while not self.ended.wait(0.004):
            self.most = max(self.most, pss_bytes())

    def finish(self) -> int:
        self.ended.set()
        self.join()
        return max(self.most, pss_bytes())


def connect(engine: str, backend: str, world: int) -> None:
    if backend == "shm":
        importlib.import_module("ds_comm.shm.shm_group")
    if world > 1 or engine.startswith("deepspeed"):
        dist.init_process_group(backend)


def timed(config: Config, step: Step, steps: int, first: int = 0) -> tuple[list[float], list[float], list[float]]:
    """(seconds, losses, processor seconds) of steps.

    A step lasts from the end of the one before: what an engine sends after a step has returned counts, and ranks meet in the steps
    only, as in training. The first begins with nothing on its way, so it is left out of the times where there are others.
    """
    rank = int(os.environ["RANK"])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    marks, losses = [clocks()], []
    for i in range(first, first + steps):
        losses.append(step(config.data(i, rank)).item())
        marks.append(clocks())
    left_out = min(1, steps - 1)
    pairs = list(itertools.pairwise(marks))[left_out:]
    return [b[0] - a[0] for a, b in pairs], losses, [b[1] - a[1] for a, b in pairs]


def clocks() -> tuple[float, float]:
    """Now, by the wall's clock and by this process's."""
    return time.perf_counter(), time.process_time()


def turns(config: Config, step: Step, base: int) -> None:
    """For each line `FIRST COUNT` read, so many steps beginning with that one's data; answer with what they took, and the peak above `base`.

    Between two lines this rank sleeps, so that engines that are alive at once can be timed in turn.
    """
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        first, count = map(int, line.split())
        times, _, cpu = timed(config, step, count, first)
        peak = (status_bytes("VmHWM") - base) / 1e6
        print(
            json.dumps({"ms": [t * 1e3 for t in times], "cpu_ms": [c * 1e3 for c in cpu], "peak_mb": peak}), flush=True
        )


def main(engine: str, name: str, steps: int) -> None:
    torch.set_num_threads(1)
    engine, _, backend = engine.partition("@")
    world, rank, config = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), CONFIGS[name]
    connect(engine, backend or "gloo", world)
    # Imported before the clock and the scales start: every optimizer imports the first of them.
    for module in ("torch._dynamo", "torch.distributed.fsdp", _PACKAGE.get(engine[:4], "json")):
        importlib.import_module(module)
    base, resident = pss_bytes(), status_bytes("VmRSS")
    model = config.model()
    psi = sum(p.nbytes for p in model.parameters())
    if world > 1:
        dist.barrier()
    with burst():
        began = time.perf_counter()
        with contextlib.redirect_stdout(sys.stderr):
            step = ENGINES[engine](config, model)
        made = time.perf_counter() - began
        if not steps:
            turns(config, step, resident)
            os._exit(0)
        times, losses, cpu = timed(config, step, steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sampler = Sampler()
    sampler.start()
    for i in range(steps, steps + 3):
        step(config.data(i, rank))
    most = sampler.finish()
    skip = min(2, len(times) - 1)
    facts = {"engine": engine, "config": name, "world": world, "rank": rank, "step_ms": statistics.median(times[skip:]) * 1e3,
             "min_ms": min(times[skip:]) * 1e3, "cpu_ms": statistics.median(cpu[skip:]) * 1e3, "init_ms": made * 1e3,
             "pss_mb": (most - base) / 1e6, "peak_mb": (peak - base) / 1e6, "psi_mb": psi / 1e6, "losses": losses,
             "torch": torch.__version__}  # fmt: skip
    print(json.dumps(facts), flush=True)
    if dist.is_initialized():
        dist.barrier()
        os._exit(0)  # some engines take longer to end than to train


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
