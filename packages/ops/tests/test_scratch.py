"""Rings and scratch files: what is where, and what goes wrong."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

import pytest
import torch

from ds_config.errors import PlanError
from ds_ops import scratch
from ds_ops.io import FileTransferError, IOSettings
from ds_ops.scratch import BufferRing, RingSettings, ScratchFile, ScratchRecord, host_bytes

CPU = torch.device("cpu")


def test_refused_page_locking_falls_back_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*args: object, pin_memory: bool = False, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("Cannot allocate memory")

    with mock.patch.object(scratch, "_told", set()), mock.patch.object(torch, "zeros", refuse):
        for _ in range(3):
            found = host_bytes(5000, torch.device("cuda"), pin=True)
            assert found.numel() == 5000
            assert found.data_ptr() % 4096 == 0
            assert not found.any()
    assert len(caplog.records) == 1


# ---- rings and records


class Copy:
    """An event of a device: what it copies from `memory` it has when somebody waits."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.before, self.done = memory, memory.clone(), False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        assert torch.equal(self.memory, self.before)
        self.done = True


@pytest.mark.parametrize("put", [False, True])
def test_a_slot_is_lent_again_after_the_device_has_read_it(tmp_path: Path, put: bool) -> None:
    ring = BufferRing(RingSettings(str(tmp_path), 2), CPU)
    records = [ScratchRecord(ring, 4096) for _ in range(4)]
    for number, record in enumerate(records):
        record.blank().fill_(number)
    for record in records:  # two slots are made, and two beside the bound
        record.put()
    copies = []
    for record in records * 2:
        copies.append(Copy(record.hold()))
        (record.put if put else record.drop)([copies[-1]])
    assert [copy.done for copy in copies] == [True] * 6 + [False] * 2
    assert not ring.free()
    records[0].begin()  # no slot is free: nothing is read
    assert ring.ahead == []
    copies[-2].synchronize()
    for transfer in [slot.writing for slot in ring._free if slot.writing is not None]:
        transfer.wait()
    assert ring.free()
    for number, record in enumerate(records):
        assert record.hold().eq(number).all()
        record.drop()
    ring.close()


def test_a_slot_beside_the_bound_is_freed_after_the_device_has_read_it(tmp_path: Path) -> None:
    ring = BufferRing(RingSettings(str(tmp_path), 1), CPU)
    records = [ScratchRecord(ring, 4096) for _ in range(2)]
    copies = [Copy(record.blank()) for record in records]
    for record, copy in zip(reversed(records), reversed(copies), strict=True):
        record.drop([copy])
    assert [copy.done for copy in copies] == [False, True]
    assert ring.extras == 0
    ring.close()


@pytest.mark.parametrize("buffers", [2, 5])
@pytest.mark.parametrize("behind", [True, False])
def test_records_keep_their_bytes(tmp_path: Path, buffers: int, behind: bool) -> None:
    chance = random.Random(buffers)
    folder = str(tmp_path / "deep" / "folder")
    ring = BufferRing(RingSettings(folder, buffers, write_behind=behind, io=IOSettings(block_bytes=4096)), CPU)
    records = [ScratchRecord(ring, n) for n in (1, 4096, 4097, 100_000, 3, 65_537, 10)]
    truth = [torch.full((r.nbytes,), i, dtype=torch.uint8) for i, r in enumerate(records)]
    for record, value in zip(records, truth, strict=True):
        record.blank().copy_(value)
        record.put()
    held: list[int] = []
    for _ in range(400):
        at = chance.randrange(len(records))
        record = records[at]
        action = chance.random()
        if action < 0.3:
            record.begin()
        elif at in held:
            held.remove(at)
            if action < 0.6:
                record.drop()
            else:
                truth[at] = torch.full((record.nbytes,), chance.randrange(256), dtype=torch.uint8)
                record.hold().copy_(truth[at])
                record.put()
        else:
            assert torch.equal(record.hold(), truth[at])
            held.append(at)
            if action > 0.95:
                grown = record.grow(record.nbytes + 5000)
                assert torch.equal(grown[: len(truth[at])], truth[at])
                truth[at] = torch.full((record.nbytes,), at, dtype=torch.uint8)
                grown.copy_(truth[at])
                held.remove(at)
                record.put()
    for at in held:
        records[at].put()
    assert ring.extras == 0
    assert len(ring.ahead) <= buffers
    for record, value in zip(records, truth, strict=True):
        assert torch.equal(record.hold(), value)
        record.drop()
    assert os.listdir(folder) == []
    ring.close()


