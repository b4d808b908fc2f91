"""Fewer bytes: what is stored is referred to, what is asked for is encoded, and nothing that is referred to is removed."""

import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ds_ckpt
from ds_ckpt import block_codecs
from ds_ckpt.block_packing import SaveOptions
from ds_ckpt.checkpoint_list import collect, shared_files
from ds_ckpt.local_storage import locate
from ds_comm.placement import Box, Interval, TensorShard
from ds_config.errors import CheckpointError, UnsupportedError

INCREMENTAL = SaveOptions(incremental=True)


def _bytes(root):
    """Bytes of data below a root, whatever the files are called; manifests and leaves aside."""
    return sum(p.stat().st_size for p in root.rglob("*") if p.suffix in (".bin", ".safetensors"))


def _equal(path, state):
    back = {name: torch.zeros_like(t) for name, t in state.items()}
    meta = ds_ckpt.load(path, ds_ckpt.full_shards(back))
    assert all(torch.equal(back[name], t) for name, t in state.items()), path
    return meta


def _lora(base=2_000_000, rank=8):
    """A frozen base, and adapters with their moments: what changes is 1 in 60."""
    state = {f"param/base.{i}": torch.randn(base // 4) for i in range(4)}
    for i in range(4):
        for name in (f"param/lora.{i}", f"optim/lora.{i}/exp_avg", f"optim/lora.{i}/exp_avg_sq"):
            state[name] = torch.randn(rank * 350)
    return state


def _train(state):
    for name, tensor in state.items():
        if "lora" in name:
            tensor.add_(1)


@pytest.mark.parametrize("restart", [False, True])
def test_a_run_with_adapters_writes_what_changed(tmp_path, restart):
    state, engine = _lora(), ds_ckpt.SyncCheckpointer(recipe=INCREMENTAL)
    changed = sum(t.nbytes for name, t in state.items() if "lora" in name)
    engine.save(tmp_path / "s0", ds_ckpt.full_shards(state), {"step": 0})
    for step in range(1, 5):
        _train(state)
        before = _bytes(tmp_path)
        if restart:
            engine = ds_ckpt.SyncCheckpointer(recipe=INCREMENTAL)
        engine.save(tmp_path / f"s{step}", ds_ckpt.full_shards(state), {"step": step})
        assert changed <= _bytes(tmp_path) - before <= 1.1 * changed
    assert _equal(tmp_path / "s4", state) == {"step": 4}
    assert ds_ckpt.verify(tmp_path / "s4").nbytes == sum(t.nbytes for t in state.values())
    assert ds_ckpt.list_tags(tmp_path) == [f"s{i}" for i in range(5)]


def test_equal_blocks_are_stored_once_whatever_they_are_called(tmp_path):
    same = torch.randn(50_000)
    state = {"a": same, "b": same.clone(), "c": same.clone() + 1}
    engine = ds_ckpt.SyncCheckpointer(recipe=INCREMENTAL)
    engine.save(tmp_path / "x", ds_ckpt.full_shards(state), {})
    assert _bytes(tmp_path) == 2 * same.nbytes
    engine.save(tmp_path / "y", ds_ckpt.full_shards({"renamed": same}), {})
    assert _bytes(tmp_path) == 2 * same.nbytes
    _equal(tmp_path / "x", state)
    _equal(tmp_path / "y", {"renamed": same})


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["save", "overwrite", "remove", "prune"]), st.integers(0, 3)), max_size=9))
def test_no_order_of_saves_and_removals_loses_a_block(tmp_path_factory, orders):
    root = tmp_path_factory.mktemp("order")
    engine, saved = ds_ckpt.SyncCheckpointer(recipe=INCREMENTAL), {}
    values = torch.arange(4) * 10.0
    for number, (action, pick) in enumerate(orders):
        values[pick] += 1
        state = {f"t{i}": torch.full((100,), float(v)) for i, v in enumerate(values)}
        tags = sorted(saved)
        if action == "save" or not tags:
            engine.save(root / f"s{number}", ds_ckpt.full_shards(state), {})
            saved[f"s{number}"] = state
        elif action == "overwrite":
            engine.save(root / tags[pick % len(tags)], ds_ckpt.full_shards(state), {})
            saved[tags[pick % len(tags)]] = state
        elif action == "remove":
            ds_ckpt.remove(root / tags[pick % len(tags)])
            del saved[tags[pick % len(tags)]]
        else:
            for tag in ds_ckpt.prune(root, 1 + pick):
                del saved[tag]
        for tag, state in saved.items():
            _equal(root / tag, state)
    names = {name for name, _ in ds_ckpt.LocalStorage(root).shared()}
    used = set().union(*(shared_files(locate(root / tag)) for tag in saved)) if saved else set()
    assert names == used  # and nothing is left that nobody refers to


