"""Helpers that programs import: sections, builders, hosts, grids, elasticity, programs of the shell."""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed._ours.base.raising import also, raising
from deepspeed._ours.launcher import command_line
from deepspeed.elasticity import compute_elastic_config
from deepspeed.launcher import launch, runner
from deepspeed.launcher.multinode_runner import MultiNodeRunner
from deepspeed.ops.op_builder import ALL_OPS, CPUAdamBuilder, UtilsBuilder
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.precision_config import DeepSpeedFP16Config, get_bfloat16_config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import Field, ValidationError

from ds_config.errors import ConfigError, DsError, PlanError, UnsupportedError
from ds_launcher import launch_options
from ds_zero.config import ZeroConfig

# ---- sections


class Modern(DeepSpeedConfigModel):
    new: list[str] | None = None
    old: str | None = Field(
        None, json_schema_extra={"deprecated": True, "new_param": "new", "new_param_fn": lambda value: [value]}
    )
    count: int = Field(0, alias="stage3_count")


def test_a_model_hands_old_keys_on():
    assert Modern(old="a").new == ["a"]
    assert (Modern(count=3).count, Modern(stage3_count=4).count, Modern(count="auto").count) == (3, 4, 0)
    with pytest.raises(AssertionError, match="both given"):
        Modern(old="a", new=["b"])
    with pytest.raises(ValidationError):
        Modern(cuont=1)
    changed = Modern()
    changed.count = 5
    assert changed.count == 5


def test_sections_keep_what_has_no_effect_here(monkeypatch):
    said = []
    monkeypatch.setattr("deepspeed.utils.logger.warning", said.append)
    DeepSpeedZeroConfig(stage=3, elastic_checkpoint=True)
    assert "elastic checkpointing is deprecated" in said[0]
    every = DeepSpeedZeroConfig(stage=3, prefetch_bucket_size=7, cpu_offload=True, leaf_module={"names": "experts"})
    assert every.prefetch_bucket_size == 7
    assert every.overlap_comm is True
    assert DeepSpeedZeroConfig(stage=2).overlap_comm is False
    assert every.offload_optimizer.device == "cpu"
    assert every.leaf_module.names == ["experts"]
    assert DeepSpeedZeroConfig(stage3_gather_fp16_weights_on_model_save=True).gather_16bit_weights_on_model_save
    assert set(ZeroConfig.model_fields) <= set(DeepSpeedZeroConfig.model_fields)
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    with pytest.raises(ValidationError):
        DeepSpeedFP16Config(enabled=True, loss_scale_window=0)
    assert DeepSpeedFP16Config(enabled=True, loss_scale=128, loss_scale_window=0).loss_scale_window == 0


def test_sums_of_gradients_are_refused_where_upstream_refuses_them():
    raw = {"train_batch_size": 1, "gradient_allreduce_op": "SUM"}
    assert deepspeed.DeepSpeedConfig(raw).gradient_allreduce_op == "sum"
    with pytest.raises(ValueError, match="not supported with ZeRO stage 3"):
        deepspeed.DeepSpeedConfig(raw | {"zero_optimization": {"stage": 3}})
    with pytest.raises(ValueError, match="Invalid"):
        deepspeed.DeepSpeedConfig(raw | {"gradient_allreduce_op": "max"})


def test_truth_values_may_be_numbers():
    raw = {"train_batch_size": 1, "fp16": {"enabled": 0}, "zero_optimization": {"stage": 1, "overlap_comm": True}}
    config = deepspeed.DeepSpeedConfig(raw | {"zero_allow_untested_optimizer": 1})
    assert config.fp16.enabled is False
    assert config.zero_optimization_stage == 1


# ---- errors


def test_errors_are_of_upstreams_kind_too_and_cross_process_borders():
    kind = also(PlanError, AssertionError)
    error = kind("what", code="compat-argument", fix="do")
    assert isinstance(error, AssertionError)
    assert also(PlanError, ValueError) is PlanError
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is PlanError
    assert str(back) == str(error)

    @raising(AssertionError)
    def refuse():
        raise PlanError("no", code="compat-argument")

    with pytest.raises(AssertionError) as caught:
        refuse()
    assert isinstance(caught.value, PlanError)
    with pytest.raises(AssertionError):
        deepspeed.initialize(config={"train_batch_size": 1})


# ---- builders


def test_builders_give_functions_or_a_reason():
    assert deepspeed.ops.__compatible_ops__[CPUAdamBuilder.NAME]
    assert not deepspeed.ops.__compatible_ops__["gds"]
    with pytest.raises(UnsupportedError, match="gds"):
        ALL_OPS["gds"].load()
    tensor = torch.arange(4, dtype=torch.int16)
    assert UtilsBuilder().load().cast_to_byte_tensor(tensor).data_ptr() == tensor.data_ptr()


def test_adam_by_its_functions_is_adamw():
    param = torch.nn.Parameter(torch.randn(33))
    mine = param.detach().clone()
    peer = torch.optim.AdamW([param], lr=1e-2, weight_decay=0.1)
    op, m, v = CPUAdamBuilder().load(), torch.zeros(33), torch.zeros(33)
    op.create_adam(0, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, False)
    for step in range(1, 4):
        param.grad = torch.randn(33)
        peer.step()
        op.adam_update(0, step, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, mine, param.grad, m, v)
    op.destroy_adam(0)
    torch.testing.assert_close(mine, param.detach())


# ---- hosts


