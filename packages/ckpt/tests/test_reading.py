"""What a reader costs: few open files, little memory, only the bytes that are wanted."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch

import ds_ckpt
from ds_ckpt import checkpoint_loader
from ds_ckpt.crc import crc32
from ds_ckpt.file_reads import Files
from ds_ckpt.format import BLOCK_BYTES, encode
from ds_ckpt.records import FileRecord, Manifest, PartRecord, PieceRecord, TensorRecord
from ds_ckpt.writer import safetensors_header
from ds_comm.placement import Box


def run(code, *arguments):
    """A program's JSON answer, from a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def many_files(root, count):
    """A checkpoint of `count` files with one tensor each."""
    folder = root / "many"
    folder.mkdir()
    files, tensors = [], {}
    for i in range(count):
        name = f"t{i:05d}"
        header = safetensors_header([(name, "float32", (8,))])
        data = torch.full((8,), float(i)).numpy().tobytes()
        (folder / f"data-{i:05d}.safetensors").write_bytes(header + data)
        files.append(FileRecord(f"data-{i:05d}.safetensors", len(header) + 32, len(header), f"{crc32(header):08x}"))
        piece = PieceRecord(i, len(header), 8, (f"{crc32(data):08x}",))
        tensors[name] = TensorRecord("float32", (8,), (PartRecord(Box.whole((8,)), (piece,)),))
    manifest = Manifest(1, "2026-01-01T00:00:00+00:00", "test", BLOCK_BYTES, tuple(files), tensors)
    (folder / "manifest.json").write_bytes(encode(manifest))
    return folder


@pytest.mark.parametrize(("count", "limit"), [(300, 64), pytest.param(3000, 256, marks=pytest.mark.slow)])
def test_more_files_than_descriptors(tmp_path, count, limit):
    """Cold and warm, one tensor from each: loaded, found complete and verified."""
    folder = many_files(tmp_path, count)
    answer = run(
        """
        import json, os, resource, sys
        count, limit = int(sys.argv[2]), int(sys.argv[3])
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        import torch, ds_ckpt
        path = sys.argv[1]
        for name in os.listdir(path):
            fd = os.open(os.path.join(path, name), os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        sums = []
        for _ in range(2):
            state = {f"t{i:05d}": torch.zeros(8) for i in range(count)}
            ds_ckpt.load(path, ds_ckpt.full_shards(state))
            sums.append(sum(float(t.sum()) for t in state.values()))
        print(json.dumps([sums, ds_ckpt.find_latest(os.path.dirname(path)), ds_ckpt.verify(path).num_files, len(os.listdir("/proc/self/fd"))]))
        """,
        folder,
        count,
        limit,
    )
    assert answer[0] == [8.0 * count * (count - 1) / 2] * 2
    assert answer[1:3] == [str(folder), count]
    assert answer[3] < 40  # nothing stays open


