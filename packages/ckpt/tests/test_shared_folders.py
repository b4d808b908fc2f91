"""Folders that others write to: nothing outside of them is touched, nothing of others is removed, nothing makes a reader wait."""

import contextlib
import os
import shutil
import threading

import pytest
import torch

import ds_ckpt
from ds_ckpt.checkpoint_list import next_sequence
from ds_ckpt.local import Disk, LocalStorage
from ds_config.errors import CheckpointError


def _shards(value=1.0):
    return ds_ckpt.full_shards({"w": torch.full((8,), value)})


def _save(path, value=1.0):
    ds_ckpt.save(path, _shards(value), {"value": value})


@pytest.fixture
def outside(tmp_path):
    """A folder of somebody else, beside the root, with a checkpoint and a file in it."""
    folder = tmp_path / "outside"
    _save(folder / "theirs", 5.0)
    (folder / "thesis.txt").write_text("years of work")
    return folder


def _contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


# ---- links


def test_a_tag_that_is_a_link_is_neither_newest_nor_removed_nor_replaced(tmp_path, outside):
    root, before = tmp_path / "root", _contents(outside)
    _save(root / "a")
    (root / "z").symlink_to(outside / "theirs")
    assert ds_ckpt.list_tags(root) == ["a"]
    with pytest.raises(CheckpointError) as raised:
        _save(root / "z")
    assert raised.value.code == "ckpt-target-exists"
    _save(root / "b")
    assert ds_ckpt.prune(root, keep=1) == ["a"]
    assert ds_ckpt.list_tags(root) == ["b"]
    assert (root / "z").is_symlink()
    assert ds_ckpt.load(root / "z", _shards())["value"] == 5.0  # asked for by name: that is the folder which was given
    ds_ckpt.remove(root / "z")
    assert not (root / "z").is_symlink()
    assert _contents(outside) == before


def test_a_data_file_that_is_a_link_out_of_its_folder_is_not_read(tmp_path, outside):
    root = tmp_path / "root"
    _save(root / "a")
    _save(root / "b")
    file = root / "b" / "data-00000.safetensors"
    file.unlink()
    file.symlink_to(outside / "theirs" / "data-00000.safetensors")
    assert os.path.basename(ds_ckpt.find_latest(root)) == "a"
    with pytest.raises(CheckpointError) as raised:
        ds_ckpt.load(root / "b", _shards())
    assert raised.value.code == "ckpt-outside"


@pytest.mark.parametrize("name", [".readers", ".blocks"])
def test_folders_beside_the_tags_that_are_links_are_not_followed(tmp_path, outside, name):
    root = tmp_path / "root"
    _save(root / "a")
    os.utime(outside / "thesis.txt", (0, 0))
    before = _contents(outside)
    (root / name).symlink_to(outside)
    recipe = ds_ckpt.SaveOptions(incremental=True)
    engine = ds_ckpt.SyncCheckpointer(recipe=recipe, keep=1)
    refused = pytest.raises(CheckpointError, match="outside of its folder")
    with refused if name == ".blocks" else contextlib.nullcontext():
        engine.save(root / "b", _shards(), {})
    ds_ckpt.load(root / "a" if (root / "a").is_dir() else root / "b", _shards())
    assert _contents(outside) == before


# ---- what is not ours


@pytest.mark.parametrize("name", [".tmp-notes", ".old-data", ".tmp-removed-thesis"])
def test_folders_that_only_look_like_leftovers_stay(tmp_path, name):
    root = tmp_path / "root"
    (root / name).mkdir(parents=True)
    (root / name / "thesis.txt").write_text("years of work")
    (root / "data").mkdir()
    _save(root / "a")
    _save(root / "a")
    assert (root / name / "thesis.txt").read_text() == "years of work"


def test_a_foreign_file_among_the_shared_blocks_stays(tmp_path):
    root = tmp_path / "root"
    engine = ds_ckpt.SyncCheckpointer(recipe=ds_ckpt.SaveOptions(incremental=True), keep=1)
    engine.save(root / "a", _shards(), {})
    (root / ".blocks").mkdir(exist_ok=True)
    note = root / ".blocks" / "thesis.txt"
    note.write_text("years of work")
    os.utime(note, (0, 0))
    engine.save(root / "b", _shards(2.0), {})
    ds_ckpt.prune(root, keep=1)
    assert note.exists()


# ---- pipes and devices


