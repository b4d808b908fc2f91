"""Saving behind the step: what was there at the call is in the file, memory is bounded, errors come out."""

import gc
import os
import threading
import time

import psutil
import pytest
import torch

import ds_ckpt
from ds_ckpt.local import Disk
from ds_ckpt.writer import SLAB_BYTES
from ds_config.errors import CheckpointError, PlanError


class Gate(Disk):
    """A disk that writes nothing until it is opened."""

    def __init__(self):
        self.open, self.fail = threading.Event(), False

    def write(self, fd, data, offset):
        self.open.wait(30)
        if self.fail:
            raise OSError(28, "No space left on device")
        return super().write(fd, data, offset)

    def begin_write(self, io, path, data, offset):
        self.open.wait(30)
        if self.fail:
            raise OSError(28, "No space left on device")
        return super().begin_write(io, path, data, offset)


def _state(value, numel=3 * SLAB_BYTES // 4):
    return {"w": torch.full((numel,), float(value)), "b": torch.full((7,), value, dtype=torch.int64)}


def _value(path, numel=3 * SLAB_BYTES // 4):
    back = _state(0, numel)
    ds_ckpt.load(path, ds_ckpt.full_shards(back))
    assert len(back["w"].unique()) == 1
    assert back["b"][0] == back["w"][0]
    return back["b"][0].item()


@pytest.fixture(params=["synchronous", "asynchronous", "double", "small", "decoupled"])
def engine(request):
    made = {
        "synchronous": ds_ckpt.SyncCheckpointer,
        "asynchronous": ds_ckpt.AsyncCheckpointer,
        "double": lambda: ds_ckpt.AsyncCheckpointer(double=True),
        "small": lambda: ds_ckpt.AsyncCheckpointer(buffer_bytes=SLAB_BYTES),
        "decoupled": lambda: ds_ckpt.AsyncCheckpointer(decoupled=True),
    }[request.param]()
    yield made
    made.close()


def test_a_change_right_after_the_return_is_not_in_the_file(tmp_path, engine):
    state = _state(1)
    for step in range(1, 6):
        engine.save(tmp_path / f"s{step}", ds_ckpt.full_shards(state), {"step": step})
        for tensor in state.values():
            tensor.add_(1)
    engine.wait()
    assert [_value(tmp_path / f"s{step}") for step in range(1, 6)] == [1, 2, 3, 4, 5]
    assert ds_ckpt.list_tags(tmp_path) == [f"s{step}" for step in range(1, 6)]


def test_a_copy_behind_is_finished_before_the_update(tmp_path, engine):
    state = _state(1)
    for step in range(1, 4):
        pending = engine.save(tmp_path / f"s{step}", ds_ckpt.full_shards(state), {}, behind=True)
        engine.before_update()
        assert pending.copied.is_set()
        for tensor in state.values():
            tensor.add_(1)
    engine.wait()
    assert [_value(tmp_path / f"s{step}") for step in range(1, 4)] == [1, 2, 3]


def test_the_save_returns_before_the_disk_has_written(tmp_path):
    disk = Gate()
    storage = ds_ckpt.LocalStorage(tmp_path, disk)
    engine = ds_ckpt.AsyncCheckpointer()
    pending = engine.save(ds_ckpt.CheckpointRef(storage, "a"), ds_ckpt.full_shards(_state(1)), {})
    assert not pending.done()
    assert ds_ckpt.list_tags(tmp_path) == []
    disk.open.set()
    assert pending.wait().nbytes == sum(t.nbytes for t in _state(1).values())
    assert ds_ckpt.list_tags(tmp_path) == ["a"]
    engine.close()


def test_a_small_buffer_waits_for_the_disk_and_stays_small(tmp_path):
    disk = Gate()
    storage = ds_ckpt.LocalStorage(tmp_path, disk)
    engine = ds_ckpt.AsyncCheckpointer(buffer_bytes=SLAB_BYTES)
    returned = threading.Event()

    def save():
        engine.save(ds_ckpt.CheckpointRef(storage, "a"), ds_ckpt.full_shards(_state(1)), {})
        returned.set()

    thread = threading.Thread(target=save)
    thread.start()
    assert not returned.wait(0.3)
    disk.open.set()
    assert returned.wait(30)
    thread.join()
    engine.wait()
    assert engine._pool.nbytes == SLAB_BYTES
    assert _value(tmp_path / "a") == 1
    engine.close()


def test_an_error_surfaces_at_the_next_call_once_and_the_engine_goes_on(tmp_path):
    disk = Gate()
    disk.fail = True
    disk.open.set()
    full = ds_ckpt.LocalStorage(tmp_path, disk)
    engine = ds_ckpt.AsyncCheckpointer()
    shards = ds_ckpt.full_shards(_state(1))
    for surface in (engine.wait, lambda: engine.save(tmp_path / "never", shards, {})):
        pending = engine.save(ds_ckpt.CheckpointRef(full, "a"), shards, {})
        while not pending.done():
            time.sleep(0.01)
        with pytest.raises(CheckpointError, match="No space left on device"):
            surface()
        engine.wait()
    engine.save(tmp_path / "b", shards, {})
    engine.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b"]
    with pytest.raises(CheckpointError) as caught:
        engine.save(tmp_path / "c", shards, {})
    assert caught.value.code == "ckpt-closed"


def test_close_raises_what_was_never_raised(tmp_path):
    disk = Gate()
    disk.fail = True
    disk.open.set()
    engine = ds_ckpt.AsyncCheckpointer()
    engine.save(ds_ckpt.CheckpointRef(ds_ckpt.LocalStorage(tmp_path, disk), "a"), ds_ckpt.full_shards(_state(1)), {})
    with pytest.raises(CheckpointError, match="No space left on device"):
        engine.close()


def test_a_tensor_that_cannot_be_copied_is_an_error_of_that_save(tmp_path, monkeypatch):
    engine = ds_ckpt.AsyncCheckpointer()

    def broken(target, item, start):
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(ds_ckpt.engines, "copier", lambda local: broken)
        engine.save(tmp_path / "a", ds_ckpt.full_shards(_state(1)), {})
        with pytest.raises(CheckpointError, match="device lost"):
            engine.wait()
    engine.save(tmp_path / "b", ds_ckpt.full_shards(_state(2)), {})
    engine.close()
    assert ds_ckpt.list_tags(tmp_path) == ["b"]


def test_retention_keeps_the_newest_after_success_only(tmp_path):
    disk = Gate()
    disk.open.set()
    storage = ds_ckpt.LocalStorage(tmp_path, disk)
    engine = ds_ckpt.AsyncCheckpointer(keep=2)
    for step in range(5):
        engine.save(ds_ckpt.CheckpointRef(storage, f"s{step}"), ds_ckpt.full_shards(_state(step, 10)), {})
    engine.wait()
    assert ds_ckpt.list_tags(tmp_path) == ["s3", "s4"]
    disk.fail = True
    engine.save(ds_ckpt.CheckpointRef(storage, "s5"), ds_ckpt.full_shards(_state(5, 10)), {})
    with pytest.raises(CheckpointError):
        engine.close()
    assert ds_ckpt.list_tags(tmp_path) == ["s3", "s4"]
    with pytest.raises(CheckpointError) as caught:
        ds_ckpt.prune(tmp_path, 0)
    assert caught.value.code == "ckpt-keep"


@pytest.mark.slow
def test_many_saves_keep_memory_threads_and_descriptors(tmp_path):
    process = psutil.Process()
    engine = ds_ckpt.AsyncCheckpointer(keep=1)
    state = _state(1)

    def round_of_saves(count):
        for step in range(count):
            engine.save(tmp_path / f"s{step % 3}", ds_ckpt.full_shards(state), {"step": step})
        engine.wait()
        gc.collect()
        return process.memory_info().rss, len(os.listdir("/proc/self/fd"))

    before = round_of_saves(5)
    after = round_of_saves(25)
    engine.close()
    assert after[0] - before[0] < 8 * 2**20
    assert after[1] <= before[1]


def _in_thread(call):
    over = threading.Event()

    def run():
        call()
        over.set()

    threading.Thread(target=run, daemon=True).start()
    return over


def test_ctrl_c_in_a_wait_forgets_no_save(tmp_path, monkeypatch):
    """The next update changed what the save was copying."""
    disk = Gate()
    engine = ds_ckpt.AsyncCheckpointer(buffer_bytes=SLAB_BYTES)
    at = ds_ckpt.CheckpointRef(ds_ckpt.LocalStorage(tmp_path, disk), "a")
    pending = engine.save(at, ds_ckpt.full_shards(_state(1)), {}, behind=True)

    def interrupted(handle):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ds_ckpt.engines.SaveHandle, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.wait()
    assert not pending.copied.is_set()
    over = _in_thread(engine.before_update)
    assert not over.wait(0.3)
    disk.open.set()
    assert over.wait(30)
    engine.close()
    assert _value(tmp_path / "a") == 1


@pytest.mark.parametrize("error", [RuntimeError("no stream"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_a_copy_that_never_began_ends_its_save(tmp_path, monkeypatch, error):
    """The thread that writes waited for ever, `before_update` and `close` with it."""
    engine = ds_ckpt.AsyncCheckpointer()

    def broken(local):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(ds_ckpt.engines, "copier", broken)
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                engine.save(tmp_path / "a", ds_ckpt.full_shards(_state(1)), {})
        else:
            engine.save(tmp_path / "a", ds_ckpt.full_shards(_state(1)), {})
    assert _in_thread(engine.before_update).wait(10)
    raised = []

    def wait():
        with pytest.raises(CheckpointError, match=type(error).__name__) as caught:
            engine.wait()
        raised.append(caught.value.code)

    assert _in_thread(wait).wait(10)
    assert raised == ["ckpt-failed"]
    engine.save(tmp_path / "b", ds_ckpt.full_shards(_state(2)), {})
    engine.close()
    assert ds_ckpt.list_tags(tmp_path) == ["b"]


@pytest.mark.parametrize("size", [0, -1, float("nan")])
def test_buffers_of_no_bytes_are_refused(size):
    with pytest.raises(PlanError, match="buffer_bytes"):
        ds_ckpt.AsyncCheckpointer(buffer_bytes=size)
