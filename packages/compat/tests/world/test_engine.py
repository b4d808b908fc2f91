"""The engine under upstream's names on two ranks: what clients call, and what they rely on."""

from __future__ import annotations

import copy
import dataclasses
import enum
import io
import json
import logging
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_config.errors import CheckpointError, ConfigError, PlanError, ShardedAccessError, UnsupportedError
from ds_testing import world

STAGES = [0, 1, 2, 3]


class Mode(enum.Enum):
    MIN = "min"


@dataclasses.dataclass(frozen=True)
class Options:
    mode: Mode


def settings(stage, **changes):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **changes,
    }


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)
        self.register_buffer("table", torch.arange(6).float() / 7, persistent=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def rows(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(2, 6, generator=generator)
    return x, x.sum(1, keepdim=True)


def loss_of(engine, step, rank):
    x, y = rows(step, rank)
    return (engine(x) - y).square().mean()


def single(steps, clip=1.0, gas=1):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)
    for step in range(0, steps * gas, gas):
        optimizer.zero_grad()
        for micro in range(gas):
            for rank in range(2):
                (loss_of(model, step + micro, rank) / (2 * gas)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.state_dict()


def start(stage, model=None, **options):
    import deepspeed

    model = model or Net()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings(stage, **options))


def same(engine, expected):
    found = engine.full_state_dict()
    if engine.mesh.rank == 0:
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@world(2, backend=None)
@pytest.mark.parametrize("stage", STAGES)
def test_three_calls(stage):
    """An absent gradient_clipping clips at 1.0, as upstream."""
    import deepspeed

    engine, optimizer, loader, scheduler = start(stage)
    assert loader is None
    assert scheduler is None
    assert isinstance(optimizer, deepspeed.DeepSpeedOptimizer)
    assert engine.gradient_clipping() == 1.0
    for step in range(5):
        engine.backward(loss_of(engine, step, engine.mesh.rank))
        engine.step()
        assert engine.get_global_grad_norm() > 0
        assert not optimizer.overflow
    assert engine.global_steps == 5
    same(engine, single(5))
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@world(2, backend=None)
@pytest.mark.parametrize("stage", [1, 3])
def test_the_caller_decides_where_a_step_ends(stage):
    """Accelerate's way: a boundary before each backward, `step` only there; windows may be shorter than configured."""
    import deepspeed

    engine, *_ = start(stage, gradient_accumulation_steps=2)
    micro = 0
    for _ in range(4):
        for last in (False, True):
            engine.set_gradient_accumulation_boundary(is_boundary=last)
            engine.backward(loss_of(engine, micro, engine.mesh.rank))
            micro += 1
            if last:
                engine.step()
    assert engine.global_steps == 4
    same(engine, single(4, gas=2))
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(loss_of(engine, 0, engine.mesh.rank), scale_wrt_gas=False)
    engine.step()
    assert engine.global_steps == 5
    engine.set_gradient_accumulation_boundary(None)  # was False: no step from here on, with no word
    steps = []
    for micro in range(4):  # after five microbatches that had a `step`, the next one is a step's second
        engine.backward(loss_of(engine, micro, engine.mesh.rank))
        engine.step()
        steps.append(engine.global_steps)
    assert steps == [6, 6, 7, 7]
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@pytest.mark.parametrize("stage", [0, 2])
@world(2, backend=None)
def test_a_whole_step_of_an_engine_without_stages(stage):
    import deepspeed

    class Losses(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x, y):
            return (self.net(x) - y).square().mean()

    engine, *_ = start(stage, Losses())
    for step in range(3):
        assert engine.train_batch(iter([rows(step, engine.mesh.rank)])).applied
    same(engine, {f"net.{name}": value for name, value in single(3).items()})
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@world(2, backend=None)
def test_who_steps_the_schedule():
    """The engine steps one that it was given or made; a client's own acts on the group dicts that the engine shares."""
    import deepspeed

    def rates(engine, after):
        found = []
        for step in range(3):
            engine.backward(loss_of(engine, step, engine.mesh.rank))
            engine.step()
            after()
            found.append(engine.get_lr()[0])
        return found

    linear = {"warmup_min_lr": 0, "warmup_max_lr": 0.3, "warmup_num_steps": 3, "warmup_type": "linear"}
    engine, _, _, scheduler = start(1, scheduler={"type": "WarmupLR", "params": linear})
    assert scheduler is engine.lr_scheduler
    assert rates(engine, lambda: None) == pytest.approx([0.0, 0.1, 0.2])
    assert scheduler.get_last_lr() == engine.get_lr()
    engine.destroy()
    model = Net()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 / (1 + step))
    config = settings(1)
    del config["optimizer"]
    engine, *_ = deepspeed.initialize(model=model, optimizer=inner, config=config)
    assert engine.optimizer.param_groups[0] is inner.param_groups[0]
    assert rates(engine, schedule.step) == pytest.approx([0.1 / 2, 0.1 / 3, 0.1 / 4])
    engine.destroy()
    with pytest.raises(PlanError, match="train_batch_size"):
        start(1, train_batch_size=5)
    deepspeed.comm.destroy_process_group()


