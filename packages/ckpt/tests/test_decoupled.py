"""Another process writes: the files are the same, its death is an error of one save, and nothing of it stays."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

import ds_ckpt
from ds_ckpt import writer_process
from ds_ckpt.decoupled import SharedPool, WriterProcess
from ds_ckpt.writer import SLAB_BYTES
from ds_config.errors import CheckpointError, UnsupportedError


def _state(value):
    return {"w": torch.full((SLAB_BYTES // 3,), float(value)), "b": torch.full((7,), value, dtype=torch.int64)}


def _value(path):
    back = _state(0)
    ds_ckpt.load(path, ds_ckpt.full_shards(back))
    assert back["w"].unique().tolist() == [back["b"][0].item()]
    return back["b"][0].item()


@pytest.fixture
def engine():
    made = ds_ckpt.AsyncCheckpointer(decoupled=True)
    yield made
    made.close()


def _writer(engine):
    return engine._place._process


def test_it_writes_the_same_files_and_knows_no_torch(tmp_path, engine):
    state = _state(1)
    for step in (1, 2, 3):
        engine.save(tmp_path / f"s{step}", ds_ckpt.full_shards(state), {"step": step})
        for tensor in state.values():
            tensor.add_(1)
    engine.wait()
    assert [_value(tmp_path / f"s{step}") for step in (1, 2, 3)] == [1, 2, 3]
    ds_ckpt.save(tmp_path / "here", ds_ckpt.full_shards(_state(3)), {"step": 3})
    name = "data-00000.safetensors"
    assert (tmp_path / "s3" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
    maps = Path(f"/proc/{_writer(engine).pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "ds-ckpt" in maps


def test_the_process_ends_with_the_engine():
    engine = ds_ckpt.AsyncCheckpointer(decoupled=True)
    pid = _writer(engine).pid
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_killed_writer_is_an_error_of_that_save_and_the_next_starts_another(tmp_path, engine):
    engine.save(tmp_path / "a", ds_ckpt.full_shards(_state(1)), {})
    engine.wait()
    pid = _writer(engine).pid
    os.kill(pid, signal.SIGSTOP)  # it is in the middle of the next save
    engine.save(tmp_path / "b", ds_ckpt.full_shards(_state(2)), {})
    time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(CheckpointError, match="exit status -9") as caught:
        engine.wait()
    assert caught.value.code == "ckpt-writer-died"
    assert ds_ckpt.list_tags(tmp_path) == ["a"]
    engine.save(tmp_path / "c", ds_ckpt.full_shards(_state(3)), {})
    engine.wait()
    assert _value(ds_ckpt.find_latest(tmp_path)) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "c"]


def test_errors_of_the_disk_come_back_with_their_number(tmp_path, engine, monkeypatch):
    monkeypatch.setattr("ds_ckpt.local.LocalDraft.data_path", lambda self, name: "/dev/full/none")
    engine.save(tmp_path / "a", ds_ckpt.full_shards(_state(1)), {})
    with pytest.raises(CheckpointError, match="Not a directory") as caught:
        engine.wait()
    assert caught.value.code == "ckpt-io"
    monkeypatch.undo()
    engine.save(tmp_path / "a", ds_ckpt.full_shards(_state(1)), {})
    engine.wait()
    assert _value(tmp_path / "a") == 1


def test_it_writes_directories_only(engine):
    with pytest.raises(UnsupportedError) as caught:
        engine.save(ds_ckpt.CheckpointRef(ds_ckpt.MemoryStorage(), "a"), ds_ckpt.full_shards(_state(1)), {})
    assert caught.value.code == "ckpt-decoupled"


@pytest.mark.slow
def test_a_training_process_that_is_killed_leaves_no_checkpoint_and_no_writer(tmp_path, crash):
    answer, _ = crash.trial(tmp_path, decoupled=True)
    assert answer["killed"], answer
    writer = int(answer["answer"])
    os.kill(writer, signal.SIGCONT)
    deadline = time.monotonic() + 150
    while Path(f"/proc/{writer}/status").exists() and "Z (zombie)" not in Path(f"/proc/{writer}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert ds_ckpt.list_tags(tmp_path) == ["a"]
    ds_ckpt.save(tmp_path / "c", ds_ckpt.full_shards(_state(1)), {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "c"]


def test_orders_over_the_socket(tmp_path):
    """The protocol by itself: several writes, in any order, a tail that is no page, and an order without a file."""
    pool = SharedPool(2 * SLAB_BYTES)
    slabs = [pool.acquire(lambda: False) for _ in range(2)]
    for index, slab in enumerate(slabs):
        slab[:] = bytes([index + 1]) * SLAB_BYTES
    process = WriterProcess(pool)
    process.start()
    with pytest.raises(OSError, match="no file is open"):
        process.wait(process.send("write", at=0, nbytes=1, **{"from": 0}))
    path = tmp_path / "file"
    nbytes = SLAB_BYTES + 4099
    process.wait(process.send("open", path=str(path), nbytes=nbytes))
    second = process.send("write", at=SLAB_BYTES, nbytes=4099, **{"from": SLAB_BYTES})
    first = process.send("write", at=0, nbytes=SLAB_BYTES, **{"from": 0})
    process.wait(first)
    process.wait(second)
    process.wait(process.send("close"))
    assert path.read_bytes() == b"\1" * SLAB_BYTES + b"\2" * 4099
    process.wait(process.send("open", path=str(tmp_path / "other"), nbytes=1))
    process.wait(process.send("abandon"))
    process.close()
    with pytest.raises(CheckpointError):
        process.send("close")
    pool.close()


def test_the_server_in_this_process(tmp_path):
    """As above without a process: what its file does is seen by coverage and by a debugger."""
    pool = SharedPool(SLAB_BYTES)
    slab = pool.acquire(lambda: False)
    slab[:] = b"x" * SLAB_BYTES
    ours, theirs = socket.socketpair()
    orders = [
        {"do": "open", "id": 1, "path": str(tmp_path / "f"), "nbytes": 5000},
        {"do": "write", "id": 2, "at": 0, "from": 0, "nbytes": 5000},
        {"do": "close", "id": 3},
        {"do": "open", "id": 4, "path": str(tmp_path / "f"), "nbytes": 1},
    ]
    ours.sendall("".join(json.dumps(order) + "\n" for order in orders).encode())
    ours.shutdown(socket.SHUT_WR)
    writer_process._Writer(theirs, pool.fd).serve()
    theirs.close()
    answers = {a["id"]: a["errno"] for a in map(json.loads, ours.makefile())}
    assert answers == {1: 0, 2: 0, 3: 0, 4: 17}  # the last one: the file exists
    assert (tmp_path / "f").read_bytes() == b"x" * 5000
    ours.close()
    pool.close()
