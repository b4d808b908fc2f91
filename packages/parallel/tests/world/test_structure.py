"""A model that nobody has described is cut by what a trace says of it, equals one process, and what a trace does not prove stays whole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_comm
from ds_config.errors import PlanError
from ds_parallel.config import LayerSpecConfig
from ds_parallel.tensor import ShardKind, TensorOptions, TensorPlan, facts_of, make_tensor_plan, parallelize_model
from ds_testing import world


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = 4, 2, 4
        self.wq, self.wk, self.wv = nn.Linear(12, 16), nn.Linear(12, 8), nn.Linear(12, 8)
        self.wo = nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        b, s = x.shape[0], x.shape[1]
        q = self.wq(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        k, v = (w(x).view(b, s, self.num_kv_heads, self.head_dim).transpose(1, 2) for w in (self.wk, self.wv))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(b, s, self.num_heads * self.head_dim))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 22), nn.Linear(12, 22), nn.Linear(22, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(functional.silu(self.a(x)) * self.b(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.att, self.gated = nn.LayerNorm(12), Attention(), Gated()
        self.plain = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.att(self.norm(x))
        return x + self.plain(x + self.gated(x))


def model() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(Block(), Block(), nn.Linear(12, 5))


def test_what_is_proven_is_cut_and_the_rest_is_whole() -> None:
    plan = make_tensor_plan(facts_of(model()), TensorOptions(degree=2))
    kinds = {d.name.removeprefix("0."): d.kind for d in plan.decisions if d.name.startswith("0.")}
    assert {name for name, kind in kinds.items() if kind is ShardKind.COLUMN} == {
        "att.wq", "att.wk", "att.wv", "gated.a", "gated.b", "plain.0"
    }  # fmt: skip
    assert {name for name, kind in kinds.items() if kind is ShardKind.ROW} == {"att.wo", "gated.c", "plain.2"}
    assert "structure: reads a, b only" in str(plan)
    with pytest.raises(PlanError, match="tensor-unmatched"):  # the last layer feeds nobody
        make_tensor_plan(facts_of(model()), TensorOptions(degree=2, strict=True))


class Residual(nn.Module):
    """What lies between is no function of one feature, or is read by others, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) + x)


class Softmaxed(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).softmax(-1))


class Shown(Residual):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h) + h


class Twice(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.a(x)))


class Branches(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if x.sum() > 0 else x


class OtherNumber(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.h = 4  # a cut would not know of it


@pytest.mark.parametrize("kind", [Residual, Softmaxed, Shown, Twice, Branches, OtherNumber])
def test_what_is_not_proven_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(PlanError, match=r"no layer of .* is cut"):
        make_tensor_plan(facts_of(kind()), TensorOptions(degree=2))


@world(2)
def test_two_ranks_equal_one() -> None:
    net = model()
    equals_one_process(net, model(), make_tensor_plan(facts_of(net), TensorOptions(degree=2)))


class HeadsOfAConfiguration(nn.Module):
    """No number of its attention says how many heads there are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.config = SimpleNamespace(num_attention_heads=3, num_key_value_heads=3, hidden_size=12)
        self.attention = nn.ModuleDict({key: nn.Linear(12, 12) for key in ("q_proj", "k_proj", "v_proj", "o_proj")})

    def forward(self, x: Tensor) -> Tensor:
        width = self.config.hidden_size // self.config.num_attention_heads
        q, k, v = (
            self.attention[key](x).unflatten(-1, (-1, width)).transpose(1, 2) for key in ("q_proj", "k_proj", "v_proj")
        )
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention["o_proj"](out.transpose(1, 2).flatten(-2))


@world(2)
def test_layers_are_cut_between_heads_that_only_a_configuration_counts() -> None:
    net = HeadsOfAConfiguration()
    facts = facts_of(net)
    with pytest.raises(PlanError, match=r"no layer of .* is cut"):  # by a trace: it has the numbers as constants
        make_tensor_plan(facts, TensorOptions(degree=2))
    kinds = {r".*\.[qkv]_proj\.weight": "column", r".*\.o_proj\.weight": "row"}
    specs = tuple(LayerSpecConfig(patterns=(names,), partition_type=kind) for names, kind in kinds.items())
    plan = make_tensor_plan(facts, TensorOptions(degree=2, specs=specs))
    widths = {(cut.width(0), cut.width(1)) for decision in plan.decisions for cut in decision.cuts.values()}
    assert widths == {(8, 4)}
    equals_one_process(net, HeadsOfAConfiguration(), plan)


def equals_one_process(net: nn.Module, whole: nn.Module, plan: TensorPlan) -> None:
    x = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(1))
    whole(x).square().mean().backward()
    cut = parallelize_model(net, plan, ds_comm.world_group())
    loss = net(x).square().mean()
    loss.backward()
    torch.testing.assert_close(loss, whole(x).square().mean(), atol=1e-6, rtol=1e-6)
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    for name, param in net.named_parameters():
        held = cut.shards.get(name)
        full = wanted[name if held is None else held.name]
        if held is not None:
            box = held.box(ds_comm.world_group().rank)
            full = full[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
        torch.testing.assert_close(param.grad, full, atol=1e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    cut.undo()