def test_reads_ahead_follow_the_order_of_uses(tmp_path: Path) -> None:
    ring = BufferRing(RingSettings(str(tmp_path), buffers=3), CPU)
    records = [ScratchRecord(ring, 4096) for _ in range(4)]
    for record in records:
        record.blank().zero_()
        record.put()
    followed = []
    for _ in range(2):
        for number in (0, 1, 2, 3, 2, 1, 0):  # forward and backward
            found = ring.used(records[number])
            followed.append(None if found is None else found.number)
    assert followed[8:13] == [2, 3, 2, 1, 0]
    ring.close()


@pytest.mark.slow
def test_drawn_sizes(tmp_path: Path) -> None:
    chance = random.Random(1)
    for _ in range(12):
        scratch = ScratchFile(
            str(tmp_path), IOSettings(block_bytes=4096 * chance.randint(1, 300), workers=chance.randint(1, 3))
        )
        sizes = [int(10 ** chance.uniform(0, 7)) for _ in range(8)]
        data = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in sizes]
        places = [scratch.reserve(n) for n in sizes]
        for moving in [scratch.write(d, at) for d, at in zip(data, places, strict=True)]:
            moving.wait()
        for value, at in zip(data, places, strict=True):
            back = torch.zeros_like(value)
            scratch.read(back, at).wait()
            assert torch.equal(back, value)
        scratch.close()
        assert os.listdir(tmp_path) == []


# ---- what goes wrong


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="file") as caught:
        ScratchFile(str(tmp_path / "file" / "folder"), IOSettings())
    assert caught.value.code == "offload-folder"


def test_a_full_disk_says_what_was_planned_and_what_is_free(tmp_path: Path) -> None:
    scratch = ScratchFile(str(tmp_path), IOSettings())
    scratch.reserve(4096)
    with pytest.raises(PlanError, match=r"holds 4 KiB and has no room for 4096 PiB more.*free") as caught:
        scratch.reserve(1 << 62)
    assert caught.value.code == "offload-space"
    scratch.close()


def test_a_file_that_is_cut_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    scratch = ScratchFile(str(tmp_path), IOSettings())
    at = scratch.reserve(10_000)
    os.truncate(scratch.path, 5000)
    with pytest.raises(FileTransferError, match=f"scratch file in {tmp_path}") as caught:
        scratch.read(torch.empty(10_000, dtype=torch.uint8), at).wait()
    assert caught.value.code == "io-end-of-file"
    assert caught.value.filename == str(tmp_path)
    scratch.close()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),  # ds-zero's test_offload_limits.py kills as well
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        None,
    ],
)
def test_nothing_is_left_however_it_ends(tmp_path: Path, how: signal.Signals | None) -> None:
    code = f"""
        import os, torch
        from ds_ops.scratch import ScratchRecord, BufferRing, RingSettings
        ring = BufferRing(RingSettings({str(tmp_path)!r}, buffers=2), torch.device("cpu"))
        record = ScratchRecord(ring, 1 << 20)
        record.blank().zero_()
        record.put()
        {"raise SystemExit(3)" if how is None else f"os.kill(os.getpid(), {int(how)})"}
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, capture_output=True)
    assert done.returncode == (3 if how is None else -how), done.stderr
    assert os.listdir(tmp_path) == []