@world(2, backend=None)
def test_the_optimizer_may_be_stepped_directly():
    """Fabric's way: counters of the engine do not move, numbers are the same."""
    import deepspeed

    engine, optimizer, *_ = start(2)
    assert not hasattr(engine, "param_groups")
    assert not hasattr(engine, "state")
    for step in range(3):
        engine.backward(loss_of(engine, step, engine.mesh.rank))
        optimizer.step()
        optimizer.zero_grad()
    assert engine.global_steps == 0
    same(engine, single(3))
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@world(2, backend=None)
def test_parameters_of_stage_3():
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param

    deepspeed.init_distributed("gloo")  # ranks on shared memory keep one whole copy together: nothing is released
    engine, *_ = start(3)
    weight = engine.module.first.weight
    assert is_zero_param(weight)
    assert weight.ds_shape == (8, 6)
    assert weight.ds_numel == 48
    assert weight.partition_numel() == 24
    assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    assert weight.ds_tensor is not None
    assert len({p.ds_id for p in engine.module.parameters()}) == 4
    with deepspeed.zero.GatheredParameters(p for p in engine.module.parameters()):
        assert weight.ds_status == ZeroParamStatus.AVAILABLE
        before = weight.clone()
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        if engine.mesh.rank == 0:
            weight.data.fill_(2.0)
    with deepspeed.zero.GatheredParameters(weight):
        assert bool((weight == 2.0).all())
        weight.data.fill_(9.0)  # dropped, with a warning
    with deepspeed.zero.GatheredParameters([weight, weight]):
        assert bool((weight == 2.0).all())
        assert not torch.equal(before, weight)
    with deepspeed.zero.GatheredParameters([None]), deepspeed.zero.GatheredParameters(nn.Linear(1, 1).weight):
        pass
    full = deepspeed.utils.safe_get_full_fp32_param(weight)
    assert full.shape == (8, 6)
    bias = engine.module.first.bias
    weight.all_gather_coalesced([weight, bias]).wait()
    assert weight.ds_status == bias.ds_status == ZeroParamStatus.AVAILABLE
    with torch.no_grad():
        weight.fill_(2.0)
        bias.fill_(2.0)
    weight.partition(has_been_updated=True)
    bias.partition()
    assert weight.ds_status == bias.ds_status == ZeroParamStatus.NOT_AVAILABLE
    assert deepspeed.utils.safe_get_full_fp32_param(weight).eq(2).all()
    assert not deepspeed.utils.safe_get_full_fp32_param(bias).eq(2).all()
    weight.ds_tensor.data = torch.full_like(weight.ds_tensor.data, 3.0)
    engine.module.first.bias.ds_tensor.narrow(0, 0, engine.module.first.bias.ds_tensor.numel()).fill_(0.5)
    engine.module.second.weight.ds_tensor.mul_(0)
    engine.module.second.bias.ds_tensor[:] = 7.0
    assert bool((engine(torch.ones(2, 6)) == 7.0).all())
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        assert bool((weight == 3.0).all())
        assert bool((engine.module.first.bias == 0.5).all())
    assert type(copy.deepcopy(weight.ds_tensor) + 1) is torch.Tensor
    engine.destroy()
    assert not hasattr(weight, "ds_id")
    plain, *_ = start(2)
    assert not hasattr(plain.module.first.weight, "ds_id")
    plain.destroy()
    deepspeed.comm.destroy_process_group()


