"""Killed anywhere, out of space, flipped bits, cut and missing files: earlier checkpoints stay, damage is named."""

import errno
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import torch

import ds_ckpt
from ds_ckpt.local import Disk, new_token
from ds_config.errors import CheckpointError


def _state(step):
    return {f"t{i}": torch.full((10_000 + i,), float(step * 100 + i)) for i in range(6)}


def _load_and_compare(path):
    """The step of a checkpoint, after checking that it holds exactly that step's values."""
    back = {name: torch.zeros_like(t) for name, t in _state(0).items()}
    step = ds_ckpt.load(path, ds_ckpt.full_shards(back))["step"]
    assert all(torch.equal(back[name], t) for name, t in _state(step).items())
    return step


@pytest.fixture
def room(tmp_path):
    """A directory in memory where there is one: hundreds of saves, each of which syncs, and no test of the device."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="ds-ckpt-", dir="/dev/shm") as folder:
        yield Path(folder)


def _lose_what_was_not_synced(root, synced):
    """What a power cut may do: contents that were never synced are gone (names given before a rename included)."""
    for path in root.rglob("*"):
        if path.is_file() and "/.tmp-" in str(path) and str(path) not in synced:
            path.write_bytes(b"\0" * (path.stat().st_size // 2))


@pytest.mark.parametrize("tag", [pytest.param("new", marks=pytest.mark.slow), "same"])
def test_kill_9_at_every_write_point(room, crash, tag):
    """At each system call of a save: the newest complete checkpoint is found, loads, and the next save cleans up."""
    trials = 0
    ds_ckpt.save(room / "before" / "older", ds_ckpt.full_shards(_state(1)), {"step": 1})
    ds_ckpt.save(room / "before" / "same", ds_ckpt.full_shards(_state(2)), {"step": 2})
    for last in range(1, 400):
        root = room / f"r{last}"
        shutil.copytree(room / "before", root)
        answer, synced = crash.trial(root, tag=tag, step=3, last=last)
        assert answer["killed"] or answer["status"] == 0, answer
        if not answer["killed"]:
            break
        trials += 1
        _lose_what_was_not_synced(root, synced)
        latest = ds_ckpt.find_latest(root)
        assert _load_and_compare(latest) in (2, 3), last
        assert _load_and_compare(root / "older") == 1
        assert _load_and_compare(root / "same") in ((2, 3) if tag == "same" else (2,))
        ds_ckpt.save(root / tag, ds_ckpt.full_shards(_state(4)), {"step": 4})
        assert _load_and_compare(ds_ckpt.find_latest(root)) == 4
        assert not [p.name for p in root.iterdir() if p.name.startswith(".")]
    assert trials >= 50
    assert _load_and_compare(ds_ckpt.find_latest(root)) == 3


class Failing(Disk):
    """Fails with `error` at call number `first`, and from then on if `forever`."""

    def __init__(self, first, error, forever):
        self._first, self._error, self._forever, self.count = first, error, forever, 0

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found):
            return found

        def call(*args):
            self.count += 1
            if self.count == self._first or (self._forever and self.count > self._first):
                if name == "close":
                    found(*args)
                raise OSError(self._error, os.strerror(self._error))
            return found(*args)

        return call


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("forever", [False, True])
@pytest.mark.parametrize("tag", ["new", "same"])
def test_a_failing_system_call_is_a_typed_error_and_changes_nothing(room, monkeypatch, error, forever, tag):
    monkeypatch.setattr(ds_ckpt.save_job, "BLOCK_BYTES", 2048)
    monkeypatch.setattr(ds_ckpt.writer, "SLAB_BYTES", 2**16)
    monkeypatch.setattr(ds_ckpt.local_files, "_DIRECT_BYTES", 0)
    failures = 0
    for first in range(1, 200):
        root = room / f"r{first}"
        ds_ckpt.save(root / "same", ds_ckpt.full_shards(_state(2)), {"step": 2})
        disk = Failing(first, error, forever)
        at = ds_ckpt.CheckpointRef(ds_ckpt.LocalStorage(root, disk), tag)
        if _fails(at, error):
            failures += 1
        elif disk.count < first:
            break
        assert _load_and_compare(ds_ckpt.find_latest(root)) in (2, 3)
        assert _load_and_compare(root / "same") in ((2, 3) if tag == "same" else (2,))
        ds_ckpt.save(root / tag, ds_ckpt.full_shards(_state(4)), {"step": 4})
        assert _load_and_compare(ds_ckpt.find_latest(root)) == 4
        assert not [p.name for p in root.iterdir() if p.name.startswith(".")]
    assert failures >= 15


def _fails(at, error):
    caught = []
    try:
        ds_ckpt.save(at, ds_ckpt.full_shards(_state(3)), {"step": 3})
    except CheckpointError as found:
        caught.append(found)
    assert all(c.code == "ckpt-io" and os.strerror(error) in str(c) for c in caught)
    return bool(caught)


def test_a_real_full_disk(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"cannot mount a small tmpfs here: {made.stderr.strip()}")
    try:
        ds_ckpt.save(mount / "fits", ds_ckpt.full_shards({"w": torch.ones(50_000)}), {"step": 1})
        with pytest.raises(CheckpointError, match="No space left on device"):
            ds_ckpt.save(mount / "does-not", ds_ckpt.full_shards({"w": torch.ones(500_000)}), {"step": 2})
        assert [p.name for p in mount.iterdir()] == ["fits"]
        assert ds_ckpt.verify(ds_ckpt.find_latest(mount)).nbytes == 200_000
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Two checkpoints, the newer one with many small blocks."""
    monkeypatch.setattr(ds_ckpt.save_job, "BLOCK_BYTES", 2048)
    for step in (1, 2):
        ds_ckpt.save(tmp_path / f"step{step}", ds_ckpt.full_shards(_state(step)), {"step": step})
    return tmp_path


