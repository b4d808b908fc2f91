"""The late device: work in order within a stream and in none between streams, poison for what is not there."""

from __future__ import annotations

import torch

from ds_accel import get_accelerator, streams
from ds_testing.late_device import drawn_orders, late_device

CPU = torch.device("cpu")


def outcome(order: int, wait: bool) -> bool:
    """Whether a copy on another stream carries what was computed before; `wait`: it waits for that."""
    with late_device(order):
        x = torch.ones(16)
        for _ in range(5):
            x = x * 2
        side, host = streams.new_stream(CPU), streams.page_locked((16,), torch.float32)
        if wait:
            streams.wait_stream(side, streams.current_stream(CPU))
        with streams.on_stream(side, CPU):
            streams.copy_into(host, x)
            streams.record_use(x, side)
            done = streams.record_event(CPU)
        done.synchronize()
        return bool((host == 32).all())


def freed(order: int, record: bool) -> bool:
    """Whether memory that was freed is still there for a copy on another stream; `record`: which the allocator knows of."""
    with late_device(order):
        x = torch.full((16,), 5.0)
        side, host = streams.new_stream(CPU), streams.page_locked((16,), torch.float32)
        streams.wait_stream(side, streams.current_stream(CPU))
        with streams.on_stream(side, CPU):
            streams.copy_into(host, x)
            if record:
                streams.record_use(x, side)
            done = streams.record_event(CPU)
        del x
        torch.ones(4) + 1
        done.synchronize()
        return bool((host == 5).all())


def overwritten(order: int, wait: bool) -> bool:
    """Whether a copy has what page-locked memory held; `wait`: the host writes there after the copy only."""
    with late_device(order):
        host = streams.page_locked((16,), torch.float32)
        host.fill_(1.0)
        there, after = streams.copy_to_device(host, CPU)
        assert after is not None
        if wait:
            after.synchronize()
        host.fill_(2.0)
        return float(there.sum()) == 16


@drawn_orders
def test_what_is_ordered_is_right(order: int) -> None:
    assert outcome(order, True)
    assert freed(order, True)
    assert overwritten(order, True)


def test_what_is_not_ordered_is_wrong_in_some_order() -> None:
    assert not all(outcome(order, False) for order in range(20))
    assert not all(freed(order, False) for order in range(20))
    assert not all(overwritten(order, False) for order in range(20))


def test_the_process_is_as_before() -> None:
    accelerator, backend = get_accelerator(), streams.backend()
    with late_device(0):
        assert get_accelerator() is not accelerator
        x = torch.ones(3) + 1
    assert get_accelerator() is accelerator
    assert streams.backend() is backend
    assert x.tolist() == [2, 2, 2]


def test_an_event_that_nobody_records_has_happened() -> None:
    with late_device(0):
        event = streams.new_event(CPU)
        assert event.query()
        event.synchronize()
