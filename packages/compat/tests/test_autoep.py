"""Experts by hand: `deepspeed.module_inject.auto_ep` finds blocks, and its layers compute what the blocks did."""

from __future__ import annotations

from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.module_inject.auto_ep import AutoEP, _resolve_route_scale
from deepspeed.module_inject.auto_ep_config import (
    AutoEPConfig,
    fill_autoep_config_from_hf,
    parse_autoep_config,
    validate_autoep_config,
    validate_autoep_post_detection,
)
from deepspeed.module_inject.auto_ep_folding import (
    FoldingGroupHandles,
    assert_group_matches_spec,
    build_folding_spec,
    expected_folding_group_tables,
    local_folding_ranks,
)
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer, combine_from_routed, compute_split_plan
from deepspeed.module_inject.auto_ep_presets.registry import preset_name_for_hf_model_type
from deepspeed.runtime.config import DeepSpeedConfig
from torch import Tensor, nn

from ds_config.errors import ConfigError, PlanError
from ds_testing import world

WIDTH, FFN, EXPERTS = 8, 12, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, FFN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * FFN, WIDTH) / 4)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, FFN) / 4)


class Block(nn.Module):
    def __init__(self, listed: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS)) if listed else Held()

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number in range(EXPERTS):
            if isinstance(self.experts, nn.ModuleList):
                each = self.experts[number](x)
            else:
                gate, up = (x @ self.experts.gate_up_proj[number].T).chunk(2, -1)
                each = (nn.functional.silu(gate) * up) @ self.experts.down_proj[number].T
            out = out + each * ((chosen == number) * weights).sum(-1, keepdim=True)
        return out


class Model(nn.Module):
    def __init__(self, listed: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            model_type="qwen3_moe" if listed else "mixtral", num_experts_per_tok=2, norm_topk_prob=True
        )
        self.mlp = Block(listed)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


@pytest.mark.parametrize("score_apply", ["auto", "pre"])
@pytest.mark.parametrize("listed", [False, True])
def test_a_replaced_block_computes_what_it_did(listed, score_apply):
    torch.manual_seed(0)
    model, x = Model(listed), torch.randn(2, 5, WIDTH)
    wanted = model(x)
    found = AutoEP(model, AutoEPConfig(enabled=True, score_apply=score_apply))
    (spec,) = found.ep_parser()
    assert (spec.model_family, spec.num_experts, spec.hidden_size) == (model.config.model_type, EXPERTS, WIDTH)
    model.mlp.gate.weight.requires_grad_(False)
    found.replace_moe_layers([spec], 1, 0)
    assert isinstance(model.mlp, AutoEPMoELayer)
    assert not model.mlp.router.gate.weight.requires_grad
    out = model(x)
    if score_apply == "auto":
        torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-5)
    out.sum().backward()
    assert all(weight.grad is not None for weight in model.mlp.experts.parameters())


def test_experts_that_differ_are_refused():
    model = Model(True)
    model.mlp.experts[1].up_proj.weight.requires_grad_(False)
    found = AutoEP(model, AutoEPConfig(enabled=True))
    with pytest.raises(ValueError, match="mixed requires_grad flags"):
        found.replace_moe_layers(found.ep_parser(), 1, 0)