@world(2)
def test_sanity_checks_make_a_change_that_would_be_lost_an_error():
    """Upstream's RuntimeError; without the checks it is dropped with a warning."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    config = settings(3)
    zero = {**config["zero_optimization"], "enable_sanity_checks": True}
    net = Net()
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config={**config, "zero_optimization": zero}
    )
    for params in (engine.module.first.weight, engine.module.parameters(), engine.module):
        refused = pytest.raises(RuntimeError, match=r"in-place modification of first\.weight")
        with refused, torch.no_grad(), deepspeed.zero.GatheredParameters(params):
            engine.module.first.weight.fill_(9.0)
    with deepspeed.zero.GatheredParameters(engine.module.first.weight):
        assert not bool((engine.module.first.weight == 9.0).any())
    engine.destroy()
    for checks in (True, False):
        with deepspeed.zero.Init(
            config_dict_or_path={"zero_optimization": {"stage": 3, "enable_sanity_checks": checks}}
        ):
            made = Net()
        refused = pytest.raises(RuntimeError, match="in-place modification") if checks else nullcontext()
        with refused, torch.no_grad(), deepspeed.zero.GatheredParameters(made.first.weight):
            made.first.weight.fill_(9.0)


@world(2, backend=None)
def test_a_model_made_inside_init(monkeypatch):
    """Transformers' way under stage 3: made cut, filled on rank 0 inside GatheredParameters, a layer replaced, initialized."""
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param

    with deepspeed.zero.Init(config_dict_or_path=settings(3, bf16={"enabled": True}, train_batch_size="auto")):
        half = Net()
        deepspeed.runtime.zero.partition_parameters.shutdown_init_context()
        apart = nn.Sequential(nn.Linear(2, 2))
        deepspeed.runtime.zero.partition_parameters.restore_init_context()
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert torch.equal(half.table, torch.arange(6).float() / 7)  # tables stay as exact as they were made
    assert not is_zero_param(apart[0].weight)
    assert apart[0].weight.dtype == torch.float32
    with deepspeed.zero.Init(config_dict_or_path=settings(3), enabled=False):
        assert type(nn.Sequential(nn.Linear(2, 2))[0].weight) is nn.Parameter
    with monkeypatch.context() as patch:  # as Transformers does, before it enters Init
        pp = deepspeed.runtime.zero.partition_parameters
        patch.setattr(pp, "zero_wrapper_for_fp_tensor_constructor", lambda fn, *rest, **options: fn)
        with deepspeed.zero.Init(config_dict_or_path=settings(3)):
            model = nn.ModuleDict({"net": Net()})
            after = torch.get_rng_state()
    Net()
    assert torch.equal(torch.get_rng_state(), after), "cutting draws no random numbers"
    weight = model["net"].first.weight
    assert is_zero_param(weight)
    assert (weight.ds_shape, weight.ds_numel, weight.partition_numel()) == ((8, 6), 48, 24)
    assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    assert weight.ds_tensor.shape == (24,)
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 0
    rank, expected = deepspeed.comm.get_rank(), Net()
    with deepspeed.zero.GatheredParameters(set(model["net"].parameters()), modifier_rank=0):
        assert weight.ds_status == ZeroParamStatus.AVAILABLE
        for param, value in zip(model["net"].parameters(), expected.parameters(), strict=True):
            param.data.copy_(value if rank == 0 else torch.zeros_like(value))
    with deepspeed.zero.GatheredParameters(weight), torch.no_grad():
        weight.fill_(9.0)  # dropped, with a warning
    net = model["net"]
    net.second = nn.Linear(8, 1)
    assert not is_zero_param(net.second.weight)
    net.second.load_state_dict(expected.second.state_dict())
    ids = weight.ds_id
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=settings(3))
    assert weight.ds_id == ids
    engine.backward(loss_of(engine, 0, rank))
    engine.step()
    same(engine, single(1))
    engine.destroy()
    made = Net()
    deepspeed.zero.Init(module=made)
    assert is_zero_param(made.first.weight)
    mics = settings(3)
    with pytest.raises(ConfigError, match="mics_shard_size"), deepspeed.zero.MiCS_Init(config_dict_or_path=mics):
        pass
    mics["zero_optimization"]["mics_shard_size"] = 1
    with deepspeed.zero.MiCS_Init(config_dict_or_path=mics):
        net = Net()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=mics)
    engine.backward(loss_of(engine, 0, rank))
    engine.step()
    same(engine, single(1))
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@world(2, backend=None)
def test_generation_without_hooks():
    """TRL's way: hooks are removed inside GatheredParameters and registered again."""
    import deepspeed

    engine, *_ = start(3)
    offload = engine.optimizer.parameter_offload
    x = torch.ones(2, 6)
    expected = engine(x)
    with torch.no_grad(), deepspeed.zero.GatheredParameters(engine.module.parameters()):
        for hook in offload.forward_hooks:
            hook.remove()
        offload.forward_hooks = []
        offload.backward_hooks = []
        for _, param in offload.module.named_parameters():
            param.ds_active_sub_modules.clear()
        assert list(offload.module.ds_external_parameters()) == []
        torch.testing.assert_close(engine.module(x), expected)
        offload._register_deepspeed_module(offload.module)
    engine.backward(loss_of(engine, 0, engine.mesh.rank))
    engine.step()
    same(engine, single(1))
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@world(2, backend=None)
@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints(tmp_path, stage):
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    folder = str(tmp_path)
    engine, *_ = start(stage)
    for step in range(2):
        engine.backward(loss_of(engine, step, engine.mesh.rank))
        engine.step()
    state = {"epoch": 3, "best": torch.tensor(0.5), "pair": (1, 2), "at": datetime(2024, 2, 29), 7: print}
    with pytest.raises(UnsupportedError, match=r"client_state\[7\] is code"):  # on both ranks, and no folder is there
        engine.save_checkpoint(folder, client_state=state)
    assert list(Path(folder).iterdir()) == []
    state[7] = Options(mode=Mode.MIN)
    assert engine.save_checkpoint(folder, client_state=state)
    assert (Path(folder) / "latest").read_text() == "global_step2"
    assert (Path(folder) / "zero_to_fp32.py").is_file()
    expected = engine.full_state_dict()
    engine.backward(loss_of(engine, 7, engine.mesh.rank))
    engine.step()
    path, client = engine.load_checkpoint(folder)
    assert Path(path).parent == Path(folder, "global_step2")
    assert (client["pair"], client["at"], client[7]) == ((1, 2), datetime(2024, 2, 29), Options(Mode.MIN))
    assert client["best"] == 0.5
    assert engine.global_steps == 2
    same(engine, expected)
    whole = get_fp32_state_dict_from_zero_checkpoint(folder)
    if engine.mesh.rank == 0:
        assert all(torch.equal(whole[name], value) for name, value in expected.items())
    assert engine.load_checkpoint(f"{folder}/nowhere") == (None, None)
    engine.save_checkpoint(folder, "checkpoint", save_latest=False)
    assert (Path(folder) / "latest").read_text() == "global_step2"
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@world(2, backend=None)
def test_what_a_function_loads_into_the_module_stays(tmp_path):
    """The masters of a bf16 model took it back."""
    import deepspeed

    engine, *_ = start(2, bf16={"enabled": True})
    state = {name: torch.full_like(value, 0.5) for name, value in engine.module.state_dict().items()}

    def load(src, dst):
        dst.load_state_dict(src)

    engine.load_module_state_dict({"module": state}, custom_load_fn=load)
    masters = [deepspeed.utils.safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    assert all(bool((master == 0.5).all()) for master in masters)
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@pytest.mark.parametrize(("stage", "layout"), [(0, "ds"), (1, "ds"), (1, "deepspeed"), (3, "ds"), (3, "deepspeed")])
@world(2, backend=None)
def test_a_checkpoint_whose_weights_a_function_loads(tmp_path, stage, layout):
    """Part of another model's, as transfer learning has it: names differ, a row is missing."""
    import deepspeed

    engine, *_ = start(stage, checkpoint={"layout": layout})
    folder = str(tmp_path)
    for step in range(2):
        engine.backward(loss_of(engine, step, engine.mesh.rank))
        engine.step()
    engine.save_checkpoint(folder, client_state={"note": 7})
    saved, states = engine.full_state_dict(), []
    name = next(name for name, param in engine.module.named_parameters() if param.dim() == 2)
    engine.backward(loss_of(engine, 5, engine.mesh.rank))
    engine.step()

    def load(src, dst):
        states.append(sorted(src))
        with torch.no_grad():
            dst.get_parameter(name)[1:].copy_(src[name][1:])
            dst.get_parameter(name)[0] = 0.25

    _, client = engine.load_checkpoint(folder, custom_load_fn=load)
    assert (client["note"], engine.global_steps) == (7, 2)
    master = deepspeed.utils.safe_get_full_fp32_param(engine.module.get_parameter(name))
    assert bool((master[0] == 0.25).all())
    if engine.mesh.rank == 0:
        assert set(states[0]) >= {key for key, _ in engine.module.named_parameters()}
        assert torch.equal(master[1:], saved[name][1:])
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@world(2, backend=None)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_in_the_files_of_deepspeed(tmp_path, stage):
    """It has no random states and does not say how much data was taken; the run goes on all the same."""
    import deepspeed

    from ds_ckpt.convert.regular import Regular, write_regular
    from ds_ckpt.convert.tensor_source import open_checkpoint

    linear = {"warmup_min_lr": 0.01, "warmup_max_lr": 0.05, "warmup_num_steps": 6, "warmup_type": "linear"}
    engine, *_ = start(stage, scheduler={"type": "WarmupLR", "params": linear}, gradient_accumulation_steps=2)

    def train(first, last):
        for step in range(first, last):
            for micro in range(2):
                engine.backward(loss_of(engine, 2 * step + micro, engine.mesh.rank))
                engine.step()

    train(0, 3)
    engine.save_checkpoint(tmp_path / "ours", "t")
    train(3, 5)
    straight, rates = engine.full_state_dict(), engine.get_lr()
    if engine.mesh.rank == 0:
        write_regular(
            open_checkpoint(tmp_path / "ours" / "t"), tmp_path / "theirs", "t", Regular(stage, 2), allow_pickle=True
        )
    deepspeed.comm.barrier()
    path, _ = engine.load_checkpoint(tmp_path / "theirs")
    assert Path(path).parent == tmp_path / "theirs" / "t"
    assert engine.global_steps == 3
    assert engine.is_gradient_accumulation_boundary() is False
    train(3, 5)
    assert engine.get_lr() == rates
    same(engine, straight)
    assert not (tmp_path / "theirs" / "t.translated").exists()
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@world(2, backend=None)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_layout_of_deepspeed_is_written_and_read(tmp_path, stage, monkeypatch):
    import deepspeed

    monkeypatch.setenv("DS_CHECKPOINT_LAYOUT", "deepspeed" if stage == 2 else "")
    layout = {} if stage == 2 else {"checkpoint": {"layout": "deepspeed"}}
    engine, *_ = start(stage, **layout)
    for step in range(2):
        engine.backward(loss_of(engine, step, engine.mesh.rank))
        engine.step()
    engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
    engine.save_checkpoint(tmp_path, client_state={"epoch": 3, "pair": (1, {2})})  # over an older one
    names = sorted(path.name for path in (tmp_path / "global_step2").iterdir())
    assert [name for name in names if name.endswith("_optim_states.pt")] == [
        f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)
    ]
    assert not [path for path in tmp_path.iterdir() if "draft" in path.name]
    expected = engine.full_state_dict()
    engine.backward(loss_of(engine, 5, engine.mesh.rank))
    engine.step()
    path, client = engine.load_checkpoint(tmp_path)
    assert Path(path).parent == tmp_path / "global_step2"
    assert client == {"epoch": 3, "pair": (1, {2})}
    same(engine, expected)
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@world(2, backend=None)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_files_that_programs_look_for_lie_beside_ours(tmp_path, stage):
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_model_state_file, get_optim_files

    engine, *_ = start(stage)
    engine.save_checkpoint(tmp_path, client_state={"epoch": 3, "best": torch.ones(2)})
    folder = f"{tmp_path}/global_step0"
    state = torch.load(get_model_state_file(folder, stage), weights_only=True)
    assert (state["epoch"], state["global_steps"]) == (3, 0)
    assert set(state["module"]) == (set() if stage == 3 else set(Net().state_dict()))
    if stage:
        (file,) = get_optim_files(folder)
        assert torch.load(file, weights_only=True)["optimizer_state_dict"]["zero_stage"] == stage
    assert engine.load_checkpoint(tmp_path)[1]["epoch"] == 3
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@world(2, backend=None)
def test_the_configuration_of_the_zero_plus_plus_tutorial_trains():
    import deepspeed

    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 1))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(),
        config=settings(3, fp16={"enabled": True, "initial_scale_power": 8}) | {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.005}},
            "zero_optimization": {
                "stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True,
                "contiguous_gradients": True, "overlap_comm": True,
            },
        },
    )  # fmt: skip
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(engine.mesh.rank)).half()
    losses = []
    for _ in range(12):
        loss = (engine(x).float() - x[:, :1].float()).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert engine.skipped_steps == 0
    assert losses[-1] < 0.6 * losses[0]
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@world(2, backend=None)
def test_orders_that_upstream_refuses(tmp_path):
    import deepspeed

    engine, *_ = start(1, checkpoint={"tag_validation": "FAIL"})
    with engine.no_sync():
        engine.backward(loss_of(engine, 0, engine.mesh.rank))
        with pytest.raises(AssertionError, match=r"Engine\.step\(\) inside no_sync"):
            engine.step()
        with pytest.raises(AssertionError, match="reentry"), engine.no_sync():
            pass
    engine.step()
    with pytest.raises(AssertionError, match="different tags"):
        engine.save_checkpoint(tmp_path, f"t{engine.mesh.rank}")
    for nothing in (None, ""):
        with pytest.raises(ValueError):
            engine.save_checkpoint(nothing)
    engine.destroy()
    engine, *_ = start(2)
    with pytest.raises(AssertionError, match="incompatible with gradient partitioning"), engine.no_sync():
        pass
    engine.destroy()
    engine, *_ = start(0)
    loss = loss_of(engine, 0, engine.mesh.rank)
    with pytest.raises(RuntimeError, match=r"Direct calls to tensor\.backward"):
        loss.backward()
    torch.func.grad(lambda x: engine(x).sum())(rows(0, 0)[0])
    engine.scale(loss_of(engine, 0, engine.mesh.rank)).backward()
    engine.step()
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@world(2, backend=None)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_several_backwards_and_one_reduction(stage):
    import deepspeed

    engine, *_ = start(stage, gradient_accumulation_steps=2)
    with engine.coalesce_grad_reduction():
        for micro in range(2):
            engine.set_gradient_accumulation_boundary(micro == 1)
            engine.backward(loss_of(engine, micro, engine.mesh.rank))
    engine.step()
    same(engine, single(1, gas=2))
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@world(2, backend=None)
def test_state_on_the_host():
    import deepspeed

    model = Net()
    config = settings(2, gradient_accumulation_steps=2)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    del config["optimizer"]
    foreign = torch.optim.Adam(model.parameters())
    with pytest.raises(deepspeed.runtime.zero.utils.ZeRORuntimeException, match="Adam of another library"):
        deepspeed.initialize(model=model, optimizer=foreign, config=config | {"zero_force_ds_cpu_optimizer": True})
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=foreign, config=config)
    sums = []
    for micro in range(2):
        engine.backward(loss_of(engine, micro, engine.mesh.rank))
        grads = optimizer.accumulated_grads_in_cpu
        sums.append(sum(grad.double().square().sum().item() for grad in grads.values()))
        engine.step()
    assert 0 < sums[0] != sums[1]
    engine.destroy()
    engine, optimizer, *_ = start(2)
    assert not hasattr(optimizer, "accumulated_grads_in_cpu")
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@world(2, backend=None)
def test_whole_weights(tmp_path):
    import deepspeed

    engine, *_ = start(3, zero_optimization={"stage": 3, "stage3_gather_16bit_weights_on_model_save": True})
    assert engine.zero_gather_16bit_weights_on_model_save()
    found = engine._zero3_consolidated_16bit_state_dict()
    assert (found is None) is (engine.mesh.rank > 0)
    assert engine.save_16bit_model(str(tmp_path))
    if engine.mesh.rank == 0:
        saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
        assert set(saved) == set(found) == set(Net().state_dict())
    engine.destroy()
    plain, *_ = start(3)
    assert not plain.save_16bit_model(str(tmp_path), "other.bin")
    assert not (tmp_path / "other.bin").exists()
    plain.destroy()
    deepspeed.comm.destroy_process_group()


