"""Small modules: routes of tokens, names of parameters, layer drop, where state lies."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ds_config.errors import UnsupportedError
from ds_testing import world


def test_routes_are_what_masks_say():
    from deepspeed.moe.sharded_moe import _route_slots, _sparse_decode, _sparse_encode

    tokens, experts, capacity, width = 6, 3, 2, 4
    indices = [torch.tensor([0, 1, 0, 2, 0, -1]), torch.tensor([1, 2, 2, 0, -1, 1])]
    places = [torch.tensor([0, 0, 1, 0, 2, 0]), torch.tensor([1, 1, 2, 5, 0, 2])]  # 2 and more are beyond the capacity
    hidden, gates = torch.randn(tokens, width), [torch.rand(tokens), torch.rand(tokens)]
    mask = torch.zeros(2, tokens, experts, capacity)
    for choice, (index, place) in enumerate(zip(indices, places, strict=True)):
        for token in range(tokens):
            if index[token] >= 0 and place[token] < capacity:
                mask[choice, token, index[token], place[token]] = 1
    slots = _route_slots(indices, places, experts, capacity)
    want = torch.einsum("ksec,sm->ecm", mask, hidden)
    torch.testing.assert_close(_sparse_encode(hidden, slots, experts, capacity), want)
    out = torch.randn(experts * capacity, width)
    weighted = torch.einsum("ksec,ks->sec", mask, torch.stack(gates))
    want = torch.einsum("sec,ecm->sm", weighted, out.view(experts, capacity, width))
    torch.testing.assert_close(_sparse_decode(out, slots, gates, tokens), want)


def test_names_of_parameters(capsys):
    from deepspeed.utils import debug

    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    assert debug.debug_param2name(model[0].bias) == "unknown"
    debug.debug_extract_module_and_param_names(model)
    assert debug.debug_module2name_class(model[0]) == "name=0 Linear"
    assert debug.debug_param2name_id_shape(model[0].weight) == "name=0.weight id=None shape=(3, 2)"
    debug.debug_clear_module_and_param_names()
    assert debug.debug_module2name(model[1]) == "unknown"
    debug.print_rank0("silent")
    debug.print_rank0("told", force=True)
    assert capsys.readouterr().out == "[rank 0] told\n"


def test_layers_are_dropped_as_the_paper_says():
    from deepspeed.runtime.progressive_layer_drop import ProgressiveLayerDrop

    drop = ProgressiveLayerDrop(0.4, 0.01)
    drop.update_state(30)
    assert drop.get_state() == {"progressive_layer_drop": True, "pld_theta": 0.6 * math.exp(-0.3) + 0.4}


@world(2)
def test_each_rank_gets_its_part_of_averages() -> None:
    from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced

    rank = torch.distributed.get_rank()
    given = [rank * torch.arange(6.0), rank * torch.arange(6.0, 9.0), torch.ones(1) * rank]
    found = reduce_scatter_coalesced(given, torch.distributed.group.WORLD)
    want = [torch.arange(6.0), torch.arange(6.0, 9.0), torch.ones(1)]
    for mine, whole in zip(found, want, strict=True):
        cuts = -(-whole.numel() // 2)
        assert torch.equal(mine, whole[rank * cuts : rank * cuts + cuts] / 2)


@world(2)
def test_where_state_lies() -> None:
    import deepspeed
    from deepspeed._ours.communication.group_getters import share_layers
    from deepspeed.moe.mappings import drop_tokens, gather_tokens
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
    from deepspeed.runtime.zero.offload_states import get_state_devices
    from deepspeed.utils import groups

    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
    engine, *_ = deepspeed.initialize(model=nn.Linear(3, 2), config=config)
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    for kind in ("lp_params", "hp_params", "optim_states", "lp_grads"):
        assert get_state_devices(engine, OffloadStateTypeEnum(kind)) == {torch.device("cpu")}
    engine.destroy()
    x = torch.arange(8.0).view(4, 2)
    assert drop_tokens(x) is x
    groups._init_tp_mesh_device(2)
    part = drop_tokens(x)
    assert torch.equal(part, x.chunk(2)[torch.distributed.get_rank()])
    assert torch.equal(gather_tokens(part), x)
    share_layers(None)


@pytest.mark.parametrize(
    ("name", "offload", "kind"), [("AdamW", "none", "FusedAdam"), ("Adam", "cpu", "DeepSpeedCPUAdam")]
)
def test_an_engine_answers_what_programs_ask_of_its_optimizer_and_profile(name, offload, kind):
    import deepspeed
    import deepspeed.ops.adam as adam

    config = {
        "train_batch_size": 1, "optimizer": {"type": name, "params": {"lr": 0.1, "adam_w_mode": True}},
        "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": offload}},
        "flops_profiler": {"enabled": True, "profile_step": 1},
    }  # fmt: skip
    engine, optimizer, *_ = deepspeed.initialize(model=nn.Linear(3, 2), config=config)
    assert isinstance(optimizer.optimizer, getattr(adam, kind))
    assert optimizer.optimizer.adam_w_mode is True
    told = optimizer.loss_scaler
    assert (told.dynamic, told.cur_scale, told.scale_window, told.cur_iter) == (True, 16.0, 2, 0)
    for bad in (False, True):
        x = torch.full((1, 3), float("inf") if bad else 1.0, dtype=torch.half)
        engine.backward(engine(x).float().sum())
        engine.step()
    assert (optimizer.loss_scale_config.cur_scale, told.cur_iter, told.last_overflow_iter) == (8.0, 2, 1)
    assert (engine.flops_profiler.flops, engine.flops_profiler.params) == (2 * 3 * 2, 8)
    optimizer.override_loss_scale(4.0)
    for bad in (False, True, False):
        x = torch.full((1, 3), float("inf") if bad else 1.0, dtype=torch.half)
        before = engine.module.weight.detach().clone()
        engine.backward(engine(x).float().sum())
        engine.step()
        assert optimizer.overflow == bad == torch.equal(engine.module.weight, before)
        assert optimizer.loss_scale == optimizer.external_loss_scale == 4.0
    assert optimizer.quantize_nontrainable_params() is None
    assert optimizer.persistent_parameters == []
    engine.destroy()


def test_an_engine_gives_its_times_and_writes_the_file_of_a_model_alone(tmp_path):
    import deepspeed

    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "wall_clock_breakdown": True}
    engine, *_ = deepspeed.initialize(model=nn.Linear(3, 2), config=config)
    assert engine.get_wall_clock_timers() == {}
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    times = engine.get_wall_clock_timers()
    names = {"fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"}
    assert set(times) == names | {f"{name}_microstep" for name in names}
    assert times["fwd"] > 0
    assert engine._create_checkpoint_file(str(tmp_path), "7", False)
    engine._save_checkpoint(str(tmp_path), "7", client_state={"iteration": 7})
    assert [path.name for path in tmp_path.rglob("*.pt")] == ["mp_rank_00_model_states.pt"]
    saved = torch.load(tmp_path / "7" / "mp_rank_00_model_states.pt")
    assert torch.equal(saved["module"]["weight"], engine.module.weight)
    assert saved["iteration"] == 7
    (tmp_path / "file").touch()
    assert not engine._create_checkpoint_file(str(tmp_path / "file"), "7", False)
    engine.destroy()


def test_an_untested_optimizer_is_refused_where_the_configuration_insists():
    import deepspeed

    class Mine(torch.optim.SGD):
        pass

    model = nn.Linear(3, 2)
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": False}
    with pytest.raises(AssertionError, match="zero_allow_untested_optimizer"):
        deepspeed.initialize(model=model, optimizer=Mine(model.parameters(), lr=0.1), config=config)


class Elsewhere:
    """The host's memory, taken for a device's."""

    facts = SimpleNamespace(torch_type="elsewhere")

    def __init__(self, host):
        self._host = host

    def holds(self, tensor):
        return True

    def new_stream(self):
        return None

    current_stream = new_stream

    def __getattr__(self, name):
        return getattr(self._host, name)


def test_marked_inputs_of_checkpointed_calls_leave_and_come_back(monkeypatch):
    """On a device whose memory is not the host's; on the host a marked tensor stays."""
    from deepspeed.runtime.activation_checkpointing import offload_activations
    from torch.utils.checkpoint import checkpoint

    def run(offload):
        x = torch.arange(6.0, requires_grad=True)
        kept = x * 1
        with offload:
            for _ in range(3):
                offload.mark(kept)
                kept = checkpoint(lambda t: t.sin() * t, kept, use_reentrant=False)
            kept.sum().backward()
        return x.grad, offload.stats

    make = offload_activations.get_checkpoint_hidden_states_offloading_ctx_manager
    expected, stats = run(make(min_offload_bytes=0))
    assert (stats.marked_tensors, stats.skipped_marked_tensors, stats.offloaded_tensors) == (3, 3, 0)
    away = make(min_offload_bytes=0, keep_last_count=1)
    monkeypatch.setattr(away._keeper, "_accelerator", Elsewhere(away._keeper.accelerator))
    found, stats = run(away)
    assert torch.equal(found, expected)
    assert (stats.offloaded_tensors, stats.restored_tensors, stats.kept_last_tensors) == (2, 2, 1)
    assert stats.offloaded_bytes == stats.restored_bytes == 2 * 24
    with pytest.raises(ValueError, match="keep_last_count"):
        make(keep_last_count=-1)


