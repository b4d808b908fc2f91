"""Pinned memory that is given back at will, and the count of what is pinned."""

import gc
import logging
import os

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import PinMemoryBuilder
from deepspeed.utils import pin_memory
from deepspeed.utils.pin_memory_tracker import _tracker, track_pinned_memory


@pytest.fixture
def native(monkeypatch):
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    monkeypatch.setattr(pin_memory, "_shared_native_pins", None)  # other tests find none
    return get_accelerator()


def test_a_pinned_copy_and_its_views_are_pinned_until_it_is_unpinned(native):
    source = torch.arange(6.0).reshape(2, 3)
    pinned = native.pin_memory(source)
    assert torch.equal(pinned, source)
    assert [native.is_pinned(t) for t in (pinned, pinned[1], source, source.to("meta"))] == [True, True, False, False]
    assert native.pin_memory(source, match_shape=False).shape == (6,)
    assert native.pin_empty(2, 3, dtype=torch.half).shape == (2, 3)
    pinned.data = torch.zeros(2, 3)
    assert [native.unpin_memory(pinned), native.is_pinned(pinned), native.unpin_memory(pinned)] == [True, False, False]


def test_memory_stays_locked_while_a_view_of_it_lives():
    handle = PinMemoryBuilder().load().pin_handle()
    pinned = handle.new_cpu_locked_tensor(8, torch.empty(0))
    view = pinned.fill_(3.0).view(2, 4)[1]
    del pinned
    gc.collect()
    assert (handle.is_pinned(view), view.tolist()) == (True, [3.0] * 4)
    del view
    gc.collect()
    assert not handle.ranges


def test_without_the_operation_nothing_is_pinned_another_way(native, monkeypatch):
    monkeypatch.setattr(pin_memory, "_shared_native_pins", None)
    monkeypatch.setattr("deepspeed.ops.op_builder.PinMemoryBuilder", None)
    with pytest.raises(RuntimeError, match="pin_memory"):
        native.pin_memory(torch.ones(1))


def test_what_is_pinned_is_told_at_powers_of_two(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("DeepSpeed"), "propagate", True)
    _tracker.reset()
    with caplog.at_level(logging.INFO, logger="DeepSpeed"):
        track_pinned_memory(40 << 30)
        track_pinned_memory(5 << 30)
    _tracker.reset()
    assert {line.split("past")[0] for line in caplog.messages} == {"pinned memory: 40.000 GB in 1 allocations, "}


def test_devices_are_listed_by_the_files_where_upstreams_are():
    assert "cpu_accelerator.py" in os.listdir(deepspeed.accelerator.__path__[0])
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    assert CPU_Accelerator().device_name() == "cpu"
