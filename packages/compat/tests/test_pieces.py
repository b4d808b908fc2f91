"""Optimizers, schedules, tools, timers, random states, accelerator, folders: each adapter against what it adapts."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed._ours.checkpoint.checkpoint_api import leave_signs, name_of_tag
from deepspeed._ours.training_engine import activation_checkpointing_api
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.utils import move_to_device, partition_balanced, partition_uniform
from deepspeed.runtime.zero.muon.original_muon import muon_update
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer, trim_mean
from torch import nn

import ds_ckpt
from ds_comm import self_group
from ds_config.errors import CheckpointError, ConfigError, PlanError, UnsupportedError

# ---- optimizers and schedules


@pytest.mark.parametrize("shape", [(6, 4), (3, 8), (6, 2, 2, 3)])
@pytest.mark.parametrize("method", ["gram", "standard"])
def test_the_direction_of_muon_is_the_steps_of_its_optimizer(shape, method):
    from ds_ops.optim import Muon

    torch.manual_seed(1)
    grad, param = torch.randn(shape), nn.Parameter(torch.randn(shape))
    before = param.detach().clone()
    param.grad = grad.clone()
    Muon([param], lr=0.1, momentum=0.9, weight_decay=0.0, ns_method=method).step()
    update = muon_update(grad.clone(), torch.zeros(shape), beta=0.9, ns_method=method)
    torch.testing.assert_close(param.detach(), before - 0.1 * update.view(shape), rtol=1e-4, atol=1e-5)


def test_a_schedule_shows_its_parameters_and_takes_an_unknown_shape_for_log():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    odd = lr_schedules.WarmupCosineLR(optimizer, total_num_steps=100, warmup_num_steps=10, warmup_type="odd")
    assert (odd.warmup_type, odd.warmup_num_steps, odd.get_lr_ratio()) == ("log", 10, 0.0)
    warmup = lr_schedules.WarmupLR(optimizer, warmup_min_lr=0.01, warmup_max_lr=[0.05])
    assert (warmup.min_lrs, warmup.max_lrs, warmup.delta_lrs) == ([0.01], [0.05], [pytest.approx(0.04)])
    assert lr_schedules.WarmupDecayLR(optimizer, total_num_steps=100).max_lrs == [0.001]
    cycle = lr_schedules.OneCycle(
        optimizer, cycle_min_lr=[0.001], cycle_max_lr=0.1, cycle_first_step_size=30, cycle_second_step_size=10
    )
    assert (cycle.min_lrs, cycle.max_lrs, cycle.step_ratio) == ([0.001], [0.1], 0.75)
    with pytest.raises(AttributeError):
        _ = cycle.warmup_type
    with pytest.raises(ValueError, match="cycle_min_lr"):
        lr_schedules.OneCycle(optimizer, cycle_min_lr=[0.1, 0.2], cycle_max_lr=1.0)


def test_a_part_of_a_model_is_stepped_by_number_and_taken_back():
    torch.manual_seed(3)
    start, grads = torch.randn(7), torch.randn(3, 7)
    param, plain = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours, theirs = DeepSpeedCPUAdam([param], lr=0.01), torch.optim.AdamW([plain], lr=0.01, weight_decay=0.0)
    kept = []
    for grad in grads:
        kept.append(param.detach().clone())
        param.grad, plain.grad = grad.clone(), grad.clone()
        ours.step_subgroup(4)
        theirs.step()
    torch.testing.assert_close(param, plain)
    assert ours.state[4]["step"] == 3
    for grad, before in zip(grads.flip(0), reversed(kept), strict=True):
        param.grad = grad.clone()
        ours.rollback_subgroup(4)
        torch.testing.assert_close(param.detach(), before, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="step count is 0"):
        ours.rollback_subgroup(4)
    with pytest.raises(RuntimeError, match="sub_group_id 5"):
        ours.rollback_subgroup(5)


def test_several_gradients_are_no_one_part():
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(ConfigError, match=r"\(2,\), \(3,\)"):
        DeepSpeedCPUAdam(params).step_subgroup(0)


def test_a_group_that_is_said_to_exist_and_does_not():
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    with pytest.raises(AssertionError, match="dist_init_required"):
        deepspeed.init_distributed(dist_init_required=False)


@pytest.mark.parametrize(
    ("given", "variables", "deadline_s"),
    [
        (None, {}, None),
        (timedelta(minutes=30), {}, 1800.0),
        (None, {"DEEPSPEED_TIMEOUT": "20"}, 1200.0),
        (timedelta(minutes=30), {"DS_COMM_DEADLINE_S": "15"}, None),
    ],
)
def test_ranks_may_wait_as_long_as_the_timeout_says(monkeypatch, given, variables, deadline_s):
    """A rank that prepares data for two minutes was taken for one that hangs, on CPUs after 60 s."""
    for name in ("DEEPSPEED_TIMEOUT", "DS_COMM_DEADLINE_S"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    told = {}
    monkeypatch.setattr("ds_comm.init_distributed", lambda backend, **options: told.update(options))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    deepspeed.init_distributed("gloo", timeout=given)
    assert told["deadline_s"] == deadline_s


def stepped(kind, **options):
    torch.manual_seed(3)
    param = nn.Parameter(torch.randn(7))
    optimizer = kind([param], **options)
    for _ in range(3):
        param.grad = param.detach() * 0.5 + 0.1
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            lambda p: DeepSpeedCPUAdam(p, lr=0.01, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
        ),
        (
            lambda p: FusedAdam(p, lr=0.01, weight_decay=0.1, adam_w_mode=False),
            lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
        ),
        (lambda p: DeepSpeedCPUAdagrad(p, lr=0.01), lambda p: torch.optim.Adagrad(p, 0.01)),
    ],
    ids=["adamw", "adam", "adagrad"],
)
def test_optimizers_are_torchs(ours, theirs):
    assert torch.allclose(stepped(ours), stepped(theirs), atol=1e-6)


@pytest.mark.parametrize("kind", [DeepSpeedCPULion, FusedLion, FusedLamb])
def test_other_optimizers_step(kind):
    assert not torch.equal(stepped(kind, lr=0.01), stepped(kind, lr=0.02))


def test_group_dicts_stay_the_same_objects():
    param = nn.Parameter(torch.zeros(2))
    groups = torch.optim.AdamW([param], lr=0.1).param_groups
    optimizer = DeepSpeedCPUAdam(groups, lr=0.1, adamw_mode=True)
    assert optimizer.param_groups[0] is groups[0]
    groups[0]["lr"] = 0.5
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_states_in_the_parameters_format():
    param = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = DeepSpeedCPUAdam([param], fp32_optimizer_states=False)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "make",
    [
        lambda p: DeepSpeedCPUAdam(p, amsgrad=True),
        lambda p: FusedAdam(p, amsgrad=True),
        lambda p: FusedAdam(p, set_grad_none=False),
        lambda p: FusedLion(p, set_grad_none=False),
        lambda p: FusedLamb(p, amsgrad=True),
    ],
)
def test_what_an_optimizer_cannot_is_refused(make):
    with pytest.raises(UnsupportedError):
        make([nn.Parameter(torch.zeros(1))])


def test_schedules_attach_to_an_optimizer():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = lr_schedules.WarmupLR(
        optimizer, warmup_min_lr=0.0, warmup_max_lr=0.1, warmup_num_steps=4, warmup_type="linear"
    )
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(5):
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.0, 0.0, 0.025, 0.05, 0.075, 0.1])
    assert schedule.get_last_lr() == [rates[-1]]
    assert set(lr_schedules.VALID_LR_SCHEDULES) == {
        "LRRangeTest",
        "OneCycle",
        "WarmupLR",
        "WarmupDecayLR",
        "WarmupCosineLR",
    }
    with pytest.raises(ValueError, match="warmup_num_steps"):
        lr_schedules.WarmupLR(optimizer, warmup_num_steps=-1)
    resumed = lr_schedules.WarmupLR(
        optimizer, warmup_max_lr=0.1, warmup_num_steps=4, warmup_type="linear", last_batch_iteration=2
    )
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert resumed.optimizer is optimizer


# ---- tools


@pytest.fixture
def logger():
    """DeepSpeed's, with its level as it was before."""
    logger = deepspeed.utils.logger
    before = logger.level
    yield logger
    logger.setLevel(before)


