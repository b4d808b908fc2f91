"""Experts over ranks through the engine and ds-zero: a dense loop's losses and values at every stage, checkpoints, clipping, bytes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_comm
import ds_engine
import ds_zero
from ds_comm import Mesh, MeshSpec
from ds_config.errors import CommError, ConfigError, PlanError
from ds_moe import MoE, place_experts
from ds_parallel.tensor import TensorOptions, TensorParallelModel, facts_of, make_tensor_plan, parallelize_model
from ds_parallel.tensor.layer_rules import LayerRule, ShardKind
from ds_testing import world

WIDTH, EXPERTS = 8, 4


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    """Two layers of experts between linears; values depend on logical names only."""

    def __init__(self, ep_size: int = 1, k: int = 2, drop: bool = False, rank: int | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        rank = (dist.get_rank() % ep_size if dist.is_initialized() else 0) if rank is None else rank
        options = {"k": k, "capacity_factor": 0.7, "min_capacity": 1, "drop_tokens": drop, "use_rts": False}
        self.moes = nn.ModuleList(
            MoE(WIDTH, Mlp(), EXPERTS, ep_size, top2_2nd_expert_sampling=False, **options) for _ in range(2)
        )
        with torch.no_grad():
            for name, param in self.named_parameters():
                logical = self.logical(name, rank, ep_size)
                seed = sum(ord(c) * 31**i for i, c in enumerate(logical)) % 2**31
                param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)) * 0.4)

    @staticmethod
    def logical(name: str, rank: int, ep_size: int) -> str:
        parts = name.split(".")
        if "deepspeed_experts" in parts:
            at = parts.index("deepspeed_experts") + 1
            parts[at] = str(int(parts[at]) + rank * (EXPERTS // ep_size))
        return ".".join(parts)

    def forward(self, x: Tensor) -> Tensor:
        balance = x.new_zeros(())
        x = self.first(x)
        for moe in self.moes:
            out, loss, _ = moe(x)
            x, balance = x + out, balance + loss
        return self.last(x).square().mean() + 0.01 * balance


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    tokens = 10 + 3 * rank
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def dense(
    size: int, k: int, drop: bool, steps: int = 3, clip: float | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """All experts in one process, routed by each rank's own tokens: norms, values at the end."""
    net = Net(1, k, drop).double()
    optimizer, norms = torch.optim.AdamW(net.parameters(), lr=1e-2), []
    for step in range(steps):
        (sum(net(batch(rank, step, torch.float64)) for rank in range(size)) / size).backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), clip or 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: p.detach() for name, p in net.named_parameters()}


def check(ep_size: int, stage: int, k: int, drop: bool, clip: float | None) -> None:
    norms, wanted = dense(dist.get_world_size(), k, drop, clip=clip)
    net = Net(ep_size, k, drop).double()
    placed = place_experts(net)
    optimizer = ds_zero.shard(net, torch.optim.AdamW(net.parameters(), lr=1e-2), stage=stage, clip=clip)
    for step in range(3):
        net(batch(dist.get_rank(), step, torch.float64)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if clip is not None:
            assert float(optimizer.last.norm) == pytest.approx(norms[step], rel=1e-6)
    optimizer.close()
    rank = dist.get_rank() % ep_size
    for name, param in net.named_parameters():
        error = float((param - wanted[Net.logical(name, rank, ep_size)]).abs().max())
        assert error < 1e-6, f"EP {ep_size} stage {stage} k {k} drop {drop} clip {clip}: {name} off by {error}"
    placed.close()


@world(2, timeout=100)
def test_two_ranks_at_every_stage():
    for stage, (k, drop) in zip((0, 1, 2, 3), ((1, False), (2, True), (4, False), (2, False)), strict=True):
        check(2, stage, k, drop, 0.3 if stage % 2 else None)


@pytest.mark.slow
@world(4, timeout=280)
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_the_grid_on_four_ranks(ep_size):
    for stage, k, drop in itertools.product((0, 1, 2, 3), (1, 2, 4), (False, True)):
        check(ep_size, stage, k, drop, 0.3)


@world(4, timeout=100)
@pytest.mark.parametrize("stage", [2, 3])
def test_four_ranks_with_copies_of_experts(stage):
    check(2, stage, 2, False, 0.3)


@world(4, timeout=100)
def test_state_of_experts_is_cut_over_their_copies():
    for stage in (1, 2, 3):
        net = nn.Sequential(MoE(32, nn.Linear(32, 64), EXPERTS, 2), nn.Linear(32, 32))
        mine = [p for n, p in net.named_parameters() if "deepspeed_experts" in n]
        experts = 2 * sum(p.numel() for p in mine)
        place_experts(net)
        optimizer = ds_zero.shard(net, torch.optim.AdamW(net.parameters()), stage=stage)
        units = [unit for unit in optimizer.sharding.units if unit.spec.family.startswith("expert")]
        held = sum(unit.layout.shard_numel for unit in units)
        assert experts / 4 <= held <= 1.05 * experts / 4
        optimizer.close()


CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "gradient_clipping": 0.5,
}