@pytest.mark.parametrize("settings", [{}, {"zero_optimization": {"stage": 1}}, {"bf16": {"enabled": True}}])
def test_without_zero_in_fp32_the_optimizer_says_it_is_the_one_that_was_given(settings):
    import deepspeed
    from deepspeed._ours.zero.zero_optimizer import DeepSpeedZeroOptimizer
    from deepspeed.ops.adam import FusedAdam

    def begin(**given):
        model = torch.nn.Linear(4, 4)
        if callable(given.get("optimizer")):
            given["optimizer"] = given["optimizer"](model.parameters())
        config = {"train_batch_size": 1, "zero_allow_untested_optimizer": True, **settings, **given.pop("config", {})}
        engine, made, *_ = deepspeed.initialize(model=model, config=config, **given)
        x = torch.ones(1, 4, dtype=next(model.parameters()).dtype)
        engine.backward(engine(x).float().square().sum())
        engine.step()
        torch.optim.lr_scheduler.StepLR(made, 1).step()
        assert isinstance(made, DeepSpeedZeroOptimizer)
        assert len({made, made}) == 1
        engine.destroy()
        return given.get("optimizer"), made

    theirs, made = begin(optimizer=lambda params: torch.optim.Adagrad(params, lr=0.1))
    assert (made == theirs, theirs == made, isinstance(made, torch.optim.Adagrad)) == (not settings,) * 3
    assert not isinstance(made, FusedAdam)
    _, made = begin(config={"optimizer": {"type": "Adam", "params": {"lr": 0.1}}})
    assert isinstance(made, FusedAdam) is (not settings)