def sparse(root):
    """60 GB of zeros in 30 files: a logical checkpoint that takes no space."""
    folder = root / "sparse"
    folder.mkdir()
    shape, each = (4, 125_000_000), 2_000_000_000
    blocks = -(-each // BLOCK_BYTES)
    zeros, last = (f"{crc32(bytes(n)):08x}" for n in (BLOCK_BYTES, each - (blocks - 1) * BLOCK_BYTES))
    sums = (zeros,) * (blocks - 1) + (last,)
    files, tensors = [], {}
    for i in range(30):
        name = f"t{i:02d}"
        header = safetensors_header([(name, "float32", shape)])
        with open(folder / f"data-{i:05d}.safetensors", "wb") as file:
            file.write(header)
            file.truncate(len(header) + each)
        files.append(FileRecord(f"data-{i:05d}.safetensors", len(header) + each, len(header), f"{crc32(header):08x}"))
        piece = PieceRecord(i, len(header), 500_000_000, sums)
        tensors[name] = TensorRecord("float32", shape, (PartRecord(Box.whole(shape), (piece,)),))
    manifest = Manifest(1, "2026-01-01T00:00:00+00:00", "test", BLOCK_BYTES, tuple(files), tensors)
    (folder / "manifest.json").write_bytes(encode(manifest))
    return folder


@pytest.mark.slow
def test_sixty_gigabytes_are_planned_and_partly_read_in_one_of_memory(tmp_path):
    folder = sparse(tmp_path)
    answer = run(
        """
        import json, re, sys
        import torch, ds_ckpt
        from ds_ckpt.checkpoint_list import read_manifest
        from ds_ckpt.save_plan import plan_load
        from ds_ckpt.local_storage import locate
        from ds_comm.placement import Box, Interval, TensorShard
        path = sys.argv[1]
        manifest = read_manifest(locate(path))
        whole = [TensorShard.whole(n, t.shape, t.dtype) for n, t in manifest.tensors.items()]
        planned = sum(run.nbytes for read in plan_load(whole, manifest) for run in read.runs)
        class Local:
            def __init__(self, name):
                box = Box((1, 1_000_000), (3, 1_000_000))
                self.shard = TensorShard(name, (4, 125_000_000), "float32", box, Interval(500_000, 1_500_000))
                self.data = torch.ones(1_000_000)
        parts = [Local(f"t{i:02d}") for i in range(30)]
        ds_ckpt.load(path, parts, options=ds_ckpt.LoadOptions(strict=False))
        # ru_maxrss would count what the test's process held when it forked
        peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
        print(json.dumps([planned, all(not p.data.any() for p in parts), peak]))
        """,
        folder,
    )
    assert answer[:2] == [60_000_000_000, True]
    assert answer[2] <= 2**30


def test_files_that_were_used_last_stay_open_and_no_more(tmp_path):
    folder = many_files(tmp_path, 20)
    manifest = ds_ckpt.inspect(folder)
    with Files(ds_ckpt.LocalStorage(tmp_path), "many", manifest.files, limit=4) as files:
        for index in (*range(20), 3, 19):
            with files.using(index) as file, files.using((index + 1) % 20) as other:
                assert file.nbytes == other.nbytes == manifest.files[0].nbytes
            assert len(files._open) <= 5
        with files.using(0), files.using(1), files.using(2), files.using(3), files.using(4), files.using(5):
            assert len(files._open) >= 6  # what is in use stays, whatever the limit
        files.check(7)
        assert len(files._open) <= 5


def test_what_cannot_be_read_in_place_is_read_a_part_at_a_time(tmp_path, monkeypatch):
    state = {f"t{i}": torch.randn(50_000) for i in range(8)}
    ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards(state), {})
    monkeypatch.setattr(checkpoint_loader, "_STAGING_BYTES", 450_000)
    held, made = [], checkpoint_loader.staging

    def staging(local, dtype):
        target, staged = made(local, dtype)
        held.append(target.nbytes if staged else 0)
        return target, staged

    monkeypatch.setattr(checkpoint_loader, "staging", staging)
    groups, grouped = [], checkpoint_loader.staged_groups
    monkeypatch.setattr(checkpoint_loader, "staged_groups", lambda *a: groups.extend(grouped(*a)) or groups)
    back = {name: torch.zeros(50_000, dtype=torch.float64) for name in state}
    ds_ckpt.load(tmp_path / "a", ds_ckpt.full_shards(back), options=ds_ckpt.LoadOptions(cast=True))
    assert all(torch.equal(back[name], t.double()) for name, t in state.items())
    assert [len(group) for group in groups] == [2, 2, 2, 2]
    assert held == [200_000] * 8


def test_memory_that_processes_share_is_read_into_where_it_is(tmp_path):
    state = {"w": torch.randn(100_000)}
    ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards(state), {})
    shared = torch.zeros(100_000).share_memory_()
    before = shared.data_ptr()
    ds_ckpt.load(tmp_path / "a", ds_ckpt.full_shards({"w": shared}))
    assert shared.data_ptr() == before
    assert shared.is_shared()
    assert torch.equal(shared, state["w"])