def test_logger_and_log_dist(caplog, monkeypatch, logger):
    assert isinstance(logger, logging.Logger)
    assert logger.name == "DeepSpeed"
    assert deepspeed.utils.logging.logger is logger
    monkeypatch.setattr(logger, "propagate", True)
    logger.setLevel(logging.INFO)  # not by its attribute: a logger remembers what its level let pass
    deepspeed.log_dist("all", ranks=[-1])
    deepspeed.log_dist("zero", ranks=[0])
    deepspeed.log_dist("other", ranks=[5])
    deepspeed.utils.set_log_level_from_string("error")
    assert logger.level == logging.ERROR
    assert list(dict.fromkeys(m.split("] ")[1] for m in caplog.messages)) == ["all", "zero"]
    with pytest.raises(ValueError, match="loud"):
        deepspeed.utils.set_log_level_from_string("loud")


def test_moving_nested_data():
    item = {"a": [torch.ones(1), 3], "b": (torch.zeros(2, dtype=torch.int64), "x")}
    moved = move_to_device(item, "meta", lambda t: t.is_floating_point())
    assert moved["a"][0].is_meta
    assert not moved["b"][0].is_meta
    assert moved["a"][1] == 3
    assert moved["b"][1] == "x"


def test_cutting_lists():
    assert partition_uniform(10, 3) == [0, 4, 7, 10]
    assert partition_balanced([1, 1, 1, 5, 1, 1], 3) in ([0, 3, 4, 6], [0, 2, 4, 6], [0, 3, 5, 6])
    assert partition_balanced([4, 1, 1], 2) == [0, 1, 3]
    assert partition_balanced([1, 2, 1], 4) == partition_uniform(3, 4) == [0, 1, 2, 3, 3]