def test_the_section_is_read_and_checked():
    config = parse_autoep_config(
        {"enabled": True, "autoep_size": 2, "load_balance_coeff": None, "comm_backend": "comm"}
    )
    assert (config.autoep_size, config._load_balance_coeff_explicit, config.route_scale) == (2, True, 1.0)
    validate_autoep_config(config, world_size=8, pp_size=2, tp_size=1, sp_size=1)
    for changes, told in (
        ({"autoep_size": 3}, r"must divide the stage size=8\. Valid expert-width values"),
        ({"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size=1"),
        ({"validate_folding_routing": "true"}, "validate_folding_routing"),
        ({"preset_model": "none_such"}, "none_such"),
        ({"score_func": "tanh"}, "score_func"),
        ({"load_balance_coeff": False}, "False is not supported"),
    ):
        with pytest.raises(ValueError, match=told):
            validate_autoep_config(AutoEPConfig(**{"enabled": True} | changes), 8, 1, 1, 1)
    with pytest.raises(PlanError, match="exceeds num_experts=4"):
        validate_autoep_post_detection(
            AutoEPConfig(autoep_size=8), AutoEP(Model(True), AutoEPConfig(enabled=True)).ep_parser()
        )
    family = SimpleNamespace(n_group=4, topk_group=2, routed_scaling_factor=2.5)
    fill_autoep_config_from_hf(config, family)
    assert (config.num_expert_groups, config.route_scale) == (4, 2.5)
    with pytest.raises(ConfigError, match="routed_scaling_factor"):
        _resolve_route_scale(AutoEPConfig(routed_scaling_factor=float("nan")), family)
    assert [preset_name_for_hf_model_type(kind) for kind in ("qwen2_moe", "qwen3_5_moe_text", "llama")] == [
        "qwen3_moe", "qwen3_5_moe", None
    ]  # fmt: skip


def test_experts_beside_tensor_parallelism_in_rank_numbers():
    spec = build_folding_spec(world_size=8, pp_size=1, tp_size=4, ep_size=4)
    assert (spec.dp_size, spec.edp_size) == (2, 2)
    validate_autoep_config(AutoEPConfig(enabled=True, autoep_size=4), 8, 1, 4, 1)
    tables = expected_folding_group_tables(spec)
    assert tables.tp_groups == tables.ep_groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert tables.dense_dp_groups == tables.edp_groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert local_folding_ranks(5, spec) == {"tp": (4, 5, 6, 7), "dense_dp": (1, 5), "ep": (4, 5, 6, 7), "edp": (1, 5)}
    assert_group_matches_spec({"ep": [[0, 1, 2, 3]], "edp": [[1, 5]]}, spec)
    with pytest.raises(RuntimeError, match="does not match folding spec"):
        assert_group_matches_spec((((0, 2, 4, 6),), ((0, 1),)), spec)
    with pytest.raises(ValueError, match=r"autotp_size=3 must divide the stage size=8\. Valid autotp_size values"):
        build_folding_spec(world_size=8, pp_size=1, tp_size=3, ep_size=1)


def test_a_configuration_shows_the_value_that_it_refuses():
    raw = {"train_batch_size": 1, "expert_parallel": {"load_balance_coeff": {"coeff": 1e-3}}}
    with pytest.raises(ValueError, match=r"load_balance_coeff = \{'coeff': 0.001\} is not supported"):
        DeepSpeedConfig(raw)
    told = DeepSpeedConfig({"train_batch_size": 1, "expert_parallel": {"enabled": True}}).expert_parallel_config
    assert (told.enabled, told._load_balance_coeff_explicit) == (True, False)


def test_rows_are_planned_and_combined(monkeypatch):
    sent = []

    def exchange(out, counts, group=None):
        sent.append(counts.tolist())
        out.copy_(torch.tensor([5, 0, 0, 2]))

    monkeypatch.setattr(deepspeed.comm, "all_to_all_single", exchange)
    plan = compute_split_plan(torch.tensor([[0, 3], [0, 2]]), 4, 2, 2, None)
    assert sent == [[2, 0, 1, 1]]
    assert (plan.input_splits, plan.output_splits, plan.local_counts.tolist()) == ([2, 2], [5, 2], [5, 2])
    rows, weights = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([[0.5, 0.25], [1.0, 2.0]])
    order = torch.tensor([2, 0, 1, 3])  # rows of choices 2, 0, 1, 3
    out = combine_from_routed(rows, weights, order, 2, "post", "auto", (1, 2, 1))
    assert out.flatten().tolist() == [0.5 * 2 + 0.25 * 3, 1.0 * 1 + 2.0 * 4]


@world(2)
@pytest.mark.parametrize("listed", [False, True])
def test_blocks_that_an_engine_cuts_look_like_replaced_ones(listed):
    section = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(listed))
    model.config = SimpleNamespace(
        model_type="mixtral", num_local_experts=EXPERTS, num_experts_per_tok=2, hidden_size=WIDTH
    )
    names = set(model.state_dict())
    assert not isinstance(model[1], AutoEPMoELayer)
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_batch_size": 2, "expert_parallel": section, "zero_optimization": {"stage": 3},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        },
    )  # fmt: skip
    (block,) = [module for module in engine.module.modules() if isinstance(module, AutoEPMoELayer)]
    assert engine.has_moe_layers
    assert (block.ep_size, block.ep_rank, block.num_local_experts) == (2, engine.mesh.rank, EXPERTS // 2)
    assert block.router is block.gate
    for params, family, name, ranks in (
        (block.experts, "autoep_expert", block.ep_group_name, 1),
        (block.router, "replicated", None, 2),
    ):
        for param in params.parameters():
            assert param.ds_zero_placement_family == family
            assert param.ds_zero_partition_group_name == name
            assert (param.ds_zero_partition_world_size, param.partition_numel()) == (ranks, param.ds_numel // ranks)
    output = engine(torch.ones(1, WIDTH))
    engine.backward((output[0] if listed else output).sum())  # lists of Mixtral's block return router logits, too
    engine.step()
    assert torch.isfinite(engine.optimizer._global_grad_norm)
    assert engine.get_global_grad_norm().item() > 0
    engine.destroy()
    assert not any(isinstance(module, AutoEPMoELayer) for module in model.modules())
    assert set(model.state_dict()) == names


@world(2, backend=None)
@pytest.mark.parametrize("folded", [False, True])
def test_a_layer_is_told_who_shares_its_experts(folded):
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model, section = nn.Sequential(Block(False)), AutoEPConfig(enabled=True, preset_model="mixtral")
    model.config = SimpleNamespace(model_type="mixtral", num_local_experts=EXPERTS, num_experts_per_tok=2)
    auto, original, rank = AutoEP(model, section), model[0], deepspeed.comm.get_rank()
    auto.replace_moe_layers(auto.ep_parser(), ep_size=2, ep_rank=rank)
    both = deepspeed.comm.new_group([0, 1])
    alone = [deepspeed.comm.new_group([number]) for number in range(2)][rank]
    spec = build_folding_spec(world_size=2, pp_size=1, tp_size=2, ep_size=2)
    handles = FoldingGroupHandles(spec, both, alone, both, alone, "ep_size_2", (0, 1), (rank,), (0, 1), (rank,))
    model[0].set_deepspeed_parallelism(folding_group_handles=handles if folded else None)
    assert deepspeed.comm.get_world_size(model[0].ep_group) == 2
    x = torch.randn(3, WIDTH)  # the same on both ranks
    output, wanted = model(x), original(x)
    torch.testing.assert_close(output, wanted)
    output.square().sum().backward()
    wanted.square().sum().backward()
    expected = original.experts.down_proj.grad.chunk(2)[rank]
    torch.testing.assert_close(model[0].experts.w2.grad, expected if folded else 2 * expected)


@world(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_layers_made_by_hand_keep_their_experts_in_an_engine(stage, tmp_path):
    torch.manual_seed(0)
    model, section = nn.Sequential(Block(False)), AutoEPConfig(enabled=True, preset_model="mixtral")
    model.config = SimpleNamespace(model_type="mixtral", num_local_experts=EXPERTS, num_experts_per_tok=2)
    auto, original, rank = AutoEP(model, section), model[0], deepspeed.comm.get_rank()
    auto.replace_moe_layers(auto.ep_parser(), ep_size=2, ep_rank=rank)
    config = {
        "train_batch_size": 2, "zero_optimization": {"stage": stage}, "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, config=config)
    x = torch.randn(3, WIDTH)  # the same on both ranks
    output, wanted = engine(x), original(x)
    torch.testing.assert_close(output, wanted)
    engine.backward(output.square().mean())
    engine.step()
    wanted.square().mean().backward()
    trained = original.experts.down_proj - 0.5 * original.experts.down_proj.grad
    engine.save_checkpoint(tmp_path)
    with deepspeed.zero.GatheredParameters(model.parameters()):
        torch.testing.assert_close(model[0].experts.w2.detach(), trained.detach().chunk(2)[rank])
    with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0 if stage else None), torch.no_grad():
        model[0].experts.w2.zero_()
    engine.load_checkpoint(tmp_path)
    with deepspeed.zero.GatheredParameters(model.parameters()):
        torch.testing.assert_close(model[0].experts.w2.detach(), trained.detach().chunk(2)[rank])
    engine.destroy()


@pytest.mark.parametrize(
    ("ranks", "others", "needs"),
    [
        ((8, 2, 2, 1), {}, "pp_size=1 only"),
        ((4, 1, 2, 2), {}, "mutually exclusive"),
        ((4, 1, 2, 1), {"zero_stage": 3}, "ZeRO stage 3"),
        ((4, 1, 2, 1), {"zero_offload_param": True}, "offload"),
        ((4, 1, 2, 1), {"tp_preset_model": "qwen3_moe"}, "must match"),
    ],
)
def test_what_upstream_does_not_fold_is_refused_by_its_validator(ranks, others, needs):
    config = AutoEPConfig(enabled=True, autoep_size=2, preset_model="mixtral")
    with pytest.raises(ValueError, match=needs):
        validate_autoep_config(config, *ranks, **others)
    validate_autoep_config(config, 4, 1, 1, 1, **{key: value for key, value in others.items() if key == "zero_stage"})