def test_hosts_and_filters(tmp_path):
    from deepspeed.launcher import multinode_runner

    file = tmp_path / "hosts"
    file.write_text("one slots=2\ntwo slots=4\n")
    pool = runner.fetch_hostfile(str(file))
    assert pool == {"one": 2, "two": 4}
    assert runner.fetch_hostfile(str(tmp_path / "none")) is None
    file.write_bytes(b"node1 slots=4\n\xff")  # was a UnicodeDecodeError that names no file
    with pytest.raises(ConfigError, match=str(file)):
        runner.fetch_hostfile(str(file))
    assert runner.parse_inclusion_exclusion(pool, "two:1,3@one", "") == {"two": [1, 3], "one": [0, 1]}
    assert runner.parse_inclusion_exclusion(pool, "", "two:0") == {"one": [0, 1], "two": [1, 2, 3]}
    assert runner.parse_resource_filter({"a": [0]}) == {"a": [0]}
    assert runner.parse_resource_filter({"a": [0, 1]}, exclude_str="a") == {}
    with pytest.raises(ValueError, match="include"):
        runner.main(["--num_gpus", "1", "-i", "localhost", "foo.py"])
    given = runner.parse_args(["--launcher_arg", "-mca btl_tcp_if_include eth1", "foo.py"])
    for kind, way in (
        ("MPICHRunner", "-ppn"),
        ("IMPIRunner", "-ppn"),
        ("MVAPICHRunner", "-ppn"),
        ("OpenMPIRunner", "eth1"),
    ):
        made = getattr(multinode_runner, kind)(given, "", {"a": 2})
        command = made.get_cmd({}, {"a": 2})
        assert (command[0], way in command, "eth0" in command) == ("mpirun", True, False)
    with pytest.raises(ValueError):
        runner.parse_inclusion_exclusion(pool, "three", "")
    assert runner.decode_world_info(runner.encode_world_info(pool)) == pool
    given = runner.parse_args(["--num_gpus", "2", "train.py", "--lr", "1"])
    assert (given.user_script, given.user_args) == ("train.py", ["--lr", "1"])


class Own(MultiNodeRunner):
    def backend_exists(self):
        return True

    def get_cmd(self, environment, active_resources):
        return [self.user_script, *self.user_arguments]


def test_a_runner_of_a_programs_own():
    own = Own(SimpleNamespace(user_args=["a b"], user_script="t.py"), "world")
    own.add_export("COUNT", "64(x2)")
    own.add_export("PATH", "/usr/bin:/bin")
    assert own.exports == {"COUNT": '"64(x2)"', "PATH": "/usr/bin:/bin"}
    assert own.get_cmd({}, {}) == ["t.py", "'a b'"]


# ---- numbers