def test_repeating_loader():
    loader = deepspeed.utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert len(loader) == 2


def test_on_device_makes_nothing_and_restores():
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        made = nn.Linear(3, 3)
    assert made.weight.is_meta
    assert made.weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32
    assert not nn.Linear(2, 2).weight.is_meta


def test_leaf_modules():
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Sequential(nn.Linear(1, 1)))
    assert deepspeed.utils.set_z3_leaf_modules(model, [nn.Linear]) == [model[0], model[2][0]]
    assert deepspeed.utils.get_z3_leaf_modules(model) == [model[0], model[2][0]]
    deepspeed.utils.unset_z3_leaf_modules(model, [nn.Linear])
    assert deepspeed.utils.get_z3_leaf_modules(model) == []
    assert deepspeed.utils.set_z3_leaf_modules_by_name(model, ["2"]) == ([model[2]], [])
    assert deepspeed.utils.set_z3_leaf_modules_by_suffix(model, ["2.0"]) == ([model[2][0]], [])
    assert deepspeed.utils.set_z3_leaf_modules_by_name(model, ["2"], False) == ([model[2]], [])
    assert deepspeed.utils.get_z3_leaf_modules(model) == [model[2][0]]
    assert deepspeed.utils.set_z3_leaf_modules(model, ["ReLU"]) == [model[1]]
    with pytest.raises(ValueError, match="no modules"):
        deepspeed.utils.set_z3_leaf_modules(model, [nn.Conv2d])


def test_a_leaf_of_the_configuration_that_no_module_is_is_told(monkeypatch, caplog):
    from deepspeed._ours.zero.module_marks import mark_leaf_modules
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig

    monkeypatch.setattr(logging.getLogger("DeepSpeed"), "propagate", True)
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    mark_leaf_modules(model, DeepSpeedZeroLeafModuleConfig())
    assert not caplog.messages
    named = {"classes": ["ReLU", "Tanh"], "names": ["0", "head"], "name_suffixes": ["experts"]}
    mark_leaf_modules(model, DeepSpeedZeroLeafModuleConfig(**named))
    assert deepspeed.utils.get_z3_leaf_modules(model) == [model[0], model[1]]
    assert "no module of Sequential is Tanh, head, experts" in caplog.text


def test_timers():
    timers = SynchronizedWallClockTimer()
    timers("a").start()
    timers("a").stop(record=True)
    assert timers.has_timer("a")
    assert timers("a").elapsed(reset=False) > 0
    assert timers.get_mean(["a"])["a"] > 0
    assert NoopTimer()("x").elapsed() == 0.0
    assert trim_mean([1, 2, 3, 100], 0.25) == 2.5
    config = type("C", (), {"enabled": True})
    meter = ThroughputTimer(config, batch_size=8, start_step=1)
    for _ in range(3):
        meter.start()
        meter.stop(global_step=True)
    assert meter.avg_samples_per_sec() > 0
    meter.update_epoch_count()
    assert (meter.epoch_count, meter.micro_step_count, meter.global_step_count) == (1, 0, 3)


