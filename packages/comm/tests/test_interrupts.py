"""Native waits and the process they run in: Ctrl-C ends them, a forked child has no part in them, layouts are checked."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ds_comm.shm import shm_group
from ds_comm.shm.symmetric_arena import _slot_bytes
from ds_ops import _native
from ds_ops.shm_collectives import Channel, ChannelSettings, SharedSegment, ShmCollective

native = _native.load("_cpu").module
pytestmark = [
    pytest.mark.skipif(bool(shm_group.available()), reason=f"no shm backend here: {shm_group.available()}"),
    pytest.mark.skipif(not hasattr(native, "shm_refusal"), reason="the native module is older than its sources"),
]
CASES = ["small", "large", "asynchronous", "message", "arena", "channel"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in ("large", "message") else pytest.mark.slow) for c in CASES]
)
def test_ctrl_c_in_a_wait_returns_within_half_a_second(case: str) -> None:
    base = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    script = str(Path(__file__).with_name("interrupts.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, case],
            env={**os.environ, **base, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said, _ = ranks[0].communicate(timeout=200)
    ranks[1].kill()
    ranks[1].communicate()
    assert said.startswith("returned after"), said
    assert float(said.split()[2]) < 0.5


def test_a_forked_child_that_drops_a_channel_goes_on() -> None:
    """A DataLoader's worker has the channel of its parent and none of its threads."""
    settings = ChannelSettings(4096, 4096)
    segment = SharedSegment(settings.segment_bytes(1))
    channel = Channel(segment, 0, [os.getpid()], settings)
    x = torch.ones(1 << 16)
    channel.start(ShmCollective.ALL_REDUCE, x, x).wait()  # its thread runs now
    child = os.fork()
    if child == 0:
        channel.close()
        os._exit(7)
    deadline = time.monotonic() + 150
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(ended[1]) == 7
    channel.call(ShmCollective.ALL_REDUCE, x, x)  # the parent's is as it was
    channel.close()


@pytest.mark.parametrize("ranks", [1, 2, 64, 65, 300])
def test_more_ranks_than_lines_in_a_page_are_laid_out_or_refused(ranks: int) -> None:
    """With less than a line a rank the chunks were empty: every call went round for ever."""
    assert native is not None
    assert (native.shm_refusal(4096, 4096, ranks) == "") == (ranks <= 64)
    assert native.shm_refusal(_slot_bytes(ranks), 4096, ranks) == ""
    assert native.shm_refusal(4000, 4096, ranks)
    if ranks == 65:
        segment = SharedSegment(1)
        with pytest.raises(ValueError, match="a slot needs 64 bytes for each rank"):
            native.ShmEndpoint(segment.fd, 4096, 4096, 0, [os.getpid()] * ranks)


def test_segments_are_their_users_alone() -> None:
    segment = SharedSegment(4096)
    assert os.fstat(segment.fd).st_mode & 0o777 == 0o600
