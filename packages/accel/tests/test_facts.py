"""The table: complete, consistent, and only data."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from ds_accel import TABLE, Capability, DeviceFacts
from ds_accel.device_facts import DETECTION_ORDER, CapabilityRule
from ds_accel.probes import (
    comm_backend,
    find_package,
    graphs,
    judge,
    present,
    supports,
    triton,
    visible_devices,
    visible_env,
)

CPU = TABLE["cpu"]
CUDA = TABLE["cuda"]


def test_every_device_of_the_table_is_asked_once_and_the_cpu_last() -> None:
    assert set(DETECTION_ORDER) == set(TABLE)
    assert len(DETECTION_ORDER) == len(TABLE) == 9
    assert DETECTION_ORDER[-1] == "cpu"
    assert DETECTION_ORDER.index("supa") < DETECTION_ORDER.index("cuda"), "supa answers as torch.cuda too"


@pytest.mark.parametrize("facts", TABLE.values(), ids=lambda facts: facts.name)
def test_each_row_is_frozen_data_that_torch_understands(facts: DeviceFacts) -> None:
    assert TABLE[facts.name] is facts
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts.name = "other"  # type: ignore[misc]
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in facts.dtypes)
    assert {"float32", "bfloat16", "float16"} <= set(facts.dtypes)
    assert comm_backend(facts, platform="linux")
    assert facts.pinned or facts.host_timers


def test_backends_follow_the_platform_and_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert comm_backend(CUDA, platform="linux") == "nccl"
    assert comm_backend(CUDA, platform="win32") == "gloo"
    assert comm_backend(TABLE["supa"], platform="win32") == "gloo"
    assert comm_backend(CPU) == "gloo"
    assert comm_backend(TABLE["xpu"]) == "xccl"
    monkeypatch.setitem(sys.modules, "oneccl_bindings_for_pytorch", sys)
    assert comm_backend(CPU) == comm_backend(TABLE["xpu"]) == "ccl"
    assert comm_backend(DeviceFacts(name="x", torch_type="x")) == ""


def test_visible_devices_are_read_as_written() -> None:
    assert visible_devices(CUDA, {"CUDA_VISIBLE_DEVICES": "0, GPU-3a,MIG-1/2"}) == ("0", "GPU-3a", "MIG-1/2")
    assert visible_devices(CUDA, {"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert visible_devices(CUDA, {}) is None
    assert visible_devices(CPU, {"CUDA_VISIBLE_DEVICES": "0"}) is None
    assert visible_env(CUDA, ("1", "3")) == {"CUDA_VISIBLE_DEVICES": "1,3"}
    assert visible_env(CPU, ("0",)) == {}
    assert visible_env(TABLE["npu"], ("7",)) == {"ASCEND_RT_VISIBLE_DEVICES": "7"}


@pytest.mark.parametrize(
    ("capability", "dtype", "ok", "reason"),
    [
        ((9, 0), "bfloat16", True, "native, compute capability 9.0 >= 8.0"),
        ((7, 5), "bfloat16", True, "emulated, compute capability 7.5 < 8.0"),
        ((7, 0), "float16", True, "compute capability 7.0 >= 7.0"),
        ((6, 1), "float16", False, "compute capability 6.1 < 7.0"),
        ((8, 9), "float8_e4m3fn", True, "8.9 >= 8.9"),
        ((8, 6), "float8_e4m3fn", False, "8.6 < 8.9"),
        ((10, 0), "float8_e5m2", True, "10.0 >= 8.9"),
        ((6, 1), "float64", True, "float64 on cuda: supported"),
    ],
)
def test_dtypes_on_cuda(make_cuda: type, capability: tuple[int, int], dtype: str, ok: bool, reason: str) -> None:
    verdict = supports(CUDA, make_cuda(capability), dtype)
    assert bool(verdict) is ok
    assert reason in verdict.reason


def test_dtypes_elsewhere() -> None:
    assert supports(CPU, torch.cpu, "float16").reason == (
        "float16 on cpu: through float32 on CPUs without float16 arithmetic: right, but slow"
    )
    assert not supports(TABLE["mps"], object(), "float64")
    assert not supports(CPU, torch.cpu, "float8_e4m3fn")
    hpu = TABLE["hpu"]
    assert not supports(hpu, object(), "float16"), "a module that cannot be asked says no"
    asked = type("Hpu", (), {"is_fp16_supported": staticmethod(lambda: True)})
    assert supports(hpu, asked, "float16") == Capability(True, "float16 on hpu: is_fp16_supported() says so")


def test_graphs_and_triton(make_cuda: type, monkeypatch: pytest.MonkeyPatch) -> None:
    assert graphs(CUDA, make_cuda())
    assert graphs(CUDA, object()).reason.endswith("object has no CUDAGraph")
    assert graphs(CPU, torch.cpu).reason == "graphs on cpu: this device has none"
    monkeypatch.setitem(sys.modules, "triton", sys)
    assert triton(CUDA, make_cuda((8, 0)))
    assert triton(CUDA, make_cuda((7, 5))).reason == "Triton on cuda: compute capability 7.5 < 8.0"
    assert not triton(TABLE["xpu"], object())
    monkeypatch.setitem(sys.modules, "triton", None)
    assert triton(CUDA, make_cuda()).reason.endswith("the package triton is not installed")


def test_rules_without_a_capability_to_read() -> None:
    assert not judge(CapabilityRule(min_capability=(8, 0)), object(), 0, "x")
    assert judge(CapabilityRule(native_from=(8, 0)), object(), 0, "x")
    properties = type("Xpu", (), {"get_device_capability": staticmethod(lambda index: {"name": "x"})})
    assert (
        "does not tell its compute capability"
        in judge(CapabilityRule(min_capability=(8, 0)), properties, 0, "x").reason
    )


def test_presence_without_importing() -> None:
    assert present(CPU)
    assert present(TABLE["mlu"]).reason == "mlu: the package torch_mlu is not installed"
    npu = dataclasses.replace(TABLE["npu"], vendor_package="json")
    assert present(npu, {}).reason == "npu: the environment has no ASCEND_HOME_PATH"
    assert present(npu, {"ASCEND_HOME_PATH": "/x"})
    assert not find_package("no_such_package.at.all")
    assert find_package("json.decoder")
    code = "import sys; from ds_accel.probes import find_package; find_package('wave'); print('wave' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