def test_at_stage_0_the_loss_scale_falls_at_every_overflow():
    import deepspeed

    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "fp16": {"enabled": True, "initial_scale_power": 4}}
    engine, optimizer, *_ = deepspeed.initialize(model=nn.Linear(3, 2), config=config)
    engine.backward(engine(torch.full((1, 3), float("inf"), dtype=torch.half)).float().sum())
    engine.step()
    assert optimizer.loss_scale_config.cur_scale == 8.0
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_loss_scale_that_a_program_sets_goes_on_from_there(stage):
    import deepspeed

    def trained(scales):
        torch.manual_seed(0)
        config = {
            "train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1},
            "zero_optimization": {"stage": stage},
        }
        engine, optimizer, *_ = deepspeed.initialize(model=nn.Linear(3, 2), config=config)
        for scale in scales:
            if scale is not None:
                optimizer.cur_scale = scale
            engine.backward(engine(torch.ones(1, 3, dtype=torch.half)).float().square().sum())
            with pytest.raises(ValueError, match=r"loss_scale = 3 after \d backwards"):
                optimizer.loss_scale = 3
            engine.step()
        weight = deepspeed.utils.safe_get_full_fp32_param(engine.module.weight)
        found = (optimizer.loss_scale, optimizer.dynamic_loss_scale)
        engine.destroy()
        return weight, found

    plain, scaled = trained([None] * 4), trained([64.0, None, 8, None])
    torch.testing.assert_close(plain[0], scaled[0])
    assert scaled[1] == (16.0, True)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_losses_and_states_that_are_none_are_refused(stage):
    import deepspeed

    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=nn.Linear(3, 2), config=config)
    out = engine(torch.ones(1, 3))
    for loss, words in ((out, r"shape \(1, 2\)"), (out.detach().sum(), "depends on no parameter"), (None, "NoneType")):
        with pytest.raises(AssertionError, match=words) as caught:
            engine.backward(loss)
        assert caught.value.code == "loss-missing"
    if stage:
        with pytest.raises(ValueError, match=r"offload_states\(include=...\) of \['adam'\]"):
            engine.offload_states(include=["adam"])
    with pytest.raises(ValueError, match="has 6 elements on this rank, the value to set 3"):
        deepspeed.utils.safe_set_local_fp32_param(engine.module.weight, torch.ones(3))
    engine.destroy()