def test_expert_groups_and_grids_of_files():
    from deepspeed.checkpoint import model_3d_desc
    from deepspeed.utils.groups import _get_expert_parallel_ranks

    shared, same = _get_expert_parallel_ranks(16, 2, 4)
    assert shared == [[0, 2, 4, 6], [8, 10, 12, 14], [1, 3, 5, 7], [9, 11, 13, 15]]
    assert same[:2] == [[0, 8], [2, 10]]
    shared, same = _get_expert_parallel_ranks(8, 1, 4, use_data_before_expert_parallel_=True)
    assert shared == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert same == [[0, 1], [2, 3], [4, 5], [6, 7]]
    plan = model_3d_desc(2, 2, 2).reshape(model_3d_desc(2, 1, 1))
    assert [plan[0].get_data(stage, 0) for stage in (0, 1)] == [[0, 4, 1, 5], [2, 6, 3, 7]]
    plan = model_3d_desc(2, 2, 2).reshape(model_3d_desc(1, 2, 2))
    assert [plan[data].get_data(0, tensor) for data in (0, 1) for tensor in (0, 1)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with pytest.raises(PlanError, match="pp degree 2 -> 3"):
        model_3d_desc(2, 2, 2).reshape(model_3d_desc(3, 1, 1))


ELASTIC = {"elasticity": {
    "enabled": True, "max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17], "min_gpus": 32,
    "max_gpus": 1500, "version": 0.1,
}}  # fmt: skip


def test_elasticity():
    from deepspeed.elasticity.config import ElasticityError, ElasticityIncompatibleWorldSize

    batch, counts = compute_elastic_config(ELASTIC, "0.19.8")
    assert (batch, len(counts)) == (9792, 23)
    assert compute_elastic_config(ELASTIC, "0.19.8", world_size=64) == (9792, counts, 17)
    with pytest.raises(ElasticityIncompatibleWorldSize):
        compute_elastic_config(ELASTIC, "0.19.8", world_size=63)
    with pytest.raises(ElasticityError):
        compute_elastic_config(ELASTIC, "0.2")
    broken = copy.deepcopy(ELASTIC)
    broken["elasticity"].pop("micro_batch_sizes")
    with pytest.raises(ElasticityError, match="no micro_batch_sizes"):
        compute_elastic_config(broken, "0.19.8")


# ---- programs


@pytest.mark.parametrize("order", ["before", "after", "without"])
def test_a_script_may_have_local_rank_itself(order):
    parser = argparse.ArgumentParser()
    if order == "before":
        parser.add_argument("--local_rank", type=int, default=0)
    parser = deepspeed.add_config_arguments(parser)
    if order == "after":
        parser.add_argument("--local_rank", type=int, default=0)
    assert parser.parse_args(["--local_rank=3", "--deepspeed"]).local_rank == 3
    assert getattr(parser.parse_args([]), "local_rank", 0) == 0
    assert parser.parse_args(["--local-rank=2"] if order == "without" else ["--local_rank", "2"]).local_rank == 2


def test_launch_takes_the_flags_that_upstreams_runner_gives(monkeypatch):
    calls = []
    monkeypatch.setattr(command_line, "ds", lambda words: calls.append(words) or 0)
    flags = ["--save_pid", "7", "--enable_each_rank_log", "logs", "--bind_cores_to_rank", "--bind_core_list", "0-3"]
    command_line.launch(["--log_level", "info", "--quiet", *flags, "--enable_each_rank_log=logs", "t.py", "-q"])
    command_line.launch(["--enable_each_rank_log=None", "--no_local_rank", "t.py"])
    assert calls == [
        ["run", "--local-rank-arg", "--save-pid", "--bind-cores", "--log-dir", "logs", "--core-list", "0-3", "t.py", "-q"],
        ["run", "t.py"],
    ]  # fmt: skip


def test_ds_to_universal_refuses_flags_that_it_does_not_know(capsys):
    folders = ["--input_folder", "a", "--output_folder", "b"]
    known = ["--num_extract_workers", "2", "--num_merge_workers=2", "--keep_temp_folder", "--no_strict"]
    assert command_line.universal_arguments([*folders, *known]).strict is False
    with pytest.raises(SystemExit):
        command_line.universal_arguments([*folders, "--no-strct"])
    assert "--no-strct" in capsys.readouterr().err


def test_launch_shows_ranks_the_devices_of_their_slots(monkeypatch):
    seen = []
    monkeypatch.setattr(command_line, "ds", lambda words: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]) or 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    for slots in ([2, 3], [0, 1], 2):
        command_line.launch(["--world_info", runner.encode_world_info({"here": slots}), "t.py"])
    assert seen == ["6,7", "4,5,6,7", "4,5,6,7"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    with pytest.raises(ConfigError, match="no slot 9"):
        command_line.launch(["--world_info", runner.encode_world_info({"here": [9]}), "t.py"])


def test_programs_are_commands_of_ds(monkeypatch, tmp_path, capsys):
    calls = []
    monkeypatch.setattr(command_line, "ds", lambda words: calls.append(words) or 0)
    world = runner.encode_world_info({"here": [0, 1], "there": [0]})
    command_line.launch(["--world_info", world, "--node_rank", "1", "--master_addr", "10.0.0.1", "t.py", "--x"])
    command_line.ssh(["-f", "hosts", "nvidia-smi", "-L"])
    command_line.io(["--folder", "/data", "--read", "--io_size", "1M", "--queue_depth", "8"])
    command_line.tune(["--nvme_dir", "/a", "/b", "--no_write"])
    command_line.bench(["--nproc", "2"])
    command_line.cli_main()
    assert calls[0] == [
        "run", "--local-rank-arg", "--nproc", "1", "--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1",
        "--master-port", "29500", "t.py", "--x",
    ]  # fmt: skip
    assert calls[1] == ["ssh", "--hostfile", "hosts", "nvidia-smi", "-L"]
    assert calls[2] == ["io", "bench", "/data", "--size", "1M", "--no-write", "--loops", "3", "--queue-depth", "8"]
    assert calls[3] == ["io", "tune", "/a", "/b", "--size", "400M", "--loops", "1", "--no-write"]
    assert calls[4:] == [["comm", "bench", "--nproc", "2"], ["env"]]
    file = tmp_path / "c.json"
    file.write_text(json.dumps(ELASTIC))
    assert command_line.elastic(["-c", str(file), "-w", "64"]) == 0
    assert "train batch size: 9792" in capsys.readouterr().out


def test_programs_of_files_take_every_flag(monkeypatch, tmp_path, capsys):
    calls = []
    monkeypatch.setattr(command_line, "ds", lambda words: calls.append(words) or 0)
    sweep = tmp_path / "sweep.json"
    sweep.write_text(json.dumps({"block_size": ["1M", "8M"], "io_parallel": [1, 2], "single_submit": [True]}))
    logs = tmp_path / "logs"
    command_line.io(["--folder_to_device_mapping", "/data:0", "--io_size", "1M", "--validate", "--warmup_loops", "2"])
    command_line.tune(["--nvme_dir", "/a", "--sweep_config", str(sweep), "--log_dir", str(logs), "--flush_page_cache"])
    assert calls[0] == ["io", "bench", "/data", "--size", "1M", "--no-read", "--loops", "3"]
    assert calls[1] == [
        "io", "tune", "/a", "--size", "400M", "--loops", "1", "--block-size", "1M", "8M", "--workers", "1", "2",
        "--json", str(logs / "measured.json"),
    ]  # fmt: skip
    told = capsys.readouterr().err
    assert "ds_io: without effect here: --validate, --warmup_loops" in told
    assert "ds_nvme_tune: without effect here: --flush_page_cache\n" in told
    assert "ds_nvme_tune: without effect here: --single_submit\n" in told


@pytest.mark.parametrize("text", [None, "{", "[1]", '{"queue_depth": 8}'])
def test_a_sweep_that_is_no_object_of_lists_is_refused_by_name(text, tmp_path):
    file = tmp_path / "sweep.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(DsError, match=r"sweep\.json is no JSON object of lists"):
        command_line.tune(["--nvme_dir", "/a", "--sweep_config", str(file)])


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("io", ["--io_size", "1M"]),
        ("io", ["--folder", "/a", "--folder_to_device_mapping", "/b:0"]),
        ("io", ["--folder_to_device_mapping", "/b"]),
        ("io", ["--folder", "/a", "--gpu", "--use_gds"]),
        ("io", ["--folder", "/a", "--engine", "torch_io"]),
        ("tune", ["--nvme_dir", "/a", "--gds"]),
    ],
)
def test_programs_of_files_refuse_what_they_do_not_measure(program, words, monkeypatch, capsys):
    with pytest.raises(DsError) as info:
        getattr(command_line, program)(words)
    assert info.value.code == "compat-argument"
    monkeypatch.setattr("sys.argv", [program, *words])
    with pytest.raises(SystemExit) as ended:
        getattr(command_line, program)()
    assert ended.value.code == 2
    assert "ds explain compat-argument" in capsys.readouterr().err


