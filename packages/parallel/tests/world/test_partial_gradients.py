"""What is trained between a column and a row layer and held whole by every rank: its gradient is that of one process, whatever rules say."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ds_comm
from ds_config.errors import PlanError
from ds_parallel.tensor import LayerRule, ShardKind, TensorOptions, facts_of, make_tensor_plan, parallelize_model
from ds_parallel.tensor.partial_gradients import ReplicaGradientCheck
from ds_testing import world

WIDTH, INNER = 12, 16


class Between(nn.Module):
    """A feed-forward layer with something trained in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.norm, self.slope = nn.LayerNorm(4), nn.PReLU()
        self.temperature, self.gain = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.tensor(0.7))
        self.router = nn.Linear(WIDTH, 1)

    def middle(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(x)) + x


class Slope(Between):
    def middle(self, x: Tensor) -> Tensor:
        return self.slope(self.up(x))


class HeadNorm(Between):
    def middle(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.norm(h.view(*h.shape[:-1], -1, 4)).flatten(-2)


class Temperature(Between):
    """Used within the region and outside of it, once of each through one node."""

    def middle(self, x: Tensor) -> Tensor:
        return self.up(x * self.temperature) * self.temperature

    def forward(self, x: Tensor) -> Tensor:
        scale = self.gain.exp()
        return self.down(self.middle(x) * scale) * scale + x


class Routed(Between):
    """A whole activation, made of whole parameters and of the block's input, weighs all features."""

    def middle(self, x: Tensor) -> Tensor:
        return functional.silu(self.gate(x)) * self.up(x) * self.router(x).sigmoid()


class Checkpointed(Between):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(checkpoint(self.middle, x, use_reentrant=False)) + x

    def middle(self, x: Tensor) -> Tensor:
        return self.slope(self.up(x))


class CheckpointedWhole(Checkpointed):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super(Checkpointed, self).forward, x, use_reentrant=True)


class FrozenColumn(Slope):
    """The first block: nothing below its slope has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)


class TwoRows(Between):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.slope(self.up(x))
        return self.down(h) + self.other(h)


KINDS = [Slope, HeadNorm, Temperature, Routed, Checkpointed, CheckpointedWhole, FrozenColumn, TwoRows]
RULES = (
    LayerRule(r".*\.(?:up|gate)", ShardKind.COLUMN, "partition_config"),
    LayerRule(r".*\.(?:down|other)", ShardKind.ROW, "partition_config"),
)


def net_of(kind: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(kind(), kind())


def batch(step: int = 0) -> Tensor:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(step))


def cut_of(net: nn.Module) -> Any:
    plan = make_tensor_plan(facts_of(net), TensorOptions(degree=ds_comm.world_group().size, defaults=True, rules=RULES))
    return parallelize_model(net, plan, ds_comm.world_group())


def part_of(full: Tensor, held: Any) -> Tensor:
    if held is None:
        return full
    box = held.box(ds_comm.world_group().rank)
    return full[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]


@pytest.mark.parametrize("kind", KINDS)
@world(2)
def test_gradients_are_those_of_one_process(kind: type[nn.Module]) -> None:
    whole, net = net_of(kind), net_of(kind)
    cut = cut_of(net)
    assert len(cut.plan.cut) >= 4
    for step in range(2):  # the second adds to the first
        for each in (whole, net):
            each(batch(step).requires_grad_(kind is CheckpointedWhole)).square().mean().backward()
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    compared = 0
    for name, param in net.named_parameters():
        held = cut.shards.get(name)
        full = wanted[name if held is None else held.name]
        assert (param.grad is None) == (full is None), name
        if full is not None:
            atol = 1e-6 * max(1.0, float(full.abs().max()))  # elements are sums of some that are as large
            torch.testing.assert_close(
                param.grad, part_of(full, held), atol=atol, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
            compared += 1
    assert compared > 5


class Random(Slope):
    """Ranks draw other numbers for what they hold whole."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.gain * ds_comm.world_group().rank)


@world(2)
def test_copies_that_would_part_are_named_after_the_first_backward() -> None:
    net = net_of(Random)
    cut_of(net)
    with (
        mock.patch.object(ReplicaGradientCheck, "every", False),
        pytest.raises(PlanError, match=r"1\.gain \(norms") as raised,
    ):
        net(batch()).square().mean().backward()
    assert raised.value.code == "tensor-gradients"


@world(2)
def test_only_the_first_backward_is_compared_and_gradients_that_are_not_finite_wait() -> None:
    net = net_of(Slope)
    cut = cut_of(net)
    counts = [len(cut._replicas._handles)]
    with mock.patch.object(ReplicaGradientCheck, "every", False):
        for factor in (float("inf"), 1.0, 1.0):
            (net(batch()).square().mean() * factor).backward()
            counts.append(len(cut._replicas._handles))
        with torch.no_grad():
            net[1].down.bias += ds_comm.world_group().rank  # compared no more
        net(batch()).square().mean().backward()
    assert counts[0] == 0  # watched from the first forward on
    used = 4  # of each block: slope and bias of the row layer
    assert [counts[1] - later for later in counts[2:]] == [used, used]
    cut.close()
    assert not cut._replicas._handles


@world(2)
def test_a_forward_without_a_backward_leaves_nothing_out_of_the_next_ones_sums() -> None:
    """Nodes were known by numbers that each thread counts for itself, from 0."""
    whole, net = net_of(Slope), net_of(Slope)
    cut_of(net)
    kept: list[Tensor] = []

    def in_thread(run: Callable[[], object]) -> None:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    whole(batch()).square().mean().backward()
    in_thread(lambda: kept.append(net(batch(1))))
    in_thread(lambda: net(batch()).square().mean().backward())
    for name, param in net.named_parameters():
        if name.endswith("slope.weight"):
            torch.testing.assert_close(param.grad, whole.get_parameter(name).grad, atol=1e-6, rtol=1e-5)


class Broken(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("out of memory")


@world(2)
def test_a_backward_that_raised_is_not_the_one_that_is_compared() -> None:
    """Its digests stayed, so that no later gradients were compared."""
    net = net_of(Random)
    cut_of(net)
    with mock.patch.object(ReplicaGradientCheck, "every", False):
        handle = net[1].register_forward_pre_hook(lambda module, args: (Broken.apply(args[0]),))
        with pytest.raises(RuntimeError, match="out of memory"):
            net(batch()).square().mean().backward()
        handle.remove()
        net.zero_grad()
        with pytest.raises(PlanError, match=r"gain \(norms"):
            net(batch()).square().mean().backward()


GLM4 = {
    "vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 44, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 2,
    "use_qk_norm": True, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@world(2)
def test_norms_of_queries_and_keys_that_a_models_own_plan_leaves_out() -> None:
    transformers = pytest.importorskip("transformers")

    def made() -> nn.Module:
        torch.manual_seed(3)
        return transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**GLM4))

    whole, net = made(), made()
    plan = make_tensor_plan(facts_of(net), TensorOptions(degree=2))
    norms = [d for d in plan.decisions if d.name.endswith(("q_norm", "k_norm"))]
    assert len(norms) == 4
    assert all(d.sum_gradient for d in norms)
    cut = parallelize_model(net, plan, ds_comm.world_group())
    ids = torch.randint(1, 67, (2, 9), generator=torch.Generator().manual_seed(1))
    for each in (whole, net):
        each(input_ids=ids, labels=ids).loss.backward()
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    for name, param in net.named_parameters():
        held = cut.shards.get(name)
        full = wanted[name if held is None else held.name]
        if full is not None:
            torch.testing.assert_close(
                param.grad, part_of(full, held), atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