# ---- activation checkpointing


@pytest.fixture
def unconfigured(monkeypatch):
    monkeypatch.setattr(activation_checkpointing_api, "_process", activation_checkpointing_api._Process())


def checkpointed(form, dropout=0.3):
    """Loss and gradients of two layers called through `form`, with a keyword."""
    torch.manual_seed(3)
    layers, x = [nn.Linear(4, 4), nn.Linear(4, 4)], torch.ones(5, 4, requires_grad=True)

    def layer(linear, t, scale):
        return nn.functional.dropout(linear(t) * scale, dropout)

    out = x * 1
    for linear in layers:
        out = form(partial(layer, linear), out, scale=torch.tensor(2.0))
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for linear in layers for p in linear.parameters())]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"partition_activations": True},
        {"contiguous_checkpointing": True, "num_checkpoints": 2},
        {"checkpoint_in_cpu": True},
        {"synchronize": True, "profile": True},
        {"deepspeed_config": {"train_batch_size": 8, "activation_checkpointing": {"number_checkpoints": 2}},
         "contiguous_checkpointing": True},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("unconfigured")
def test_activation_checkpointing(options, caplog):
    plain = checkpointed(lambda f, *args, **kwargs: f(*args, **kwargs))
    assert not deepspeed.checkpointing.is_configured()
    with caplog.at_level("INFO", "ds_parallel"):
        deepspeed.checkpointing.configure(None, **options)
        assert deepspeed.checkpointing.is_configured()
        for form in (deepspeed.checkpointing.checkpoint, deepspeed.checkpointing.non_reentrant_checkpoint):
            assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed(form), strict=True))
            deepspeed.checkpointing.reset()
            assert deepspeed.checkpointing.is_configured()
    said = " ".join(record.getMessage() for record in caplog.records)
    assert ("partition_activations has no effect" in said) == options.get("partition_activations", False)
    assert ("cpu_checkpointing has no effect" in said) == options.get("checkpoint_in_cpu", False)


@pytest.mark.usefixtures("unconfigured")
def test_buffers_of_contiguous_checkpointing_run_out():
    with pytest.raises(ConfigError, match="number_checkpoints: the number of layers") as caught:
        deepspeed.checkpointing.configure(contiguous_checkpointing=True)
    assert isinstance(caught.value, AssertionError)
    deepspeed.checkpointing.configure(contiguous_checkpointing=True, num_checkpoints=1)
    with pytest.raises(PlanError, match="number_checkpoints = 1"):
        checkpointed(deepspeed.checkpointing.checkpoint)
    deepspeed.checkpointing.set_num_layers(2)
    checkpointed(deepspeed.checkpointing.checkpoint)


@pytest.mark.parametrize("name", ["checkpoint", "non_reentrant_checkpoint"])
@pytest.mark.usefixtures("unconfigured")
def test_several_outputs_of_a_checkpointed_call_are_a_tuple_and_one_is_itself(name):
    form, x = getattr(deepspeed.checkpointing, name), torch.ones(2, requires_grad=True)
    several = form(lambda t: [t * 2, None, t * 3], x)
    assert isinstance(several, tuple)
    assert several[1] is None
    single = form(lambda t: (t * 5,), x)
    (several[0] + several[2] + single).sum().backward()
    assert x.grad.tolist() == [10, 10]


@pytest.mark.usefixtures("unconfigured")
def test_checkpoint_function_fills_the_list_of_outputs():
    x, outputs = torch.ones(2, requires_grad=True), []
    tensors = deepspeed.checkpointing.CheckpointFunction.apply(lambda t, k: (t * k, "said", t), outputs, x, 3)
    assert len(tensors) == 2
    assert outputs[1] == "said"
    assert outputs[0] is tensors[0]
    only = deepspeed.checkpointing.CheckpointFunction.apply(torch.sin, outputs, x)
    assert outputs[3] is only
    (tensors[0] + only).sum().backward()
    assert torch.allclose(x.grad, 3 + torch.ones(2).cos())


