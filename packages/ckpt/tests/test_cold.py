"""Files that are not in the page cache are read past it; those that ranks share are not."""

import os

import pytest
import torch

import ds_ckpt
from ds_ckpt import file_reads, reader
from ds_comm.placement import Box, Interval, TensorShard
from ds_config.errors import CheckpointError
from ds_ops.mapped import MappedFile

FILE = "data-00000.safetensors"


def _state():
    g = torch.Generator().manual_seed(1)
    sizes = {"a": 700_001, "b": 1_300_003, "c": 5, "d": 262_144, "e": 90_007}
    return {name: torch.randn(n, generator=g) for name, n in sizes.items()}


def _drop(path):
    """Take a file out of the page cache, as a restarted machine would."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _cached(path):
    file = MappedFile(path)
    middle = file.nbytes // 2
    return file.cached(middle, min(4096, file.nbytes - middle))


@pytest.fixture
def cold(tmp_path):
    """A checkpoint whose data is on the device alone."""
    ds_ckpt.save(tmp_path / "x", ds_ckpt.full_shards(_state()), {})
    _drop(tmp_path / "x" / FILE)
    if _cached(tmp_path / "x" / FILE):
        pytest.skip("this file system keeps its files in memory, or nobody can tell")
    return tmp_path / "x"


def _loaded(path, ranks=None, part=None):
    got = {name: torch.zeros_like(t) for name, t in _state().items()}
    shards = ds_ckpt.full_shards(got)
    ds_ckpt.load(path, shards if part is None else part(got), group=ranks)
    return got


def test_a_cold_load_is_right_and_leaves_the_page_cache_alone(cold):
    got = _loaded(cold)
    assert all(torch.equal(got[name], t) for name, t in _state().items())
    assert not _cached(cold / FILE)


def test_a_warm_load_begins_no_transfer(cold, monkeypatch):
    (cold / FILE).read_bytes()
    monkeypatch.setattr(file_reads, "AsyncIO", None)
    got = _loaded(cold)
    assert all(torch.equal(got[name], t) for name, t in _state().items())


@pytest.mark.parametrize("stretch", [2**16, 2**18 + 2**12])
def test_blocks_and_tensors_may_begin_and_end_anywhere(tmp_path, model, monkeypatch, stretch):
    monkeypatch.setattr(ds_ckpt.save_job, "BLOCK_BYTES", 100_003 * 4)
    monkeypatch.setattr(file_reads, "STRETCH_BYTES", stretch)
    for module in (file_reads, reader):
        monkeypatch.setattr(module, "DIRECT_BYTES", 1)
    state = _state()
    ds_ckpt.save(tmp_path / "x", ds_ckpt.full_shards(state), {})
    for name, low, high in [("a", 1, 700_000), ("b", 65_533, 1_299_999), ("d", 0, 1), ("b", 1_300_002, 1_300_003)]:
        _drop(tmp_path / "x" / FILE)
        part = torch.zeros(high - low)
        shape = tuple(state[name].shape)
        shard = TensorShard(name, shape, "float32", Box.whole(shape), Interval(low, high))
        ds_ckpt.load(tmp_path / "x", [model.Shard(shard, part)], options=ds_ckpt.LoadOptions(strict=False))
        assert torch.equal(part, state[name][low:high]), (name, low, high)


def test_a_flipped_bit_on_the_device_is_named(cold):
    manifest = ds_ckpt.inspect(cold)
    at = manifest.tensors["b"].parts[0].pieces[0].at + 1_000_000
    with (cold / FILE).open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    _drop(cold / FILE)
    with pytest.raises(CheckpointError, match="part of 'b'") as caught:
        _loaded(cold)
    assert caught.value.code == "ckpt-block-damaged"
    with pytest.raises(CheckpointError, match="part of 'b'"):
        ds_ckpt.verify(cold)


def test_a_file_cut_while_it_is_read_is_a_typed_error(cold, monkeypatch):
    real = file_reads.Files.start

    def cut(self, index, offset, nbytes):
        self.check(index)  # it is open
        os.truncate(cold / FILE, 1_000_000)
        return real(self, index, offset, nbytes)

    monkeypatch.setattr(file_reads.Files, "start", cut)
    with pytest.raises(CheckpointError) as caught:
        _loaded(cold)
    assert caught.value.code in ("ckpt-io", "io-end-of-file")


def test_what_all_ranks_read_goes_through_the_page_cache(cold, model):
    whole = _state()
    for got in model.together(2, lambda ranks: _loaded(cold, ranks)):
        assert all(torch.equal(got[name], t) for name, t in whole.items())
    assert _cached(cold / FILE)


def test_what_each_rank_reads_alone_does_not(cold, model, monkeypatch):
    # A short stretch is read through the cache, and the kernel's read-ahead around it may be megabytes.
    for module in (file_reads, reader):
        monkeypatch.setattr(module, "DIRECT_BYTES", 1)

    def half(rank):
        def shards(got):
            out = []
            for name, t in got.items():
                cut = t.numel() // 2
                part = Interval(0, cut) if rank == 0 else Interval(cut, t.numel())
                shard = TensorShard(name, tuple(t.shape), "float32", Box.whole(tuple(t.shape)), part)
                out.append(model.Shard(shard, t[part.start : part.stop]))
            return out

        return shards

    first, second = model.together(2, lambda ranks: _loaded(cold, ranks, half(ranks.rank)))
    assert all(torch.equal(first[name] + second[name], t) for name, t in _state().items())
    assert not _cached(cold / FILE)
