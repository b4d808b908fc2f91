"""What every device must do, as checks that a third party runs on its own.

    import pytest
    from ds_accel import contract, get_accelerator

    @pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
    def test_contract(check):
        check(get_accelerator())

Each check takes an accelerator, uses a few MiB, leaves the process as it was, and raises `ContractError` with what was
expected and found. `run` makes all of them and returns one line for each that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

import ds_accel.streams as streams
from ds_accel.accelerator import Accelerator
from ds_config.errors import DsError, UnsupportedError

__all__ = ["CHECKS", "REQUIRED", "Check", "ContractError", "run"]

Check = Callable[[Accelerator], None]
REQUIRED = ("device_count", "synchronize")
"""Functions that a device's module must have."""

_MIB = 1 << 20


class ContractError(DsError, AssertionError):
    """A device does not do what its facts or the contract say."""


def _expect(condition: object, message: str) -> None:
    if not condition:
        raise ContractError(message, code="accel-contract", fix="Correct the device's module, or its Facts.")


def run(accelerator: Accelerator) -> tuple[str, ...]:
    """Make every check; returns "check: what is wrong" for those that failed, so () is a pass."""
    failures = []
    for check in CHECKS:
        try:
            check(accelerator)
        except (ContractError, UnsupportedError) as error:
            failures.append(f"{check.__name__}: {error.message}")
        except (RuntimeError, AttributeError, TypeError, ValueError) as error:
            failures.append(f"{check.__name__}: {type(error).__name__}: {error}")
    return tuple(failures)


def facts_fit_the_module(accelerator: Accelerator) -> None:
    """Check that the device module has every required function and all that the facts name."""
    facts, module = accelerator.facts, accelerator.module
    named = [name for name in (facts.graph_class, facts.ranges, facts.probe) if name]
    named += [rule.ask for rule in (*facts.dtypes.values(), facts.triton) if rule.ask]
    missing = [name for name in (*REQUIRED, *named) if not hasattr(module, name)]
    _expect(not missing, f"the module of {facts.name} lacks {', '.join(missing)}")
    unknown = [name for name in facts.dtypes if not isinstance(getattr(torch, name, None), torch.dtype)]
    _expect(not unknown, f"the facts of {facts.name} name dtypes that torch does not have: {', '.join(unknown)}")
    _expect(facts.name == facts.name.lower() and facts.name.strip(), f"the name {facts.name!r} is not lower case")


def devices_are_counted(accelerator: Accelerator) -> None:
    """Check that there is a device, that the current index is valid, and that an index past the last is refused."""
    count, current = accelerator.device_count(), accelerator.current_index()
    _expect(count >= 1, f"device_count() is {count}")
    _expect(0 <= current < count, f"the current device is {current} of {count}")
    accelerator.set_device(current)
    _expect(accelerator.current_index() == current, f"set_device({current}) left device {accelerator.current_index()}")
    if hasattr(accelerator.module, "set_device") and accelerator.module is not torch.cpu:
        try:
            accelerator.set_device(count)
        except UnsupportedError:
            return
        _expect(False, f"set_device({count}) was accepted with {count} devices")


def tensors_live_on_it(accelerator: Accelerator) -> None:
    """Check that a tensor moved to the device computes there and returns the right values."""
    host = torch.arange(1000, dtype=torch.float32, device="cpu")
    there = host.to(accelerator.device())
    _expect(accelerator.holds(there), f"a tensor moved to {accelerator.device()} is on {there.device}")
    back = (there * 2).cpu()
    accelerator.synchronize()
    _expect(torch.equal(back, host * 2), "2 * x computed on the device differs from the host's")


def work_is_ordered(accelerator: Accelerator) -> None:
    """Work on another stream is done when its event says so, and after synchronize."""
    stream, event = accelerator.new_stream(), accelerator.new_event()
    start = torch.ones(1 << 16, device=accelerator.device())
    accelerator.synchronize()
    with accelerator.on_stream(stream):
        for _ in range(8):
            start = start * 2
        event.record()
    event.synchronize()
    _expect(event.query(), "an event is not done after its synchronize()")
    accelerator.synchronize(accelerator.current_index())
    _expect(float(start[-1].cpu()) == 256.0, f"2**8 computed on a stream is {float(start[-1].cpu())}")


def time_is_measured(accelerator: Accelerator) -> None:
    """Check that a timer gives milliseconds that are not negative, also at its second use."""
    timer = accelerator.timer()
    for _ in range(2):
        with timer:
            torch.ones(1 << 16, device=accelerator.device()).sum()
        _expect(0 <= timer.elapsed_ms() < 60_000, f"a small sum took {timer.elapsed_ms()} ms")


def memory_is_counted(accelerator: Accelerator) -> None:
    """Check that allocations are counted, that no peak is below them, and that free is at most total."""
    before = accelerator.memory()
    block = torch.ones(16 * _MIB, dtype=torch.uint8, device=accelerator.device())
    accelerator.synchronize()
    now = accelerator.memory()
    _expect(now.total > 0 and 0 <= now.free <= now.total, f"free {now.free} of total {now.total} bytes")
    _expect(now.peak >= now.allocated, f"peak {now.peak} is below allocated {now.allocated}")
    if accelerator.facts.torch_type != "cpu":  # a process's resident set may shrink meanwhile
        grown = now.allocated - before.allocated
        _expect(grown >= block.numel(), f"16 MiB were allocated, the account grew by {grown} bytes")
    del block
    accelerator.empty_cache()
    accelerator.reset_peak_memory()
    after = accelerator.memory()
    _expect(after.peak >= after.allocated, f"after a reset, peak {after.peak} is below allocated {after.allocated}")