def test_folders_are_measured_at_the_same_time(tmp_path, capsys):
    for name in "ab":
        (tmp_path / name).mkdir()
    words = ["--folder_to_device_mapping", f"{tmp_path}/a:0", f"{tmp_path}/b:1", "--io_size", "1M", "--loops", "1"]
    assert command_line.io([*words, "--block_size", "1M", "--queue_depth", "8", "--io_parallel", "1"]) == 0
    shown = capsys.readouterr().out
    assert f"{tmp_path}/a" in shown
    assert f"{tmp_path}/b" in shown
    assert list(tmp_path.glob("*/*")) == list(tmp_path.glob("*/.*")) == []


def test_a_program_that_launches_adds_variables_and_ends_as_its_job_does(monkeypatch):
    calls = []
    monkeypatch.setattr(command_line, "ds", lambda words: calls.append(words) or len(calls) - 1)
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert not runner.main(["t.py"])
    runner.EXPORT_ENVS.append("WANDB_API_KEY")
    for main in (runner.main, launch.main):
        with pytest.raises(SystemExit) as ended:
            main(["t.py"])
        assert ended.value.code == len(calls) - 1
    runner.EXPORT_ENVS.remove("WANDB_API_KEY")
    assert calls == [
        ["run", "--local-rank-arg", "t.py"],
        ["run", "--local-rank-arg", "-x", "WANDB_API_KEY", "t.py"],
        ["run", "--local-rank-arg", "t.py"],
    ]


def test_a_hostfile_that_is_not_there_means_this_host(monkeypatch, tmp_path, capsys):
    calls = []
    monkeypatch.setattr(command_line, "ds", lambda words: calls.append(options_of_run(words)) or 0)
    default = tmp_path / "job"
    monkeypatch.setattr(command_line, "HOSTFILE", str(default))
    given = ["--hostfile", "no/such", "--num_gpus", "2", "t.py", "--hostfile", "of_the_script"]
    command_line.main(given)
    assert "no hostfile no/such" in capsys.readouterr().err
    command_line.main(["-H=no/such", "t.py"])
    command_line.main(["t.py"])
    default.write_text("node1 slots=2\n")
    command_line.main(["t.py", "-x"])
    command_line.main(["--hostfile", str(tmp_path / "job"), "t.py"])
    files = [options.hostfile for options in calls]
    assert files == ["", "", "", str(default), str(default)]
    assert calls[0].script_args == ("--hostfile", "of_the_script")
    assert calls[0].nproc == 2
    assert capsys.readouterr().err.count("no hostfile") == 1


def options_of_run(words):
    parser = argparse.ArgumentParser()
    launch_options.register(parser)
    assert words[0] == "run"
    return launch_options.options_of(parser.parse_args(words[1:]))


@pytest.mark.slow
def test_deepspeed_starts_ranks_as_a_module_and_passes_arguments(tmp_path):
    script = tmp_path / "t.py"
    script.write_text(
        "import os, sys, deepspeed, argparse\n"
        "p = argparse.ArgumentParser(); p.add_argument('--prompt'); deepspeed.add_config_arguments(p)\n"
        "a = p.parse_args(); print('seen', a.prompt, a.local_rank, a.deepspeed, os.environ['WORLD_SIZE'])\n"
    )
    source = str(Path(deepspeed.__path__[0]).parent)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    for module, options in (
        ("runner", ["--num_gpus", "2"]),
        ("launch", ["--world_info", runner.encode_world_info({"localhost": 2})]),
    ):
        command = [
            sys.executable,
            "-m",
            f"deepspeed.launcher.{module}",
            *options,
            str(script),
            "--deepspeed",
            "--prompt",
            'I\'m "it"',
        ]
        done = subprocess.run(command, env=environ, text=True, capture_output=True, timeout=200)
        lines = sorted(line.split("] ")[-1] for line in done.stdout.splitlines() if "seen" in line)
        assert lines == ['seen I\'m "it" 0 True 2', 'seen I\'m "it" 1 True 2'], done.stderr


def test_a_wrong_configuration_is_a_config_error():
    with pytest.raises(ConfigError, match="log_level"):
        deepspeed.runtime.config.get_log_level({"log_level": "loud"})
    assert deepspeed.runtime.config.get_log_level({"log_level": "warning"}) == "WARNING"