def test_what_a_damaged_manifest_may_refer_to_stays(tmp_path):
    engine = ds_ckpt.SyncCheckpointer(recipe=INCREMENTAL)
    for step in range(2):
        engine.save(tmp_path / f"s{step}", ds_ckpt.full_shards({"t": torch.full((9,), float(step))}), {})
    manifest = tmp_path / "s0" / "manifest.json"
    good = manifest.read_bytes()
    manifest.write_bytes(good[:-9])
    storage = ds_ckpt.LocalStorage(tmp_path)
    collect(storage, {name for name, _ in storage.shared()})
    manifest.write_bytes(good)
    _equal(tmp_path / "s0", {"t": torch.zeros(9)})


def test_a_save_that_fails_leaves_no_blocks_and_the_next_one_is_right(tmp_path, monkeypatch):
    engine, state = ds_ckpt.SyncCheckpointer(recipe=INCREMENTAL), {"a": torch.ones(1000), "b": torch.zeros(1000)}
    engine.save(tmp_path / "s0", ds_ckpt.full_shards(state), {})
    before = sorted(p.name for p in (tmp_path / ".blocks").iterdir())
    state["a"] += 1
    with monkeypatch.context() as patch:
        patch.setattr(ds_ckpt.local.LocalDraft, "commit", lambda self, manifest: _full())
        with pytest.raises(CheckpointError, match="No space"):
            engine.save(tmp_path / "s1", ds_ckpt.full_shards(state), {})
    assert sorted(p.name for p in (tmp_path / ".blocks").iterdir()) == before
    engine.save(tmp_path / "s1", ds_ckpt.full_shards(state), {})
    _equal(tmp_path / "s1", state)


def _full():
    raise OSError(28, "No space left on device")


def test_files_that_somebody_removed_are_written_again(tmp_path):
    engine, state = ds_ckpt.SyncCheckpointer(recipe=INCREMENTAL), {"a": torch.ones(1000)}
    engine.save(tmp_path / "s0", ds_ckpt.full_shards(state), {})
    shutil.rmtree(tmp_path / ".blocks")
    assert ds_ckpt.find_latest(tmp_path) is None
    engine.save(tmp_path / "s1", ds_ckpt.full_shards(state), {})
    assert ds_ckpt.find_latest(tmp_path) == str(tmp_path / "s1")
    _equal(tmp_path / "s1", state)