@pytest.mark.usefixtures("unconfigured")
def test_an_mpu_stays_until_another_is_given():
    mpu = SimpleNamespace(get_model_parallel_group=lambda: self_group("tensor"))
    deepspeed.checkpointing.configure(mpu)
    deepspeed.checkpointing.configure(None, checkpoint_in_cpu=True)
    assert deepspeed.checkpointing.mpu is mpu


@pytest.mark.usefixtures("unconfigured")
def test_named_states_come_again_in_the_recomputation():
    deepspeed.checkpointing.configure()
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(5)
    drawn = []

    def draw(t):
        with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
            drawn.append(torch.rand(2))
        return t.sin()

    deepspeed.checkpointing.checkpoint(draw, torch.ones(2, requires_grad=True)).sum().backward()
    assert torch.equal(drawn[0], drawn[1])


def test_named_random_states():
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(5)
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    tracker.set_states(tracker.get_states())
    outside = torch.get_rng_state()
    with tracker.fork():
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), outside)
    with tracker.fork():
        second = torch.rand(3)
    assert not torch.equal(first, second)
    with pytest.raises(ValueError, match="was added"):
        tracker.add("model-parallel-rng", 1)
    tracker.reset()
    with pytest.raises(ValueError, match="no random state"), tracker.fork():
        pass


# ---- accelerator


def test_accelerator():
    found = deepspeed.accelerator.get_accelerator()
    assert found is deepspeed.get_accelerator()
    assert torch.ones(1).to(found.current_device_name()).device.type == found.device_name(0).split(":")[0]
    assert found.device_count() >= 1
    assert found.communication_backend_name()
    assert torch.float in found.supported_dtypes()
    assert found.total_memory() >= found.available_memory() > 0
    assert found.memory_allocated() > 0
    assert found.on_accelerator(torch.ones(1, device=found.current_device_name()))
    state = found.get_rng_state()
    first = torch.rand(1)
    found.set_rng_state(state)
    assert torch.equal(torch.rand(1), first) or found.device_name() != "cpu"
    assert found.create_op_builder("FusedAdamBuilder").is_compatible()
    assert found.get_op_builder("Nothing") is None
    assert not hasattr(found, "no_such_verb")


def test_accelerator_of_megatron_and_offloading():
    found = deepspeed.accelerator.get_accelerator()
    called: list[int] = []
    found.lazy_call(lambda: called.append(1))
    assert called == [1] or found.device_name() != "cpu"
    assert not found.is_current_stream_capturing()
    assert found.default_stream() is None or found.device_name() != "cpu"
    assert found.is_fp64_supported() or found.device_name() == "mps"
    for buffer in (found.pin_empty(2, 3, dtype=torch.int), found.pin_empty_like(torch.ones(2, 3, dtype=torch.int))):
        assert (buffer.shape, buffer.dtype, found.is_pinned(buffer)) == ((2, 3), torch.int, found.ours.facts.pinned)
    with pytest.raises(ValueError, match="leave out device"):
        found.pin_empty(2, dtype=torch.int, device="meta")


# ---- folders


def test_signs_do_not_follow_links(tmp_path):
    folder, thesis = tmp_path / "save", tmp_path / "thesis.txt"
    folder.mkdir()
    thesis.write_text("years of work")
    for name in ("latest", "latest.new", "zero_to_fp32.py"):
        (folder / name).symlink_to(thesis)
    leave_signs(str(folder), "t", latest=True, sharded=True)
    assert thesis.read_text() == "years of work"
    assert (folder / "latest").read_text() == "t"


def test_signs_of_a_checkpoint(tmp_path):
    alone = self_group("test")
    assert name_of_tag(str(tmp_path), None, alone) is None
    (tmp_path / "global_step3").mkdir()
    torch.save({}, tmp_path / "global_step3" / "mp_rank_00_model_states.pt")
    leave_signs(str(tmp_path), "global_step3", latest=True, sharded=True)
    assert name_of_tag(str(tmp_path), None, alone) == "global_step3"
    assert name_of_tag(str(tmp_path), "other", alone) == "other"
    (tmp_path / "latest_universal").write_text("global_step3")
    (tmp_path / "latest").unlink()
    assert [name_of_tag(str(tmp_path), None, alone, universal) for universal in (False, True)] == [None, "global_step3"]
    with pytest.raises(CheckpointError) as caught:
        name_of_tag(str(tmp_path), "../other", alone)
    assert caught.value.code == "ckpt-outside"
    utils = (
        tmp_path / "site" / "deepspeed" / "utils"
    )  # DeepSpeed's programs are modules that run as scripts, without a function
    utils.mkdir(parents=True)
    for name in ("zero_to_fp32", "zero_to_torch"):
        (utils / f"{name}.py").write_text(
            "if __name__ == '__main__':\n    import sys\n    print('ran', sys.argv[1:])\n"
        )
        for place, answer in (
            (tmp_path / "site", "ran ['--help']"),
            (Path(deepspeed.__file__).parents[1], f"usage: {name}.py"),
        ):
            environment = os.environ | {"PYTHONPATH": str(place)}
            command = [sys.executable, str(tmp_path / f"{name}.py"), "--help"]
            out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
            assert out.startswith(answer)
    with pytest.raises(CheckpointError, match="_optim_states"):
        deepspeed.utils.zero_to_fp32.get_optim_files(str(tmp_path))


