"""One rank of the benchmark of compiled training: `compile.py ENGINE`, an engine of `ENGINES`, over shared memory where it says @shm."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rank import begin, passing_bytes, take_turns
from steps import Step, engine_step, stepping
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH, BATCH = 256, 8, 4, 4096, 128, 4


class Block(nn.Module):
    """Attention and a gated MLP, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.other(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """Tokens in, loss out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def ours(schedule: list | None) -> tuple[Step, Callable[[], dict]]:
    import ds_engine

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "compile": {"deepcompile": schedule is not None},
    }
    engine = ds_engine.initialize(model=Model(), config=config)[0]
    if schedule is not None:
        engine.compile(schedule=schedule)

    def told() -> dict:
        session = engine.compiled.session
        return {} if session is None else {"compile_s": session.seconds, "graphs": len(session.pieces)}

    return engine_step(engine), told


def fsdp2() -> tuple[Step, Callable[[], dict]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = Model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
        block.compile()
    fully_shard(model, mesh=mesh)
    model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, foreach=True)
    return stepping(model, optimizer, clipped=model), dict


BASE = [(0, ["reduce", "gather"])]
ENGINES: dict[str, Callable[[], tuple[Step, Callable[[], dict]]]] = {
    "eager": lambda: ours(None),
    "compiled": lambda: ours(BASE),
    "kept": lambda: ours([*BASE, (2, ["reduce", "gather", "prefetch", "keep"])]),
    "fsdp2": fsdp2,
}


def main(name: str) -> None:
    engine, answer = begin(name)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator) for _ in range(8)]
    begun = time.perf_counter()
    step, told = ENGINES[engine]()
    losses = [step(batches[at]).item() for at in range(4)]
    facts = {"start_s": time.perf_counter() - begun, "losses": losses}
    dist.barrier()
    facts |= {"passing": passing_bytes(lambda: step(batches[0])), **told()}
    take_turns(answer, facts, step, lambda i: batches[i % 8], apart=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
