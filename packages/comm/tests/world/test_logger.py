"""The logger over real spans: who came late is told from who was slow."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import ds_comm
import ds_monitor
from ds_comm.logger import CommsLogger
from ds_testing import world


@world(2)
def test_stragglers_are_told_from_communication() -> None:
    logger = CommsLogger()
    ds_monitor.configure([logger])
    try:
        for _ in range(3):
            ds_comm.barrier()
            time.sleep(0.1 * dist.get_rank())
            ds_comm.all_reduce(torch.ones(1000))
        ds_monitor.configure([])  # the summary itself communicates
        rows = {row["op"]: row for row in logger.as_dict(show_straggler=True)["summary"]}
    finally:
        ds_monitor.configure([])
    assert rows["all_reduce"]["count"] == rows["barrier"]["count"] == 3
    assert rows["all_reduce"]["message_bytes"] == 4000
    late = rows["all_reduce"]["straggler_ms"]
    assert (late > 200) == (dist.get_rank() == 0), "rank 0 waited for rank 1"