@pytest.mark.parametrize("name", ["manifest.json", "data-00000.safetensors"])
def test_a_pipe_in_place_of_a_file_hangs_nobody(tmp_path, name):
    root = tmp_path / "root"
    _save(root / "a")
    _save(root / "b")
    (root / "b" / name).unlink()
    os.mkfifo(root / "b" / name)
    ended = threading.Event()

    def look():
        assert os.path.basename(ds_ckpt.find_latest(root)) == "a"
        with pytest.raises(CheckpointError) as raised:
            ds_ckpt.load(root / "b", _shards())
        assert raised.value.code in ("ckpt-not-a-file", "ckpt-not-found")
        ended.set()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(20)
    assert ended.is_set()


def test_a_device_in_place_of_a_manifest_takes_no_memory(tmp_path):
    root = tmp_path / "root"
    _save(root / "a")
    (root / "b").mkdir()
    (root / "b" / "manifest.json").symlink_to("/dev/zero")
    assert ds_ckpt.list_tags(root) == ["a"]
    with pytest.raises(CheckpointError):
        ds_ckpt.inspect(root / "b")


# ---- damage that would spread


def test_a_damaged_manifest_does_not_push_later_saves_beyond_what_readers_take(tmp_path):
    root = tmp_path / "root"
    _save(root / "a")
    manifest = (root / "a" / "manifest.json").read_bytes()
    (root / "junk").mkdir()
    head, rest = manifest.split(b"\n", 1)
    rest = b'"sequence":999999999999999999,' + rest.split(b",", 1)[1]
    (root / "junk" / "manifest.json").write_bytes(head + b"\n" + rest)
    _save(root / "b", 2.0)
    assert os.path.basename(ds_ckpt.find_latest(root)) == "b"
    assert next_sequence(LocalStorage(root)) == 3


# ---- others at work at the same time


def test_a_draft_that_another_save_takes_for_a_leftover_before_it_is_locked_is_made_again(tmp_path):
    root = tmp_path / "root"
    _save(root / "a")

    class Raced(Disk):
        """Another job's `recover` comes between the two system calls that make and lock a draft."""

        raced = False

        def make_directory(self, path):
            super().make_directory(path)
            if ".tmp-" in path and not self.raced:
                self.raced = True
                LocalStorage(root).recover()

    disk = Raced()
    ds_ckpt.save(ds_ckpt.CheckpointRef(LocalStorage(root, disk), "b"), _shards(2.0), {"value": 2.0})
    assert disk.raced
    assert ds_ckpt.load(root / "b", _shards())["value"] == 2.0


def test_the_newest_is_looked_for_again_when_what_was_listed_is_gone(tmp_path, monkeypatch):
    root = tmp_path / "root"
    _save(root / "a")
    storage, listed, looks = LocalStorage(root), LocalStorage.tags, []

    def tags(self):
        names = listed(self)
        looks.append(names)
        if len(looks) == 1:  # another job saves its next one and removes this, after the list was made
            _save(root / "b", 2.0)
            ds_ckpt.remove(root / "a")
        return names

    monkeypatch.setattr(LocalStorage, "tags", tags)
    assert os.path.basename(str(ds_ckpt.find_latest(storage.root))) == "b"


def test_a_checkpoint_that_a_reader_took_after_the_list_was_made_is_not_removed(tmp_path, monkeypatch):
    root = tmp_path / "root"
    for name in "abc":
        _save(root / name)
    storage, in_use = LocalStorage(root), LocalStorage.tags_in_use
    looks = []

    def tags_in_use(self):
        looks.append(len(looks))
        if len(looks) == 2:
            storage.hold("a", 60.0)
        return in_use(self)

    monkeypatch.setattr(LocalStorage, "tags_in_use", tags_in_use)
    assert ds_ckpt.prune(root, keep=1) == ["b"]
    assert ds_ckpt.list_tags(root) == ["a", "c"]


@pytest.mark.parametrize("then", ["saved again", "removed", "damaged"])
def test_what_happens_to_a_checkpoint_between_its_index_and_its_data_is_said(tmp_path, monkeypatch, then):
    """It was called damaged, whatever it was."""
    from ds_ckpt import checkpoint_loader

    ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards({"w": torch.ones(3000)}), {})
    plan = checkpoint_loader.plan_load

    def meanwhile(*args):
        if then == "saved again":
            ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards({"w": torch.zeros(3000)}), {})
        elif then == "removed":
            shutil.rmtree(tmp_path / "a")
        else:
            file = tmp_path / "a" / "data-00000.safetensors"
            content = file.read_bytes()
            file.write_bytes(content[:5000] + b"?" + content[5001:])
        return plan(*args)

    monkeypatch.setattr(checkpoint_loader, "plan_load", meanwhile)
    with pytest.raises(CheckpointError) as caught:
        ds_ckpt.load(tmp_path / "a", ds_ckpt.full_shards({"w": torch.zeros(3000)}))
    assert caught.value.code == ("ckpt-block-damaged" if then == "damaged" else "ckpt-replaced")


