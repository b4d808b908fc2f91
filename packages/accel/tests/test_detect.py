"""Which device is chosen, by whom, and what is said when it cannot be."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ds_accel import Accelerator, detect, get_accelerator, known_devices, set_accelerator
from ds_accel.device_facts import DETECTION_ORDER, TABLE
from ds_config.errors import ConfigError, UnsupportedError


@pytest.fixture
def nothing_but_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices that torch has in-tree, with none of them attached, whatever the machine has."""
    for kind in ("cuda", "xpu", "mps"):
        monkeypatch.setattr(getattr(torch, kind), "device_count", lambda: 0)


def test_the_cpu_when_there_is_nothing_else(nothing_but_cpu: None) -> None:
    found = detect({})
    assert found.accelerator.name == "cpu"
    assert [name for name, _ in found.tried] == list(DETECTION_ORDER)
    reasons = {name: verdict.reason for name, verdict in found.tried}
    assert reasons["cuda"] == f"cuda: torch {torch.__version__} finds no device"
    assert reasons["npu"] == "npu: the package torch_npu is not installed"
    assert str(found).splitlines()[-1] == "using cpu"
    assert str(found).splitlines()[-2] == "yes cpu: 1 device"


def test_the_order_is_kept_when_several_are_there(
    nothing_but_cpu: None, monkeypatch: pytest.MonkeyPatch, make_cuda: type
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert detect({}).accelerator.name == "cuda"
    monkeypatch.setitem(sys.modules, "torch_supa", ModuleType("torch_supa"))
    monkeypatch.setattr(torch, "supa", make_cuda(), raising=False)
    torch.get_device_module.cache_clear()
    monkeypatch.setattr(torch, "get_device_module", lambda kind: getattr(torch, kind))
    assert detect({}).accelerator.name == "supa", "its package answers as torch.cuda too, so it is asked first"
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    assert detect({}).accelerator.name == "xpu"


def test_forcing_one(nothing_but_cpu: None) -> None:
    assert detect({"DS_ACCELERATOR": " CPU "}).accelerator.name == "cpu"
    assert [name for name, _ in detect({"DS_ACCELERATOR": "cpu"}).tried] == ["cpu"]


def test_a_wrong_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        detect({"DS_ACCELERATOR": "cudaa"})
    assert caught.value.code == "accel-unknown"
    assert "known are cpu, cuda, hpu, mlu, mps, npu, sdaa, supa, xpu" in caught.value.message
    assert caught.value.fix == "Did you mean 'cuda'?"
    with pytest.raises(ConfigError, match="install the package that brings the device"):
        detect({"DS_ACCELERATOR": "tpuv9"})


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("mlu", "the package torch_mlu is not installed"),
        ("hpu", "the package habana_frameworks.torch is not installed"),
        ("cuda", "finds no device"),
        ("mps", "finds no device"),
    ],
)
def test_a_forced_device_that_is_not_there_says_what_is_missing(nothing_but_cpu: None, name: str, missing: str) -> None:
    with pytest.raises(UnsupportedError, match=missing) as caught:
        detect({"DS_ACCELERATOR": name})
    assert caught.value.code == "accel-unavailable"
    assert f"DS_ACCELERATOR='{name}' cannot be used here" in caught.value.message


def test_a_device_whose_probe_fails_is_not_used(nothing_but_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise RuntimeError("MPS backend is supported on macOS 14+")

    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", broken)
    found = detect({})
    assert found.accelerator.name == "cpu"
    assert dict(found.tried)["mps"].reason == "mps: asking for devices failed: MPS backend is supported on macOS 14+"


def test_a_vendor_package_that_fails_to_import(
    nothing_but_cpu: None, monkeypatch: pytest.MonkeyPatch, install: Any
) -> None:
    install(
        "sick",
        "sick_accel.facts:FACTS",
        {"facts.py": "raise ImportError('libsick.so.3: cannot open shared object file')"},
    )
    found = detect({})
    assert found.accelerator.name == "cpu", "a broken third party does not hold up the others"
    assert found.tried[0][1].reason == "sick: ImportError: libsick.so.3: cannot open shared object file"
    with pytest.raises(UnsupportedError, match=r"libsick\.so\.3"):
        detect({"DS_ACCELERATOR": "sick"})


def test_third_parties_are_found_by_entry_point_and_come_first(acme: str) -> None:
    assert known_devices() == ("acme", *DETECTION_ORDER)
    found = detect({})
    assert found.accelerator.name == "acme"
    assert found.accelerator.module.__name__ == "acme_accel.device"
    assert found.accelerator.device_count() == 2
    assert detect({"DS_ACCELERATOR": "cpu"}).accelerator.name == "cpu"
    with pytest.raises(ConfigError, match="known are acme, cpu"):
        detect({"DS_ACCELERATOR": "nope"})


def test_listing_devices_imports_no_third_party(acme: str) -> None:
    known_devices()
    detect({"DS_ACCELERATOR": "cpu"})
    assert not [module for module in sys.modules if module.startswith("acme_accel")]


def test_an_entry_point_that_is_no_facts(install: Any) -> None:
    install("bad", "bad_accel.facts:FACTS", {"facts.py": "FACTS = {'name': 'bad'}"})
    with pytest.raises(
        ConfigError, match=r"bad = bad_accel.facts:FACTS .* is a dict, not the Facts of 'bad'"
    ) as caught:
        detect({"DS_ACCELERATOR": "bad"})
    assert caught.value.code == "accel-plugin"


def test_an_entry_point_of_another_name(install: Any) -> None:
    install("alias", "alias_accel.facts:FACTS", {"facts.py": "from ds_accel import TABLE\nFACTS = TABLE['cpu']"})
    with pytest.raises(ConfigError, match="the Facts of 'cpu', not the Facts of 'alias'"):
        detect({})


def test_a_third_party_may_replace_a_row(nothing_but_cpu: None, install: Any) -> None:
    facts = "import dataclasses\nfrom ds_accel import TABLE\nFACTS = dataclasses.replace(TABLE['cpu'], compile_backend='eager')"
    install("cpu", "cpu_accel.facts:FACTS", {"facts.py": facts})
    assert known_devices().count("cpu") == 1
    assert detect({}).accelerator.compile_backend == "eager"


def test_nothing_works(nothing_but_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "device_count", lambda: 0)
    with pytest.raises(UnsupportedError, match="not even the CPU"):
        detect({})


def test_one_accelerator_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    first = get_accelerator()
    monkeypatch.setenv("DS_ACCELERATOR", "nonsense")
    assert get_accelerator() is first
    mine = Accelerator(TABLE["cuda"], SimpleNamespace())
    set_accelerator(mine)
    assert get_accelerator() is mine
    set_accelerator(None)
    with pytest.raises(ConfigError):
        get_accelerator()