def _flipped(data, bit):
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


def test_a_flipped_bit_in_the_manifest_is_seen_and_skipped(pair):
    path = pair / "step2" / "manifest.json"
    good = path.read_bytes()
    for bit in range(0, len(good) * 8, max(1, len(good) * 8 // 400)):
        path.write_bytes(_flipped(good, bit))
        with pytest.raises(CheckpointError) as caught:
            ds_ckpt.inspect(pair / "step2")
        assert caught.value.code in ("ckpt-manifest-damaged", "ckpt-version")
        assert ds_ckpt.find_latest(pair) == str(pair / "step1")


def test_a_flipped_bit_in_the_data_names_file_bytes_and_tensor(pair):
    path = pair / "step2" / "data-00000.safetensors"
    good = path.read_bytes()
    manifest = ds_ckpt.inspect(pair / "step2")
    start = manifest.files[0].header_nbytes
    for bit in range(start * 8, len(good) * 8, (len(good) - start) * 8 // 50):
        path.write_bytes(_flipped(good, bit))
        with pytest.raises(CheckpointError) as caught:
            _load_and_compare(pair / "step2")
        assert caught.value.code == "ckpt-block-damaged"
        (name,) = [
            n for n, t in manifest.tensors.items() for q in t.parts[0].pieces if q.at <= bit // 8 < q.at + q.numel * 4
        ]
        assert f"part of {name!r}" in str(caught.value)
        assert "data-00000.safetensors is damaged: bytes" in str(caught.value)
        with pytest.raises(CheckpointError, match=f"part of '{name}'"):
            ds_ckpt.verify(pair / "step2")


def test_a_flipped_bit_in_a_header_does_not_matter_to_a_load_and_is_found_by_verify(pair):
    path = pair / "step2" / "data-00000.safetensors"
    good = path.read_bytes()
    for bit in range(0, 4096 * 8, 997):
        path.write_bytes(_flipped(good, bit))
        assert _load_and_compare(pair / "step2") == 2
        with pytest.raises(CheckpointError, match="header"):
            ds_ckpt.verify(pair / "step2")


@pytest.mark.parametrize("name", ["manifest.json", "data-00000.safetensors"])
def test_cut_and_missing_files(pair, name):
    path = pair / "step2" / name
    good = path.read_bytes()
    for length in [*range(0, len(good), max(1, len(good) // 40)), len(good) - 1, None]:
        if length is None:
            path.unlink()
        else:
            path.write_bytes(good[:length])
        assert ds_ckpt.find_latest(pair) == str(pair / "step1")
        with pytest.raises(CheckpointError) as caught:
            _load_and_compare(pair / "step2")
        assert caught.value.code in ("ckpt-manifest-damaged", "ckpt-file-truncated", "ckpt-not-found")
        with pytest.raises(CheckpointError):
            ds_ckpt.verify(pair / "step2")


def test_verify_lists_everything_that_is_wrong(pair):
    path = pair / "step2" / "data-00000.safetensors"
    data = bytearray(path.read_bytes())
    for at in (5000, 9000, 20000, 10):
        data[at] ^= 255
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        ds_ckpt.verify(pair / "step2")
    assert caught.value.code == "ckpt-damaged"
    assert str(caught.value).count("is damaged: bytes") == 3
    assert "the header of" in str(caught.value)


def test_a_draft_that_is_being_written_is_left_alone(tmp_path):
    storage = ds_ckpt.LocalStorage(tmp_path)
    draft = storage.draft("slow", "token")
    draft.create()
    ds_ckpt.save(tmp_path / "quick", ds_ckpt.full_shards(_state(1)), {"step": 1})
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".tmp-")] == [".tmp-slow-token"]
    assert ds_ckpt.list_tags(tmp_path) == ["quick"]
    draft.abort()
    assert [p.name for p in tmp_path.iterdir()] == ["quick"]


def _draft(root, token, touched_s):
    """A draft that nobody holds, last written so long ago."""
    path = root / f".tmp-slow-{token}"
    path.mkdir(parents=True)
    (path / "data-00000.safetensors").write_bytes(b"half")
    for each in (path / "data-00000.safetensors", path):
        os.utime(each, (time.time() - touched_s, time.time() - touched_s))
    return path


def test_a_draft_of_another_host_is_left_alone_until_nothing_has_touched_it_for_a_day(tmp_path, monkeypatch):
    """Locks of NFS may end at the host: a living job's draft looks free from another one."""
    monkeypatch.setattr("socket.gethostname", lambda: "other")
    foreign = new_token()
    monkeypatch.undo()
    own = new_token()
    assert foreign[16:] != own[16:]
    living, leftover = _draft(tmp_path, foreign, 3600), _draft(tmp_path, f"{'0' * 16}{foreign[16:]}", 90_000)
    mine, older = _draft(tmp_path, own, 3600), _draft(tmp_path, "ab12", 3600)
    ds_ckpt.save(tmp_path / "t", ds_ckpt.full_shards({"a": torch.ones(3)}), {})
    assert living.is_dir()
    assert [path.exists() for path in (leftover, mine, older)] == [False, False, False]


def test_a_file_system_that_cannot_lock_directories_is_saved_to(tmp_path, monkeypatch):
    """NFS answers EBADF: it locks only what is open for writing."""

    def refuse(fd, how):
        raise OSError(errno.EBADF, "bad file descriptor")

    monkeypatch.setattr("fcntl.flock", refuse)
    left = _draft(tmp_path, new_token(), 3600)
    ds_ckpt.save(tmp_path / "t", ds_ckpt.full_shards({"a": torch.ones(3)}), {})
    assert left.is_dir()  # it may be someone's
    assert ds_ckpt.list_tags(tmp_path) == ["t"]
