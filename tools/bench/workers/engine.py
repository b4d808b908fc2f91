"""One measurement of an engine on one rank; one line of JSON on rank 0.

usage: python engine.py pair ROUNDS            the quickstart's model: bare loop and engine in turn, in one process
       python engine.py init ds_engine|deepspeed   a fresh process: import, then initialize, then the first step

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set. `init` runs under a peer's interpreter, too.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "docs" / "examples" / "train_gpt"))
from model import GPT, GPTConfig

STEPS = 2  # of one kind before the other kind has its turn
CONFIG = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 15}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
}


def batch(seed: int, samples: int, size: GPTConfig) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (samples, size.context + 1), generator=generator)


def pair(rounds: int) -> dict[str, object]:
    """Median step times of a bare PyTorch loop and of both loops of the engine, over the same ds-zero optimizer."""
    import ds_engine
    import ds_ops
    import ds_zero

    size, world, rank = GPTConfig(), int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    micro = 16 // 2 // world
    models = []
    for _ in range(3):
        torch.manual_seed(0)
        models.append(GPT(size))
    three, whole = (ds_engine.initialize(model=model, config=CONFIG)[0] for model in models[:2])
    inner = ds_ops.optim.AdamW(models[2].parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    bare = ds_zero.shard(models[2], inner, stage=2, clip=1.0)

    def bare_step(data: list[Tensor]) -> Tensor:
        for part in data:
            loss = models[2](part) / 2
            loss.backward()
        bare.step()
        return loss

    def engine_step(data: list[Tensor]) -> Tensor:
        for part in data:
            loss = three(part)
            three.backward(loss)
            three.step()
        return loss

    kinds = {
        "bare loop": bare_step,
        "engine, three calls": engine_step,
        "train_batch": lambda d: whole.train_batch(iter(d)),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    work: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(rounds + 1):
        for name, step in kinds.items():
            for i in range(STEPS):
                data = [batch((turn * STEPS + i) * 8 + 2 * m + rank, micro, size) for m in range(2)]
                since, busy = time.perf_counter(), time.process_time()
                step(data)
                if turn:
                    times[name].append(time.perf_counter() - since)
                    work[name].append(time.process_time() - busy)
    same = all(
        torch.equal(a, b) for a, b in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True)
    )
    return {
        "step_ms": {name: statistics.median(found) * 1e3 for name, found in times.items()},
        "ratios": _ratios(times),
        "processor_ratios": _ratios(work),
        "same": same,
    }


def _ratios(found: dict[str, list[float]]) -> dict[str, float]:
    """Medians of the ratios of neighbouring steps."""
    base = found["bare loop"]
    return {name: statistics.median(a / b for a, b in zip(one, base, strict=True)) for name, one in found.items()}


def init(package: str) -> dict[str, object]:
    """Seconds to import a package, to initialize, and for the first step; processor time of import and initialize."""
    size = GPTConfig()
    torch.manual_seed(0)
    model: nn.Module = GPT(size)
    began, busy = time.perf_counter(), time.process_time()
    module = importlib.import_module(package)
    imported = time.perf_counter()
    settings = {**CONFIG, "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    if package == "deepspeed":
        settings["optimizer"] = {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}}
    with contextlib.redirect_stdout(sys.stderr):
        engine = module.initialize(model=model, config=settings)[0]
        made, processor = time.perf_counter(), time.process_time() - busy
        for m in range(2):
            loss = engine(batch(m, 8 // int(os.environ["WORLD_SIZE"]), size))
            engine.backward(loss)
            engine.step()
    return {
        "import_s": imported - began,
        "initialize_s": made - imported,
        "first_step_s": time.perf_counter() - made,
        "processor_until_made_s": processor,
    }


def main() -> None:
    torch.set_num_threads(1)
    result = pair(int(sys.argv[2])) if sys.argv[1] == "pair" else init(sys.argv[2])
    if os.environ["RANK"] == "0":
        print(json.dumps(result), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    os._exit(0)  # some engines take longer to end than to train


if __name__ == "__main__":
    main()
