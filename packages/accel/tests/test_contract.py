"""The contract: kept by the CPU and by a device that a third party brings, and broken ones are told apart."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_accel import TABLE, Accelerator, CapabilityRule, CommBackend, DeviceFacts, contract, detect, get_accelerator


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_the_cpu_keeps_it(check: contract.Check) -> None:
    check(detect({"DS_ACCELERATOR": "cpu"}).accelerator)


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_an_out_of_tree_device_keeps_it(check: contract.Check, acme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", acme)
    accelerator = get_accelerator()
    assert accelerator.name == "acme"
    check(accelerator)


def test_an_out_of_tree_device_needs_few_functions(acme: str) -> None:
    module = detect({}).accelerator.module
    assert len([name for name in vars(module) if callable(getattr(module, name)) and not name.startswith("_")]) <= 15


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_cuda_keeps_it(check: contract.Check) -> None:
    check(detect({"DS_ACCELERATOR": "cuda"}).accelerator)


def module_of(**functions: Any) -> SimpleNamespace:
    """A module that keeps the contract in host memory, with some functions replaced."""
    whole = {
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda index: None,
        "synchronize": lambda index=None: None,
        "get_rng_state": lambda index: torch.get_rng_state(),
        "set_rng_state": lambda state, index: torch.set_rng_state(state),
        "mem_get_info": lambda index: (5, 10),
    }
    return SimpleNamespace(**{**whole, **functions})


SOUND = DeviceFacts(name="sound", torch_type="cpu", backends=(CommBackend("gloo"),), pinned=False, host_timers=True)

BROKEN = [
    (SOUND, {"device_count": lambda: 0}, "devices_are_counted: device_count() is 0"),
    (SOUND, {"current_device": lambda: 4}, "devices_are_counted: the current device is 4 of 1"),
    (SOUND, {"mem_get_info": lambda index: (11, 10)}, "memory_is_counted: free 11 of total 10 bytes"),
    (
        SOUND,
        {"set_rng_state": lambda state, index: None},
        "random_streams_are_independent: the same seed and name gave other numbers",
    ),
    (dataclasses.replace(SOUND, graph_class="Graph"), {}, "facts_fit_the_module: the module of sound lacks Graph"),
    (dataclasses.replace(SOUND, ranges="marks"), {}, "facts_fit_the_module: the module of sound lacks marks"),
    (
        dataclasses.replace(SOUND, dtypes={"float99": CapabilityRule()}),
        {},
        "facts_fit_the_module: the facts of sound name dtypes",
    ),
    (dataclasses.replace(SOUND, name="Sound"), {}, "facts_fit_the_module: the name 'Sound' is not lower case"),
    (dataclasses.replace(SOUND, pinned=True), {}, "pinned_buffers_carry_copies: "),
    (dataclasses.replace(SOUND, compile_backend=""), {}, "names_are_known: the compile backend is empty"),
    (dataclasses.replace(SOUND, torch_type="meta"), {}, "tensors_live_on_it: "),
    (SOUND, {"synchronize": lambda: None}, "work_is_ordered: TypeError: "),
]


@pytest.mark.parametrize(("facts", "functions", "failure"), BROKEN)
def test_a_broken_device_is_told_what_is_wrong(facts: DeviceFacts, functions: dict[str, Any], failure: str) -> None:
    failures = contract.run(Accelerator(facts, module_of(**functions)))
    assert any(line.startswith(failure) for line in failures), failures


def test_sound_devices_pass_as_a_whole() -> None:
    assert contract.run(Accelerator(SOUND, module_of())) == ()
    assert contract.run(Accelerator(TABLE["cpu"], torch.cpu)) == ()


def test_graphs_that_do_not_replay_are_caught() -> None:
    class Graph:
        def replay(self) -> None:
            return None

    module = module_of(Graph=Graph, graph=lambda graph, pool=None, stream=None: __import__("contextlib").nullcontext())
    failures = contract.run(Accelerator(dataclasses.replace(SOUND, graph_class="Graph"), module))
    assert failures == ("graphs_replay: three replays of x += 1 from 1 gave 2.0",)