# ---- schedules of stages


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (3, 4), (4, 8)])
def test_stages_send_what_others_take(stages, micro_batches):
    """What one stage sends in a step its neighbour takes in the same one; every microbatch goes through all of them once."""
    from deepspeed.runtime.pipe import schedule

    plans = [list(schedule.TrainSchedule(micro_batches, stages, stage)) for stage in range(stages)]
    assert {len(plan) for plan in plans} == {2 * (micro_batches + stages - 1)}

    def count(step, stage, kind):
        return sum(type(done) is kind for done in plans[stage][step]) if 0 <= stage < stages else 0

    for step in range(len(plans[0])):
        for stage in range(stages):
            assert count(step, stage, schedule.SendActivation) == count(step, stage + 1, schedule.RecvActivation)
            assert count(step, stage, schedule.SendGrad) == count(step, stage - 1, schedule.RecvGrad)
    for plan in plans:
        done = [type(instruction) for cmds in plan for instruction in cmds]
        assert done.count(schedule.ForwardPass) == done.count(schedule.BackwardPass) == micro_batches
        assert done[-3:] == [schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep]
    runs = list(schedule.InferenceSchedule(micro_batches, stages, stages - 1))
    assert sum(type(done) is schedule.ForwardPass for cmds in runs for done in cmds) == micro_batches


def test_a_checkpoint_of_upstreams_to_look_into(tmp_path):
    from deepspeed.checkpoint import DeepSpeedCheckpoint, get_model_3d_descriptor

    for rank in range(2):
        torch.save(
            {"global_steps": 7, "universal_checkpoint_info": {"a": 1}}, tmp_path / f"mp_rank_{rank:02d}_model_states.pt"
        )
        for data in range(3):
            torch.save({}, tmp_path / f"bf16_zero_pp_rank_{data}_mp_rank_{rank:02d}_optim_states.pt")
    found = DeepSpeedCheckpoint(str(tmp_path), tp_degree=1)
    assert (found.pp_degree, found.tp_degree, found.dp_degree) == (1, 1, 3)
    assert found.is_change_tp_degree()
    assert found.get_iteration() == 7
    assert found.get_checkpoint_info() == {"a": 1}
    assert len(found.zero_files) == 6
    torch.save(
        {"checkpoint_parallel_dimensions": {"pp_degree": 2, "tp_degree": 1}}, tmp_path / "mp_rank_00_model_states.pt"
    )
    with pytest.raises(RuntimeError, match="missing from model-state files"):
        get_model_3d_descriptor(str(tmp_path))


# ---- writers of events, logs of communication


def test_monitors_write_what_they_are_given(tmp_path):
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.monitor.monitor import MonitorMaster

    there = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    monitor = MonitorMaster(get_monitor_config({"csv_monitor": there}))
    assert monitor.enabled
    assert monitor.tb_monitor is None
    monitor.write_events([("Train/Samples/loss", 0.5, 8), ("my name", 2, 8)])
    monitor.write_events([("Train/Samples/loss", 0.25, 16)])
    assert (tmp_path / "job" / "Train_Samples_loss.csv").read_text().split() == ["step,loss", "8,0.5", "16,0.25"]
    assert (tmp_path / "job" / "my_name.csv").is_file()
    assert not MonitorMaster(get_monitor_config({})).enabled


def test_comet_gets_what_its_section_says(monkeypatch):
    from unittest.mock import Mock

    from deepspeed.monitor.comet import CometMonitor
    from deepspeed.monitor.config import get_monitor_config

    service = Mock()
    monkeypatch.setitem(sys.modules, "comet_ml", service)
    section = {"enabled": True, "samples_log_interval": 10, "project": "p", "api_key": "k", "experiment_name": "n"}
    monitor = CometMonitor(get_monitor_config({"comet": section}).comet)
    service.start.assert_called_once_with(
        api_key="k", project="p", workspace=None, experiment_key=None, mode=None, online=None
    )
    for samples in (5, 14, 15):
        monitor.write_events([("loss", 1.0, samples)])
    assert [call.kwargs["step"] for call in monitor.experiment.log_metric.call_args_list] == [5, 15]


def test_a_log_of_communication_keeps_rows_together():
    from deepspeed.utils.comms_logging import CommsLogger, calc_bw_log, convert_size

    log = CommsLogger()
    for latency in (3.0, 1.0, 2.0):
        log.append("all_reduce", "all_reduce", latency, 1024)
    assert log.get_total_operations() == 3
    row = log.get_raw_data()["all_reduce"][1024]
    assert row[0] == 3
    assert row[1] == [3.0, 1.0, 2.0]
    summary = log.get_operation_summary("all_reduce")[1024]
    assert (summary["avg_latency_ms"], summary["total_latency_ms"]) == (2.0, 6.0)
    assert log.get_operation_summary("broadcast") is None
    assert set(log.log_all(print_log=False, return_dict=True)) == {"summary", "straggler_analysis", "metadata"}
    assert convert_size(1536) == "1.5 KB"
    assert calc_bw_log("broadcast", 10**6, 1.0)[0] == pytest.approx(8.0)


# ---- cores, scales, small tensors


def test_a_hostfile_by_its_lines():
    assert runner._parse_hostfile(["one slots=2", "", " # nobody", "two slots=1"]) == {"one": 2, "two": 1}
    for bad in (["this is bad slots=1"], ["missing"], [""], ["one slots=1", "one slots=2"]):
        with pytest.raises(ValueError, match="hostfile"):
            runner._parse_hostfile(bad)


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), True, [], {}])
def test_a_loss_scale_is_a_finite_number(scale):
    with pytest.raises(ValidationError, match="must be a number"):
        DeepSpeedFP16Config(loss_scale=scale)


