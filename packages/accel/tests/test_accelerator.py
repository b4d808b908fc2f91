"""Verbs: on the CPU for real, on CUDA with a module that records what it is asked."""

from __future__ import annotations

import dataclasses
import mmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_accel import TABLE, Accelerator, DeviceFacts
from ds_config.errors import UnsupportedError

CUDA = TABLE["cuda"]


@pytest.fixture
def cpu() -> Accelerator:
    return Accelerator(TABLE["cpu"], torch.cpu)


@pytest.fixture
def cuda(fake_cuda: Any) -> Accelerator:
    return Accelerator(CUDA, fake_cuda)


# --- CPU


def test_the_cpu_is_one_synchronous_device(cpu: Accelerator) -> None:
    assert cpu.device() == cpu.device(3) == torch.device("cpu")
    assert (cpu.device_count(), cpu.current_index()) == (1, 0)
    cpu.set_device(5)  # a launcher's local rank; there is nothing to choose
    cpu.synchronize()
    cpu.synchronize(0)
    assert cpu.holds(torch.ones(1))
    event = cpu.new_event()
    event.record()
    event.wait()
    event.synchronize()
    assert event.query()
    with cpu.on_stream(cpu.new_stream()), cpu.on_stream(None), cpu.range("x"):
        assert cpu.current_stream() is not None
    assert repr(cpu) == "Accelerator('cpu')"
    assert cpu.variant == "cpu"
    assert cpu.compile_backend == "inductor"


def test_seeding_the_cpu(cpu: Accelerator) -> None:
    cpu.manual_seed(3)
    first = torch.rand(4)
    cpu.manual_seed(3)
    assert torch.equal(first, torch.rand(4))


def test_memory_of_the_cpu_is_that_of_the_process(cpu: Accelerator) -> None:
    before = cpu.memory()
    block = torch.frombuffer(mmap.mmap(-1, 64 << 20), dtype=torch.uint8)  # malloc may keep what is freed
    block.fill_(1)
    during = cpu.memory()
    assert during.allocated - before.allocated > 50 << 20
    assert during.peak >= during.allocated
    del block
    assert cpu.memory().peak >= during.allocated - (8 << 20)
    cpu.reset_peak_memory()
    assert cpu.memory().peak < during.allocated
    cpu.empty_cache()


# --- CUDA, on a fake


def test_devices_of_cuda(cuda: Accelerator, fake_cuda: Any) -> None:
    assert cuda.device() == torch.device("cuda")
    assert cuda.device(1) == torch.device("cuda", 1)
    cuda.set_device(1)
    assert cuda.current_index() == 1
    with pytest.raises(UnsupportedError, match=r"cuda device 2 was asked for, this process sees 2\.") as caught:
        cuda.set_device(2)
    assert caught.value.code == "accel-index"
    assert "CUDA_VISIBLE_DEVICES" in caught.value.fix
    with pytest.raises(UnsupportedError):
        cuda.set_device(-1)
    assert fake_cuda.calls == [("set_device", 1)]
    assert not cuda.holds(torch.ones(1))


def test_order_of_work_on_cuda(cuda: Accelerator, fake_cuda: Any) -> None:
    stream = cuda.new_stream()
    assert isinstance(stream, fake_cuda.Stream)
    assert cuda.current_stream() == "default stream"
    with cuda.on_stream(stream):
        cuda.synchronize()
    with cuda.on_stream(None):
        cuda.synchronize(1)
    assert fake_cuda.calls == [("stream", stream), ("synchronize",), ("end of stream",), ("synchronize", 1)]
    event = cuda.new_event()
    assert not event.query()
    assert not event.enable_timing


def test_time_on_cuda_is_that_of_its_events(cuda: Accelerator, fake_cuda: Any) -> None:
    with cuda.timer() as timer:
        pass
    assert timer.elapsed_ms() == 1.0
    timer.start()
    cuda.new_event().record()
    timer.stop()
    assert timer.elapsed_ms() == 2.0
    assert ("synchronize",) not in fake_cuda.calls, "the device is not held up"


def test_timers_read_too_early(cuda: Accelerator, cpu: Accelerator) -> None:
    for timer in (cuda.timer(), cpu.timer()):
        with pytest.raises(RuntimeError, match="not started and stopped"):
            timer.elapsed_ms()
        with pytest.raises(RuntimeError, match="stopped, but not started"):
            timer.stop()
        timer.start()
        with pytest.raises(RuntimeError, match="not started and stopped"):
            timer.elapsed_ms()
        timer.stop()
        first = timer.elapsed_ms()
        timer.stop()
        assert timer.elapsed_ms() >= first, "a second stop moves the end"


