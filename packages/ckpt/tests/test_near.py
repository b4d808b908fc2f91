"""Copies on the nodes and in the store: killed anywhere, a run goes on from a complete one, and loses one interval at most."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch

import ds_ckpt
from ds_ckpt import peer_reads
from ds_ckpt.local_checkpoints import DrainOptions, LocalCheckpointer
from ds_config.errors import CheckpointError

EVERY, DRAIN, STEPS = 2, 4, 12


def _state(step):
    return {f"t{i}": torch.full((3_000 + i,), float(step * 10 + i)) for i in range(4)}


@contextlib.contextmanager
def _server():
    script = Path(__file__).with_name("near_server.py")
    process = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def trial(root, last):
        order = {"near": str(root / "near"), "far": str(root / "far"), "told": str(root / "told"), "last": last}
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        assert answer["killed"] or answer["status"] == 0, answer
        lines = (root / "told").read_text().split() if (root / "told").exists() else []
        assert "wrong" not in lines
        return answer, max((int(line) for line in lines if line.isdigit()), default=0)

    try:
        yield trial
    finally:
        process.stdin.close()
        process.kill()
        process.wait(10)
        process.stdout.close()


def _restored(root):
    """The step a new process goes on from: 0 for none. What it has is what that step had."""
    copies = LocalCheckpointer(root / "near", root / "far", every=EVERY, draining=DrainOptions(every=DRAIN, keep=2))
    back = {name: torch.zeros_like(t) for name, t in _state(0).items()}
    found = copies.restore(ds_ckpt.full_shards(back))
    copies.close()
    if found is None:
        return 0
    step, meta = found
    assert meta == {"step": step}
    assert all(torch.equal(back[name], t) for name, t in _state(step).items())
    return step


def _trials(count, seed):
    rng, shm = random.Random(seed), Path("/dev/shm")
    with _server() as trial, tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as folder:
        whole = Path(folder) / "whole"
        whole.mkdir()
        answer, _ = trial(whole, 0)
        points = int(answer["answer"])
        assert _restored(whole) == STEPS
        outcomes = []
        for number in range(count):
            root = Path(folder) / f"r{number}"
            root.mkdir()
            answer, offered = trial(root, rng.randrange(1, points + 1))
            far = ds_ckpt.list_tags(root / "far")
            for tag in far:
                ds_ckpt.verify(root / "far" / tag)
            if number % 3 == 0:  # the node is gone with what was on it
                shutil.rmtree(root / "near", ignore_errors=True)
                step = _restored(root)
                # One interval of the store: what was due last may be on its way there.
                assert step >= offered // DRAIN * DRAIN - DRAIN, (offered, step, far)
            else:
                step = _restored(root)
                assert step >= offered - EVERY, (offered, step)
            assert step <= offered + EVERY
            answer, _ = trial(root, 0)  # and it goes on to the end
            assert not answer["killed"]
            assert _restored(root) == STEPS
            outcomes.append((offered, step))
            shutil.rmtree(root)
        return outcomes


def test_killed_at_some_points(tmp_path):
    assert len(_trials(3, seed=1)) == 3


@pytest.mark.slow
def test_killed_at_a_hundred_drawn_points(tmp_path):
    outcomes = _trials(100, seed=2)
    assert len(outcomes) == 100
    assert len({offered for offered, _ in outcomes}) >= 5  # at many stages of the run


def test_a_drained_step_is_an_ordinary_checkpoint(tmp_path, model):
    copies = LocalCheckpointer(tmp_path / "near", tmp_path / "far", draining=DrainOptions(every=2, keep=1))
    local = [model.local(s, fill=True) for s in model.layout(0, 1, 1, "flat")]
    taken = [
        copies.offer(step, local, {"v": step, "best": float("inf")}, {"tied": "param/prime"}) for step in (1, 2, 3)
    ]
    copies.close()
    assert taken == [True] * 3
    (tag,) = ds_ckpt.list_tags(tmp_path / "far")

    def load(ranks):
        back = [model.local(s, fill=False) for s in model.layout(ranks.rank, 3, 1, "flat")]
        meta = ds_ckpt.load(tmp_path / "far" / tag, back, group=ranks)
        return meta["best"], all(torch.equal(i.data, model.expected(i.shard)) for i in back)

    assert model.together(3, load) == [(float("inf"), True)] * 3
    assert ds_ckpt.inspect(tmp_path / "far" / tag).aliases == {"tied": "param/prime"}


def test_a_slow_store_delays_the_next_drain_and_no_step(tmp_path, model, monkeypatch):
    import threading

    gate, sync = threading.Event(), ds_ckpt.local.Disk.rename

    def rename(self, old, new):
        if "/far/" in new:
            gate.wait(300)
        return sync(self, old, new)

    monkeypatch.setattr(ds_ckpt.local.Disk, "rename", rename)
    copies = LocalCheckpointer(tmp_path / "near", tmp_path / "far", draining=DrainOptions(every=2))
    local = [model.local(s, fill=True) for s in model.layout(0, 1, 1, "flat")]
    for step in range(1, 10):  # the drain of step 2 does not end
        assert copies.offer(step, local, {})
    assert ds_ckpt.list_tags(tmp_path / "far") == []
    gate.set()
    copies.close()
    assert ds_ckpt.list_tags(tmp_path / "far") == ["step-2", "step-9"]
    left = {p.name for p in (tmp_path / "near").glob("holder-*/owner-*/step-*")}
    assert (
        {"step-8", "step-9"} <= left <= {"step-2", "step-8", "step-9"}
    )  # what was being drained stays until the next snapshot


def test_what_went_wrong_in_the_store_is_told(tmp_path, model, monkeypatch):
    sync = ds_ckpt.local.Disk.rename

    def rename(self, old, new):
        if "/far/" in new:
            raise OSError(28, "No space left on device")
        return sync(self, old, new)

    monkeypatch.setattr(ds_ckpt.local.Disk, "rename", rename)
    copies = LocalCheckpointer(tmp_path / "near", tmp_path / "far")
    local = [model.local(s, fill=True) for s in model.layout(0, 1, 1, "flat")]
    copies.offer(1, local, {})
    with pytest.raises(CheckpointError, match="No space"):
        copies.wait()
    copies.close()
    with pytest.raises(CheckpointError):
        LocalCheckpointer(tmp_path / "other", tmp_path / "far", draining=DrainOptions(every=0))


def test_ctrl_c_in_a_wait_leaves_the_snapshot_under_way(tmp_path, monkeypatch):
    """What came next used the group beside the thread that still used it."""
    going = threading.Event()
    plain = peer_reads.save

    def slow(*args, **kwargs):
        assert going.wait(30)
        return plain(*args, **kwargs)

    monkeypatch.setattr(peer_reads, "save", slow)
    snapshots = ds_ckpt.PeerSnapshots(tmp_path)
    snapshots.offer(1, ds_ckpt.full_shards({"w": torch.ones(4)}), {"step": 1})
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job behind ignores it
    threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        snapshots.wait()
    signal.signal(signal.SIGINT, before)
    threading.Timer(0.2, going.set).start()
    back = ds_ckpt.full_shards({"w": torch.zeros(4)})
    assert snapshots.restore(back) == (1, {"step": 1})
    assert going.is_set()
    snapshots.close()