def test_norms_before_a_step_and_decorators_of_autocast():
    import deepspeed
    from deepspeed.runtime.zero.linear import autocast_custom_bwd, autocast_custom_fwd

    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 3}}
    engine, optimizer, *_ = deepspeed.initialize(model=nn.Linear(3, 2), config=config)
    assert not hasattr(optimizer, "bit16_groups_flat")
    assert (optimizer.averaged_gradients, optimizer.grad_partitions_flat_buffer.numel()) == ({}, 0)
    engine.backward(engine(torch.ones(1, 3)).square().sum())
    norm = torch.stack(optimizer._get_norm_groups()).norm()
    flat = torch.cat([grad.flatten() for grad in optimizer.averaged_gradients[0]])
    torch.testing.assert_close((flat.norm(), optimizer.grad_partitions_flat_buffer.norm()), (norm, norm))
    engine.step()
    torch.testing.assert_close(float(norm), float(engine.get_global_grad_norm()))
    assert autocast_custom_fwd.func is torch.amp.custom_fwd
    assert autocast_custom_bwd.keywords == {"device_type": engine.device.type}
    engine.destroy()


@pytest.mark.parametrize("device", ["cpu", "none"])
def test_gradients_of_each_group_and_the_tensors_of_parameters(device):
    import deepspeed

    zero = {"stage": 2, "offload_optimizer": {"device": device}}
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": zero}
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.1}]
    engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    assert sum(flat.numel() for flat in optimizer.bit16_groups_flat) >= 8
    for parts, state in zip(
        optimizer.parallel_partitioned_bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True
    ):
        assert parts[0].data_ptr() % (2 * optimizer.nccl_start_alignment_factor) == 0
        torch.testing.assert_close(parts[0].float(), state)
    engine.backward(engine(torch.ones(1, 3)).sum())
    found = {number: [grad.numel() for grad in grads] for number, grads in optimizer.averaged_gradients.items()}
    assert found == ({0: [6], 1: [2]} if device == "none" else {})
    assert hasattr(optimizer, "accumulated_grads_in_cpu") is (device == "cpu")
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_state_is_found_by_the_flat_weights_and_gradients_are_flat_too(stage):
    import deepspeed

    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    config |= {"optimizer": {"type": "Adam"}, "gradient_clipping": 0.0}
    engine, optimizer, *_ = deepspeed.initialize(model=nn.Linear(3, 2), config=config)
    engine.backward(engine(torch.ones(1, 3, dtype=torch.bfloat16)).sum())
    assert hasattr(optimizer, "fp32_groups_gradients_flat") is (stage == 1)
    if stage == 1:
        (flat,) = optimizer.fp32_groups_gradients_flat
        assert (flat.dtype, flat.tolist()) == (torch.float32, [1.0] * 8)
    engine.step()
    for flat in optimizer.fp32_partitioned_groups_flat:
        assert optimizer.optimizer.state[flat]["step"] == 1
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_not_trained_has_no_fp32_copy(stage):
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
    from deepspeed.utils.tensor_fragment import safe_get_local_fp32_param, safe_get_local_optimizer_state

    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.backward(engine(torch.ones(1, 3)).sum())
    for read in (safe_get_full_fp32_param, safe_get_local_fp32_param, safe_get_full_grad):
        assert read(model.weight) is not None
        assert read(model.bias) is None
    engine.step()
    for state in (safe_get_full_optimizer_state, safe_get_local_optimizer_state):
        assert state(model.weight, "exp_avg") is not None
        assert state(model.bias, "exp_avg") is None
    engine.destroy()