def test_cores_of_a_rank(monkeypatch):
    from deepspeed.utils import numa

    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    assert numa.parse_range_list("0,2-4,6,8-9") == [0, 2, 3, 4, 6, 8, 9]
    for bad in ("0,2-6,5-9", "8,2-6", "1,6-2", "1,a"):
        with pytest.raises(ValueError, match="range"):
            numa.parse_range_list(bad)
    cores, command = numa.get_numactl_cmd("0-3,8-11", 2, 1)
    assert cores == 4
    assert command[:3] == ["numactl", "-C", "8-11"]
    with pytest.raises(AssertionError, match="share 1 cores"):
        numa.get_numactl_cmd("3", 2, 0)
    monkeypatch.setenv("KMP_AFFINITY", "x")
    with pytest.raises(ValueError, match="KMP_AFFINITY"):
        numa.get_numactl_cmd(None, 1, 0)


def test_scales_halve_and_double():
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, DynamicLossScaler, LossScaler

    scaler = DynamicLossScaler(init_scale=16, scale_window=2, min_scale=4)
    for overflow, scale in ((True, 8), (False, 8), (False, 8), (False, 16), (True, 8), (True, 4)):
        scaler.update_scale(overflow)
        assert scaler.cur_scale == scale
    with pytest.raises(RuntimeError, match="minimum"):
        scaler.update_scale(True)
    scaler = DynamicLossScaler(init_scale=64, scale_window=1, scale_factor=4.0)
    scaler.update_scale(True)
    assert scaler.cur_scale == 16
    for _ in range(2):
        scaler.update_scale(False)
    assert scaler.cur_scale == 64
    assert isinstance(CreateLossScaler(torch.float, 8.0, True, None), LossScaler)
    x = torch.ones(1, requires_grad=True)
    LossScaler(8.0).backward(x.sum())
    assert x.grad.item() == 8.0


def test_rows_of_a_matrix_add_up():
    from deepspeed.runtime.sparse_tensor import SparseTensor

    one, two = torch.zeros(6, 3), torch.zeros(6, 3)
    one[[1, 4]], two[[4, 5]] = torch.randn(2, 3), torch.randn(2, 3)
    rows = SparseTensor(one)
    assert rows.indices.tolist() == [1, 4]
    rows.add(SparseTensor(two.to_sparse(1)))
    torch.testing.assert_close(rows.to_dense(), one + two)
    torch.testing.assert_close(rows.to_coo_tensor().to_dense(), one + two)
    with pytest.raises(AssertionError):
        rows.add(SparseTensor(torch.ones(2, 3)))


def test_a_linear_layer_as_one_node():
    from deepspeed.runtime.zero.linear import LinearModuleForZeroStage3, zero3_linear_wrap

    layer = LinearModuleForZeroStage3(4, 3)
    x = torch.randn(2, 5, 4, requires_grad=True)
    inputs = (x, layer.weight, layer.bias)
    ours = torch.autograd.grad(zero3_linear_wrap(*inputs).square().sum(), inputs)
    theirs = torch.autograd.grad(torch.nn.functional.linear(*inputs).square().sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    one, two = (
        torch.func.grad(lambda w, f=f: f(x, w).sum())(layer.weight)
        for f in (zero3_linear_wrap, torch.nn.functional.linear)
    )
    torch.testing.assert_close(one, two)


def test_runners_make_the_launchers_own_commands():
    from deepspeed.launcher.multinode_runner import OpenMPIRunner, PDSHRunner, SlurmRunner

    hosts = {"one": 2, "two": 2}
    args = runner.parse_args(["train.py", "--lr", "1"])
    command, _, environment = PDSHRunner(args, runner.encode_world_info(hosts)).get_cmd({"A": "b"}, hosts)
    assert command[0] == "pdsh"
    assert "train.py --lr 1" in command[-1]
    assert environment == {"A": "b", "PDSH_RCMD_TYPE": "ssh"}
    for kind, tool in ((OpenMPIRunner, "mpirun"), (SlurmRunner, "srun")):
        assert kind(args, "", hosts).get_cmd({}, hosts)[0] == tool


# ---- deepspeed.linear


def test_layers_of_deepspeed_linear():
    from deepspeed.linear import Init, LoRAConfig, OptimizedLinear, QuantizationConfig, init_lora
    from deepspeed.linear.quantization import QuantizedLinear, QuantizedParameter

    plain = torch.nn.Linear
    with Init(LoRAConfig(lora_r=2)):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        assert isinstance(plain(2, 2), torch.nn.Linear)
    assert torch.nn.Linear is plain
    with pytest.raises(PlanError, match="before its update"):
        model(torch.ones(1, 8, dtype=torch.bfloat16))
    init_lora(model)
    assert sorted({name.split(".")[1] for name, p in model.named_parameters() if p.requires_grad}) == [
        "lora_weight_1",
        "lora_weight_2",
    ]
    assert model(torch.ones(1, 8, dtype=torch.bfloat16)).shape == (1, 4)
    with Init(LoRAConfig(lora_r=2, target_mods=["q_proj"])):
        model = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(8, 8), "head": torch.nn.Linear(8, 4)})
    values = {"q_proj.weight": torch.randn(8, 8), "head.weight": torch.randn(4, 8)}
    model.load_state_dict(values)
    init_lora(model)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        f"q_proj.lora_weight_{i}.weight" for i in (1, 2)
    ]
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    torch.testing.assert_close(model["head"](x), x @ values["head.weight"].bfloat16().T)
    coded = OptimizedLinear(32, 16, quantization_config=QuantizationConfig(q_bits=8))
    assert isinstance(coded, QuantizedLinear)
    x, before = torch.randn(2, 32, dtype=torch.bfloat16), coded.weight.dequantized().clone()
    coded.to("cpu")
    assert coded.weight.dtype is torch.uint8
    torch.testing.assert_close(coded.weight.dequantized(), before, rtol=0.1, atol=0.02)
    assert coded(x).shape == (2, 16)
    again = QuantizedParameter(coded.weight.data, **coded.weight.__dict__)
    assert torch.equal(again.dequantized(), coded.weight.dequantized())
    with pytest.raises(ValueError, match="codes have no gradient"):
        QuantizedParameter(before, requires_grad=True)
    with pytest.raises(ValueError, match="expected a LoRAConfig"):
        OptimizedLinear(4, 4, lora_config={"lora_r": 2})
    with pytest.raises(AssertionError, match="base_weight_sharding = 3"):
        OptimizedLinear(4, 4, lora_config=LoRAConfig(base_weight_sharding=3))


