"""Tensor and sequence parallelism under upstream's names."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed._ours.communication.group_getters import share_layers, share_sequences
from torch import Tensor, nn
from torch.nn import functional

from ds_config.errors import PlanError, UnsupportedError, set_place
from ds_testing import world


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(functional.silu(gate) * up)


@world(2)
def test_gradients_are_clipped_by_one_norm_on_all_ranks() -> None:
    """Experts differ between data-parallel ranks; parts of a layer, and what is on each model-parallel rank, are one norm."""
    from deepspeed.runtime.utils import clip_grad_norm_, get_grad_norm

    import ds_comm

    rank = ds_comm.world_group().rank

    def parameters() -> list[nn.Parameter]:
        whole, part = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        whole.grad, part.grad = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0 * rank])
        part.model_parallel = True
        return [whole, part, nn.Parameter(torch.zeros(1))]

    params = parameters()
    norm = clip_grad_norm_(params, 1.0)
    expected = (2.0 + 13.0**0.5) / 2.0
    assert float(norm) == pytest.approx(expected)
    assert float(params[0].grad[0]) == pytest.approx(2.0 / expected, rel=1e-5)
    mpu = SimpleNamespace(
        get_model_parallel_group=lambda: ds_comm.world_group().pg,
        get_model_parallel_rank=lambda: rank,
        get_model_parallel_world_size=lambda: 2,
    )
    assert get_grad_norm(parameters(), mpu=mpu) == pytest.approx(13.0**0.5)
    assert get_grad_norm(parameters(), torch.inf, mpu) == 3.0
    assert float(clip_grad_norm_(parameters(), 1.0, mpu=mpu)) == pytest.approx(13.0**0.5)


@world(2)
def test_an_overflow_of_an_expert_or_a_part_is_known_on_every_rank_that_shares_it() -> None:
    from deepspeed.runtime.utils import CheckOverflow
    from deepspeed.utils import groups

    import ds_comm

    rank = ds_comm.world_group().rank
    groups._create_expert_and_data_parallel(2)
    dense, expert = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    dense.grad, expert.grad = torch.ones(1), torch.full((1,), float("inf") if rank else 1.0)
    assert CheckOverflow([[dense, expert]]).check() == bool(rank)
    assert CheckOverflow([[dense, expert]], zero_reduce_scatter=True).check()
    assert CheckOverflow([[dense]]).check_using_norm([-1.0 if rank else 1.0])
    expert.allreduce = False
    checker = CheckOverflow([[dense, expert]])
    assert checker.check()
    assert not checker.check([[dense]])
    assert checker.check_using_norm([float("inf") if rank else 1.0], reduce_overflow=False)


@world(2)
def test_attention_over_patches_and_images_in_text() -> None:
    from deepspeed.sequence.auto_sp import auto_wrap_model_for_sp
    from deepspeed.sequence.autosp_fusion import ModalityFusionSPAdapter, Qwen2VLFusionAdapter
    from deepspeed.sequence.autosp_vit import UlyssesSPViTAttention

    import ds_comm

    group = ds_comm.world_group()
    kind = type("SiglipAttention", (nn.Identity,), {})
    model = auto_wrap_model_for_sp(nn.ModuleList([kind(), type("LlamaAttention", (nn.Identity,), {})()]), group.pg)
    assert isinstance(model[0], UlyssesSPViTAttention)
    assert not model[0].has_cls_token
    assert not isinstance(model[1], UlyssesSPViTAttention)
    patches = torch.randn(1, 2 + group.rank, 4)
    torch.testing.assert_close(model[0](patches), patches)
    with pytest.raises(ValueError, match="no attention of a known class"):
        auto_wrap_model_for_sp(nn.Linear(2, 2), group.pg)
    text, ids = torch.zeros(1, 5, 4), torch.tensor([[7, 1, 1, 8, 1]])
    image = torch.full((1, 1, 4), 1.0 + group.rank)
    part = Qwen2VLFusionAdapter(nn.Identity(), group.pg, 7, 8)(image, text, ids)
    assert part[0, :, 0].tolist() == ([0.0, 1.0, 2.0] if group.rank == 0 else [0.0, 0.0, 0.0])
    with pytest.raises(NotImplementedError):
        ModalityFusionSPAdapter(nn.Identity(), group.pg)(image, text, ids)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.config = SimpleNamespace(model_type="phi3", to_dict=lambda: {})
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": Mlp()}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["mlp"](x)
        return x.square().mean()


CONFIG = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


@world(2)
def test_tp_model_init_and_whole_parameters() -> None:
    alone = Model()
    model = deepspeed.tp_model_init(Model(), tp_size=2, dtype=torch.float32)
    with pytest.raises(PlanError, match="autotp_size = 4"):
        deepspeed.initialize(model=model, config=CONFIG | {"tensor_parallel": {"autotp_size": 4}})
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(engine(x), alone(x))
    down = model.layers[0]["mlp"].down_proj.weight
    assert down.shape == (8, 6)
    from deepspeed.module_inject.layers import GatherReplacedLayerParams

    with GatherReplacedLayerParams([down], model, enabled=True):
        assert torch.equal(down, alone.layers[0]["mlp"].down_proj.weight)
    assert down.shape == (8, 6)
    from deepspeed.module_inject.layers import (
        LinearAllreduce,
        LinearLayer,
        SubParamLinearLayer,
        is_autotp_training_mode,
    )
    from deepspeed.utils import groups

    up = model.layers[0]["mlp"].gate_up_proj
    assert isinstance(up, SubParamLinearLayer)
    assert isinstance(up, LinearLayer)
    assert not isinstance(up, LinearAllreduce)
    assert isinstance(model.layers[0]["mlp"].down_proj, LinearAllreduce)
    assert is_autotp_training_mode()
    assert not isinstance(alone.layers[0]["mlp"].down_proj, LinearAllreduce)
    down.gather_params([down])
    assert torch.equal(down, alone.layers[0]["mlp"].down_proj.weight)
    down._tp_partition([down])
    assert down.shape == (8, 6)
    rank = torch.distributed.get_rank()
    assert groups.get_tensor_model_parallel_world_size() == 2
    assert groups.get_tensor_model_parallel_rank() == rank
    assert groups.get_data_parallel_world_size() == 1
    assert groups.get_tensor_model_parallel_src_rank() == 0
    torch.distributed.all_reduce(ranks := torch.tensor(1 + rank), group=groups.get_data_parallel_group())
    assert ranks == 1 + rank
    engine.close()
    assert groups.get_tensor_model_parallel_world_size() == 1
    with pytest.raises(UnsupportedError, match="checkpoint"):
        deepspeed.tp_model_init(Model(), 2, torch.float32, checkpoint="here")
    with pytest.raises(ValueError, match="Conflicting dtype"):
        deepspeed.initialize(
            model=deepspeed.tp_model_init(Model(), 2, torch.float16), config=CONFIG | {"bf16": {"enabled": True}}
        )
    with pytest.raises(ValueError, match="tp_group"):
        deepspeed.initialize(
            model=deepspeed.tp_model_init(Model(), 2, torch.float32, tp_group=torch.distributed.group.WORLD),
            config=CONFIG,
            mpu=SimpleNamespace(get_model_parallel_world_size=lambda: 2),
        )
    set_place("")


@world(2)
def test_every_model_parallel_rank_has_a_file_that_tells_the_shapes_of_its_parts(tmp_path: Any) -> None:
    from deepspeed.checkpoint import DeepSpeedCheckpoint

    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    specs = [
        {"patterns": ["0.weight"], "partition_type": "column"},
        {"patterns": ["2.weight"], "partition_type": "row"},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": specs}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.save_checkpoint(str(tmp_path), "t")
    for rank in range(2):
        states = torch.load(tmp_path / "t" / f"mp_rank_{rank:02d}_model_states.pt", weights_only=True)
        (shapes,) = states["param_shapes"]
        assert shapes == {"0.weight": (3, 4), "0.bias": (3,), "2.weight": (2, 3), "2.bias": (2,)}
        assert bool(states["module"]) == (rank == 0)
    degrees = DeepSpeedCheckpoint(str(tmp_path / "t")).original
    assert (degrees.tp_degree, degrees.pp_degree) == (2, 1)
    assert engine.load_checkpoint(str(tmp_path))[0] is not None
    engine.close()
    set_place("")


@world(2)
def test_tensor_parallel_ranks_with_different_batches() -> None:
    config = CONFIG | {"tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True}}
    engine, *_ = deepspeed.initialize(model=Model(), config=config)
    with pytest.raises(AssertionError) as error:
        engine(torch.full((2, 5, 8), float(torch.distributed.get_rank())))
    assert str(error.value) == (
        "Data inconsistency within the TP group. Please check the Dataloader implementation to ensure consistency."
    )
    engine.close()
    set_place("")


@pytest.mark.parametrize(
    "kind", ["LinearLayer", "GateUpPack_LinearLayer", "SubParamLinearLayer", "fused_LinearLayer", "conv_LinearLayer"]
)
@world(2)
def test_a_layer_that_a_program_cuts_by_columns(kind: str) -> None:
    from deepspeed.module_inject import layers

    plain, x = nn.Linear(5, 12), torch.randn(3, 5, generator=torch.Generator().manual_seed(2))
    for name, param in plain.named_parameters():
        torch.nn.init.normal_(param, generator=torch.Generator().manual_seed(len(name)))
    given = nn.Linear(5, 12)
    given.load_state_dict(plain.state_dict())
    if kind == "conv_LinearLayer":
        given.weight.data = given.weight.data.t().contiguous()
    told = {"shape": ((6, 4, 2), -1), "partition_dim": 0} if kind == "SubParamLinearLayer" else {}
    whole, want = [x.clone().requires_grad_() for _ in range(2)]
    layer = getattr(layers, kind)(given, torch.distributed.group.WORLD, gather_output=True, name="up", **told)
    assert layer.weight.shape == (6, 5)
    assert isinstance(layer, layers.LinearLayer)
    layer(whole).square().sum().backward()
    plain(want).square().sum().backward()
    torch.testing.assert_close(layer(x), plain(x))
    torch.testing.assert_close(whole.grad, want.grad)
    part, gradient = layer.weight.detach().clone(), layer.weight.grad
    with layers.GatherReplacedLayerParams([layer.weight, layer.bias], layer):
        assert torch.equal(layer.weight, plain.weight)
        assert torch.equal(layer.bias, plain.bias)
    assert torch.equal(layer.weight, part)
    layer.weight.data, layer.weight.grad = gradient, None
    layer.weight.gather_params([layer.weight])
    torch.testing.assert_close(layer.weight.data, plain.weight.grad)


@pytest.mark.parametrize("kind", ["LinearAllreduce", "LmHeadLinearAllreduce", "SubParamLinearAllreduce"])
@world(2)
def test_a_layer_that_a_program_cuts_by_rows(kind: str) -> None:
    from deepspeed.module_inject import layers

    torch.manual_seed(4)
    plain, x, rank = nn.Linear(12, 5), torch.randn(3, 12), torch.distributed.get_rank()
    given = nn.Linear(12, 5)
    given.load_state_dict(plain.state_dict())
    told = {"shape": (-1, (8, 4)), "partition_dim": 1} if kind == "SubParamLinearAllreduce" else {}
    layer = getattr(layers, kind)(given, torch.distributed.group.WORLD, **told)
    parts = [x[:, :8], x[:, 8:]] if told else [x]
    mine = x if kind == "LmHeadLinearAllreduce" else torch.cat([part.chunk(2, 1)[rank] for part in parts], 1)
    torch.testing.assert_close(layer(mine), plain(x))
    assert layer.weight.shape == (5, 6)
    assert layer.bias.shape == (5,)
    layer.gather_params([layer.weight, layer.bias])
    assert torch.equal(layer.weight, plain.weight)


@pytest.mark.parametrize("stage", [0, 2, 3])
@world(2)
def test_layers_that_a_program_cut_are_parts_of_the_model_that_is_trained(stage: int) -> None:
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, SubParamLinearLayer

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.LayerNorm(4))
    model, everyone = copy.deepcopy(plain), torch.distributed.group.WORLD
    model[0], model[2] = LinearLayer(model[0], everyone), LinearAllreduce(model[2], everyone)
    skip = {"use_default_specs": False, "layer_specs": [{"patterns": [".*"], "partition_type": "skip"}]}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.01, "torch_adam": True}},
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": 2, "partition_config": skip},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.01)
    for seed in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        loss = plain(x).exp().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        mine = engine(x).exp().mean()
        torch.testing.assert_close(mine, loss)
        engine.backward(mine)
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-4)
    state = engine._consolidated_16bit_state_dict() if stage < 3 else engine._zero3_consolidated_16bit_state_dict()
    if engine.global_rank == 0:
        torch.testing.assert_close(dict(state), dict(plain.state_dict()), rtol=1e-4, atol=1e-5)
    engine.destroy()
    fused = nn.Sequential(SubParamLinearLayer(nn.Linear(4, 8), everyone, shape=(2, -1), partition_dim=0))
    with pytest.raises(UnsupportedError, match="was cut before, in 2 parts"):
        deepspeed.initialize(model=fused, config=config)
    share_layers(None)


@world(2)
def test_rules_that_a_program_applies_itself() -> None:
    from deepspeed.module_inject.auto_tp import AutoTP, AutoTPConfig
    from deepspeed.module_inject.layers import (
        LinearAllreduce,
        SubParamLinearLayer,
        collect_autotp_universal_checkpoint_info,
    )
    from deepspeed.utils import groups

    data, tensor = groups._init_tp_mesh_device(tensor_model_parallel_size=2)
    assert (torch.distributed.get_world_size(data), torch.distributed.get_world_size(tensor)) == (1, 2)
    rules = {
        "layer_specs": [
            {"patterns": [r".*\.gate_up_proj\.weight$"], "partition_type": "column", "shape": [2, -1]},
            {"patterns": [r".*\.down_proj\.weight$"], "partition_type": "row"},
        ]
    }
    model, alone, x = Model(), Model(), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    auto = AutoTP(model, partition_config=AutoTPConfig.from_dict(rules))
    auto.set_tensor_parallel_config(2, tensor)
    auto.update_linear_policies()
    assert auto._replace_module(model) is model
    assert isinstance(model.layers[1]["mlp"].gate_up_proj, SubParamLinearLayer)
    assert isinstance(model.layers[1]["mlp"].down_proj, LinearAllreduce)
    torch.testing.assert_close(model(x), alone(x))
    told = collect_autotp_universal_checkpoint_info(model)
    assert r"^layers\.0\.mlp\.down_proj\.weight$" in told["parameter_with_row_parallelism_patterns"]
    assert r"^layers\.0\.mlp\.down_proj\.bias$" in told["tp_replicated_parameter_patterns"]
    assert AutoTP.tp_parser(Model()) == [(nn.ModuleDict, ["mlp.down_proj"])]
    itself = Model()
    found = AutoTP(itself)
    found.set_tensor_parallel_config(2, tensor)
    torch.testing.assert_close(found._replace_module(itself)(x), alone(x))
    share_layers(None)


@world(2)
def test_heads_that_ranks_do_not_divide_are_exchanged() -> None:
    from deepspeed._ours.parallel.tp_shards import set_num_kv_heads
    from deepspeed.sequence.layer import _SeqAllToAll

    rank, everyone = torch.distributed.get_rank(), torch.distributed.group.WORLD
    whole = torch.arange(2 * 6 * 3 * 2.0).view(2, 6, 3, 2)  # [batch, sequence, heads, width]
    try:
        for x, sequence in ((whole, 1), (whole.transpose(0, 1).contiguous(), 0)):
            mine = x.chunk(2, sequence)[rank].clone().requires_grad_()
            heads = _SeqAllToAll.apply(everyone, mine, 2, sequence, 1 - sequence)
            assert torch.equal(heads, x[:, :, :2] if rank == 0 else x[:, :, 2:])
            back = _SeqAllToAll.apply(everyone, heads, sequence, 2, 1 - sequence)
            assert torch.equal(back, mine)
            (back * mine.detach()).sum().backward()
            assert torch.equal(mine.grad, mine)
    finally:
        set_num_kv_heads(None)


@world(2)
def test_groups_are_those_of_an_engine_with_a_mesh_of_sequences() -> None:
    from deepspeed.utils import groups

    rank = torch.distributed.get_rank()
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=config, mesh_param=(1, 2))
    assert (groups._get_sequence_parallel_rank(), groups._get_sequence_parallel_world_size()) == (rank, 2)
    assert groups._get_sequence_parallel_group() is engine.seq_parallel_group
    assert (groups._get_data_parallel_rank(), groups._get_data_parallel_world_size()) == (0, 1)
    assert groups._get_sequence_data_parallel_world_size() == 2
    engine.destroy()
    assert groups._get_sequence_parallel_world_size() == 1
    assert groups._get_sequence_parallel_group() is None


@world(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_of_sequences_are_summed_where_ranks_have_one_loss(stage: int) -> None:
    """As Megatron does it: each rank has the loss of all tokens, and the gradient of its own. Upstream's own mpu: a loss each."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.sequence.cross_entropy import vocab_sequence_parallel_cross_entropy
    from deepspeed.utils import safe_get_full_grad

    rank, everyone = torch.distributed.get_rank(), torch.distributed.group.WORLD
    megatron = SimpleNamespace(
        get_sequence_parallel_world_size=lambda: 2,
        get_sequence_parallel_group=lambda: everyone,
        get_data_parallel_world_size=lambda: 1,
        get_tensor_model_parallel_world_size=lambda: 1,
    )
    x, labels = torch.randn(6, 1, 4, generator=torch.Generator().manual_seed(1)), torch.arange(6).view(6, 1) % 5
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    parallel_state_sp.initialize_sequence_parallel(2)
    try:
        for mpu in (megatron, parallel_state_sp):
            torch.manual_seed(0)
            model = nn.Linear(4, 5)
            alone = copy.deepcopy(model)
            functional.cross_entropy(alone(x).flatten(0, 1), labels.flatten()).backward()
            engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
            for boundary in (False, True):
                logits, own = engine(x.chunk(2)[rank]), labels.chunk(2)[rank]
                if mpu is megatron:
                    loss = vocab_sequence_parallel_cross_entropy(logits, own, everyone).mean()
                else:
                    loss = functional.cross_entropy(logits.flatten(0, 1), own.flatten())
                engine.backward(loss)
                if boundary:
                    torch.testing.assert_close(safe_get_full_grad(engine.module.weight), alone.weight.grad)
                engine.step()
            whole = nn.utils.get_total_norm([param.grad for param in alone.parameters()])
            assert float(engine.get_global_grad_norm()) == pytest.approx(float(whole))
            engine.destroy()
    finally:
        share_sequences(None)


