"""One engine of the benchmark of tensor and sequence shards on one rank: `parallel.py ENGINE[@BACKEND] CONFIG`.

It takes turns, see `turns.py`. A step is a forward and a backward; all engines of a configuration have the same weights and inputs, and
the first line says the loss of the whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from rank import begin, passing_bytes, take_turns
from torch import Tensor, nn

WIDTH, INNER, HEADS, KV_HEADS, TOKENS = 1024, 2816, 16, 8, 256  # of the block that is cut
COLUMNS, ROWS = ("q", "k", "v", "gate", "up"), ("o", "down")
# sequence of all ranks together, heads, head size, causal attention (else the exchanges alone)
SEQUENCES = {"exchange": (2048, 16, 64, False), "ulysses": (1024, 16, 64, True), "long": (4096, 8, 64, True)}
LOSS = (8192, 512, 32768)  # tokens, width, vocabulary

Step = Callable[[], Tensor]
"""One forward and backward; returns this rank's loss."""


class Block(nn.Module):
    """A block as Llama has it, without rotary embedding. Its code asks the weights how many heads there are.

    `share` of the heads and of the inner width: what one of so many ranks computes.
    """

    def __init__(self, share: int) -> None:
        super().__init__()
        queries, keys, inner = WIDTH // share, KV_HEADS * (WIDTH // HEADS) // share, INNER // share
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.o = nn.Linear(WIDTH, queries, bias=False), nn.Linear(queries, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, keys, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        normed = self.norms[0](x)
        q, k, v = (part(normed).view(b, t, -1, WIDTH // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(seen.transpose(1, 2).reshape(b, t, -1))
        normed = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


class Model(nn.Module):
    def __init__(self, share: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(share) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stepping(model: nn.Module) -> Step:
    x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))

    def step() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        for param in model.parameters():
            param.grad = None
        return loss.detach()

    return step


def tensor_ours() -> Step:
    import ds_comm
    from ds_parallel.config import LayerSpecConfig
    from ds_parallel.tensor import TensorOptions, facts_of, make_tensor_plan, parallelize_model

    specs = (
        LayerSpecConfig(patterns=tuple(rf".*\.{n}\.weight" for n in COLUMNS), partition_type="column"),
        LayerSpecConfig(patterns=tuple(rf".*\.{n}\.weight" for n in ROWS), partition_type="row"),
    )
    model, group = Model(), ds_comm.world_group()
    parallelize_model(model, make_tensor_plan(facts_of(model), TensorOptions(degree=group.size, specs=specs)), group)
    return stepping(model)


def tensor_torch() -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = Model(), init_device_mesh("cpu", (dist.get_world_size(),))
    cuts = {**{name: ColwiseParallel() for name in COLUMNS}, **{name: RowwiseParallel() for name in ROWS}}
    for block in model.blocks:
        parallelize_module(block, mesh, cuts)
    return stepping(model)


def tensor_deepspeed() -> Step:
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, set_autotp_mode

    set_autotp_mode(training=True)  # else it wants no gradients of the weights
    model, group = Model(), dist.group.WORLD
    for block in model.blocks:
        for names, kind in ((COLUMNS, LinearLayer), (ROWS, LinearAllreduce)):
            for name in names:
                setattr(block, name, kind(getattr(block, name), group, name=name))
    return stepping(model)


def causal(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def sums(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return q + k + v


def sequence(config: str, engine: str) -> Step:
    length, heads, size, attends = SEQUENCES[config]
    world, rank = dist.get_world_size(), dist.get_rank()
    made = torch.Generator().manual_seed(2)
    whole = [torch.randn(1, length, heads, size, generator=made) for _ in range(3)]
    local = causal if attends else sums
    cut = lambda t: t.chunk(world, 1)[rank]  # noqa: E731
    attention: Callable[..., Tensor]
    if engine == "deepspeed":
        from deepspeed.sequence.layer import DistributedAttention

        attention = DistributedAttention(local, dist.group.WORLD, 2, 1)
        call = lambda q, k, v: attention(q, k, v, 0)  # noqa: E731
    elif engine == "ours":
        from ds_parallel.sequence import DistributedAttention as Ours

        call = attention = Ours(local, dist.group.WORLD, 2, 1)
    else:
        from ds_parallel.sequence import RingAttention, plan_ring

        plan = plan_ring(length, world, zigzag=engine == "zigzag")
        cut = lambda t: plan.part(t, rank, 1)  # noqa: E731
        call = RingAttention(plan, dist.group.WORLD)
    parts = [cut(t).clone().requires_grad_() for t in whole]

    def step() -> Tensor:
        loss = call(*parts).square().sum() / (length * heads * size)
        loss.backward()
        for part in parts:
            part.grad = None
        return loss.detach()

    return step


def loss_of(engine: str) -> Step:
    """`tiled`, `whole`: the loss of a long sequence with and without its logits as one tensor."""
    tokens, width, vocabulary = LOSS
    made = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, width, generator=made, requires_grad=True)
    weight = (torch.randn(vocabulary, width, generator=made) * 0.02).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), generator=made)
    if engine == "tiled":
        from ds_parallel.tiling import tiled_cross_entropy

        of = lambda h, w, y: tiled_cross_entropy(h, w, y, tiles=64)  # noqa: E731
    else:
        of = lambda h, w, y: nn.functional.cross_entropy(nn.functional.linear(h, w), y)  # noqa: E731

    def step() -> Tensor:
        loss = of(hidden, weight, labels)
        loss.backward()
        hidden.grad = weight.grad = None
        return loss.detach()

    return step


def make(engine: str, config: str) -> Step:
    if config == "tensor":
        half = lambda: stepping(Model(share=dist.get_world_size()))  # noqa: E731
        return {"ours": tensor_ours, "torch": tensor_torch, "deepspeed": tensor_deepspeed, "half": half}[engine]()
    return loss_of(engine) if config == "loss" else sequence(config, engine)


def main(name: str, config: str) -> None:
    engine, answer = begin(name)
    step = make(engine, config)
    total = step()
    if config != "tensor":
        dist.all_reduce(total)
    facts = {"losses": [float(total)], "mb": passing_bytes(step) / 2**20}
    take_turns(answer, facts, lambda _: step(), lambda i: i, apart=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
