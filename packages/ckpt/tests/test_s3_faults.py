"""A store that refuses, stalls, cuts and shortens: right bytes or a clear error, never half a checkpoint."""

import random
import sys
from pathlib import Path

import pytest
import torch

import ds_ckpt
from ds_ckpt import uploads
from ds_config.errors import CheckpointError

sys.path.insert(0, str(Path(__file__).parent))
from fault_proxy import KINDS, FaultProxy

s3fs = pytest.importorskip("s3fs", reason="the group `tests` of ds-ckpt is not installed")

OPTIONS = {"key": "key", "secret": "secret", "use_listings_cache": False}
QUICK = ds_ckpt.RetryPolicy(attempts=6, first_s=0.01, limit_s=0.05)
NEVER = ds_ckpt.RetryPolicy(attempts=2, first_s=0.01, limit_s=0.01)


@pytest.fixture(scope="module")
def store():
    server_module = pytest.importorskip("moto.server", reason="the group `tests` of ds-ckpt is not installed")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    proxy = FaultProxy(host, port)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem(endpoint_url=proxy.url, **OPTIONS).mkdir("bucket")
    yield proxy
    proxy.close()
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


def storage(proxy, name, retries=QUICK):
    fast = {"retries": {"max_attempts": 1}, "read_timeout": 20, "connect_timeout": 5}
    return ds_ckpt.ObjectStorage(
        f"s3://bucket/{name}", retries=retries, endpoint_url=proxy.url, config_kwargs=fast, max_concurrency=4, **OPTIONS
    )


def _state(value, numel=300_000):
    return {"w": torch.full((numel,), float(value)), "b": torch.arange(7) + value}


def _value(at):
    back = _state(0)
    meta = ds_ckpt.load(at, ds_ckpt.full_shards(back))
    assert all(torch.equal(back[name], t) for name, t in _state(meta["v"]).items())
    return meta["v"]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 2**18)
    monkeypatch.setattr(uploads, "PART_BYTES", 2**18)  # several parts an object, as large ones have
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)  # ours are what is tried


def _trials(seed, count, requests):
    rng = random.Random(seed)
    for number in range(count):
        faults = {rng.randrange(requests): rng.choice(KINDS) for _ in range(rng.choice([1, 1, 2, 4]))}
        yield number, faults, rng.random() < 0.25


def _save_trials(store, count, seed):
    told = []
    for number, faults, hopeless in _trials(seed, count, 24):
        place = storage(store, f"save{seed}-{number}")
        ds_ckpt.save(ds_ckpt.CheckpointRef(place, "old"), ds_ckpt.full_shards(_state(1)), {"v": 1})
        if hopeless:
            faults = dict.fromkeys(range(min(faults), 500), "refused")
        tag = "old" if number % 2 else "new"
        store.arm(faults)
        try:
            target = storage(store, f"save{seed}-{number}", NEVER if hopeless else QUICK)
            ds_ckpt.save(ds_ckpt.CheckpointRef(target, tag), ds_ckpt.full_shards(_state(2)), {"v": 2})
            code = None
        except CheckpointError as error:
            code = error.code
        assert code in (None, "ckpt-store", "ckpt-io"), (faults, code)
        done = code is None
        told += store.seen
        store.arm({})
        newest = ds_ckpt.find_latest(place)
        assert _value(newest) in ((2,) if done else (1, 2)), (faults, done)
        assert _value(ds_ckpt.CheckpointRef(place, "old")) in ((1, 2) if tag == "old" else (1,))
        assert done or hopeless, faults  # what passes is waited for
        for found in ds_ckpt.list_tags(place):
            ds_ckpt.verify(ds_ckpt.CheckpointRef(place, found))
    return told


def _load_trials(store, count, seed):
    place = storage(store, f"load{seed}")
    ds_ckpt.save(ds_ckpt.CheckpointRef(place, "a"), ds_ckpt.full_shards(_state(3)), {"v": 3})
    told = []
    for number, faults, hopeless in _trials(seed, count, 7):
        if hopeless:
            faults = dict.fromkeys(range(min(faults), 500), ("short", "refused")[number % 2])
        store.arm(faults)
        try:
            found = _value(ds_ckpt.CheckpointRef(storage(store, f"load{seed}", NEVER if hopeless else QUICK), "a"))
        except CheckpointError as error:
            found = error.code
        assert found in ((3, "ckpt-store", "ckpt-io") if hopeless else (3,)), faults
        told += store.seen
        store.arm({})
    return told


def test_some_faults_of_saves_and_loads(store):
    assert len(_save_trials(store, 3, seed=1)) >= 2
    assert len(_load_trials(store, 3, seed=2)) >= 2


@pytest.mark.slow
def test_twenty_drawn_faults_of_a_save(store):
    told = _save_trials(store, 20, seed=3)
    assert {entry.split()[0] for entry in told} == set(KINDS)


@pytest.mark.slow
def test_twenty_drawn_faults_of_a_load(store):
    told = _load_trials(store, 20, seed=4)
    assert {entry.split()[0] for entry in told} >= {"refused", "slow", "cut", "short"}


def test_a_reader_keeps_what_it_reads(store):
    place = storage(store, "held")
    for v in (1, 2, 3):
        ds_ckpt.save(ds_ckpt.CheckpointRef(place, f"s{v}"), ds_ckpt.full_shards(_state(v)), {"v": v})
    over = place.hold("s1", 60)
    ds_ckpt.save(ds_ckpt.CheckpointRef(place, "s2"), ds_ckpt.full_shards(_state(4)), {"v": 4})
    assert ds_ckpt.prune(place, 1) == ["s3"]
    assert _value(ds_ckpt.CheckpointRef(place, "s1")) == 1
    over()
    assert ds_ckpt.prune(place, 1) == ["s1"]
    assert place.tags_in_use() == set()


def test_incremental_saves_of_objects(store):
    place = storage(store, "incremental")
    engine, state = ds_ckpt.SyncCheckpointer(recipe=ds_ckpt.SaveOptions(incremental=True), keep=2), _state(1)
    for v in (1, 2, 3):
        state["b"] = torch.arange(7) + v
        engine.save(
            ds_ckpt.CheckpointRef(place, f"s{v}"), ds_ckpt.full_shards({"w": _state(1)["w"], "b": state["b"]}), {"v": v}
        )
    sizes = {name: int(place.fs.info(f"{place.root}/.blocks/{name}")["size"]) for name, _ in place.shared()}
    assert sorted(sizes.values()) == [56, 56, 1_200_056]
    back = {"w": torch.zeros(300_000), "b": torch.zeros(7, dtype=torch.int64)}
    assert ds_ckpt.load(ds_ckpt.CheckpointRef(place, "s3"), ds_ckpt.full_shards(back)) == {"v": 3}
    assert torch.equal(back["w"], _state(1)["w"])
    assert torch.equal(back["b"], state["b"])