@world(2, backend=None)
def test_an_optimizer_that_is_passed_stands_for_the_section():
    """What the section says is neither read nor checked, and a warning says that; 1 and null mean what they mean to upstream."""
    import deepspeed

    from ds_engine import init_args

    model = Net()
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    raw = settings(1, optimizer={"type": "OneBitAdam", "params": {"lr": "auto", "betas": "auto", "unknown": -1}})
    raw["zero_optimization"]["overlap_comm"] = 1
    with mock.patch.object(init_args, "_log") as log:
        engine, *_ = deepspeed.initialize(model=model, optimizer=mine, config=raw)
    rank = deepspeed.comm.get_rank()
    assert [call.args[1] for call in log.warning.call_args_list] == (["OneBitAdam"] if rank == 0 else [])
    assert engine.optimizer_name() == "SGD"
    assert engine.plan.config.zero_optimization.overlap_comm is True


@world(2, backend=None)
def test_what_is_thawed_has_its_attributes_anew():
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_get_local_fp32_param

    model = Net()
    model.first.requires_grad_(False)
    raw = settings(3)
    raw["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    engine, *_ = deepspeed.initialize(model=model, config=raw, optimizer=torch.optim.Adam(model.parameters(), lr=0.1))
    for step in range(3):
        model.first.requires_grad_(step > 0)
        engine.backward(engine(torch.ones(2, model.first.weight.ds_shape[1]) + step).square().mean())
        engine.step()
    for param in model.parameters():
        assert torch.equal(param.ds_tensor, safe_get_local_fp32_param(param))
        assert safe_get_full_fp32_param(param).shape == param.ds_shape
        assert safe_get_full_optimizer_state(param, "exp_avg").abs().sum() > 0


@world(2, backend=None)
def test_what_an_engine_tells():
    import deepspeed
    from deepspeed._surface import MISSING_ATTRIBUTES

    raw = settings(1, gradient_accumulation_steps=4, gradient_clipping=0.5, bf16={"enabled": True})
    model = Net()
    engine, *_ = deepspeed.initialize(model=model, config_params=raw, args={"local_rank": 0})
    assert engine.config is raw
    assert engine.get_batch_info() == (16, 2, 4)
    assert (engine.train_batch_size(), engine.zero_optimization_stage()) == (16, 1)
    assert engine.bfloat16_enabled()
    assert not engine.fp16_enabled()
    assert engine.gradient_clipping() == 0.5
    assert engine.optimizer_name() == "adamw"
    assert engine.get_type() == ["FusedAdam"]
    assert engine.first is model.first
    assert engine.module is model
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert any(isinstance(module, deepspeed.DeepSpeedEngine) for module in nn.ModuleList([engine]).modules())
    assert (engine.global_rank, engine.world_size, engine.dp_world_size) == (deepspeed.comm.get_rank(), 2, 2)
    assert engine.local_rank == engine.global_rank
    assert deepspeed.comm.get_world_size(engine.data_parallel_group) == 2
    for missing in MISSING_ATTRIBUTES:
        assert not hasattr(engine, missing)
    with pytest.raises(UnsupportedError, match=r"DeepSpeedEngine\.swap_tensor_config is not here"):
        _ = engine.swap_tensor_config
    assert not engine.monitor.enabled
    assert engine.get_summary_writer() is None
    assert (engine.mp_world_size, engine.checkpoint_mp_rank, engine.seq_parallel_group) == (1, 0, None)
    engine.lr_scheduler = None
    engine.mpu = None
    engine.backward(engine(rows(0, engine.mesh.rank)[0].bfloat16()).float().square().mean())
    before = engine.full_state_dict()
    kinds = deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum
    engine.optimizer.offload_states(include=[kinds.hp_params, kinds.optim_states], device="cpu", pin_memory=False)
    engine.offload_states(pin_memory=False)
    with pytest.raises(ShardedAccessError):
        engine.optimizer.step()
    engine.optimizer.reload_states(non_blocking=True)
    after = engine.full_state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    with pytest.raises(ConfigError):
        engine.offload_states(device="nvme")
    with pytest.raises(PlanError, match="deepcompile is off"):
        engine.compile(schedule=[(0, ["prefetch"])])
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@world(2, backend=None)
def test_a_model_without_an_optimizer_and_again_with_one():
    """TRL's reference model; and Lightning's second initialize of a module whose engine was dropped."""
    import deepspeed

    model = Net()
    config = settings(3)
    del config["optimizer"]
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=copy.deepcopy(config))
    assert optimizer is None
    engine.eval()
    with torch.no_grad():
        assert engine(torch.ones(1, 6)).shape == (1, 1)
    again, *_ = deepspeed.initialize(
        model=model, config=settings(2), model_parameters=filter(None.__ne__, model.parameters())
    )
    again.backward(loss_of(again, 0, again.mesh.rank))
    again.step()
    same(again, single(1))
    again.destroy()
    deepspeed.comm.destroy_process_group()


