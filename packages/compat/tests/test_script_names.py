"""Names and attributes that scripts for DeepSpeed expect: groups of experts, losses of cut sequences, what an engine tells."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from ds_config.errors import UnsupportedError
from ds_testing import world

ADAM = {"type": "Adam", "params": {"lr": 1e-2}}


class Routed(nn.Module):
    """A layer, experts on `ep_size` ranks, and experts that every rank has."""

    def __init__(self, ep_size: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.first = nn.Linear(4, 4)
        self.moe = MoE(4, nn.Linear(4, 4), 4, ep_size=ep_size, drop_tokens=False, use_rts=False)
        self.everywhere = MoE(4, nn.Linear(4, 4), 2, drop_tokens=False, use_rts=False)

    def forward(self, x):
        return self.everywhere(self.moe(self.first(x))[0])[0].square().mean()


# ---- groups of experts


@world(2)
def test_groups_of_experts_are_those_of_the_layers() -> None:
    import deepspeed
    from deepspeed.utils import groups
    from deepspeed.utils.groups import _get_expert_data_parallel_group, _get_expert_parallel_group, _get_max_expert_size

    dist, rank = torch.distributed, torch.distributed.get_rank()
    with pytest.raises(AssertionError, match=r"_get_expert_parallel_group\('ep_size_2'\).*no layer"):
        _get_expert_parallel_group("ep_size_2")
    assert _get_max_expert_size() is None
    config = {"train_batch_size": 2, "optimizer": ADAM, "zero_optimization": {"stage": 1}}
    engine, *_ = deepspeed.initialize(model=Routed(2), config=config)
    assert _get_expert_parallel_group("ep_size_2") is engine.module.moe.deepspeed_moe.places.expert.pg
    assert dist.get_process_group_ranks(_get_expert_parallel_group("ep_size_2")) == [0, 1]
    assert dist.get_process_group_ranks(_get_expert_data_parallel_group("ep_size_2")) == [rank]
    assert dist.get_process_group_ranks(_get_expert_parallel_group("ep_size_1")) == [rank]
    assert dist.get_process_group_ranks(_get_expert_data_parallel_group("ep_size_1")) == [0, 1]
    assert (_get_max_expert_size(), groups._get_max_expert_size_name()) == (2, "ep_size_2")
    assert groups._get_max_expert_parallel_group() is _get_expert_parallel_group("ep_size_2")
    assert (groups._get_expert_parallel_rank("ep_size_2"), groups._get_expert_parallel_world_size("ep_size_2")) == (
        rank,
        2,
    )
    assert groups._get_expert_data_parallel_rank("ep_size_1") == rank
    assert groups._get_expert_data_parallel_world_size("ep_size_2") == 1
    assert groups._get_expert_parallel_group_ranks("ep_size_2") == [0, 1]
    assert groups._get_expert_data_parallel_group_ranks("ep_size_2") == [rank]
    assert groups._get_expert_broadcast_src_rank("ep_size_1") == groups._get_broadcast_src_rank() == 0
    assert (
        sorted(engine.expert_parallel_group) == sorted(engine.expert_data_parallel_group) == ["ep_size_1", "ep_size_2"]
    )
    assert engine.num_experts == [4, 2]
    assert [len(engine.moe_layers), len(engine.gate_modules)] == [2, 2]
    with pytest.raises(AssertionError, match=r"ep_size_4.*ep_size_1 and ep_size_2"):
        _get_expert_data_parallel_group("ep_size_4")
    engine.backward(engine(torch.ones(1, 4)))
    engine.step()
    engine.destroy()
    with pytest.raises(AssertionError):
        _get_expert_parallel_group("ep_size_2")
    groups._create_expert_and_data_parallel(2)
    assert groups._get_expert_parallel_world_size("ep_size_2") == 2


# ---- losses of cut sequences


@world(2)
def test_the_loss_of_a_cut_sequence_is_that_of_the_whole() -> None:
    from deepspeed.sequence.cross_entropy import vocab_sequence_parallel_cross_entropy

    rank, generator = torch.distributed.get_rank(), torch.Generator().manual_seed(3)
    logits = torch.randn(6, 2, 11, generator=generator)  # [sequence, batch, vocabulary]
    labels = torch.randint(11, (6, 2), generator=generator)
    labels[4, 1] = -100
    weights = torch.randn(6, 2, generator=generator)
    whole = logits.clone().requires_grad_()
    want = functional.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="none").view(6, 2)
    (want * weights).sum().backward()
    part = logits.chunk(2)[rank].clone().requires_grad_()
    loss = vocab_sequence_parallel_cross_entropy(part, labels.chunk(2)[rank], torch.distributed.group.WORLD)
    (loss * weights).sum().backward()
    assert torch.equal(loss, want)
    assert torch.equal(part.grad, whole.grad.chunk(2)[rank])
    mine = vocab_sequence_parallel_cross_entropy(
        part, labels.chunk(2)[rank], torch.distributed.group.WORLD, gather_sequence_loss=False
    )
    assert torch.equal(mine, want.chunk(2)[rank])


@world(2)
def test_the_mean_loss_of_a_cut_sequence_counts_every_token_once() -> None:
    from deepspeed.sequence import cross_entropy

    sequence, generator = torch.distributed.group.WORLD, torch.Generator().manual_seed(3)
    rank, logits = sequence.rank(), torch.randn(6, 2, 11, generator=generator)
    labels = torch.randint(11, (6, 2), generator=generator)
    labels[4:, 1] = -100
    whole, labels_here = logits.clone().requires_grad_(), labels.chunk(2)[rank]
    want = functional.cross_entropy(whole.flatten(0, 1), labels.flatten())
    want.backward()
    part = logits.chunk(2)[rank].clone().requires_grad_()
    loss = cross_entropy.VocabParallelCrossEntropyLoss(sp_group=sequence)(part, labels_here)
    loss.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(part.grad, whole.grad.chunk(2)[rank])
    summed = cross_entropy.vocab_parallel_cross_entropy(part, labels_here, sp_group=sequence, reduction="sum")
    torch.testing.assert_close(summed, want * 10)
    every = cross_entropy.vocab_parallel_cross_entropy(
        part, labels_here, None, sequence, reduction="none", gather_sequence_loss=True
    )
    assert every.shape == (6, 2)
    torch.testing.assert_close(every.sum(), summed)


@world(2)
def test_the_loss_of_a_cut_vocabulary_is_that_of_the_whole() -> None:
    from deepspeed.sequence.cross_entropy import vocab_sequence_parallel_cross_entropy

    rank, generator = torch.distributed.get_rank(), torch.Generator().manual_seed(3)
    logits, labels = torch.randn(6, 2, 12, generator=generator), torch.randint(12, (6, 2), generator=generator)
    whole = logits.clone().requires_grad_()
    want = functional.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="none").view(6, 2)
    want.sum().backward()
    part = logits.chunk(2, -1)[rank].clone().requires_grad_()
    loss = vocab_sequence_parallel_cross_entropy(part, labels, None, torch.distributed.group.WORLD)
    loss.sum().backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(part.grad, whole.grad.chunk(2, -1)[rank])
    with pytest.raises(ValueError, match="reduction='mean'"):
        vocab_sequence_parallel_cross_entropy(part, labels, None, reduction="mean")


# ---- what an engine tells


class Dropping(nn.Linear):
    thetas: list[float]

    def forward(self, x, progressive_layer_drop=False, pld_theta=None):
        assert progressive_layer_drop
        self.thetas.append(pld_theta)
        return super().forward(x)


def test_the_share_of_layers_is_told():
    import deepspeed

    model = Dropping(2, 2)
    model.thetas = []
    config = {
        "train_batch_size": 1, "optimizer": ADAM, "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.1},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, config=config)
    drop = engine.progressive_layer_drop
    assert drop.get_theta() == 1.0
    for step in range(3):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        assert engine.get_pld_theta() == drop.get_theta() == model.thetas[-1] == 0.5 * math.exp(-0.1 * step) + 0.5
    assert drop.get_state() == {"progressive_layer_drop": True, "pld_theta": model.thetas[-1]}
    assert (engine.pld_theta(), engine.pld_gamma()) == (0.5, 0.1)
    engine.destroy()


def test_an_engine_tells_what_its_configuration_says():
    import deepspeed

    config = {
        "train_batch_size": 1, "optimizer": ADAM, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "flops_profiler": {"profile_step": 7, "top_modules": 3}, "checkpoint": {"tag_validation": "Fail"},
    }  # fmt: skip
    model = nn.Linear(2, 2)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert engine.losses is engine.progressive_layer_drop is engine.get_pld_theta() is None
    assert (engine.seq_dp_world_size, engine.sequence_parallel_size, engine.pipeline_parallelism) == (1, 1, False)
    assert engine.seq_data_parallel_group.size() == 1
    assert engine.param_names == {model.weight: "weight", model.bias: "bias"}
    assert engine.get_data_types() == (torch.bfloat16, torch.bfloat16)
    assert engine.zero_cpu_offload()
    assert engine.zero_use_cpu_optimizer()
    assert not engine.zero_quantized_weights()
    assert engine.zero_allgather_partitions()
    assert (engine.flops_profiler_profile_step(), engine.flops_profiler_top_modules()) == (7, 3)
    assert engine.checkpoint_tag_validation_enabled()
    assert engine.checkpoint_tag_validation_fail()
    assert not engine.inside_no_sync_ctxt
    assert engine.gradient_average
    engine.destroy()


# ---- memory, tensors, modules


def test_memory_is_told(caplog, capsys):
    from deepspeed.runtime.utils import get_ma_status, memory_status

    with caplog.at_level(logging.INFO, logger="DeepSpeed"):
        memory_status("before the step")
        memory_status("of another rank", print_rank=3)
        memory_status("after", reset_max=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "before the step" in lines[0]
    assert "GiB" in lines[1]
    assert get_ma_status() > 0


def test_small_helpers():
    from deepspeed.compression.helper import recursive_getattr, recursive_setattr
    from deepspeed.constants import CROSS_RANK, CROSS_SIZE
    from deepspeed.runtime import utils
    from deepspeed.runtime.zero.partition_parameters import zero3_linear_wrap

    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU())
    new = nn.Linear(2, 3)
    recursive_setattr(model, "0.0", new)
    assert recursive_getattr(model, "0.0") is model[0][0] is new
    assert (CROSS_RANK, CROSS_SIZE) == ("CROSS_RANK", "CROSS_SIZE")
    assert torch.equal(zero3_linear_wrap(torch.ones(1, 2), new.weight, new.bias), new(torch.ones(1, 2)))
    assert utils.get_only_unique_item([3, 3, 3]) == 3
    with pytest.raises(RuntimeError, match=r"\[1, 2\]"):
        utils.get_only_unique_item([1, 2])
    assert utils.get_tensor_bytes([torch.ones(3), {"a": (torch.ones(2, dtype=torch.int64),)}, "text"]) == 28
    assert utils.has_inf_or_nan(torch.tensor([1.0, math.nan]))
    assert not utils.has_inf_or_nan(torch.ones(2))
    first = {"a": [torch.ones(2), 3]}
    assert utils.compare_tensors_in_structures(first, copy.deepcopy(first))
    assert not utils.compare_tensors_in_structures(first, {"a": [torch.zeros(2), 3]})
    assert not utils.compare_tensors_in_structures(first, {"b": [torch.ones(2), 3]})
    with utils.noop_context():
        pass


# ---- parameters that another module uses


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return functional.linear(self.outer(self.inner(x)), self.inner.weight).sum()


def test_external_parameters_are_listed():
    import deepspeed

    model = Tied()
    with pytest.raises(RuntimeError, match="Tensor"):
        deepspeed.zero.register_external_parameter(model, torch.ones(1))
    with pytest.raises(RuntimeError, match="was not registered"):
        deepspeed.zero.unregister_external_parameter(model, model.inner.weight)
    deepspeed.zero.register_external_parameter(model, model.inner.weight)
    assert [param for _, param in model.ds_external_parameters()] == [model.inner.weight]
    pickle.loads(pickle.dumps(model))
    deepspeed.zero.unregister_external_parameter(model, model.inner.weight)
    assert list(model.ds_external_parameters()) == []
    deepspeed.zero.register_external_parameter(model, model.inner.weight)
    config = {"train_batch_size": 1, "optimizer": ADAM, "zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert [param for _, param in engine.module.ds_external_parameters()] == [model.inner.weight]
    assert list(model.inner.ds_external_parameters()) == []
    assert [p for _, p in engine.optimizer.parameter_offload.module.ds_external_parameters()] == [model.inner.weight]
    engine.backward(engine(torch.ones(1, 3)))
    engine.step()
    engine.destroy()
    assert not hasattr(model.inner, "ds_external_parameters")


# ---- torch's fused Adam


@pytest.mark.parametrize("stage", [0, 2])
def test_adam_of_torch_may_be_fused(stage):
    import deepspeed

    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    twin = copy.deepcopy(model)
    section = {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True, "fused": True, "adam_w_mode": False}}
    config = {
        "train_batch_size": 1,
        "optimizer": section,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert type(engine.basic_optimizer) is torch.optim.Adam
    assert engine.basic_optimizer.defaults["fused"] is True
    alone = torch.optim.Adam(twin.parameters(), lr=1e-2, fused=True)
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 3)).square().sum())
        engine.step()
        twin(torch.ones(1, 3)).square().sum().backward()
        alone.step()
        alone.zero_grad()
    torch.testing.assert_close(model.weight, twin.weight, rtol=0, atol=1e-7)
    engine.destroy()


# ---- inference of what no kernel knows


def test_bert_runs_where_kernels_were_to_be_injected():
    transformers = pytest.importorskip("transformers")
    import deepspeed

    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 40,
    }
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).eval()
    ids = torch.randint(40, (2, 7))
    want = model(ids).logits
    with pytest.warns(UserWarning, match=r"2 BertLayer .*BertForMaskedLM"):
        engine = deepspeed.init_inference(model, replace_with_kernel_inject=True, dtype=torch.float32)
    assert torch.equal(engine(ids).logits, want)


# ---- heads that hold a part of the vocabulary


@world(2)
def test_a_causal_loss_of_a_cut_vocabulary_is_that_of_the_whole() -> None:
    from deepspeed.sequence import VocabParallelCausalLMLoss

    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    logits = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(3))
    labels = torch.randint(12, (2, 5), generator=torch.Generator().manual_seed(4))
    labels[0, 3] = -100
    want = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    loss = VocabParallelCausalLMLoss(tp_group=group)
    part = logits.chunk(2, -1)[rank]
    torch.testing.assert_close(loss(part, labels, vocab_size=12), want / 7)
    torch.testing.assert_close(loss(part, labels, num_items_in_batch=torch.tensor(14)), want / 14)
    torch.testing.assert_close(loss(part[:, :-1], shift_labels=labels[:, 1:]), want / 7)
    widths = (8, 4)
    cut = VocabParallelCausalLMLoss(group, None, 8 * rank, 8 + 4 * rank)
    torch.testing.assert_close(cut(logits.split(widths, -1)[rank], labels), want / 7)
    with pytest.raises(ValueError, match="shift_labels"):
        loss(part)


def test_a_loss_is_set_where_a_model_takes_it():
    from deepspeed.sequence.cross_entropy import (
        VocabParallelCausalLMLoss,
        configure_vocab_parallel_loss,
        validate_vocab_parallel_loss,
    )

    class Fixed(nn.Module):
        @property
        def loss_function(self):
            return len

    head, model = SimpleNamespace(mp_group=None, vocab_start_index=0, vocab_end_index=3), nn.Linear(2, 3)
    with pytest.raises(ValueError, match="Linear has no loss_function"):
        configure_vocab_parallel_loss(model, head)
    model.loss_function = first = nn.CrossEntropyLoss()
    validate_vocab_parallel_loss(model)
    assert model.loss_function is first
    assert configure_vocab_parallel_loss(model, head, ignore_index=7) is model
    assert isinstance(model.loss_function, VocabParallelCausalLMLoss)
    assert (model.loss_function.ignore_index, model.loss_function.vocab_end_index) == (7, 3)
    assert model._deepspeed_original_loss_function is first
    fixed = Fixed()
    with pytest.raises(ValueError, match="cannot be set"):
        validate_vocab_parallel_loss(fixed)
    assert fixed.loss_function is len


# ---- what an engine was given, and its section of tuning


def test_an_engine_tells_what_it_was_given(tmp_path):
    import deepspeed
    from deepspeed.runtime.engine import autocast_if_enabled

    model, data = nn.Linear(2, 2), [torch.ones(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {
        "train_batch_size": 1, "aio": {"queue_depth": 3}, "fp16": {"enabled": True, "initial_scale_power": 5, "hysteresis": 4},
        "autotuning": {"enabled": False, "metric": "flops", "metric_path": str(tmp_path / "m.json")},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, training_data=data, collate_fn=torch.stack, config=config
    )
    assert engine.client_optimizer is optimizer
    assert engine.client_lr_scheduler is None
    assert engine.training_data is data
    assert engine.collate_fn is torch.stack
    assert engine.enable_backward_allreduce
    assert (engine.aio_config()["queue_depth"], engine.aio_config()["block_size"]) == (3, 1 << 20)
    assert engine.dynamic_loss_scale_args() == {
        "init_scale": 32, "scale_window": 1000, "delayed_shift": 4, "consecutive_hysteresis": False, "min_scale": 1,
    }  # fmt: skip
    assert (engine.autotuning_start_profile_step(), engine.autotuning_end_profile_step()) == (3, 5)
    assert (engine.autotuning_metric(), engine.autotuning_metric_path()) == ("flops", str(tmp_path / "m.json"))
    assert engine.autotuning_model_info_path().endswith("autotuning_model_info.json")
    assert engine.autotuning_profile_model_info() is False
    with autocast_if_enabled(engine):
        assert not torch.is_autocast_enabled("cpu")
    engine.timers("mine").start()
    engine.timers("mine").stop()
    assert engine.timers("mine").elapsed() > 0
    assert isinstance(engine.timers("mine"), deepspeed.utils.timer.SynchronizedWallClockTimer.Timer)
    with pytest.raises(AttributeError, match="swap_tensor_config is not here"):
        engine.swap_tensor_config()
    engine.destroy()


@world(2)
def test_neighbours_keep_what_was_gathered() -> None:
    import deepspeed
    from deepspeed._ours.communication.group_getters import share_layers
    from deepspeed.utils import groups

    rank = torch.distributed.get_rank()
    assert groups._get_zero_param_intra_parallel_group() is None
    assert groups._get_zero_param_intra_parallel_group_world_size() == 2
    assert groups.expert_tensor_parallel_world_size == groups._get_expert_model_parallel_world_size() == 1
    section = {"stage": 3, "zero_hpz_partition_size": 2}
    config = {"train_batch_size": 2, "optimizer": ADAM, "zero_optimization": section}
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=config)
    group = groups._get_zero_param_intra_parallel_group()
    assert torch.distributed.get_process_group_ranks(group) == groups._get_zero_param_intra_parallel_group_ranks()
    assert groups._get_zero_param_intra_parallel_group_ranks() == [0, 1]
    assert groups._get_zero_param_intra_parallel_rank_in_mygroup() == rank
    engine.destroy()
    assert groups._get_zero_param_intra_parallel_group() is None
    groups._init_tp_mesh_device(2)
    assert groups.expert_tensor_parallel_world_size == deepspeed.utils.expert_tensor_parallel_world_size == 1
    groups._create_expert_data_and_model_parallel(2, None)
    assert groups._get_expert_parallel_group_ranks("ep_size_2") == [0, 1]
    apart = SimpleNamespace(get_model_parallel_world_size=lambda: 2)
    with pytest.raises(UnsupportedError, match="mp_size=2"):
        groups._create_expert_data_and_model_parallel(2, apart)
    share_layers(None)


@world(2)
def test_the_backend_is_the_module() -> None:
    from datetime import timedelta

    import deepspeed.comm as dist
    from deepspeed import utils

    backend = dist.TorchBackend("gloo", timedelta(seconds=60), None)
    assert (backend.initialized, backend.get_world_size()) == (True, 2)
    value = torch.ones(2)
    backend.all_reduce(value)
    assert value.tolist() == [2, 2]
    parts = torch.empty(4)
    dist.TorchBackend.get_all_gather_function()(parts, value)
    assert parts.tolist() == [2] * 4
    assert dist.TorchBackend.get_reduce_scatter_function() is torch.distributed.reduce_scatter_tensor
    assert not hasattr(backend, "os")
    assert utils.is_initialized()


# ---- classes by name


def test_small_classes(tmp_path, capsys):
    from deepspeed.checkpoint import get_layer_ckpt_name_for_rank
    from deepspeed.inference.config import DtypeEnum
    from deepspeed.inference.v2.ragged import DSStateManagerConfig
    from deepspeed.ops.adam.multi_tensor_apply import MultiTensorApply
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.utils.logging import print_dist
    from deepspeed.utils.tensor_fragment import fragment_address
    from deepspeed.utils.zero_to_fp32 import get_model_state_files

    assert DtypeEnum.from_str("half").value[0] is torch.float16
    with pytest.raises(ValueError, match="'fp4' is no format"):
        DtypeEnum.from_str("fp4")
    assert DSStateManagerConfig(max_ragged_batch_size=9).max_ragged_batch_size == 9
    assert MultiTensorApply(5)(lambda *args: args, None, [[]], 1) == (5, None, [[]], 1)
    assert OpBuilder.is_rocm_pytorch() is bool(torch.version.hip)
    print_dist("hello", ranks=[0])
    print_dist("other", ranks=[3])
    assert capsys.readouterr().out == "[Rank 0] hello\n"
    with torch.serialization.safe_globals([fragment_address]):
        torch.save(fragment_address(3, 4), tmp_path / "mp_rank_00_model_states.pt")
        assert torch.load(tmp_path / "mp_rank_00_model_states.pt") == fragment_address(numel=3, start=4)
    assert get_model_state_files(str(tmp_path)) == [str(tmp_path / "mp_rank_00_model_states.pt")]
    assert get_layer_ckpt_name_for_rank("f", "layer_03", 1).endswith("layer_03-model_01-model_states.pt")
    with pytest.raises(AttributeError, match=r"PipelineEngine\._INSTRUCTION_MAP is not here: (?s:.*)zb-h1"):
        PipelineEngine._INSTRUCTION_MAP.update({})


def test_a_policy_names_a_family_that_is_found_anyway():
    transformers = pytest.importorskip("transformers")
    import deepspeed
    from deepspeed.module_inject.replace_policy import HFGPT2LayerPolicy, replace_policies

    block = transformers.models.gpt2.modeling_gpt2.GPT2Block
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=32)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(40, (1, 7))
    want = model(ids).logits
    engine = deepspeed.init_inference(
        model, dtype=torch.float32, injection_policy={block: HFGPT2LayerPolicy}, replace_with_kernel_inject=True
    )
    torch.testing.assert_close(engine(ids).logits, want, rtol=1e-4, atol=1e-4)
    assert HFGPT2LayerPolicy in replace_policies
    assert deepspeed.module_inject.HFBertLayerPolicy in replace_policies
    with pytest.raises(UnsupportedError, match=r"HFGPT2LayerPolicy\(\.\.\.\)"):
        HFGPT2LayerPolicy(block)


def test_names_that_the_script_in_deepspeeds_checkpoints_imports() -> None:
    """Each folder has the `zero_to_fp32.py` of the DeepSpeed that wrote it, and is kept for longer than the installation."""
    from deepspeed.checkpoint.constants import (
        AUTOEP_LAYERS_KEY,
        AUTOEP_LAYERS_KEY_LEGACY,
        AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY,
        AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT,
        BUFFER_NAMES,
        DS_VERSION,
        FP32_FLAT_GROUPS,
        FROZEN_PARAM_FRAGMENTS,
        FROZEN_PARAM_SHAPES,
        OPTIMIZER_STATE_DICT,
        PARAM_ALIGNMENT_PADDINGS,
        PARAM_SHAPES,
        PARTITION_COUNT,
        SINGLE_PARTITION_OF_FP32_GROUPS,
        ZERO_STAGE,
    )

    names = (
        AUTOEP_LAYERS_KEY, AUTOEP_LAYERS_KEY_LEGACY, AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY, BUFFER_NAMES, DS_VERSION,
        FP32_FLAT_GROUPS, FROZEN_PARAM_FRAGMENTS, FROZEN_PARAM_SHAPES, OPTIMIZER_STATE_DICT, PARAM_SHAPES, PARTITION_COUNT,
        SINGLE_PARTITION_OF_FP32_GROUPS, ZERO_STAGE, PARAM_ALIGNMENT_PADDINGS, AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT,
    )  # fmt: skip
    assert len(set(names)) == len(names)
    assert names[-2:] == ("param_alignment_paddings", "zero3_partitioned")
