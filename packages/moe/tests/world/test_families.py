"""Tiny models of every family: experts cut over two ranks give transformers' own loss, gradients and files."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import ds_comm
from ds_config.errors import PlanError
from ds_moe import apply_expert_parallel, expert_load, full_state, load_experts, record_routing, replay_routing
from ds_moe.config import ExpertParallelConfig
from ds_testing import world

COMMON = {
    "vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "intermediate_size": 24, "moe_intermediate_size": 12, "head_dim": 8,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
FAMILIES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 20, "norm_topk_prob": False},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 4, "norm_topk_prob": False},
    "deepseek_v2": {
        **LATENT, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {
        **LATENT, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}  # fmt: skip
EP2 = ExpertParallelConfig(enabled=True, autoep_size=2)


def build(family):
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()  # its thread would outlive the test
    config = transformers.AutoConfig.for_model(family, **COMMON | FAMILIES[family])
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" not in name:
                param.normal_(std=0.2)
    return model


def batch(rank, step):
    return torch.randint(0, 48, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def dense(family, size, steps, lr=0.1):
    """transformers' own model on all ranks' batches: losses, gradients of the first step, values at the end."""
    model, first, losses = build(family), None, []
    for step in range(steps):
        each = [loss_of(model, batch(rank, step)) for rank in range(size)]
        (sum(each) / size).backward()
        losses.append([float(loss.detach()) for loss in each])
        with torch.no_grad():
            first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
            for param in model.parameters():
                param -= lr * param.grad
                param.grad = None
    return losses, first, model


def averaged(model):
    for param in model.parameters():
        family = ds_comm.param_sharding(param).family
        if family is None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        else:
            if family.group.size > 1:
                dist.all_reduce(param.grad, group=family.group.pg)
            param.grad /= family.divisor


def part_of(param, whole):
    box = ds_comm.param_sharding(param).box
    return whole if box is None else whole[box.offset[0] : box.offset[0] + box.shape[0]]


def check(family):
    rank = dist.get_rank()
    losses, grads, after = dense(family, 2, 5)
    model = build(family)
    cut = apply_expert_parallel(model, EP2)
    names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in after.named_parameters()]
    for step in range(5):
        loss = loss_of(model, batch(rank, step))
        assert float(loss.detach()) == pytest.approx(losses[step][rank], abs=1e-5)
        loss.backward()
        averaged(model)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if step == 0:
                    torch.testing.assert_close(param.grad, part_of(param, grads[name]), atol=1e-5, rtol=1e-4)
                param -= 0.1 * param.grad
                param.grad = None
    state = dict(full_state(cut))
    for name, value in after.named_parameters():
        torch.testing.assert_close(state[name], value.detach(), atol=1e-5, rtol=1e-4)
    files(family, cut, after)
    cut.undo()
    for (name, param), value in zip(model.named_parameters(), after.parameters(), strict=True):
        assert param.shape == value.shape, name
        torch.testing.assert_close(param, value, atol=1e-5, rtol=1e-4)
    tokens = batch(7, 0)
    torch.testing.assert_close(model(tokens).logits, after(tokens).logits, atol=1e-4, rtol=1e-4)


def files(family, cut, after):
    """What is exported loads in transformers, packed and listed, and back into shards."""
    transformers = pytest.importorskip("transformers")
    for listed in (False, True):
        state = {name: value.contiguous().clone() for name, value in full_state(cut, listed=listed)}
        if listed and family != "gpt_oss":
            assert any(
                name.endswith(".experts.1.w2.weight" if family == "mixtral" else ".experts.1.down_proj.weight")
                for name in state
            )
        with tempfile.TemporaryDirectory() as folder:
            save_file(state, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            after.config.save_pretrained(folder)
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
            tokens = batch(3, 3)
            torch.testing.assert_close(loaded(tokens).logits, after(tokens).logits, atol=1e-4, rtol=1e-4)
            kept = {name: p.detach().clone() for name, p in cut.model.named_parameters()}
            with torch.no_grad():
                for one in cut.blocks:
                    for param in cut.layers[one.name].parameters():
                        param.zero_()
            assert load_experts(cut, folder)
            for name, param in cut.model.named_parameters():
                torch.testing.assert_close(param, kept[name], atol=0, rtol=0)


@world(2, timeout=180)
def test_packed_experts_of_two_families():
    check("mixtral")
    check("gpt_oss")


@world(2, timeout=280)
def test_packed_experts_of_the_other_families():
    for family in ("qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3"):
        check(family)


@world(2, timeout=120)
def test_choices_of_a_family_are_recorded_and_applied():
    model = build("deepseek_v3")
    cut = apply_expert_parallel(model, EP2)
    tokens = batch(dist.get_rank(), 0)
    with record_routing(model) as tape:
        first = loss_of(model, tokens)
    with replay_routing(model, tape):
        again = loss_of(model, tokens)
    torch.testing.assert_close(first, again, atol=1e-6, rtol=0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("gate.weight"):
                param.neg_()
    expert_load(model)
    with replay_routing(model, tape):
        loss_of(model, tokens)
    load = expert_load(model)
    for name, choices in tape.choices.items():
        assert load[name].counts == tuple(torch.bincount(choices[0].flatten(), minlength=8).tolist())
    cut.undo()


@world(2, timeout=120)
def test_what_is_not_recognised_or_contradicts_is_an_error_and_changes_nothing():
    model = build("mixtral")
    names = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for section, told in (
        ({"top_k": 3}, "k = 3, and the router of mixtral has 2"),
        ({"score_func": "sigmoid", "route_norm": False}, "normalize = False"),
        ({"num_experts_attr": "hidden_size"}, "hidden_size = 16"),
        ({"preset_model": "none_such"}, "preset_model 'none_such'"),
        ({"moe_layer_pattern": "nowhere"}, "'nowhere' matches"),
        ({"autoep_size": 3}, "expert groups of 3"),
    ):
        with pytest.raises(PlanError, match=told):
            apply_expert_parallel(model, ExpertParallelConfig(**{"enabled": True, "autoep_size": 2} | section))
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == names
    with pytest.raises(PlanError, match="no block of experts"):
        apply_expert_parallel(copy.deepcopy(model.lm_head), EP2)
    odd = copy.deepcopy(model)
    odd.config.num_local_experts = 4
    cut = apply_expert_parallel(odd, EP2)
    with pytest.raises(PlanError, match="no block of experts"):
        apply_expert_parallel(odd, EP2)
    cut.undo()
