"""The spans of four ranks become one trace: every collective is matched on all of them, and the rank that came late is named."""

from __future__ import annotations

import time
from pathlib import Path

import torch

import ds_comm
import ds_monitor
from ds_comm import world_group
from ds_monitor.tracing import lateness, match, offsets, read_ranks, straggler
from ds_testing import world


@world(4)
def test_the_straggler_of_four_ranks(tmp_path: Path) -> None:
    group = world_group()
    ds_monitor.configure([ds_monitor.JsonlSink(tmp_path / "trace.jsonl", rank=group.rank)])
    try:
        for step in range(1, 7):
            ds_monitor.set_step(step)
            with ds_monitor.span("engine/step"):
                time.sleep(0.06 if group.rank == 2 else 0.001)
            ds_comm.all_reduce(torch.ones(8), group=group)
    finally:
        ds_monitor.shutdown()
    ds_comm.barrier(group=group)
    if group.rank != 0:
        return
    ranks = read_ranks(tmp_path)
    calls = match(ranks)
    assert [(call.name, sorted(call.spans)) for call in calls] == [("comm/all_reduce", [0, 1, 2, 3])] * 6
    worst = straggler(lateness(calls, offsets(calls)), 0.4)
    assert worst is not None
    assert worst.rank == 2
    assert worst.seconds > 0.1