# ---- shards, sections, files, arguments


def test_shards_tile_a_dim():
    from deepspeed.module_inject import tp_shard

    try:
        tp_shard.set_tp_grain_size(64)
        for size, ranks in ((50257, 2), (50257, 8), (32000, 4)):
            assert sum(tp_shard.get_shard_size_list(size, ranks, "lm_head")) == size
        tp_shard.set_tp_grain_size(1)
        assert tp_shard.get_shard_size_list(101, 2, "lm_head") == [51, 50]
        assert tp_shard.get_shard_size_list(384, 4, "self_attn.q_proj", num_kv_heads=6) == [128, 128, 64, 64]
        tp_shard.set_num_kv_heads(6)
        assert tp_shard.get_shard_size_list(384, 4, "layers.0.self_attn.q_proj") == [128, 128, 64, 64]
        assert tp_shard.get_shard_size_list(384, 4, "layers.0.mlp.up_proj") == [96] * 4
        with pytest.raises(ValueError, match="group-local rank or process group"):
            tp_shard.get_shard_size(12, 2)
    finally:
        tp_shard.set_tp_grain_size(1)
        tp_shard.set_num_kv_heads(None)


def test_values_of_schedules_given_as_arguments():
    from deepspeed.runtime import lr_schedules

    parser = lr_schedules.add_tuning_arguments(argparse.ArgumentParser())
    parser.add_argument("--total_num_steps", type=int)  # a script's own
    given = parser.parse_args(["--lr_schedule", "WarmupLR", "--warmup_max_lr", "0.5", "--warmup_num_steps", "7"])
    config, why = lr_schedules.get_config_from_args(given)
    assert why is None
    rise = {"warmup_min_lr": 0.0, "warmup_type": "log"}
    assert config == {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 7, **rise}}
    switches = parser.parse_args(["--lr_range_test_staircase", "--cycle_momentum", "--lr_schedule", "OneCycle"])
    cycle, _ = lr_schedules.get_config_from_args(switches)
    assert (switches.lr_range_test_staircase, cycle["params"]["cycle_max_lr"], "cycle_momentum" in cycle["params"]) == (
        True,
        0.1,
        False,
    )
    lr_schedules.OneCycle(torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]), **cycle["params"]).step()
    assert lr_schedules.get_lr_from_config({"type": "WarmupCosineLR", "params": {}})[0] is None
    assert lr_schedules.get_lr_from_config(config) == (0.5, "")
    assert lr_schedules.get_lr_from_config({"type": "Nothing", "params": {}})[0] is None
    assert lr_schedules.get_config_from_args(argparse.Namespace())[0] is None
    params = {"warmup_num_steps": 1}
    lr_schedules.override_params(given, params)
    assert params["warmup_num_steps"] == 7


def test_files_by_upstreams_handle(tmp_path):
    from deepspeed.ops.aio import AsyncIOBuilder

    handle = AsyncIOBuilder().load().aio_handle(1 << 16, 8, True, False, 2)
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (1 << 16, 8, 2)
    data, found = torch.randn(30_000), torch.empty(30_000)
    path = str(tmp_path / "a.bin")
    assert handle.async_pwrite(data, path) == 0
    assert handle.wait() == 1
    assert handle.sync_pread(found, path) == 1
    assert torch.equal(data, found)
    part = torch.empty(100)
    assert handle.pread(part, path, False, True, 400) == 0
    assert handle.wait() == 1
    assert torch.equal(part, data[100:200])
    with pytest.raises(OSError, match="nothing"):
        handle.sync_pread(part, str(tmp_path / "nothing"))
    with open(path, "r+b") as file:
        assert handle.async_pwrite(buffer=part.neg(), fd=file.fileno(), file_offset=400) == 0
        assert handle.wait() == 1
    assert handle.sync_pread(found, path) == 1
    assert torch.equal(found, torch.cat((data[:100], -part, data[200:])))
    with pytest.raises(TypeError, match="descriptor"):
        handle.async_pwrite(part)
    locked = handle.new_cpu_locked_tensor(4096, part)
    assert (locked.shape, locked.dtype) == ((4096,), torch.float32)
    other = AsyncIOBuilder().load().aio_handle()
    assert handle.is_pinned(locked)
    assert other.is_pinned(locked[1024:2048])  # from a page's beginning
    assert not handle.is_pinned(locked[1:])