class Scaled(Net):
    """With a parameter of no dimension, as the clients' own regression models have."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return super().forward(x) * self.scale


@world(2, backend=None)
@pytest.mark.parametrize("stage", [1, 2])
def test_weights_of_an_average_stand_in_for_the_models_for_a_while(stage):
    from deepspeed.runtime.utils import all_gather_dp_groups
    from deepspeed.utils import safe_get_full_fp32_param

    def show(shards):
        groups = zip(optimizer.parallel_partitioned_bit16_groups, shards, optimizer.real_dp_process_group, strict=True)
        for parts, shard, group in groups:
            parts[dist.get_rank(group)].data.copy_(shard)
        all_gather_dp_groups(
            groups_flat=optimizer.bit16_groups_flat,
            partitioned_param_groups=optimizer.parallel_partitioned_bit16_groups,
            dp_process_group=optimizer.real_dp_process_group,
            start_alignment_factor=optimizer.nccl_start_alignment_factor,
            allgather_bucket_size=optimizer.allgather_bucket_size,
        )

    engine, optimizer, *_ = start(stage, bf16={"enabled": True})
    plain, *_ = start(stage, bf16={"enabled": True})
    for step in range(4):
        x, y = (part.bfloat16() for part in rows(step, engine.mesh.rank))
        for each in (engine, plain):
            each.backward((each(x) - y).square().mean())
            each.step()
        show([2 * shard for shard in optimizer.single_partition_of_fp32_groups])
        for mine, other in zip(engine.module.parameters(), plain.module.parameters(), strict=True):
            torch.testing.assert_close(mine, 2 * other)
        if step % 2:
            show(optimizer.single_partition_of_fp32_groups)
        else:
            optimizer.update_lp_params()
    for mine, other in zip(engine.module.parameters(), plain.module.parameters(), strict=True):
        masters = [safe_get_full_fp32_param(param) for param in (mine, other)]
        torch.testing.assert_close(*masters, rtol=0, atol=0)
    with torch.no_grad():
        for param in engine.module.parameters():
            param.fill_(0.5)
    optimizer.refresh_fp32_params()
    assert all(bool((shard[shard != 0] == 0.5).all()) for shard in optimizer.single_partition_of_fp32_groups)
    for each in (engine, plain):
        each.destroy()
    dist.destroy_process_group()


@world(2, backend=None)
@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_without_dimensions_and_values_that_are_set(stage):
    import deepspeed

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    deepspeed.utils.logger.addHandler(handler)
    level = deepspeed.utils.logger.level
    deepspeed.utils.logger.setLevel(logging.INFO)
    engine, *_ = start(stage, Scaled())
    deepspeed.utils.logger.removeHandler(handler)
    deepspeed.utils.logger.setLevel(level)
    assert any("DeepSpeed info: version=" in line for line in said) == (engine.mesh.rank == 0)
    engine.backward(loss_of(engine, 0, engine.mesh.rank))
    engine.step()
    scale = engine.module.scale
    assert deepspeed.utils.safe_get_full_fp32_param(scale).shape == ()
    assert deepspeed.utils.safe_get_full_fp32_param(scale).item() == pytest.approx(0.95, abs=1e-3)  # Adam's first step
    bias = engine.module.second.bias
    deepspeed.utils.safe_set_full_fp32_param(bias, torch.full((1,), 5.0))
    assert deepspeed.utils.safe_get_full_fp32_param(bias).item() == 5.0
    engine.backward(loss_of(engine, 1, engine.mesh.rank))
    engine.step()
    with deepspeed.zero.GatheredParameters([bias, scale]):
        assert bias.item() == pytest.approx(4.95, abs=0.02)
        assert scale.shape == ()
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@world(2, backend=None)
def test_communication():
    import deepspeed

    assert not deepspeed.comm.is_initialized()
    deepspeed.init_distributed("gloo", distributed_port=29501)
    comm = deepspeed.comm
    assert comm.is_initialized()
    rank = comm.get_rank()
    value = torch.tensor([1.0 + rank])
    comm.all_reduce(value, op=comm.ReduceOp.SUM, log_name="mine", prof=True)
    assert value.item() == 3.0
    out = torch.empty(2)
    comm.all_gather_into_tensor(output_tensor=out, tensor=torch.tensor([float(rank)]))
    assert out.tolist() == [0.0, 1.0]
    objects = [{"a": 1} if rank == 0 else None]
    comm.broadcast_object_list(objects, src=0)
    assert objects == [{"a": 1}]
    part = torch.empty(1)
    comm.reduce_scatter_fn(part, torch.tensor([1.0, 2.0]))
    assert part.item() == 2.0 * (rank + 1)
    group = comm.new_group([0, 1])
    assert comm.get_world_size(group) == comm.get_world_size() == 2
    assert comm.get_all_ranks_from_group(group) == [0, 1]
    assert deepspeed.utils.groups._get_data_parallel_world_size() == 2
    assert deepspeed.utils.groups._get_sequence_parallel_world_size() == 1
    comm.barrier()
    comm.configure(enabled=True)
    for _ in range(3):
        comm.all_reduce(torch.ones(64))
    assert comm.has_comm_data()
    assert comm.get_comm_operation_count("all_reduce") == 3
    told = comm.log_summary(return_dict=True)["summary"]["all_reduce"][256]
    assert (told["count"], told["msg_size_str"]) == (3, "256.0 B")
    straggling = comm.log_summary(show_straggler=True, return_dict=True)["straggler_analysis"]["all_reduce"][256]
    assert straggling["total_comm_lat_ms"] <= told["total_latency_ms"]
    comm.reset_log()
    assert not comm.has_comm_data()
    comm.configure(enabled=False)
    comm.all_reduce(torch.ones(64))
    assert comm.get_logged_comm_ops() == []
    comm.destroy_process_group()


@world(1, backend=None)
def test_without_a_launcher(monkeypatch, tmp_path):
    import deepspeed

    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings(2)))
    model = Net()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=str(file))
    assert torch.distributed.get_world_size() == 1
    engine.backward(loss_of(engine, 0, 0))
    engine.step()
    assert engine.global_steps == 1
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2)
def test_a_model_may_be_looked_at_on_one_rank_and_averaged(stage: int) -> None:
    """What libraries around DeepSpeed do with a model's parameters; the average is kept as its users write it for stage 3."""
    import deepspeed
    from deepspeed.zero import ZeroParamStatus

    plain, model = Net(), Net()
    config = settings(stage, gradient_clipping=0)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    engine, *_ = deepspeed.initialize(model=model, config=config)
    average = copy.deepcopy(engine.module)
    cut = [param for param in model.parameters() if getattr(param, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE]
    assert bool(cut) == (stage == 3)
    if engine.global_rank == 0:
        torch.save(model.state_dict(), file := io.BytesIO())
        file.seek(0)
        shapes = {name: value.shape for name, value in torch.load(file, weights_only=True).items()}
        for name, param in model.named_parameters():
            shown = param.detach().clone().cpu()
            assert shapes[name] == shown.shape == ((0,) if stage == 3 else param.shape)
            if stage == 3:
                assert shown.ds_shape == param.ds_shape == param.shape
                assert shown.ds_status == ZeroParamStatus.NOT_AVAILABLE
                with pytest.raises(ShardedAccessError):
                    shown.mul_(0.5)
    pairs = list(zip(average.parameters(), model.parameters(), strict=True))
    fetched = [p for pair in pairs for p in pair if getattr(p, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE]
    assert len(fetched) == 2 * len(cut)
    with torch.no_grad(), deepspeed.zero.GatheredParameters(fetched, modifier_rank=0, enabled=bool(fetched)):
        for mine, other in pairs:
            mine.lerp_(other.detach() + 1, 0.25)
    with deepspeed.zero.GatheredParameters(list(average.parameters()), enabled=stage == 3):
        for name, value in average.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name] + 0.25)
    engine.destroy()


