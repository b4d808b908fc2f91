"""Blocks of the older kind, with a list of experts: cut over two ranks they equal the block itself. Low-rank updates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_comm
from ds_comm import differentiable
from ds_config.errors import PlanError, UnsupportedConfigError
from ds_moe import MoE, RouterOptions, apply_expert_parallel, attach_lora, full_state, place_experts, select_experts
from ds_moe.config import ExpertParallelConfig
from ds_testing import world


class Mlp(nn.Module):
    def __init__(self, inner: int = 6) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, inner, bias=False), nn.Linear(8, inner, bias=False)
        self.down_proj = nn.Linear(inner, 8, bias=False)

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """As transformers 4 wrote Qwen2-MoE: softmax, two of four experts, one more for all tokens."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(4))
        if shared:
            self.shared_expert, self.shared_expert_gate = Mlp(10), nn.Linear(8, 1, bias=False)

    def forward(self, hidden_states):
        x = hidden_states.view(-1, 8)
        logits = self.gate(x)
        weights, chosen = logits.softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (chosen == number)).sum(1)[:, None]
        if hasattr(self, "shared_expert"):
            out = out + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return out.view(hidden_states.shape), logits


class Model(nn.Module):
    def __init__(self, model_type: str = "qwen2_moe", shared: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.config = SimpleNamespace(model_type=model_type, num_experts_per_tok=2, norm_topk_prob=False)
        self.layers = nn.ModuleList(Block(shared) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


EP2 = {"enabled": True, "autoep_size": 2}


@world(2)
def test_lists_of_experts_cut_over_two_ranks():
    rank = dist.get_rank()
    model, wanted = Model(), Model()
    cut = apply_expert_parallel(model, ExpertParallelConfig(**EP2))
    x = torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(x[rank]), wanted(x[rank]), atol=1e-6, rtol=1e-5)
    model(x[rank]).square().sum().backward()
    (wanted(x[0]).square().sum() + wanted(x[1]).square().sum()).div(2).backward()
    grads = {name: param.grad for name, param in wanted.named_parameters()}
    for name, param in model.named_parameters():
        said = ds_comm.param_sharding(param)
        if said.family is None:
            dist.all_reduce(param.grad)
        torch.testing.assert_close(param.grad / 2, grads[said.name or name], atol=1e-5, rtol=1e-4)
    assert sum(p.numel() for p in model.layers[0].experts.parameters()) == 2 * 3 * 48
    state = dict(full_state(cut))
    assert set(state) == set(wanted.state_dict())
    for name, value in wanted.state_dict().items():
        assert torch.equal(state[name], value), name
    cut.undo()
    for (name, param), value in zip(model.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(param, value), name


@world(2)
def test_a_users_own_block_is_described_by_the_configuration():
    rank = dist.get_rank()
    model, wanted = Model("mine", shared=False), Model("mine", shared=False)
    with pytest.raises(PlanError, match="how does its router choose"):
        apply_expert_parallel(model, ExpertParallelConfig(**EP2))
    section = ExpertParallelConfig(**EP2, top_k=2, score_func="softmax", moe_layer_pattern=r"layers\.\d+$")
    cut = apply_expert_parallel(model, section)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(rank))
    torch.testing.assert_close(model(x), wanted(x), atol=1e-6, rtol=1e-5)
    cut.undo()
    model.layers[0].extra = nn.Linear(2, 2)
    with pytest.raises(PlanError, match="not known what they do"):
        apply_expert_parallel(model, section)
    with pytest.raises(UnsupportedConfigError, match="expert_tensor_parallel_size"):
        apply_expert_parallel(wanted, ExpertParallelConfig(**EP2, expert_tensor_parallel_size=2))


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.randn(4, 12, 8)), nn.Parameter(torch.randn(4, 8, 6))