def steps(engine: ds_engine.Engine, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = engine(batch(dist.get_rank(), step))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def built(ep_size: int, stage: int) -> ds_engine.Engine:
    return ds_engine.initialize(model=Net(ep_size), config=CONFIG | {"zero_optimization": {"stage": stage}})[0]


@world(2, timeout=100)
def test_a_checkpoint_of_one_degree_goes_on_at_another_degree_and_stage(tmp_path):
    straight = built(2, 2)
    steps(straight, 0, 2)
    straight.save_checkpoint(tmp_path, tag="t")
    wanted = steps(straight, 2, 4)
    straight.close()
    for ep_size, stage in ((1, 3), (2, 1), (2, 3)):
        engine = built(ep_size, stage)
        engine.load_checkpoint(tmp_path, tag="t")
        assert steps(engine, 2, 4) == pytest.approx(wanted, abs=1e-5)
        engine.close()


COMMON = {
    "vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 24, "moe_intermediate_size": 12, "max_position_embeddings": 32, "head_dim": 8,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
GROUPED = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
FAMILIES = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 20},
    "qwen3_moe": {"num_experts": 6, "norm_topk_prob": True},
    "olmoe": {"num_experts": 8},
    "deepseek_v2": LATENT | GROUPED | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
    "deepseek_v3": LATENT | GROUPED | {"routed_scaling_factor": 2.5},
    "gpt_oss": {"num_local_experts": 4},
}