def test_host_timers_wait_for_the_device(fake_cuda: Any) -> None:
    mps_like = Accelerator(dataclasses.replace(CUDA, host_timers=True), fake_cuda)
    with mps_like.timer():
        pass
    assert fake_cuda.calls == [("synchronize",), ("synchronize",)]


def test_memory_of_cuda(cuda: Accelerator, fake_cuda: Any) -> None:
    stats = cuda.memory(1)
    assert dataclasses.astuple(stats) == (101, 201, 301, 401, 501, 1000)
    cuda.set_device(1)
    assert cuda.memory() == stats
    cuda.reset_peak_memory()
    cuda.reset_peak_memory(0)
    cuda.empty_cache()
    assert fake_cuda.calls[1:] == [("reset peak", 1), ("reset peak", 0), ("empty cache",)]


def test_graphs_on_cuda(cuda: Accelerator, fake_cuda: Any) -> None:
    graph = cuda.new_graph()
    with cuda.capture(graph, pool="pool", stream="side"):
        pass
    graph.replay()
    assert fake_cuda.calls == [("graph", "pool", "side")]
    assert graph.replays == 1
    assert cuda.graphs()


def test_no_graphs_are_refused_by_name(cpu: Accelerator) -> None:
    for use in (cpu.new_graph, lambda: cpu.capture(None)):
        with pytest.raises(UnsupportedError, match="cpu") as caught:
            use()
        assert caught.value.code == "accel-no-graphs"


def test_ranges_and_seeds(cuda: Accelerator, fake_cuda: Any) -> None:
    with pytest.raises(ZeroDivisionError), cuda.range("outer"), cuda.range("inner"):
        raise ZeroDivisionError
    assert fake_cuda.calls == [("push", "outer"), ("push", "inner"), ("pop",), ("pop",)]
    cuda.manual_seed(5)
    assert fake_cuda.calls[-1] == ("seed", 5)


def test_dtype_triton_and_names(cuda: Accelerator, make_cuda: type) -> None:
    assert cuda.supports(torch.float8_e4m3fn)
    assert not Accelerator(CUDA, make_cuda((6, 0))).supports(torch.float16)
    assert "compute capability 9.0 >= 8.0" in cuda.triton().reason or "triton is not installed" in cuda.triton().reason
    assert cuda.comm_backend == "nccl"


def test_rocm_is_a_variant_of_cuda(cuda: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    assert cuda.variant == "cuda"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert (cuda.name, cuda.variant) == ("cuda", "rocm")


# --- devices that have little


def test_mps_like_modules_have_one_device_and_no_streams() -> None:
    calls: list[Any] = []
    module = SimpleNamespace(
        __name__="fake.mps",
        device_count=lambda: 1,
        synchronize=lambda: calls.append("synchronize"),
        current_allocated_memory=lambda: 10,
        driver_allocated_memory=lambda: 30,
        recommended_max_memory=lambda: 100,
    )
    mps = Accelerator(TABLE["mps"], module)
    mps.synchronize(0)
    mps.set_device(0)
    assert calls == ["synchronize"]
    assert mps.current_index() == 0
    assert mps.device(0) == torch.device("mps", 0)
    assert mps.new_stream() is None
    assert mps.current_stream() is None
    with mps.on_stream(None):
        mps.empty_cache()
    assert dataclasses.astuple(mps.memory()) == (10, 10, 30, 30, 70, 100)
    mps.reset_peak_memory()
    assert mps.new_event().query()
    assert mps.comm_backend == "gloo"


def test_total_memory_from_device_properties() -> None:
    module = SimpleNamespace(
        current_device=lambda: 0,
        memory_allocated=lambda index: 10,
        get_device_properties=lambda index: SimpleNamespace(total_memory=50),
    )
    assert dataclasses.astuple(Accelerator(TABLE["npu"], module).memory()) == (10, 10, 10, 10, 40, 50)


def test_what_is_required_is_named_when_it_is_missing() -> None:
    bare = Accelerator(DeviceFacts(name="bare", torch_type="bare"), SimpleNamespace(__name__="bare_module"))
    with pytest.raises(UnsupportedError, match=r"bare: bare_module has no synchronize\(\)") as caught:
        bare.synchronize()
    assert caught.value.code == "accel-missing-verb"
    with pytest.raises(UnsupportedError, match=r"no torch\.distributed backend is known for bare") as caught:
        _ = bare.comm_backend
    assert caught.value.code == "accel-no-backend"


def test_backend_from_torch_when_the_facts_have_none() -> None:
    assert Accelerator(DeviceFacts(name="other", torch_type="cpu"), torch.cpu).comm_backend == "gloo"
