"""Options of `MoE` on two ranks: as in one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ds_moe import MoE, MoEOptions, balance_experts, place_experts
from ds_testing import world


def layer(ep_size: int) -> MoE:
    torch.manual_seed(5 + dist.get_rank() * (ep_size > 1))  # ranks that are not seeded alike
    mlp = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))
    options = MoEOptions(grouped=True, draw_apart=True, bias_rate=0.1)
    model = MoE(6, mlp, 4, ep_size, k=2, drop_tokens=False, top2_2nd_expert_sampling=False, options=options)
    with torch.no_grad():
        model.deepspeed_moe.gate.wg.weight.copy_(torch.randn(4, 6, generator=torch.Generator().manual_seed(1)))
    return model


@world(2)
def test_experts_apart_grouped_and_balanced() -> None:
    rank = dist.get_rank()
    whole, cut = layer(1), layer(2)
    placed = place_experts(cut)
    for number in range(2):
        ours = cut.deepspeed_moe.experts.deepspeed_experts[number].state_dict()
        theirs = whole.deepspeed_moe.experts.deepspeed_experts[2 * rank + number].state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), "rank 0's seed, the logical expert's number"
    tokens = torch.randn(2, 30, 6, generator=torch.Generator().manual_seed(2))
    for _ in range(3):
        torch.testing.assert_close(cut(tokens[rank])[0], whole(tokens[rank])[0], atol=1e-6, rtol=1e-5)
        balance_experts(whole)
        balance_experts(cut)
        torch.testing.assert_close(whole.deepspeed_moe.gate.expert_bias, cut.deepspeed_moe.gate.expert_bias)
    both = torch.empty(2, 4)
    dist.all_gather(list(both), cut.deepspeed_moe.gate.expert_bias)
    assert torch.equal(both[0], both[1])
    assert both.abs().max() > 0
    placed.close()


@world(2)
def test_values_that_were_loaded_are_not_drawn_again() -> None:
    cut = layer(2)
    with torch.no_grad():
        for param in cut.deepspeed_moe.experts.parameters():
            param.fill_(dist.get_rank() + 1.0)
    placed = place_experts(cut)
    assert all((param == dist.get_rank() + 1.0).all() for param in cut.deepspeed_moe.experts.parameters())
    placed.close()