def check_family(family: str) -> None:
    """Five steps at stages 2 and 3, experts over two ranks: transformers' own losses, gradients' norms and values."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, num_experts_per_tok=2, **COMMON | FAMILIES[family])
    rank = dist.get_rank()
    tokens = [torch.randint(0, 48, (2, 9), generator=torch.Generator().manual_seed(i)) for i in range(10)]

    def model() -> nn.Module:
        torch.manual_seed(1)
        return transformers.AutoModelForCausalLM.from_config(config)

    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    losses, norms = [], []
    for step in range(5):
        each = [own(input_ids=tokens[2 * step + r], labels=tokens[2 * step + r]).loss for r in range(2)]
        losses.append(float(each[rank].detach()))
        (sum(each) / 2).backward()
        norms.append(float(nn.utils.clip_grad_norm_(own.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    for stage, inside in ((2, False), (3, False), (3, True)):
        section = {
            "zero_optimization": {"stage": stage},
            "expert_parallel": {"enabled": True, "autoep_size": 2},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        }
        with ds_zero.Init(enabled=inside):
            net = model()
        engine, *_ = ds_engine.initialize(model=net, config=CONFIG | section)
        assert "experts" in str(engine.plan)
        for step in range(5):
            mine = tokens[2 * step + rank]
            loss = engine(input_ids=mine, labels=mine).loss
            assert float(loss.detach()) == pytest.approx(losses[step], abs=1e-5), f"{family} stage {stage} step {step}"
            engine.backward(loss)
            engine.step()
            assert engine.optimizer.last.norm == pytest.approx(norms[step], rel=1e-4)
        whole = engine.full_state_dict()
        for name, value in whole.items():
            torch.testing.assert_close(
                value, own.state_dict()[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
        assert rank or whole.keys() == own.state_dict().keys()
        engine.close()
        for (name, param), value in zip(net.named_parameters(), own.parameters(), strict=True):
            torch.testing.assert_close(param, value, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{family} {n}: {m}")


@world(2, timeout=110)
def test_an_engine_cuts_a_models_experts_and_gives_them_back():
    check_family("mixtral")


@pytest.mark.slow
@world(2, timeout=280)
def test_other_families():
    for family in sorted(FAMILIES.keys() - {"mixtral"}):
        check_family(family)


CUT_INSIDE = {
    "tensor_parallel": {
        "autotp_size": 2,
        "partition_config": {
            "layer_specs": [
                {"patterns": [r".*deepspeed_experts\.\d+\.up\.weight$"], "partition_type": "column"},
                {"patterns": [r".*deepspeed_experts\.\d+\.down\.weight$"], "partition_type": "row"},
            ]
        },
    }
}


@world(4, timeout=100)
def test_experts_by_number_and_inside_each_expert_at_every_stage(tmp_path):
    """2 tensor ranks x 2 expert ranks: one process's norms and losses; what is saved goes on without tensor ranks."""
    norms, wanted = dense(2, 2, False, clip=0.5)
    for stage in (0, 1, 2, 3):
        net = Net(2, rank=dist.get_rank() // 2)
        decayed = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}}  # torch's default, which `dense` has
        section = {"zero_optimization": {"stage": stage}, "optimizer": decayed}
        engine, *_ = ds_engine.initialize(model=net, config=CONFIG | CUT_INSIDE | section)
        assert net.moes[0].deepspeed_moe.how.compare  # the experts were cut: all rows go to both tensor ranks
        for step in range(3):
            loss = engine(batch(dist.get_rank() // 2, step))
            engine.backward(loss)
            engine.step()
            assert engine.optimizer.last.norm == pytest.approx(norms[step], rel=1e-4), f"stage {stage} step {step}"
        if stage == 2:
            engine.save_checkpoint(tmp_path, tag="t")
        engine.close()
    whole = built(4, 1)
    whole.load_checkpoint(tmp_path, tag="t")
    whole.close()
    for name, param in whole.module.named_parameters():
        expected = wanted[Net.logical(name, dist.get_rank(), 4)]
        torch.testing.assert_close(param.double(), expected, atol=2e-5, rtol=0)


class Summed(Net):
    """A rank without tokens has a loss of 0, not of 0 / 0; with `one`, one feature sends all tokens to experts 0 and 1."""

    def __init__(self, ep_size: int = 1, k: int = 2, drop: bool = False, rank: int | None = None, *, one: bool) -> None:
        super().__init__(ep_size, k, drop, rank)
        if one:
            with torch.no_grad():
                self.first.bias.copy_(torch.eye(WIDTH)[0] * 30)
                for moe in self.moes:
                    moe.deepspeed_moe.gate.wg.weight[:, 0] = torch.tensor([9.0, 6.0, -3.0, -6.0])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for moe in self.moes:
            x = x + moe(x)[0]
        return self.last(x).square().sum() / 10


def cut_inside(net: nn.Module, mesh: Mesh) -> TensorParallelModel:
    rules = (
        LayerRule(r".*deepspeed_experts\.\d+\.up", ShardKind.COLUMN, "test"),
        LayerRule(r".*deepspeed_experts\.\d+\.down", ShardKind.ROW, "test"),
    )
    plan = make_tensor_plan(facts_of(net), TensorOptions(mesh["tensor"].size, rules=rules))
    cut = parallelize_model(net, plan, mesh["tensor"])
    cut.assign(mesh["gradient"], mesh["gradient"].size)
    return cut


@world(4, timeout=100)
def test_gradients_of_parts_of_experts_equal_one_process():
    """Columns and rows over 2 ranks, experts over 1 or 2: uneven batches, a rank without tokens, experts that get all or nothing, drops."""
    mesh = Mesh.build(MeshSpec(data_shard=2, tensor=2))
    data = mesh["gradient"].rank
    cases = itertools.product(
        (1, 2), ((2, False, False, 13), (1, True, False, 10), (2, False, False, 0), (1, False, True, 7))
    )
    for ep_size, (k, drop, one, tokens) in cases:
        net = Summed(ep_size, k, drop, data % ep_size, one=one).double()
        whole = Summed(1, k, drop, 0, one=one).double()
        batches = [batch(0, 0, torch.float64), batch(1, 0, torch.float64)[:tokens]]
        cut = cut_inside(net, mesh)
        placed = place_experts(net, mesh)
        loss = net(batches[data])
        loss.backward()
        losses = [whole(x) for x in batches]
        (sum(losses) / 2).backward()
        torch.testing.assert_close(loss, losses[data], atol=1e-8, rtol=1e-9)
        wanted = {name: p.grad for name, p in whole.named_parameters()}
        parts = 0
        for name, param in net.named_parameters():
            said = ds_comm.param_sharding(param)
            if said.family.group.size > 1:
                dist.all_reduce(param.grad, group=said.family.group.pg)
            expected = wanted[said.name or name]
            if said.box is not None:
                assert said.family.copies == 1
                parts += param.numel() * 2 == expected.numel()
                for dim, (start, size) in enumerate(zip(said.box.offset, said.box.shape, strict=True)):
                    expected = expected.narrow(dim, start, size)
            else:
                assert said.family.copies == 2, name
            torch.testing.assert_close(param.grad / said.family.divisor, expected, atol=1e-8, rtol=1e-9)
        assert parts == 2 * 3 * EXPERTS // ep_size  # in each expert: weight and bias of columns, weight of rows
        placed.close()
        cut.undo()


@world(2)
def test_ranks_with_parts_of_experts_that_route_differently_are_an_error():
    mesh = Mesh.build(MeshSpec(tensor=2))
    net = Summed(one=False)
    cut = cut_inside(net, mesh)
    placed = place_experts(net, mesh)
    net(batch(0, 0))
    with torch.no_grad():
        net.moes[0].deepspeed_moe.gate.wg.weight.mul_(1 - 2 * dist.get_rank())
    with pytest.raises(CommError, match="moe-routing-differs"):
        net(batch(0, 0))
    placed.close()
    cut.undo()


@world(2, timeout=100)
def test_tensor_ranks_hold_other_experts(tmp_path):
    """2 experts' ranks in a tensor group of 2: one process's losses and norms; what is saved goes on without either."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("mixtral", num_experts_per_tok=2, **COMMON | FAMILIES["mixtral"])

    def model() -> nn.Module:
        torch.manual_seed(1)
        return transformers.AutoModelForCausalLM.from_config(config)

    own, tokens = model(), torch.randint(0, 48, (3, 2, 9), generator=torch.Generator().manual_seed(3))
    optimizer, sgd = torch.optim.SGD(own.parameters(), lr=0.1), {"type": "SGD", "params": {"lr": 0.1}}
    cut = {"tensor_parallel": {"autotp_size": 2}, "expert_parallel": {"enabled": True, "autoep_size": 2}}
    section = CONFIG | {"optimizer": sgd}
    engine, *_ = ds_engine.initialize(model=model(), config=section | cut | {"zero_optimization": {"stage": 2}})
    for step in tokens:
        wanted, loss = own(input_ids=step, labels=step).loss, engine(input_ids=step, labels=step).loss
        assert float(loss.detach()) == pytest.approx(float(wanted.detach()), abs=1e-5)
        wanted.backward()
        engine.backward(loss)
        norm = nn.utils.clip_grad_norm_(own.parameters(), 0.5)
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
        assert engine.optimizer.last.norm == pytest.approx(float(norm), rel=1e-4)
    engine.save_checkpoint(tmp_path, tag="t")
    engine.close()
    whole, *_ = ds_engine.initialize(model=model(), config=section | {"zero_optimization": {"stage": 1}})
    whole.load_checkpoint(tmp_path, tag="t")
    whole.close()
    for (name, param), value in zip(whole.module.named_parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(param, value, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@world(2)
def test_what_cannot_be_is_said_before_anything_is_built():
    with pytest.raises((PlanError, ConfigError), match="no block of experts"):
        ds_engine.initialize(
            model=nn.Linear(2, 2), config=CONFIG | {"expert_parallel": {"enabled": True, "autoep_size": 2}}
        )
    with pytest.raises(PlanError, match="mesh-expert"):
        ds_engine.initialize(
            model=nn.Linear(2, 2), config=CONFIG | {"expert_parallel": {"enabled": True, "autoep_size": 3}}
        )
