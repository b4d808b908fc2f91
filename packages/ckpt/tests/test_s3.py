"""Against a server that speaks S3 (moto, on loopback): the same calls, an upload that fails leaves nothing."""

import pytest
import torch

import ds_ckpt
from ds_config.errors import CheckpointError

pytest.importorskip("s3fs", reason="the group `tests` of ds-ckpt is not installed")


@pytest.fixture(scope="module")
def server():
    server_module = pytest.importorskip("moto.server", reason="the group `tests` of ds-ckpt is not installed")
    made = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def root(server, monkeypatch, request):
    import s3fs

    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    bucket = f"bucket-{abs(hash(request.node.name)) % 10**8}"
    s3fs.S3FileSystem().mkdir(bucket)
    yield f"s3://{bucket}/run"
    s3fs.S3FileSystem.clear_instance_cache()


def _state(value, numel=1000):
    return {"w": torch.full((numel,), float(value)), "b": torch.full((7,), value, dtype=torch.int64)}


def _value(path, numel=1000):
    back = _state(0, numel)
    meta = ds_ckpt.load(path, ds_ckpt.full_shards(back))
    assert back["w"].unique().tolist() == [back["b"][0].item()] == [meta["v"]]
    return meta["v"]


def _names(root):
    import s3fs

    return sorted(p.rsplit("/", 1)[-1].split("-")[0] for p in s3fs.S3FileSystem().find(root, refresh=True))


def test_save_load_find_replace_prune(root):
    assert ds_ckpt.find_latest(root) is None
    for v in (1, 2, 3):
        ds_ckpt.save(f"{root}/s{v}", ds_ckpt.full_shards(_state(v)), {"v": v})
    assert ds_ckpt.list_tags(root) == ["s1", "s2", "s3"]
    ds_ckpt.save(f"{root}/s1", ds_ckpt.full_shards(_state(4)), {"v": 4})
    assert _value(ds_ckpt.find_latest(root)) == 4
    assert ds_ckpt.verify(f"{root}/s1").nbytes == 4056
    assert ds_ckpt.diff(f"{root}/s2", f"{root}/s3").values == ("b", "w")
    assert ds_ckpt.prune(root, 2) == ["s2"]
    assert _names(root) == ["data", "data", "manifest.json", "manifest.json"]


def test_parts_of_a_large_object_and_of_a_tensor(root):
    """More than one part of a multipart upload, and ranges of an object."""
    numel = 14_000_000  # 56 MB: s3fs sends parts of 50 MB
    ds_ckpt.save(f"{root}/a", ds_ckpt.full_shards(_state(5, numel)), {"v": 5})
    assert _value(f"{root}/a", numel) == 5


def test_saved_behind_the_step(root):
    engine = ds_ckpt.AsyncCheckpointer(keep=1)
    state = _state(1)
    for v in (1, 2):
        engine.save(f"{root}/s{v}", ds_ckpt.full_shards(state), {"v": v})
        for tensor in state.values():
            tensor.add_(1)
    engine.close()
    assert ds_ckpt.list_tags(root) == ["s2"]
    assert _value(f"{root}/s2") == 2


def test_a_copy_that_fails_leaves_no_object_and_the_older_checkpoint(root, monkeypatch):
    ds_ckpt.save(f"{root}/s", ds_ckpt.full_shards(_state(1)), {"v": 1})

    def broken(local):
        def copy(target, item, start):
            raise RuntimeError("device lost")

        return copy

    with monkeypatch.context() as patch:
        patch.setattr(ds_ckpt.save_job, "copier", broken)
        with pytest.raises(CheckpointError, match="device lost"):
            ds_ckpt.save(f"{root}/s", ds_ckpt.full_shards(_state(2)), {"v": 2})
    assert _value(ds_ckpt.find_latest(root)) == 1
    assert _names(root) == ["data", "manifest.json"]


def test_damage_is_found(root):
    import s3fs

    ds_ckpt.save(f"{root}/s", ds_ckpt.full_shards(_state(1)), {"v": 1})
    fs = s3fs.S3FileSystem()
    (path,) = [p for p in fs.find(root) if "data-" in p]
    data = bytearray(fs.cat_file(path))
    data[-5] ^= 1
    fs.pipe_file(path, bytes(data))
    with pytest.raises(CheckpointError, match="is damaged: bytes"):
        _value(f"{root}/s")
    fs.pipe_file(path, bytes(data[:-1]))
    assert ds_ckpt.find_latest(root) is None
