"""Unmodified client programs give with the facade the numbers that they give with DeepSpeed."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.timeout(400)
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


@pytest.mark.parametrize(("stage", "mode"), [(2, "plugin"), (3, "plugin"), (3, "file")])
def test_accelerate(client, stage, mode):
    ours, upstream = client.both("loop", stage=stage, mode=mode)
    agree(ours, upstream)
    assert ours["rates"] == upstream["rates"]
    assert ours["again"] == ours["straight"] == pytest.approx(upstream["straight"], rel=1e-5)
    assert ours["keys"] == upstream["keys"]
    assert ours["kind"] == upstream["kind"] == "LlamaForCausalLM"


@pytest.mark.parametrize(("stage", "mode"), [(2, ""), (3, ""), (2, "lora")])
def test_trainer(client, stage, mode):
    options = {"mode": mode} if mode else {}
    ours, upstream = client.both("trainer", stage=stage, steps=12, **options)
    agree(ours, upstream)
    assert ours["norms"] == pytest.approx(upstream["norms"], rel=1e-4)
    assert ours["resumed"] == pytest.approx(ours["straight"], rel=1e-5), (
        "a run resumed mid-epoch is the run that was not"
    )
    assert ours["loaded"] == upstream["loaded"]


def test_pretrained_and_generation(client):
    ours, upstream = client.both("pretrained", stage=3, steps=5)
    agree(ours, upstream)
    assert ours["text"] == ours["plain"] == upstream["text"]
    assert ours["after"] == pytest.approx(upstream["after"], rel=1e-5)


def test_trl(client):
    ours, upstream = client.both("sft", stage=3, steps=6)
    agree(ours, upstream)
