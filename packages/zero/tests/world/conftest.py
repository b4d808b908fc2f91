"""Models of every kind the core must get right, and the single-process answer for each."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

VOCAB, WIDTH = 31, 16


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, head; subclasses change one thing each."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Reused(Net):
    def body(self, x: Tensor) -> Tensor:
        return super().body(super().body(x))


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, 5)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__(3)
        self.blocks[1].requires_grad_(False)
        self.embed.requires_grad_(False)


class Checkpointed(Net):
    reentrant = False

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Reentrant(Checkpointed):
    reentrant = True


def _keep_products(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Net):
    """Matrix products are kept, the rest is computed again."""

    def body(self, x: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, _keep_products)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x


class ReentrantReused(Reentrant):
    """A block in two checkpointed segments: its gradients arrive in two inner backwards."""

    def body(self, x: Tensor) -> Tensor:
        return super().body(super().body(x))


class ReentrantFrozen(Reentrant):
    def __init__(self) -> None:
        super().__init__(3)
        self.blocks[1].requires_grad_(False)


class ZeroSize(Net):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.nothing.sum()


class Mixed(Net):
    """One block in another format than the rest."""

    def __init__(self) -> None:
        super().__init__(3)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x.to(block.up.weight.dtype)).to(x.dtype)
        return x


class External(Net):
    """A parameter used by a sibling, through a view, and in pieces."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(self.embed(tokens))
        x = x @ self.blocks[0].up.weight.t()[:, :WIDTH]
        return self.head(x) + x @ self.embed.weight.t()


class TiedTwice(Tied):
    """The embedding is called twice, and stays gathered meanwhile; its weight is the head's, too."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens) + self.embed(tokens.flip(1))))


class ExternalBetween(Net):
    """The embedding's weight is used as it is between two calls of the embedding."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(self.embed(tokens))
        return self.head(x + self.embed((x.detach() @ self.embed.weight.t()).argmax(-1))) + x @ self.embed.weight.t()


class SideOutput(Net):
    """Part of the loss leaves the block through an attribute."""

    def forward(self, tokens: Tensor) -> Tensor:
        out = super().forward(tokens)
        return out + self.blocks[0].up(self.blocks[1].norm(self.embed(tokens))).mean()


MODELS: dict[str, Callable[[], Net]] = {
    "plain": Net, "tied": Tied, "reused": Reused, "unused": Unused, "frozen": Frozen, "checkpointed": Checkpointed, "selective": Selective,
    "reentrant": Reentrant, "reentrant_reused": ReentrantReused, "reentrant_frozen": ReentrantFrozen,
    "zero_size": ZeroSize, "mixed": Mixed, "external": External, "side_output": SideOutput,
    "tied_twice": TiedTwice, "external_between": ExternalBetween,
}  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """What a parity test needs; everything is deterministic in (step, microbatch, rank)."""

    rate: float = 1e-2

    def model(self, kind: str, dtype: torch.dtype = torch.float32) -> Net:
        torch.manual_seed(0)
        net = MODELS[kind]().to(dtype)
        if kind == "mixed":
            net.blocks[1].to(torch.float32 if dtype == torch.float64 else torch.float64)
        return net

    @property
    def kinds(self) -> list[str]:
        return list(MODELS)

    def batch(self, step: int, micro: int, rank: int) -> Tensor:
        made = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
        return torch.randint(0, VOCAB, (3, 7), generator=made)

    def loss(self, net: nn.Module, tokens: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def adamw(self, net: nn.Module) -> torch.optim.AdamW:
        return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=self.rate, foreach=False)

    def ddp(self, kind: str, steps: int = 5) -> list[Tensor]:
        """Parameters after `steps` of plain DDP."""
        net = self.model(kind)
        ddp = DistributedDataParallel(net, find_unused_parameters=kind == "unused")
        if kind == "reentrant_reused":  # DDP refuses it unless told that the graph never changes
            ddp = DistributedDataParallel(net, static_graph=True)
        optimizer = self.adamw(net)
        for step in range(steps):
            optimizer.zero_grad()
            self.loss(ddp, self.batch(step, 0, dist.get_rank())).backward()
            optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    def dense(
        self,
        kind: str,
        *,
        steps: int,
        micros: int,
        clip: float | None,
        world: int,
        make: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    ) -> list[Tensor]:
        """Parameters after `steps` of one process that sees every rank's data, in fp64."""
        net = self.model(kind, torch.float64)
        optimizer = (make or self.adamw)(net)
        for step in range(steps):
            optimizer.zero_grad()
            for micro in range(micros):
                for rank in range(world):
                    (self.loss(net, self.batch(step, micro, rank)) / (world * micros)).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    def copy(self, net: nn.Module) -> nn.Module:
        return copy.deepcopy(net)


@pytest.fixture
def bench() -> Bench:
    return Bench()
