"""What torch's own functions called, as stamps."""

from __future__ import annotations

import json
import time

import pytest
import torch

from ds_comm.watch import torch_calls
from ds_comm.watch.torch_calls import CallLog, TorchCalls


class Work:
    def __init__(self) -> None:
        self.over = False

    def is_completed(self) -> bool:
        return self.over


def test_a_call_ends_with_its_work_and_holds_nothing() -> None:
    log, work = CallLog(lambda: "7"), Work()
    with log.begin("all_reduce", torch.ones(2, 3)) as call:
        assert not call.ended()
        call.work = work
    assert not call.ended()
    work.over = True
    assert call.ended()
    work.over = False
    del work  # nobody waits for it
    assert call.ended()
    with pytest.raises(ValueError, match="refused"), log.begin("broadcast", None) as failed:
        raise ValueError("refused")
    assert failed.ended()
    assert [(c.number, c.op, c.dtype, c.shape) for c in log.calls] == [
        (1, "all_reduce", "float32", (2, 3)),
        (2, "broadcast", "", ()),
    ]


def entry(number: int, op: str, retired: bool, **more: object) -> dict[str, object]:
    return {
        "collective_seq_id": number, "profiling_name": op, "retired": retired, "is_p2p": False, "input_sizes": [[4, 2]],
        "input_dtypes": ["BFloat16"], "process_group": ["0", "default_pg"], "time_created_ns": time.time_ns() - 10**9, **more,
    }  # fmt: skip


def test_the_flight_recorder_is_read_as_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        entry(1, "gloo:all_reduce", True),
        entry(2, "gloo:all_reduce", False),
        entry(3, "gloo:scatter", False),
        entry(4, "gloo:recv", False, is_p2p=True),
    ]
    monkeypatch.setattr(torch_calls, "flight_records", lambda active: [json.dumps({"entries": entries})])
    calls = TorchCalls()
    first, second, third = calls.stamps(waiting=True)
    assert [stamp.waits for stamp in (first, second, third)] == [False, True, False]  # only the first of a group
    assert str(second) == "all_reduce[torch] #2 bfloat16[4, 2] of group '0'"
    assert (third.op, third.shape, third.numel) == ("scatter", (), 0)  # which has other sizes on other ranks
    assert 0.9 < time.monotonic() - second.began_s < 60
    assert not any(stamp.waits for stamp in calls.stamps(waiting=False))


def test_a_thread_that_computes_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    name = ["gloo:all_reduce"]
    monkeypatch.setattr(
        torch_calls, "flight_records", lambda active: [json.dumps({"entries": [entry(1, name[0], False)]})]
    )
    calls, clock = TorchCalls(), [0.0]
    monkeypatch.setattr(torch_calls.sys, "_current_frames", dict)  # the thread stands still
    monkeypatch.setattr(torch_calls.time, "clock_gettime", lambda _: clock[0])
    looked = iter(range(100, 200))
    monkeypatch.setattr(torch_calls.time, "monotonic", lambda: float(next(looked)))
    found = []
    for busy, op in [(0.0, "gloo"), (0.0, "gloo"), (1.0, "gloo"), (0.0, "gloo"), (1.0, "nccl")]:
        clock[0] += busy
        name[0] = f"{op}:all_reduce"
        found.append(_since(calls))
    assert found[2] > found[1]  # it had computed since
    assert found[4] == found[3]  # on a device one that waits may spin


def _since(calls: TorchCalls) -> float:
    calls.blocked_since()
    return calls._since_s