def random_streams_are_independent(accelerator: Accelerator) -> None:
    """Streams repeat by seed, differ by name, resume from their state, and leave the global generator alone."""
    device = accelerator.device()

    def drawn(streams: Any, name: str) -> torch.Tensor:
        with streams.fork(name):
            return torch.rand(64, device=device).cpu()

    first, second = accelerator.rng(7), accelerator.rng(7)
    a = drawn(first, "a")
    _expect(torch.equal(a, drawn(second, "a")), "the same seed and name gave other numbers")
    _expect(not torch.equal(a, drawn(first, "b")), "two names gave the same numbers")
    state = first.state_dict()
    following = drawn(first, "a")
    _expect(not torch.equal(a, following), "a stream did not advance")
    second.load_state_dict(state)
    _expect(torch.equal(following, drawn(second, "a")), "a restored stream gave other numbers")
    with _global_numbers(accelerator) as undisturbed:
        drawn(first, "c")
    _expect(undisturbed(), "a fork changed what the global generator gives")


@contextmanager
def _global_numbers(accelerator: Accelerator) -> Any:
    """Record whether the global generator draws the same numbers after the block as it would have before.

    Yields a function that returns the outcome, to be called after the block.
    """
    outer = accelerator.rng(0)
    device = accelerator.device()
    outcome: list[bool] = []
    with outer.fork("probe"):
        expected = torch.rand(8, device=device).cpu()
    again = accelerator.rng(0)
    with again.fork("probe"):
        yield lambda: outcome[0]
        outcome.append(torch.equal(expected, torch.rand(8, device=device).cpu()))


def pinned_buffers_carry_copies(accelerator: Accelerator) -> None:
    """Check that a pinned buffer carries data to the device and back, and that none is in use afterwards."""
    pool = accelerator.pinned(4 * _MIB)
    values = torch.arange(1000, dtype=torch.float32, device="cpu")
    with pool.take(values.nbytes) as buffer:
        out = buffer.view(torch.float32)
        out.copy_(values)
        there = streams.copy_to(out, accelerator.device(), fresh=True)
        event = accelerator.new_event()
        event.record()
        accelerator.synchronize()
        out.zero_()
        streams.copy_into(out, there)
        accelerator.synchronize()
        _expect(torch.equal(out, values), "data came back changed through a pinned buffer")
        _expect(out.is_pinned() == accelerator.facts.pinned, f"is_pinned() is {out.is_pinned()}")
    stats = pool.stats()
    _expect(stats.num_in_use == 0 and stats.in_use_bytes == 0, f"after release the account shows {stats}")


def dtypes_compute(accelerator: Accelerator) -> None:
    """Check that every dtype declared as supported adds and multiplies correctly.

    float8 is left out: that dtype has scaled matrix products only.
    """
    for name in accelerator.facts.dtypes:
        dtype = getattr(torch, name)
        if not accelerator.supports(dtype) or name.startswith("float8"):
            continue  # float8 has matrix products only, with scales; its rule is the capability
        x = torch.tensor([1.0, 2.0, -3.0], device=accelerator.device()).to(dtype)
        got = (x * x + x).float().cpu().tolist()
        _expect(got == [2.0, 6.0, 6.0], f"x * x + x in {name} for 1, 2, -3 is {got}")


def graphs_replay(accelerator: Accelerator) -> None:
    """Check that a graph captures and replays where graphs are supported, and is refused by name elsewhere."""
    if not accelerator.graphs():
        try:
            accelerator.new_graph()
        except UnsupportedError:
            return
        _expect(False, "new_graph() gave a graph although graphs() says no")
    x = torch.ones(64, device=accelerator.device())
    side = accelerator.new_stream()
    with accelerator.on_stream(side):
        x.add_(0)  # kernels must have run once before they are recorded
    accelerator.synchronize()
    graph = accelerator.new_graph()
    with accelerator.capture(graph):
        x.add_(1)
    for _ in range(3):
        graph.replay()
    accelerator.synchronize()
    _expect(float(x[0].cpu()) == 4.0, f"three replays of x += 1 from 1 gave {float(x[0].cpu())}")


def names_are_known(accelerator: Accelerator) -> None:
    """Check that a communication and a compile backend are named, and that profiler ranges nest."""
    _expect(accelerator.comm_backend, "the communication backend is empty")
    _expect(accelerator.compile_backend, "the compile backend is empty")
    with accelerator.range("outer"), accelerator.range("inner"):
        accelerator.synchronize()


CHECKS: tuple[Check, ...] = (
    facts_fit_the_module,
    devices_are_counted,
    tensors_live_on_it,
    work_is_ordered,
    time_is_measured,
    memory_is_counted,
    random_streams_are_independent,
    pinned_buffers_carry_copies,
    dtypes_compute,
    graphs_replay,
    names_are_known,
)