@world(2)
def test_another_configuration_on_one_rank_is_refused():
    import deepspeed

    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01 if torch.distributed.get_rank() else 0.02}},
    }
    with pytest.raises(AssertionError, match=r"optimizer\.params\.lr: 0\.02 on rank 0 and 0\.01 on rank 1"):
        deepspeed.initialize(model=nn.Linear(4, 4), config=config)


@world(2, backend=None)
def test_evaluation_alone_with_a_scheduler_of_no_steps():
    """What transformers makes of "auto" for `--do_eval` without `--do_train`."""
    import deepspeed

    params = {"warmup_min_lr": 0, "warmup_max_lr": 5e-5, "warmup_num_steps": 0, "total_num_steps": 0}
    config = settings(3, scheduler={"type": "WarmupDecayLR", "params": params})
    del config["optimizer"]
    engine, optimizer, _, scheduler = deepspeed.initialize(model=Net(), config=config)
    assert optimizer is None
    assert scheduler is None
    x, _ = rows(0, 0)
    torch.testing.assert_close(engine.eval()(x), Net()(x))
    engine.zero_grad()
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@world(2, backend=None)
def test_each_worker_saves_into_its_own_folder_and_ray_joins_them(tmp_path):
    """As Ray's own example: a temporary folder for each worker, one folder on resuming."""
    import shutil

    import deepspeed

    engine, *_ = start(3)
    for step in range(2):
        engine.backward(loss_of(engine, step, engine.mesh.rank))
        engine.step()
    expected = engine.full_state_dict()
    own, joined = tmp_path / f"worker{engine.mesh.rank}", tmp_path / "joined"
    own.mkdir()
    engine.save_checkpoint(str(own))
    deepspeed.comm.barrier()
    if engine.mesh.rank == 0:
        for worker in sorted(tmp_path.glob("worker*")):
            shutil.copytree(worker, joined, dirs_exist_ok=True)
    deepspeed.comm.barrier()
    engine.backward(loss_of(engine, 7, engine.mesh.rank))
    engine.step()
    assert engine.load_checkpoint(str(joined))[0] is not None
    assert engine.global_steps == 2
    same(engine, expected)
    engine.destroy()
    engine, *_ = start(3, checkpoint={"layout": "deepspeed"})
    with pytest.raises(CheckpointError, match="different places in DeepSpeed's layout"):
        engine.save_checkpoint(str(own), "other")
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@pytest.mark.parametrize("more", [{"gradient_allreduce_op": "sum"}, {"prescale_gradients": True}])
@world(2)
def test_gradients_read_and_set_are_those_of_the_update(more):
    """Summed over ranks, or divided before they are: what is read is what the step subtracts, and so is what is set."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

    expected = 4.0 if "gradient_allreduce_op" in more else 2.0  # of inputs 1 and 2 on rank 0, 2 and 3 on rank 1
    for stage, plain, sets in ((0, False, True), (1, True, False), (2, False, False)):
        net = nn.Linear(4, 1, bias=False)
        config = {**settings(stage, gradient_accumulation_steps=2, gradient_clipping=0.0), **more}
        del config["optimizer"]
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
        before = net.weight.detach().clone()
        for microbatch in range(2):
            loss = engine(torch.full((1, 4), 1.0 + engine.global_rank + microbatch)).sum()
            engine.scale(loss).backward() if plain else engine.backward(loss)
            if microbatch:
                grad = safe_get_full_grad(net.weight)
                assert torch.equal(grad, torch.full((1, 4), expected)), (stage, grad)
            if microbatch and sets:
                safe_set_full_grad(net.weight, torch.full((1, 4), 3.0))
            engine.step()
        moved = before - net.weight.detach()
        torch.testing.assert_close(moved, torch.full((1, 4), 3.0 if sets else expected), msg=f"{stage}: {moved}")
        engine.destroy()


@world(2)
def test_state_at_stage_3_can_be_read_as_upstream_cuts_it():
    import deepspeed

    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}, "optimizer": {"type": "Adam"}}
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=config)
    engine.backward(engine(torch.ones(1, 3)).square().sum())
    engine.step()
    assert engine._get_zero_param_shapes() == [{"weight": torch.Size([3, 3]), "bias": torch.Size([3])}]
    optimizer._set_fp32_optimizer_param_groups()
    state = optimizer.optimizer.state_dict()["state"][0]
    optimizer._clear_fp32_optimizer_param_groups()
    assert optimizer.optimizer is optimizer.inner
    whole = [deepspeed.utils.safe_get_full_optimizer_state(param, "exp_avg") for param in model.parameters()]
    rank, (weight, bias) = deepspeed.comm.get_rank(), state["exp_avg"].split([5, 2])
    torch.testing.assert_close(weight, nn.functional.pad(whole[0].flatten(), (0, 1)).chunk(2)[rank])
    torch.testing.assert_close(bias, nn.functional.pad(whole[1], (0, 1)).chunk(2)[rank])
    assert state["step"] == 1
    engine.destroy()


@world(2)
def test_muon_is_clipped_as_upstream_clips_it():
    """Its directions at stages 1 to 3, by their norm; gradients at stage 0, and at stage 1 beside sums in fp32 of weights in bf16."""
    import deepspeed

    wide = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    host = {"offload_optimizer": {"device": "cpu"}}
    cases = [
        (0, {}, {}, {}, False), (1, {}, {}, {}, True), (2, {}, {}, {}, True), (3, {}, {}, {}, True), (1, wide, {}, {}, False),
        (2, wide, {}, {}, True), (1, wide, host, {}, True), (1, {}, {}, {"clip_directions": False}, False),
    ]  # fmt: skip
    moved = []
    for stage, formats, tier, params, directions in cases:
        raw = settings(stage, optimizer={"type": "Muon", "params": {"lr": 0.01, **params}}, gradient_clipping=0.1)
        raw["zero_optimization"] |= tier
        net = Net()
        before = net.first.weight.detach().clone()
        engine, *_ = deepspeed.initialize(model=net, config=raw | formats)
        engine.backward(
            0.01 * engine(rows(0, dist.get_rank())[0].to(engine.get_data_types()[0])).float().square().mean()
        )
        engine.step()
        assert (engine.get_global_grad_norm() > 1.0) == directions, (stage, formats, tier, params)
        with deepspeed.zero.GatheredParameters([net.first.weight]):
            moved.append(net.first.weight.detach().float() - before)
        engine.destroy()
    torch.testing.assert_close(moved[1:4], [moved[1]] * 3)
    torch.testing.assert_close(moved[7], moved[0])
    assert moved[1].norm() < 0.1 * moved[0].norm()