class Holding(nn.Module):
    """A block that computes with weights that its experts only hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.gate, self.experts = nn.Linear(8, 4, bias=False), Weights()

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        gate, up = torch.einsum("...n,efn->...ef", x, self.experts.gate_up_proj).chunk(2, -1)
        each = torch.einsum("...ef,enf->...en", torch.nn.functional.silu(gate) * up, self.experts.down_proj)
        return (each.gather(-2, chosen[..., None].expand(*chosen.shape, 8)) * weights[..., None]).sum(-2)


@world(2)
def test_a_block_that_computes_with_weights_that_its_experts_hold():
    rank = dist.get_rank()
    model, wanted = nn.Sequential(Holding(), Holding()), nn.Sequential(Holding(), Holding())
    section = ExpertParallelConfig(**EP2, top_k=2, score_func="softmax", route_norm=True)
    cut = apply_expert_parallel(model, section)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(rank))
    torch.testing.assert_close(model(x), wanted(x), atol=1e-5, rtol=1e-4)
    assert tuple(model[1].experts.down_proj.shape) == (2, 8, 6)
    state = dict(full_state(cut))
    assert all(torch.equal(state[name], value) for name, value in wanted.state_dict().items())
    cut.undo()
    assert isinstance(model[0], Holding)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted.parameters(), strict=True))
    with pytest.raises(PlanError, match="gives other values"):
        apply_expert_parallel(wanted, ExpertParallelConfig(**EP2, top_k=2, score_func="softmax"))


class Packed(nn.Module):
    """Packed experts as transformers 5 has them."""

    has_gate, has_bias, is_transposed = True, False, False

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.randn(4, 12, 8)), nn.Parameter(torch.randn(4, 8, 6))

    def _apply_gate(self, x):
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


class PackedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.gate, self.experts = nn.Linear(8, 4, bias=False), Packed()

    def forward(self, x):
        routed = select_experts(self.gate(x), RouterOptions(2))
        return self.experts(x, routed.experts, routed.weights)


@world(2)
def test_low_rank_updates_are_attached_without_communication():
    rank = dist.get_rank()
    model = nn.Sequential(PackedBlock())
    cut = apply_expert_parallel(model, ExpertParallelConfig(**EP2))
    ours = [
        name
        for name in dir(dist)
        if name.startswith(("all_", "broadcast", "reduce", "gather", "scatter", "isend", "send"))
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name in ours:
            patch.setattr(dist, name, lambda *args, **kwargs: pytest.fail("communication"))
        made = attach_lora(model, 2, alpha=4.0)
    assert sum(p.numel() for p in made) == 2 * 2 * ((8 + 12) + (6 + 8))
    layer = model[0].experts
    x = torch.randn(7, 8, generator=torch.Generator().manual_seed(rank))
    before = model(x)
    with torch.no_grad():
        for param in made:
            if param is layer.lora["down_proj"].lora_B or param is layer.lora["gate_up_proj"].lora_B:
                param.normal_(generator=torch.Generator().manual_seed(4 + rank))
    after = model(x)
    assert not torch.equal(before, after)
    after.square().sum().backward()
    assert all(param.grad is not None for param in made)
    assert layer.gate_up_proj.grad is None
    # The same update merged into the weights gives the same numbers.
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            extra = layer.lora[name]
            getattr(layer, name).data += 2.0 * extra.lora_B @ extra.lora_A
            extra.lora_B.zero_()
    torch.testing.assert_close(model(x), after, atol=1e-4, rtol=1e-4)
    # Drawn by the expert's number among all, so that another cut draws the same.
    alone = nn.Sequential(PackedBlock())
    whole = apply_expert_parallel(alone, ExpertParallelConfig(enabled=True))
    attach_lora(alone, 2, alpha=4.0)
    assert torch.equal(
        layer.lora["down_proj"].lora_A, alone[0].experts.lora["down_proj"].lora_A[2 * rank : 2 * rank + 2]
    )
    whole.undo()
    cut.undo()
    with pytest.raises(PlanError, match="no packed experts"):
        attach_lora(nn.Linear(2, 2), 2)


@pytest.mark.parametrize("kind", ["listed", "residual"])
@world(2)
def test_shared_experts_are_computed_while_tokens_travel(kind, monkeypatch):
    """In both directions: their output between start and end of the dispatch, their gradient between those of its gradient."""
    monkeypatch.setattr(
        "ds_moe.shm_dispatch.Windows.ask", lambda *_: False
    )  # rows are taken out of memory there, nothing travels
    log = []
    depart, arrive = differentiable._Journey.depart, differentiable._Journey.arrive

    def note(word, journey):
        if journey.move.call.unit.startswith("moe dispatch"):
            log.append(word)

    monkeypatch.setattr(differentiable._Journey, "depart", lambda self, x: (note("start", self), depart(self, x))[1])
    monkeypatch.setattr(differentiable._Journey, "arrive", lambda self: (note("end", self), arrive(self))[1])
    if kind == "listed":
        model = Model()
        cut = apply_expert_parallel(model, ExpertParallelConfig(**EP2))
        shared, out = [layer.shared_expert for layer in model.layers], model
    else:
        model = nn.ModuleList(MoE(8, Mlp(), 4, ep_size=2, use_residual=True, drop_tokens=False) for _ in range(2))
        cut, shared = place_experts(model), [layer.mlp for layer in model]

        def out(x):
            return model[1](model[0](x)[0])[0]

    for one in shared:
        one.register_forward_hook(lambda *_: log.append("shared"))
        one.register_full_backward_hook(lambda *_: log.append("shared gradient"))
    out(torch.randn(3, 5, 8, requires_grad=True)).sum().backward()
    cut.undo() if kind == "listed" else cut.close()
    assert log[:6] == ["start", "shared", "end"] * 2
    assert log[6:] == ["start", "shared gradient", "end"] * 2