def test_weights_are_converted_as_upstreams_programs_do(tmp_path, caplog):
    from deepspeed.utils import zero_to_fp32, zero_to_torch

    state = {"param/a.weight": torch.randn(4, 6), "param/b.weight": torch.randn(6, 4), "buffer/count": torch.tensor(3)}
    ds_ckpt.save(tmp_path / "t", ds_ckpt.full_shards(state), {})
    leave_signs(str(tmp_path), "t", latest=True, sharded=True)
    out = tmp_path / "out"
    zero_to_fp32.main([str(tmp_path), str(out), "--max_shard_size", "110B"])
    assert sorted(p.name for p in out.iterdir())[:2] == [
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
    ]
    for _ in range(2):  # a second one takes the place of the first
        zero_to_torch.main([str(tmp_path), str(out), "--dtype", "bf16", "-t", "t"])
    assert [p.name for p in out.iterdir()] == ["pytorch_model.bin"]
    loaded = torch.load(out / "pytorch_model.bin")
    assert torch.equal(loaded["a.weight"], state["param/a.weight"].bfloat16())
    assert loaded["count"].dtype == torch.int64
    with pytest.raises(ValueError, match="'int8' is none"):
        zero_to_fp32.convert_zero_checkpoint_to_state_dict(tmp_path, out, dtype="int8")
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, out, max_shard_size=100, safe_serialization=True)
    assert (out / "model.safetensors.index.json").is_file()

    lazy = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), lazy_mode=True)["a.weight"]
    assert (lazy.shape.numel(), lazy.dtype) == (24, torch.float32)
    for tag, kind in (("other", FileNotFoundError), (None, ValueError)):
        with pytest.raises(kind):
            zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(out), tag)
    model = nn.ModuleDict({"a": nn.Linear(6, 4), "c": nn.Linear(2, 2)})
    assert zero_to_fp32.load_state_dict_from_zero_checkpoint(model, str(tmp_path)) is model
    assert torch.equal(model["a"].weight, state["param/a.weight"])
    assert "b.weight" in caplog.text
    assert "c.weight" in caplog.text


def test_status_looks_like_its_enum():
    param = nn.Parameter(torch.zeros(1))
    from deepspeed._ours.zero.params import Status

    status = Status(param)
    assert status == ZeroParamStatus.AVAILABLE
    assert {ZeroParamStatus.AVAILABLE: 1}[status] == 1
    assert status != ZeroParamStatus.NOT_AVAILABLE
    assert status in (ZeroParamStatus.AVAILABLE,)
    assert pickle.loads(pickle.dumps(status)) is ZeroParamStatus.AVAILABLE
    assert status.name == "AVAILABLE"


def test_estimators_come_from_the_plan():
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_cold

    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    alone = estimate_zero3_model_states_mem_needs_all_live(model, 1)
    assert estimate_zero3_model_states_mem_needs_all_live(model, 8) < alone
    assert estimate_zero2_model_states_mem_needs_all_cold(10**6, 8) < estimate_zero2_model_states_mem_needs_all_cold(
        10**6, 1
    )


def test_estimators_take_sizes_as_the_tutorial_writes_them():
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_cold

    assert estimate_zero3_model_states_mem_needs_all_cold(
        total_params=2851e6, largest_layer_params=32e6, num_gpus_per_node=8
    ) == estimate_zero3_model_states_mem_needs_all_cold(2851 * 10**6, 32 * 10**6, 8)