def test_what_somebody_reads_is_not_removed(tmp_path):
    for step in range(3):
        ds_ckpt.save(tmp_path / f"s{step}", ds_ckpt.full_shards({"t": torch.ones(3)}), {})
    over = ds_ckpt.LocalStorage(tmp_path).hold("s0", 60)
    with pytest.raises(CheckpointError) as caught:
        ds_ckpt.remove(tmp_path / "s0")
    assert caught.value.code == "ckpt-in-use"
    assert ds_ckpt.prune(tmp_path, 1) == ["s1"]
    over()
    assert ds_ckpt.prune(tmp_path, 1) == ["s0"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s2"]


def test_an_asynchronous_run_over_ranks_of_any_number(tmp_path, model):
    def save(ranks):
        local = [model.local(s, fill=True) for s in model.layout(ranks.rank, 2, 2, "mixed")]
        engine = ds_ckpt.SyncCheckpointer(ranks, keep=2, recipe=SaveOptions(True, {"optim/": "zstd"}))
        for step in range(4):
            engine.save(tmp_path / f"s{step}", local, {"step": step})
        return True

    pytest.importorskip("zstandard")
    assert all(model.together(4, save))
    assert ds_ckpt.list_tags(tmp_path) == ["s2", "s3"]
    back = [model.local(s, fill=False) for s in model.layout(0, 1, 1, "flat")]
    assert ds_ckpt.load(tmp_path / "s3", back) == {"step": 3}
    assert all(torch.equal(item.data, model.expected(item.shard)) for item in back)
    engine = ds_ckpt.AsyncCheckpointer(recipe=INCREMENTAL, keep=1)
    before = _bytes(tmp_path)
    engine.save(tmp_path / "s4", back, {"step": 4})
    engine.save(tmp_path / "s5", back, {"step": 5})
    engine.close()
    assert _bytes(tmp_path) < 2 * before
    assert _equal(tmp_path / "s5", {i.shard.name: i.data.reshape(i.shard.shape) for i in back}) == {"step": 5}


# --- codecs

floats = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=700)


@settings(max_examples=200, deadline=None)
@given(floats)
def test_bf16_is_torchs_rounding(values):
    data = np.array(values, np.float32)
    stored, back = block_codecs.encode("bf16", memoryview(data).cast("B"))
    expected = torch.from_numpy(data).to(torch.bfloat16)
    assert bytes(stored) == expected.view(torch.uint8).numpy().tobytes()
    assert bytes(back) == expected.float().numpy().tobytes()


@settings(max_examples=200, deadline=None)
@given(floats)
def test_int8_stays_within_its_bound_and_never_makes_a_zero(values):
    data = np.array(values, np.float32)
    stored, back = block_codecs.encode("int8", memoryview(data).cast("B"))
    got = np.frombuffer(back, np.float32)
    assert len(stored) == data.size + 4 * -(-data.size // block_codecs.GROUP)
    for low in range(0, data.size, block_codecs.GROUP):
        group, found = data[low : low + block_codecs.GROUP], got[low : low + block_codecs.GROUP]
        bound = max(float(np.abs(group).max()) / 127, float(np.finfo(np.float32).tiny)) * 1.001
        assert np.all(np.abs(group.astype(np.float64) - found) <= bound)
        assert np.all((group == 0) | (found != 0))
        assert np.all(np.sign(group) == np.sign(found))


def test_nan_stays_one_in_bf16_and_is_refused_by_int8():
    data = np.array([float("nan"), float("inf"), -float("inf")], np.float32)
    _, back = block_codecs.encode("bf16", memoryview(data).cast("B"))
    assert np.isnan(np.frombuffer(back, np.float32)[0])
    assert np.frombuffer(back, np.float32)[1:].tolist() == [float("inf"), -float("inf")]
    with pytest.raises(CheckpointError) as caught:
        block_codecs.encode("int8", memoryview(data).cast("B"))
    assert caught.value.code == "ckpt-codec"


@pytest.mark.parametrize("codec", ["zstd", "bf16", "int8"])
def test_moments_are_stored_smaller_and_parts_of_them_are_read(tmp_path, monkeypatch, model, codec):
    if codec == "zstd":
        pytest.importorskip("zstandard")
    monkeypatch.setattr(ds_ckpt.save_job, "BLOCK_BYTES", 4096)
    state = {"param/w": torch.randn(30_000), "optim/w/exp_avg": torch.randn(30_000), "optim/w/step": torch.tensor(7)}
    ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards(state), {}, recipe=SaveOptions(codecs={"optim/": codec}))
    size = _bytes(tmp_path)
    assert size < state["param/w"].nbytes * {"zstd": 1.96, "bf16": 1.51, "int8": 1.27}[codec]
    back = {name: torch.zeros_like(t) for name, t in state.items()}
    ds_ckpt.load(tmp_path / "a", ds_ckpt.full_shards(back))
    assert torch.equal(back["param/w"], state["param/w"])
    assert back["optim/w/step"] == 7
    error = (back["optim/w/exp_avg"] - state["optim/w/exp_avg"]).abs().max()
    assert error <= {"zstd": 0, "bf16": 0.02, "int8": 0.05}[codec]
    assert ds_ckpt.verify(tmp_path / "a").num_files == 1
    piece = TensorShard("optim/w/exp_avg", (30_000,), "float32", Box.whole((30_000,)), Interval(777, 9_001))
    got = model.Shard(piece, torch.zeros(piece.numel))
    ds_ckpt.load(tmp_path / "a", [got], options=ds_ckpt.LoadOptions(strict=False))
    assert torch.equal(got.data, back["optim/w/exp_avg"][777:9_001])