@world(2)
def test_sequences_over_ranks() -> None:
    from deepspeed.runtime.sequence_parallel.parallel_state_sp import initialize_sequence_parallel
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
    from deepspeed.utils import groups

    assert groups._get_sequence_parallel_world_size() == 1
    initialize_sequence_parallel(2)
    try:
        group, rank = groups._get_sequence_parallel_group(), groups._get_sequence_parallel_rank()
        assert (groups._get_sequence_parallel_world_size(), groups._get_data_parallel_world_size()) == (2, 1)
        ids = torch.arange(4).view(1, 4) + 10 * rank
        adapter = UlyssesSPDataLoaderAdapter(
            [{"input_ids": ids, "labels": ids}], sp_rank=rank, sp_group=group, sp_world_size=2, device="cpu"
        )
        first, second = adapter
        assert first["shift_labels"].tolist() == [[[1, 2], [3, -100]][rank]]
        assert second["input_ids"].tolist() == [[[10, 11], [12, 13]][rank]]
        with pytest.raises(PlanError, match="sp_rank = 7"):
            UlyssesSPDataLoaderAdapter([], 7, group, 2, "cpu")
    finally:
        share_sequences(None)
    set_place("")


def test_tiles() -> None:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import SequenceTiledCompute, TiledFusedLogitsLoss, TiledMLP

    torch.manual_seed(0)
    mlp, x = Mlp(), torch.randn(1, 7, 8, requires_grad=True)
    found = TiledMLP.apply(lambda module, part: module(part), mlp, x, 3, list(mlp.parameters()))
    torch.testing.assert_close(found, mlp(x))
    head, labels = nn.Linear(8, 5), torch.tensor([[0, 1, -100, 4, -100, -100, 2]])

    def loss(module: Any, part: Tensor, wanted: Tensor) -> Tensor:
        return functional.cross_entropy(module(part).flatten(0, -2), wanted.flatten())

    whole = loss(head, x, labels)
    tiles = TiledFusedLogitsLoss.apply(loss, head, x, labels, None, 4, None, "mean")
    torch.testing.assert_close(tiles, whole)
    for a, b in zip(
        torch.autograd.grad(tiles * 3, [x, *head.parameters()]),
        torch.autograd.grad(whole * 3, [x, *head.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    summed = SequenceTiledCompute.apply(lambda x, y: (x * y).sum(), 7, 2, ["x"], ["y"], "x", None, 1, "sum", x, 2.0)
    torch.testing.assert_close(summed, (x * 2).sum())


@world(2)
def test_experts_that_were_replaced_by_hand_are_on_two_ranks():
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig

    def block() -> nn.Module:
        torch.manual_seed(0)
        one = nn.Module()
        one.gate, one.experts = nn.Linear(8, 4, bias=False), nn.ModuleList(nn.Module() for _ in range(4))
        for expert in one.experts:
            expert.gate_proj, expert.up_proj = (nn.Linear(8, 12, bias=False) for _ in range(2))
            expert.down_proj = nn.Linear(12, 8, bias=False)
        model = nn.ModuleDict({"mlp": one})
        model.config = SimpleNamespace(model_type="qwen3_moe", num_experts_per_tok=2, norm_topk_prob=True)
        return model

    rank, layers = deepspeed.comm.get_rank(), []
    for degree in (1, 2):
        model = block()
        found = AutoEP(model, AutoEPConfig(enabled=True, autoep_size=degree))
        found.replace_moe_layers(found.ep_parser(), degree, rank % degree)
        layers.append(model["mlp"])
    x = torch.randn(3 + rank, 8, generator=torch.Generator().manual_seed(rank))
    torch.testing.assert_close(layers[1](x), layers[0](x), atol=1e-6, rtol=1e-5)
    assert layers[1].experts.w1.shape[0] == layers[1].num_local_experts == 2