def test_counting_operations(tmp_path, caplog, capsys):
    from deepspeed.profiling import flops_profiler
    from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    flops = 2 * 3 * (8 * 16 + 16 * 4)
    there = tmp_path / "made" / "profile.txt"
    found = get_model_profile(model, (3, 8), as_string=False, output_file=str(there))
    assert found == (flops, flops // 2, sum(p.numel() for p in model.parameters()))
    assert "Linear" in there.read_text()
    assert get_model_profile(model, (3, 8), as_string=False, output_file=str(tmp_path)) == found  # a folder: a warning
    assert "was not written" in caplog.text
    given = get_model_profile(model, kwargs={"input": torch.ones(3, 8)}, print_profile=False)
    assert given == ("1.15 K", "576 MACs", "212")
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    loss = model(torch.ones(3, 8)).sum()
    under_way = profiler.get_total_flops(), profiler.get_total_macs(), profiler.get_total_duration() > 0
    assert under_way == (flops, flops // 2, True)  # the documented loop asks here
    profiler.print_model_profile(output_file=str(tmp_path / "loop.txt"))
    assert "Linear" in (tmp_path / "loop.txt").read_text()
    loss.backward()
    profiler.stop_profile()
    assert profiler.started
    assert profiler.get_total_flops() == flops  # backward is counted apart
    profiler.start_profile(ignore_list=[nn.Linear])
    model(torch.ones(3, 8))
    profiler.stop_profile()
    assert profiler.get_total_flops() == 0
    assert profiler.get_total_duration() > 0
    capsys.readouterr()
    profiler.print_model_aggregated_profile()
    assert "largest classes" in capsys.readouterr().out
    profiler.ds_engine = SimpleNamespace(
        train_micro_batch_size_per_gpu=lambda: 1,
        world_size=8,
        mp_world_size=2,
        dp_world_size=None,
        seq_dp_world_size=4,
    )
    profiler.print_model_profile()  # with Ulysses DeepSpeed's engine tells the other size
    assert "data parallel size: 4" in capsys.readouterr().out
    profiler.end_profile()
    assert profiler.get_total_flops(as_string=True) == "0 "
    profiler.print_model_profile()  # before start_profile there is none
    without = get_model_profile(model, (3, 8), ignore_modules=[nn.Linear], as_string=False, print_profile=False)
    assert without[:2] == (0, 0)
    with pytest.raises(UnsupportedError):
        get_model_profile(model, (3, 8), mode="backward")
    with pytest.raises(AssertionError, match="input_shape"):
        get_model_profile(model)
    norm = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).bfloat16()
    assert get_model_profile(norm, (4, 8), print_profile=False)[2] == "88"  # inputs of the model's format
    assert (norm.training, float(norm[1].running_mean.abs().sum())) == (True, 0.0)
    strings = (
        flops_profiler.params_to_string(2_500_000_000),
        flops_profiler.flops_to_string(0.5),
        flops_profiler.number_to_string(1e4, "M", 3),
    )
    assert (*strings, flops_profiler.duration_to_string(2e-5)) == ("2.5 B", "500 mFLOPS", "0.01 M", "20 us")


def test_tiles_of_a_linear_layer():
    whole = nn.Linear(10, 6)
    tiled = deepspeed.zero.TiledLinear(10, 6, in_splits=3, out_splits=2, init_linear=whole)
    x = torch.randn(4, 10)
    torch.testing.assert_close(tiled(x), whole(x))
    apart = deepspeed.zero.TiledLinear(
        10, 6, True, 3, 2, input_is_already_split=True, combine_out_splits=False, init_linear=whole
    )
    parts = apart(x.split(apart.in_sizes, -1))
    assert [part.shape[-1] for part in parts] == [3, 3]
    torch.testing.assert_close(torch.cat(parts, -1), whole(x))
    with pytest.raises(PlanError, match="1 parts"):
        apart([x])


class ReturnsBias(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight), self.bias


@pytest.mark.parametrize("bias", [True, False])
def test_tiles_that_return_their_bias(bias):
    whole = ReturnsBias(10, 7, bias=bias)
    tiled = deepspeed.zero.TiledLinearReturnBias(10, 7, bias, 2, 3, linear_cls=ReturnsBias, init_linear=whole)
    x = torch.randn(4, 10)
    (product, added), (expected, held) = tiled(x), whole(x)
    torch.testing.assert_close(product, expected)
    assert (added is None) == (held is None) == (not bias)
    (product if added is None else product + added).sum().backward()
    (expected if held is None else expected + held).sum().backward()
    for row in range(3):
        for column in range(2):
            rows, columns = slice(*tiled.out_parts[row : row + 2]), slice(*tiled.in_parts[column : column + 2])
            torch.testing.assert_close(tiled.linears[row][column].weight.grad, whole.weight.grad[rows, columns])


def test_inference_is_ds_inference():
    engine = deepspeed.init_inference(nn.Linear(2, 2), dtype=torch.float32)
    assert isinstance(engine, deepspeed.InferenceEngine)
    assert deepspeed.default_inference_config()["max_out_tokens"] == 1024
    from deepspeed.inference.v2 import InferenceEngineV2, RaggedInferenceEngineConfig, build_hf_engine

    assert RaggedInferenceEngineConfig(manager={"max_context": 7}).state_manager.max_context == 7
    assert callable(build_hf_engine)
    assert InferenceEngineV2.put


def test_not_here_at_the_top():
    model = nn.Linear(1, 1)
    assert deepspeed.tp_model_init(model, tp_size=1, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    with pytest.raises(ConfigError):
        deepspeed.initialize(model=model)
    assert OffloadDeviceEnum.cpu == "cpu"


def test_states_of_experts_are_joined_from_their_ranks_parts(tmp_path):
    from deepspeed.checkpoint.autoep_universal import _zero12_fragment_path, consolidate_autoep_zero12_expert_states

    name, told = "layer.experts.w1", {"num_experts": 4, "num_local_experts": 2, "ep_size": 2}
    (tmp_path / name / "0").mkdir(parents=True)
    for state in ("fp32", "exp_avg", "exp_avg_sq", "step"):
        for rank in range(4):
            torch.save(torch.tensor([float(rank)]), _zero12_fragment_path(str(tmp_path), name, state, rank))
    for data_first, order in ((False, [0, 2, 1, 3]), (True, [0, 1, 2, 3])):
        out = tmp_path / str(data_first)
        arguments = ({name: told}, {name: (2, 1)}, 4, 1, data_first)
        consolidate_autoep_zero12_expert_states(str(tmp_path), str(out), *arguments)
        found = torch.load(out / "zero" / name / "exp_avg.pt", weights_only=True)
        assert found["param"].flatten().tolist() == order
        assert found["is_expert_param"]


def test_metadata_of_experts_is_checked():
    with pytest.raises(RuntimeError, match="malformed"):
        deepspeed.DeepSpeedEngine.load_moe_state_dict("/none", "tag", {}, autoep_layers="all")
    with pytest.raises(RuntimeError, match="missing fields"):
        deepspeed.DeepSpeedEngine.load_moe_state_dict("/none", "tag", {}, autoep_layers=[{"moe_layer_id": 0}])
    deepspeed.DeepSpeedEngine.load_moe_state_dict("/none", "tag", {}, model=torch.nn.Linear(1, 1))  # without experts
    mpu = SimpleNamespace(get_model_parallel_rank=lambda: 3)
    name_of = deepspeed.DeepSpeedEngine._get_expert_ckpt_name
    assert name_of("d", 1, 2, "tag", mpu) == "d/tag/layer_1_expert_2_mp_rank_03_model_states.pt"
    assert name_of("d", -1, 2, "tag", mpu, checkpoint_mp_rank=0) == "d/tag/expert_2_mp_rank_00_model_states.pt"


def test_accelerators_by_device():
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    assert CPU_Accelerator().device_name() == "cpu"
    assert CUDA_Accelerator().communication_backend_name() == "nccl"
    assert isinstance(CPU_Accelerator(), deepspeed.accelerator.DeepSpeedAccelerator)


def test_packed_experts_are_told_by_their_shapes():
    from deepspeed.moe.fused_expert_layout import FusedExpertLayout, classify_fused_gate_up_layout

    assert classify_fused_gate_up_layout((2, 8, 3), (2, 3, 4)) == FusedExpertLayout("gate_up_first", 3, 4, False)
    assert classify_fused_gate_up_layout((2, 3, 8), (2, 4, 3)) == FusedExpertLayout("hidden_first", 3, 4, True)
    assert classify_fused_gate_up_layout((2, 7, 3), (2, 3, 3)) is None