def test_a_full_disk_is_named_with_the_file(tmp_path, monkeypatch):
    def full(self, fd, data, offset):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Disk, "write", full)
    with pytest.raises(CheckpointError, match=r"No space left on device: '.*root/\.tmp-a-"):
        _save(tmp_path / "root" / "a")


# ---- a manifest.json of another program


THEIRS = '{"files": ["a.bin"], "format": "theirs"}'


def _deepspeed_folder(path, value):
    from ds_ckpt.convert.deepspeed_folders import publish_folder

    def write(folder):
        (folder / path.name).mkdir()
        torch.save({"module": {"w": torch.full((8,), value)}}, folder / path.name / "mp_rank_00_model_states.pt")

    publish_folder(path.parent, path.name, write)


def test_a_manifest_of_another_program_is_neither_read_nor_replaced(tmp_path):
    root = tmp_path / "root"
    _save(root / "a")
    (root / "b").mkdir()
    for text in (THEIRS, "[]", '{"format": 1}'):
        (root / "b" / "manifest.json").write_text(text)
        assert ds_ckpt.list_tags(root) == ["a"]
        with pytest.raises(CheckpointError, match="another program's") as caught:
            _save(root / "b")
        assert caught.value.code == "ckpt-target-exists"
        assert (root / "b" / "manifest.json").read_text() == text
    assert sorted(p.name for p in root.iterdir()) == ["a", "b"]


def test_nor_in_a_store(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/theirs/b/manifest.json", THEIRS.encode())
    with pytest.raises(CheckpointError, match="another program's"):
        _save("memory://theirs/b")
    assert fs.cat_file("/theirs/b/manifest.json") == THEIRS.encode()


def test_a_damaged_manifest_of_ours_is_replaced(tmp_path):
    _save(tmp_path / "a")
    for damaged in (b"", b'{"formau"' + (tmp_path / "a" / "manifest.json").read_bytes()[9:80]):
        (tmp_path / "a" / "manifest.json").write_bytes(damaged)
        _save(tmp_path / "a", 2.0)
        assert ds_ckpt.inspect(tmp_path / "a").meta == {"value": 2.0}


@pytest.mark.parametrize("exchange", [True, False])
def test_it_stays_beside_files_in_deepspeeds_layout(tmp_path, exchange, monkeypatch):
    from ds_ckpt.convert.deepspeed_folders import newest_sound, usable_tag

    if not exchange:
        monkeypatch.setattr(Disk, "exchange", lambda *names: False)
    _deepspeed_folder(tmp_path / "a", 1.0)
    (tmp_path / "a" / "manifest.json").write_text(THEIRS)
    _deepspeed_folder(tmp_path / "a", 2.0)
    assert (tmp_path / "a" / "manifest.json").read_text() == THEIRS
    assert usable_tag(tmp_path) == newest_sound(tmp_path) == "a"
    found = torch.load(tmp_path / "a" / "mp_rank_00_model_states.pt")["module"]["w"]
    assert found.tolist() == [2.0] * 8
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "latest"]


def test_a_save_that_ends_between_the_renames_of_deepspeeds_layout_is_finished(tmp_path, monkeypatch):
    _deepspeed_folder(tmp_path / "a", 1.0)
    renamed = []

    def killed(path, target):
        renamed.append(path)
        os.rename(path, target)
        if len(renamed) == 1:
            raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "exchange", lambda *names: False)
        patch.setattr("pathlib.Path.rename", killed)
        patch.setattr("shutil.rmtree", lambda *args, **kwargs: None)
        patch.setattr("pathlib.Path.exists", lambda path: path.name != "replaced" and os.path.exists(path))
        with pytest.raises(SystemExit):
            _deepspeed_folder(tmp_path / "a", 2.0)
    assert not (tmp_path / "a").exists()
    _save(tmp_path / "b")
    found = torch.load(tmp_path / "a" / "mp_rank_00_model_states.pt")["module"]["w"]
    assert found.tolist() == [2.0] * 8
