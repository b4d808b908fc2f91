"""The three storages behave alike; object storage commits with its manifest."""

import sys

import pytest
import torch

import ds_ckpt
from ds_ckpt.local_storage import locate
from ds_ckpt.python_objects import ObjectStorage
from ds_config.errors import CheckpointError, UnsupportedError


@pytest.fixture(params=["local", "memory", "objects"])
def storage(request, tmp_path):
    if request.param == "objects":
        made = ObjectStorage(f"memory://{tmp_path.name}")
        yield made
        if made.fs.exists(made.root):
            made.fs.rm(made.root, recursive=True)
    else:
        yield ds_ckpt.LocalStorage(tmp_path) if request.param == "local" else ds_ckpt.MemoryStorage()


def _save(storage, tag, value):
    ds_ckpt.save(
        ds_ckpt.CheckpointRef(storage, tag),
        ds_ckpt.full_shards({"w": torch.full((1000,), value), "e": torch.zeros(0)}),
        {"v": value},
    )


def _load(storage, tag):
    w = torch.zeros(1000)
    meta = ds_ckpt.load(ds_ckpt.CheckpointRef(storage, tag), ds_ckpt.full_shards({"w": w, "e": torch.zeros(0)}))
    assert torch.equal(w, torch.full((1000,), meta["v"]))
    return meta["v"]


def test_save_find_overwrite_verify_remove(storage):
    assert ds_ckpt.find_latest(storage) is None
    _save(storage, "a", 1.0)
    _save(storage, "b", 2.0)
    assert ds_ckpt.list_tags(storage) == ["a", "b"]
    _save(storage, "a", 3.0)
    latest = ds_ckpt.find_latest(storage)
    assert latest.tag == "a"
    assert _load(storage, "a") == 3.0
    assert ds_ckpt.verify(latest).nbytes == 4000
    ds_ckpt.remove(latest)
    assert ds_ckpt.list_tags(storage) == ["b"]
    with pytest.raises(CheckpointError) as caught:
        _load(storage, "a")
    assert caught.value.code == "ckpt-not-found"


def test_a_save_that_fails_leaves_what_was_there(storage, monkeypatch):
    _save(storage, "a", 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(ds_ckpt.save_job, "encode", lambda manifest: 1 / 0)
        with pytest.raises(CheckpointError) as caught:
            _save(storage, "a", 2.0)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(CheckpointError):
            _save(storage, "b", 2.0)
    assert ds_ckpt.list_tags(storage) == ["a"]
    assert _load(storage, "a") == 1.0


def test_objects_of_earlier_generations_are_removed_after_the_commit(tmp_path):
    storage = ObjectStorage(f"memory://{tmp_path.name}")
    for value in (1.0, 2.0, 3.0):
        _save(storage, "a", value)
    names = [p.rsplit("/", 1)[-1] for p in storage.fs.ls(f"{storage.root}/a", detail=False)]
    assert len(names) == 2
    assert "manifest.json" in names
    assert _load(storage, "a") == 3.0


def test_a_url_is_a_path(tmp_path):
    url = f"memory://{tmp_path.name}-url/run/step-1"
    ds_ckpt.save(url, ds_ckpt.full_shards({"w": torch.ones(3)}), {})
    assert ds_ckpt.find_latest(url.rpartition("/")[0]) == url
    target = torch.zeros(3)
    ds_ckpt.load(url, ds_ckpt.full_shards({"w": target}))
    assert target.tolist() == [1, 1, 1]


def test_without_fsspec_a_url_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UnsupportedError, match="fsspec") as caught:
        locate("s3://bucket/run/step-1")
    assert caught.value.code == "ckpt-fsspec"


def test_a_relative_path_and_a_trailing_slash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ds_ckpt.save("step-1/", ds_ckpt.full_shards({"w": torch.ones(1)}), {})
    assert ds_ckpt.list_tags(".") == ["step-1"]
    assert ds_ckpt.find_latest(".") == str(tmp_path / "step-1")