def test_small_modules_of_upstreams():
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime import utils
    from deepspeed.runtime.config_utils import get_scalar_param
    from deepspeed.runtime.pipe.topology import _prime_factors

    assert _prime_factors(60) == [2, 2, 3, 5]
    with pytest.raises(ValueError, match="not positive"):
        _prime_factors(0)
    assert get_scalar_param({"a": 1}, "b", 2) == 2
    assert DeepSpeedFlopsProfilerConfig({"flops_profiler": {"enabled": True}}).enabled
    assert utils.get_global_norm([3.0, 4.0]) == 5.0
    megatron = SimpleNamespace(get_slice_parallel_rank=lambda: 3, get_model_parallel_world_size=lambda: 4)
    assert utils.bwc_tensor_model_parallel_rank(megatron) == 3
    assert utils.bwc_tensor_model_parallel_world_size(megatron) == 4
    assert utils.bwc_tensor_model_parallel_world_size() == 1
    layer = torch.nn.Linear(2, 2)
    assert not utils.is_model_parallel_parameter(layer.weight)
    layer(torch.ones(1, 2)).sum().backward()
    grads = torch.cat([p.grad.flatten() for p in layer.parameters()])
    assert utils.get_grad_norm(layer.parameters()) == pytest.approx(float(grads.norm()))
    assert utils.get_grad_norm(layer.parameters(), math.inf) == float(grads.abs().max())
    assert utils.get_grad_norm([]) == 0.0
    long = torch.nn.Parameter(torch.zeros(4_000_000))
    long.grad = torch.full_like(long, 1e-3)
    assert utils.get_grad_norm([layer.bias, long]) == pytest.approx(math.sqrt(4.0 + 2.0), rel=1e-6)
    assert float(utils.clip_grad_norm_(long, 1.0)) == pytest.approx(2.0, rel=1e-6)
    assert float(long.grad[0]) == pytest.approx(5e-4, rel=1e-5)
    assert utils.get_weight_norm([torch.tensor([3.0]), torch.tensor([4.0])]) == 5.0
    assert utils.get_weight_norm(torch.tensor([math.inf])) == -1.0
    counted = []
    layer.weight.register_hook(lambda grad: counted.append(utils.count_used_parameters_in_backward(layer.parameters())))
    (layer.weight * 2).sum().backward()
    assert counted == [1]
    with pytest.raises(RuntimeError, match="no backward runs"):
        utils.count_used_parameters_in_backward(layer.parameters())
    other, before = SimpleNamespace(), get_accelerator()
    set_accelerator(other)
    assert get_accelerator() is other
    set_accelerator(None)
    assert get_accelerator() is before


def test_every_generator_is_seeded():
    from deepspeed.runtime.utils import set_random_seed

    def drawn():
        set_random_seed(7 + 2**32)
        return random.random(), np.random.rand(), float(torch.rand(1))

    assert drawn() == drawn()
    assert drawn()[1] == np.random.RandomState(7).rand()


def test_arguments_are_taken_by_upstreams_names_and_in_its_order():
    """A table of what programs may call by position or by keyword: (callable, upstream's first arguments)."""
    import inspect

    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, SubParamLinearLayer
    from deepspeed.moe.utils import has_moe_layers
    from deepspeed.runtime.zero.linear import LinearModuleForZeroStage3, zero3_linear_wrap
    from deepspeed.sequence.layer import DistributedAttention, single_all_to_all

    table = {
        deepspeed.utils.set_z3_leaf_modules_by_name: "model module_names flag raise_if_not_found",
        deepspeed.utils.set_z3_leaf_modules_by_suffix: "model module_name_suffixes flag raise_if_not_found",
        deepspeed.utils.safe_update_full_grad_vectorized: "param_list update_func",
        deepspeed.zero.Init: "module data_parallel_group mem_efficient_linear remote_device pin_memory config_dict_or_path config "
        "enabled dtype mpu zero_param_parallel_group zero_quantized_weights zero_quantized_nontrainable_weights "
        "sequence_data_parallel_group param_swapper tensor_overrides",
        deepspeed.DeepSpeedEngine.register_compile_pass: "self pass_name pass_fn contract",
        deepspeed.PipelineEngine.module_state_dict: "self exclude_frozen_parameters",
        LinearLayer: "module mp_group skip_partition gather_output",
        SubParamLinearLayer: "module mp_group shape partition_dim",
        LinearAllreduce.forward: "self input",
        LinearModuleForZeroStage3.forward: "self input",
        zero3_linear_wrap: "input weight bias",
        has_moe_layers: "m",
        single_all_to_all: "input scatter_idx gather_idx batch_dim_idx group async_op handle type num_kv_heads",
        DistributedAttention: "local_attention sequence_process_group scatter_idx gather_idx sp_stream num_kv_heads",
    }
    for target, names in table.items():
        assert list(inspect.signature(target).parameters)[: len(names.split())] == names.split(), target


def test_schedulers_take_their_parameters_by_position():
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    cycle = lr_schedules.OneCycle(optimizer, 0.01, 0.1, 0.0, 4)
    assert (cycle.cycle_min_lr, cycle.cycle_max_lr, cycle.cycle_first_step_size) == (0.01, 0.1, 4)
    decay = lr_schedules.WarmupDecayLR(optimizer, 10, 0.0, 0.1, 2, "linear", 3)
    assert (decay.total_num_steps, decay.warmup_max_lr, decay.last_batch_iteration) == (10, 0.1, 3)
    with pytest.raises(TypeError, match="each once"):
        lr_schedules.WarmupLR(optimizer, 0.0, warmup_min_lr=0.1)
