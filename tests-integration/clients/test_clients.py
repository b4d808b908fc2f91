"""Unmodified client programs give with the facade the numbers that they give with DeepSpeed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.timeout(900)
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}


def agree(ours, upstream, dtype="fp32", name="losses"):
    assert ours["deepspeed"].startswith("0.19.8+ds.")
    assert upstream["deepspeed"] == "0.19.8"
    assert ours[name] == pytest.approx(upstream[name], rel=TOLERANCE[dtype], abs=TOLERANCE[dtype])


@pytest.mark.parametrize(("stage", "dtype"), [(1, "fp32"), (2, "fp32"), (3, "fp32"), (2, "bf16"), (3, "bf16")])
def test_plain_loop(client, stage, dtype):
    ours, upstream = client.both("plain", stage=stage, dtype=dtype)
    assert len(ours["losses"]) == 20
    agree(ours, upstream, dtype)
    assert ours["rates"] == pytest.approx(upstream["rates"], rel=1e-12)
    assert ours["norms"] == pytest.approx(upstream["norms"], rel=1e-4 if dtype == "fp32" else 0.1)


@pytest.mark.parametrize("stage", [1, 3])
def test_goes_on_from_deepspeeds_checkpoint(client, stage):
    """What DeepSpeed saved in the middle of its run, our run goes on from and ends as it did."""
    folder = client.folder / "of-deepspeed"
    upstream = client.run("upstream", "plain", stage=stage, steps=10, mode="save", folder=folder)
    ours = client.run("ours", "plain", stage=stage, steps=10, mode="late", folder=folder)
    assert ours["losses"] == pytest.approx(upstream["losses"][5:], rel=1e-5)
    assert ours["rates"] == pytest.approx(upstream["rates"][5:], rel=1e-12)


LAUNCHERS = {
    "torchrun": ("torchrun", "--nproc_per_node=2", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"),
    "ds": ("ds", "run", "--nproc", "2"),
    "deepspeed": ("deepspeed", "--num_gpus", "2"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers(client, launcher):
    started = client.run("ours", "plain", launcher=LAUNCHERS[launcher], stage=2, mode="own", steps=6)
    assert started["losses"] == client.run("ours", "plain", stage=2, mode="own", steps=6)["losses"]


@pytest.mark.parametrize(("stage", "mode"), [(2, "plugin"), (3, "plugin"), (3, "file")])
def test_accelerate(client, stage, mode):
    ours, upstream = client.both("loop", stage=stage, mode=mode)
    agree(ours, upstream)
    assert ours["rates"] == upstream["rates"]
    assert ours["again"] == ours["straight"] == pytest.approx(upstream["straight"], rel=1e-5)
    assert ours["keys"] == upstream["keys"]
    assert ours["kind"] == upstream["kind"] == "LlamaForCausalLM"


def test_accelerate_launch(client):
    file = client.folder / "accelerate.json"  # YAML holds JSON
    wanted = {"zero_stage": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "zero3_init_flag": False}
    offload = {"offload_optimizer_device": "none", "offload_param_device": "none"}
    here = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": 2, "machine_rank": 0}
    settings = {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "no",
        "use_cpu": False,
        "main_training_function": "main",
    }
    file.write_text(json.dumps({**here, **settings, "deepspeed_config": wanted | offload}))
    launcher = ("accelerate", "launch", "--config_file", str(file), "--main_process_port", "0")
    ours, upstream = client.both("loop", launcher=launcher, stage=2, mode="launch")
    agree(ours, upstream)
    assert ours["again"] == ours["straight"]
    assert ours["keys"] == upstream["keys"]


def test_several_plugins(client):
    ours, upstream = client.both("several", stage=2)
    agree(ours, upstream)
    assert ours["first"]
    assert ours["stages"] == upstream["stages"] == [2, 3]


@pytest.mark.parametrize(
    ("stage", "mode"), [(0, ""), (1, ""), (2, ""), (3, ""), (2, "lora"), (3, "lora"), (2, "compiled"), (3, "compiled")]
)
def test_trainer(client, stage, mode):
    options = {"mode": mode} if mode else {}
    ours, upstream = client.both("trainer", stage=stage, **options)
    agree(ours, upstream)
    if stage > 0:  # there, DeepSpeed does not tell it in fp32
        assert ours["norms"] == pytest.approx(upstream["norms"], rel=1e-4)
    assert ours["resumed"] == pytest.approx(ours["straight"], rel=1e-5), (
        "a run resumed mid-epoch is the run that was not"
    )
    assert ours["loaded"] == upstream["loaded"]


@pytest.mark.parametrize("stage", [2, 3])
def test_trainer_resumes_on_another_world_size(client, stage):
    """DeepSpeed itself cannot without a conversion: compared with our own run that went straight on."""
    whole = client.run("ours", "trainer", stage=stage, steps=12)
    folder = client.folder / "trainer-ours-run"
    late = client.run("ours", "trainer", ranks=1, stage=stage, steps=12, mode="late", folder=folder)
    assert len(late["losses"]) == 6
    assert late["losses"] == pytest.approx(whole["straight"], rel=1e-5)


@pytest.mark.parametrize("mode", ["loop", "peft", "tensor"])
def test_saved_files(client, mode):
    """What two ranks write at every stage, in every way that clients have, is what one process writes: whole, under the model's names."""
    alone = client.run("ours", "saving", ranks=1, stage=0, steps=3, mode=mode)
    wanted = {name: load_file(Path(alone["folder"]) / name) for name in alone["files"]}
    assert len(wanted) == {"loop": 4, "peft": 2, "tensor": 2}[mode]
    for stage in range(4):
        shutil.rmtree(alone["folder"])
        found = client.run("ours", "saving", stage=stage, steps=3, mode=mode)
        assert found["files"] == alone["files"]
        for name, tensors in wanted.items():
            saved = load_file(Path(found["folder"]) / name)
            assert set(saved) == set(tensors), name
            for key, value in tensors.items():
                torch.testing.assert_close(
                    saved[key], value, atol=1e-5, rtol=1e-4, msg=lambda said, at=(stage, name, key): f"{at}: {said}"
                )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_pretrained_and_generation(client, dtype):
    ours, upstream = client.both("pretrained", stage=3, dtype=dtype)
    agree(ours, upstream, dtype)
    assert max(ours["held"], upstream["held"]) < 1000, "no rank holds the model before initialize"
    assert ours["tables"] == upstream["tables"] == ["torch.float32"]
    assert ours["text"] == ours["plain"]
    if dtype == "fp32":
        assert ours["text"] == upstream["text"]
    assert ours["after"] == pytest.approx(upstream["after"], rel=TOLERANCE[dtype])


def test_sft(client):
    ours, upstream = client.both("sft", stage=3)
    agree(ours, upstream)


def test_grpo(client):
    ours, upstream = client.both("grpo", stage=3, steps=8)
    agree(ours, upstream)
    assert ours["rewards"] == upstream["rewards"]
    assert len(set(ours["rewards"])) > 1


@pytest.mark.parametrize("stage", [2, 3])
def test_fabric(client, stage):
    ours, upstream = client.both("fabric", stage=stage)
    agree(ours, upstream)
    assert ours["again"] == ours["straight"] == pytest.approx(upstream["straight"], rel=1e-5)
    assert ours["step"] == 20


@pytest.mark.parametrize("stage", [2, 3])
def test_lightning(client, stage):
    ours, upstream = client.both("lit", stage=stage)
    agree(ours, upstream)
    agree(ours, upstream, name="later")
    assert ours["steps"] == upstream["steps"] == 20
    assert ours["validation"] == pytest.approx(upstream["validation"], rel=1e-5)