class _WithLogits(nn.Module):
    """Returns a loss and what it is made of, as models of transformers do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        logits = self.head(x)
        return {"loss": logits.square().mean(), "logits": logits}


@pytest.mark.parametrize("ways", ["pp", "ss", "ep", "pe", "pn", "oo"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_backward_that_the_engine_does_not_start_is_one_microbatch(stage, ways):
    """p: plain, s: of a scaled loss, e: the engine's, n: the engine's without the division, o: of an output by its gradient."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    config = {
        "train_batch_size": 6, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0, "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }  # fmt: skip
    alone = _WithLogits()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1, weight_decay=0.0)
    engine, *_ = deepspeed.initialize(model=_WithLogits(), config=config)
    generator = torch.Generator().manual_seed(2)
    for way in ways * 3:
        x = torch.randn(3, 4, generator=generator)
        (alone(x)["loss"] / (1 if way == "n" else 2)).backward()
        outputs = engine(x)
        if way == "o":
            outputs["logits"].backward(2 / 3 * outputs["logits"].detach())
        elif way == "p":
            (outputs["loss"] if ways == "pp" else outputs["logits"].square().mean()).backward()
        elif way == "s":
            engine.scale(outputs["loss"]).backward()
        else:
            engine.backward(outputs["loss"], scale_wrt_gas=way == "e")
        if engine.is_gradient_accumulation_boundary():
            for param, other in zip(engine.module.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(safe_get_full_grad(param), other.grad)
            optimizer.step()
            optimizer.zero_grad()
        engine.step()
    with deepspeed.zero.GatheredParameters(engine.module):
        for param, other in zip(engine.module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(param, other)
    engine.destroy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_as_codes_come_back_in_their_format(dtype):
    from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

    quantizer, values = CUDAQuantizer(), torch.linspace(-3.0, 3.0, 16_016, dtype=dtype).view(2, -1)
    codes, scale = quantizer.quantize(values)
    assert (codes.dtype, codes.shape, scale.numel()) == (torch.int8, values.shape, 7)
    back = quantizer.dequantize(codes, scale, dtype=dtype)
    assert back.dtype == dtype
    torch.testing.assert_close(back, values, atol=0.02, rtol=0.01)


@pytest.mark.parametrize(
    ("section", "code", "words"),
    [
        ({"zero_optimization": {"stage": 3, "max_live_parameters": 1.5}}, "config-value", "zero_optimization.max_live_parameters"),
        ({"fp16": {"enabled": True, "initial_scale_power": 2**31}}, "config-value", "fp16.initial_scale_power"),
        ({"train_batch_size": 2**62}, "program-size", "takes at most"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_meant_are_refused_by_name(section, code, words):
    import deepspeed

    with pytest.raises(ValueError, match=words) as caught:
        deepspeed.initialize(model=nn.Linear(3, 2), config={"train_micro_batch_size_per_gpu": 1, **section})
    assert caught.value.code == code


@pytest.mark.parametrize("model", [None, "gpt2", nn.Linear, len])
def test_what_is_no_module_is_refused(model):
    import deepspeed

    with pytest.raises(AssertionError) as caught:
        deepspeed.initialize(model=model, config={"train_batch_size": 1})
    assert caught.value.code == "engine-no-model"


@world(1)
def test_what_programs_ask_of_deepspeed_zero() -> None:
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    assert deepspeed.zero.partition_parameters.ZeroParamStatus is ZeroParamStatus
    assert not hasattr(deepspeed.zero, "nothing")
    layer = nn.Linear(2, 2, bias=False)
    with deepspeed.zero.GatheredParameters(layer.bias, modifier_rank=0), pytest.raises(RuntimeError, match="'disk'"):
        deepspeed.zero.Init(remote_device="disk")
    for device in (None, "none", "cpu", "nvme", "cuda:0"):
        with deepspeed.zero.Init(remote_device=device, enabled=False):
            pass


def test_ranks_are_not_told_before_there_is_a_world(monkeypatch):
    import deepspeed
    from deepspeed.comm.utils import get_world_rank_from_launcher, get_world_size_from_launcher

    deepspeed.comm.destroy_process_group()  # of a test before this one
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    for call in (deepspeed.comm.get_rank, deepspeed.comm.get_world_size, deepspeed.comm.get_all_ranks_from_group):
        with pytest.raises(AssertionError, match="rank 1 of 2"):
            call()
    assert (get_world_rank_from_launcher(), get_world_size_from_launcher()) == (1, 2)
    with deepspeed.zero.Init(enabled=False):
        nn.Linear(2, 2)


def test_a_path_that_is_no_text_is_taken():
    import deepspeed

    config = {"train_batch_size": 1, "csv_monitor": {"job_name": "\udcff"}}
    deepspeed.initialize(model=nn.Linear(3, 2), config=config)


def _coded_config(bits: int, dim: int) -> dict:
    return {"num_bits": bits, "group_size": 8, "group_dim": dim, "symmetric": False}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_codes_of_groups(bits, dim):
    from deepspeed.inference.quantization.utils import DeQuantizer, Quantizer

    values = torch.randn(16, 24)
    values[:8, 0] = values[0, :8] = 3.0  # a group of one number
    codes, scale, least = Quantizer(_coded_config(bits, dim)).quantize(values)
    assert codes.dtype is torch.uint8
    assert codes.shape == (16, 24 * bits // 8)
    back = DeQuantizer(_coded_config(bits, dim), torch.float32).dequantize(codes, scale, least)
    step = (1 / scale).expand(values.unflatten(dim, (-1, 8)).shape).flatten(dim, dim + 1)
    assert ((back - values).abs() <= step / 2 + 1e-6).all()
    with pytest.raises(AssertionError, match="group_size = 8"):
        Quantizer(_coded_config(bits, dim)).quantize(values[:7, :7])


@pytest.mark.parametrize("initially", [False, True])
@world(1)
def test_a_model_that_only_answers_has_codes(initially):
    import deepspeed
    from deepspeed.inference.quantization.layers import QuantizedEmbedding, QuantizedLinear
    from deepspeed.inference.quantization.quantization import _init_group_wise_weight_quantization

    how = _coded_config(8, 1)
    codes = {"quantized_initialization": how} if initially else {"post_init_quant": {"0": how, "1": how, "2": how}}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "weight_quantization": codes}
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16), nn.Linear(16, 16, bias=False))
        model[2].weight = model[0].weight
    ids = torch.arange(4)
    want = model(ids)
    if not initially:
        assert _init_group_wise_weight_quantization(model, config) is model
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert [type(layer) for layer in engine.module] == [QuantizedEmbedding, QuantizedLinear, QuantizedLinear]
    assert engine.module[0].codes is engine.module[2].codes
    torch.testing.assert_close(engine(ids), want, atol=0.05, rtol=0.05)
    with pytest.raises(AssertionError, match="post_init_quant"):
        _init_group_wise_weight_quantization(nn.Linear(2, 2), {})


@world(1)
def test_gradients_of_stage_0_stay_in_the_format_of_the_weights():
    import deepspeed

    model = nn.Linear(4, 2)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    before = model.weight.detach().clone()
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
        assert model.weight.grad is not None
        assert model.weight.grad.dtype is torch.bfloat16
        model.weight.grad.mul_(0.5)  # a loop that clips by itself
        engine.step()
    torch.testing.assert_close((before - model.weight).float(), torch.full((2, 4), 0.375), atol=0.01, rtol=0)
    assert model.weight.grad is None


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("sums", [None, "bf16", "fp32"])
@world(1)
def test_updates_below_the_last_bit_of_a_bf16_weight_add_up(stage, sums):
    import deepspeed

    model = nn.Linear(4, 4, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)  # a bf16 near 1 is a multiple of 1/256
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "data_types": {"grad_accum_dtype": sums},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(20):
        engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
        engine.step()
    with deepspeed.zero.GatheredParameters(model.weight):
        torch.testing.assert_close(model.weight.float(), torch.full((4, 4), 0.98), atol=2e-3, rtol=0)


@pytest.mark.parametrize("stage", range(4))
@world(1)
def test_parameters_of_the_optimizer_in_no_module_of_the_model(stage, tmp_path):
    import deepspeed

    def start():
        torch.manual_seed(0)
        model, temperature = nn.Linear(4, 2), nn.Parameter(torch.zeros(()))
        config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
        params = [*model.parameters(), temperature]
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.Adam(params, lr=1e-2), config=config)
        return engine, temperature

    def train(engine, temperature):
        for step in range(2):
            y = engine(torch.full((2, 4), 1.0 + step, dtype=torch.bfloat16)).float()
            engine.backward((y * temperature.exp()).square().mean())
            engine.step()
        return temperature.item(), engine.get_global_grad_norm()

    engine, temperature = start()
    assert temperature.dtype is torch.float32, "what the model's casting does not reach"
    train(engine, temperature)
    assert temperature.item() == pytest.approx(-0.02, abs=5e-4)
    engine.save_checkpoint(tmp_path)
    assert list(engine._consolidated_16bit_state_dict()) == ["weight", "bias"]
    expected = train(engine, temperature)
    engine.destroy()
    engine, temperature = start()
    engine.load_checkpoint(tmp_path)
    assert train(engine, temperature) == expected
    engine.destroy()


def test_a_schedule_of_what_is_no_optimizer():
    from deepspeed.runtime.lr_schedules import OneCycle, WarmupLR

    for made in (lambda: WarmupLR(3), lambda: OneCycle(nn.Linear(1, 1), 0.1, 0.2)):
        with pytest.raises(TypeError, match=r"no torch\.optim\.Optimizer"):
            made()


def test_a_method_that_nothing_would_call_is_told(monkeypatch, caplog):
    from deepspeed import DeepSpeedEngine

    monkeypatch.setattr("deepspeed.utils.logger.propagate", True)
    monkeypatch.setattr(DeepSpeedEngine, "step", DeepSpeedEngine.step)
    assert not caplog.messages
    monkeypatch.setattr(DeepSpeedEngine, "clip_fp32_gradients", lambda self: None, raising=False)
    assert "DeepSpeedEngine.clip_fp32_gradients is set from outside" in caplog.text


def test_a_schedule_of_a_programs_own_is_told(monkeypatch, caplog):
    from deepspeed.runtime.pipe.schedule import InferenceSchedule, TrainSchedule

    class Mine(TrainSchedule):
        def steps(self):
            yield []

    monkeypatch.setattr("deepspeed.utils.logger.propagate", True)
    assert list(Mine(2, 2, 0)) == [[]]
    assert len(list(InferenceSchedule(2, 1, 0))) == 2
    assert not caplog.messages
    monkeypatch.setattr(TrainSchedule, "steps", Mine.steps)
    assert "TrainSchedule.steps is set from outside: engines run ds-pipe's schedules" in caplog.text


@pytest.mark.parametrize("options", [{}, {"static_loss_scale": 128.0, "clip_grad": 1.0}])
def test_an_optimizer_of_deepspeeds_is_made_with_its_engine(options):
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

    for kind in (FP16_Optimizer, BF16_Optimizer):
        with pytest.raises(UnsupportedError, match=r"around Adam: .*is made with the engine") as info:
            kind(torch.optim.Adam(nn.Linear(1, 1).parameters()), **options)
        assert isinstance(info.value, TypeError)


def test_lines_of_rank_0_are_printed_when_asked_for(capsys):
    from deepspeed.runtime.zero.partition_parameters import print_rank_0

    print_rank_0("quiet")
    print_rank_0("loud", force=True)
    assert capsys.readouterr().out == "loud\n"