def test_damage_of_an_encoded_block_is_named(tmp_path):
    pytest.importorskip("zstandard")
    state = {"a": torch.zeros(100_000)}
    ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards(state), {}, recipe=SaveOptions(codecs={"": "zstd"}))
    (file,) = (tmp_path / "a").glob("blocks-*")
    good = file.read_bytes()
    for at in range(len(good)):
        file.write_bytes(good[:at] + bytes([good[at] ^ 0x55]) + good[at + 1 :])
        with pytest.raises(CheckpointError, match=r"is damaged: bytes .* part of 'a'"):
            ds_ckpt.load(tmp_path / "a", ds_ckpt.full_shards({"a": torch.zeros(100_000)}))
    with pytest.raises(CheckpointError, match="part of 'a'") as caught:
        ds_ckpt.verify(tmp_path / "a")
    assert caught.value.code == "ckpt-damaged"


@pytest.mark.parametrize("asked", [{"param/": "int8"}, {"": "bf16"}, {"optim/": "lzma"}])
def test_lossy_codecs_are_for_moments(asked):
    with pytest.raises(CheckpointError) as caught:
        SaveOptions(codecs=asked)
    assert caught.value.code == "ckpt-codec"


def test_a_writer_process_packs_nothing():
    with pytest.raises(UnsupportedError) as caught:
        ds_ckpt.AsyncCheckpointer(decoupled=True, recipe=INCREMENTAL)
    assert caught.value.code == "ckpt-decoupled"


def test_without_zstandard_it_says_so(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(UnsupportedError) as caught:
        SaveOptions(codecs={"": "zstd"})
    assert caught.value.code == "ckpt-zstd"


def train(codec, steps=500, every=50):
    """A small model whose moments go through a codec at every `every`-th step, as if it were resumed there: the last losses."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    target = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(1, steps + 1):
        x = torch.randn(128, 16)
        loss = torch.nn.functional.mse_loss(model(x), target(x).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % every == 0:
            for state in optimizer.state.values():
                for moment in (state["exp_avg"], state["exp_avg_sq"]):
                    _, back = block_codecs.encode(codec, memoryview(moment.numpy().reshape(-1)).cast("B"))
                    moment.copy_(torch.frombuffer(bytearray(back), dtype=torch.float32).reshape(moment.shape))
    return sum(losses[-50:]) / 50


@pytest.mark.parametrize("codec", block_codecs.LOSSY)
def test_the_certificate_is_what_a_run_gives(codec):
    """500 steps, the moments through the codec ten times: the loss within 1 % of the exact run's, and as recorded."""
    exact, found = train(""), train(codec)
    recorded = block_codecs.certificates()[codec]
    assert abs(found / exact - 1) <= 0.01
    assert recorded["steps"] == 500
    assert recorded["loss"] == pytest.approx(found, rel=2e-2)
    assert recorded["exact"] == pytest.approx(exact, rel=2e-2)


if __name__ == "__main__":  # makes the certificates
    exact = train("")
    print(
        json.dumps(
            {codec: {"steps": 500, "every": 50, "exact": exact, "loss": train(codec)} for codec in block_codecs.LOSSY},
            indent=1,
        )
    )
