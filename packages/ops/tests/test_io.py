"""Transfers move exactly the bytes they were asked to, on every backend, and say what went wrong when they cannot."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_config.errors import ConfigError, KernelError
from ds_ops.io import AsyncIO, FileTransferError, IOSettings, backends

WORKING = [name for name, why in backends().items() if not why]
BLOCK = 8192


@pytest.fixture(params=[*WORKING, "io_uring one by one", "libaio in rounds"])
def io(request: pytest.FixtureRequest) -> Iterator[AsyncIO]:
    backend, _, manner = request.param.partition(" ")
    if backend not in WORKING:
        pytest.skip(f"{backend}: {backends()[backend]}")
    settings = IOSettings(
        block_bytes=BLOCK,
        queue_depth=4,
        workers=2,
        backend=backend,
        single_submit=manner == "one by one",
        overlap=manner != "in rounds",
    )
    with AsyncIO(settings) as engine:
        yield engine


def aligned(nbytes: int, skew: int = 0) -> torch.Tensor:
    """[nbytes] uint8 whose address is `skew` past a multiple of 4096."""
    raw = torch.empty(nbytes + 8192, dtype=torch.uint8)
    start = -raw.data_ptr() % 4096 + skew
    return raw[start : start + nbytes]


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    nbytes=st.one_of(st.integers(0, 9), st.integers(0, 5 * BLOCK), st.sampled_from([4096, BLOCK, BLOCK * 4])),
    offset=st.one_of(st.just(0), st.integers(0, 3 * 4096), st.just(4096)),
    skew=st.sampled_from([0, 1, 64, 512]),
)
def test_what_is_written_is_read_and_nothing_else_changes(
    io: AsyncIO, tmp_path: Path, nbytes: int, offset: int, skew: int
) -> None:
    path = tmp_path / "file"
    before = pattern(offset + nbytes + 5000, seed=1)
    path.write_bytes(before.numpy().tobytes())
    data = aligned(nbytes, skew).copy_(pattern(nbytes, seed=2))
    io.write(path, data, offset).wait()
    expected = before.clone()
    expected[offset : offset + nbytes] = data
    assert path.read_bytes() == expected.numpy().tobytes()
    into = aligned(nbytes, skew).zero_()
    io.read(path, into, offset).wait()
    assert torch.equal(into, data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_of_any_dtype_and_shape(io: AsyncIO, tmp_path: Path, dtype: torch.dtype) -> None:
    for shape in [(), (3, 5), (0, 4)]:
        data = torch.ones(shape, dtype=dtype)
        io.write_file(tmp_path / "t", data).wait()
        into = torch.zeros(shape, dtype=dtype)
        io.read(tmp_path / "t", into).wait()
        assert torch.equal(into, data)


def test_write_file_cuts_a_longer_file_and_write_does_not(io: AsyncIO, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 20000)
    io.write(path, b"abc").wait()
    assert path.stat().st_size == 20000
    io.write_file(path, b"y" * 9001, sync=True).wait()
    assert path.read_bytes() == b"y" * 9001
    io.write_file(path, b"").wait()
    assert path.stat().st_size == 0


def test_many_files_at_once(io: AsyncIO, tmp_path: Path) -> None:
    parts = [pattern(1000 * i + i, seed=i) for i in range(40)]
    for i, part in enumerate(parts):
        io.write_file(tmp_path / str(i), part)
    io.wait_all()
    into = [torch.empty_like(part) for part in parts]
    for i, part in enumerate(into):
        io.read(tmp_path / str(i), part)
    io.wait_all()
    assert all(map(torch.equal, into, parts))


def test_a_file_that_ends_early_names_file_and_byte(io: AsyncIO, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"x" * 10001)
    with pytest.raises(FileTransferError, match=r"ends at byte 10001, 29999 bytes early") as caught:
        io.read(path, torch.zeros(40000, dtype=torch.uint8)).wait()
    assert (caught.value.offset, caught.value.filename, caught.value.errno) == (10001, str(path), errno.EIO)


def test_a_missing_directory_names_the_path(io: AsyncIO, tmp_path: Path) -> None:
    with pytest.raises(FileTransferError, match="No such file or directory") as caught:
        io.write_file(tmp_path / "no" / "such" / "file", b"x")
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(OSError, match="cannot open"):
        io.read(tmp_path / "absent", bytearray(1))


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("small")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", path], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small tmpfs: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_full_disk_is_an_error_that_says_so_and_the_engine_goes_on(io: AsyncIO, small_disk: Path) -> None:
    with pytest.raises(FileTransferError, match="No space left") as caught:
        io.write_file(small_disk / "big", pattern(1 << 20)).wait()
    assert caught.value.errno == errno.ENOSPC
    assert 0 <= caught.value.offset < 1 << 20
    (small_disk / "big").unlink()
    io.write_file(small_disk / "fits", b"ok").wait()
    assert (small_disk / "fits").read_bytes() == b"ok"


def test_files_beside_a_full_one_are_whole(io: AsyncIO, small_disk: Path, tmp_path: Path) -> None:
    """One transfer of many fails: the others have every byte, and the failure is the one that is told."""
    parts = [pattern(30_000 + i, seed=i) for i in range(8)]
    for i, part in enumerate(parts):
        io.write_file(tmp_path / str(i), part)
        if i == 3:
            io.write_file(small_disk / "big", pattern(1 << 20))
    with pytest.raises(FileTransferError, match="No space left") as caught:
        io.wait_all()
    assert caught.value.filename == str(small_disk / "big")
    (small_disk / "big").unlink()
    for i, part in enumerate(parts):
        assert (tmp_path / str(i)).read_bytes() == part.numpy().tobytes()


def test_a_file_cut_while_it_is_read_gives_its_bytes_or_an_error(io: AsyncIO, tmp_path: Path) -> None:
    data = pattern(40 * BLOCK)
    path = tmp_path / "cut"
    for keep in (0, 5000, 39 * BLOCK + 1):
        path.write_bytes(data.numpy().tobytes())
        into = torch.zeros_like(data)
        transfer = io.read(path, into)
        os.truncate(path, keep)
        failure: FileTransferError | None = None
        try:
            transfer.wait()
        except FileTransferError as error:
            failure = error
        if failure is None:
            assert torch.equal(into, data)
        else:
            assert "ends at byte" in str(failure)
            assert failure.offset >= keep


def test_an_error_of_the_device_is_passed_on(io: AsyncIO) -> None:
    with pytest.raises(FileTransferError) as caught:
        io.write("/dev/full", pattern(9000)).wait()
    assert caught.value.errno == errno.ENOSPC


def test_unwaited_failures_surface_once_at_close(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"x")
    io = AsyncIO(IOSettings(block_bytes=BLOCK))
    io.read(path, bytearray(10))
    io.read(path, bytearray(20))
    with pytest.raises(FileTransferError) as caught:
        io.close()
    assert len(caught.value.__notes__) == 1
    io.close()


def test_a_failure_raised_by_wait_is_not_raised_again(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"x")
    with AsyncIO() as io:
        transfer = io.read(path, bytearray(10))
        with pytest.raises(FileTransferError):
            transfer.wait()


def test_memory_outlives_the_caller(io: AsyncIO, tmp_path: Path) -> None:
    for i in range(20):
        io.write_file(tmp_path / str(i), torch.full((50000,), i, dtype=torch.uint8))  # a temporary
    io.wait_all()
    assert all((tmp_path / str(i)).read_bytes() == bytes([i]) * 50000 for i in range(20))


@pytest.fixture(scope="module")
def small_ext4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A real file system, with O_DIRECT and a journal, on 16 MiB of a file."""
    folder = tmp_path_factory.mktemp("loop")
    image, path = folder / "image", folder / "mounted"
    path.mkdir()
    image.write_bytes(bytes(16 << 20))
    for command in (["mkfs.ext4", "-q", "-F", str(image)], ["mount", "-o", "loop", str(image), str(path)]):
        if not shutil.which(command[0]):
            pytest.skip(f"{command[0]} is not installed")
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot make a loop mount: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_full_real_disk_past_the_page_cache(io: AsyncIO, small_ext4: Path) -> None:
    """O_DIRECT writes reach the end of the disk: the error names the first byte that is not there, all before it are."""
    path, data = small_ext4 / "big", aligned(32 << 20).copy_(pattern(32 << 20))
    with pytest.raises(FileTransferError, match="No space left") as caught:
        io.write_file(path, data).wait()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert 0 < caught.value.offset < 16 << 20
    there = path.read_bytes()[: caught.value.offset]
    assert there == data[: len(there)].numpy().tobytes()
    path.unlink()
    io.write_file(small_ext4 / "fits", data[: 1 << 20], sync=True).wait()
    assert (small_ext4 / "fits").read_bytes() == data[: 1 << 20].numpy().tobytes()
    (small_ext4 / "fits").unlink()


def test_a_directory_and_a_file_without_permission_are_named(io: AsyncIO, tmp_path: Path) -> None:
    with pytest.raises(FileTransferError, match="Is a directory") as caught:
        io.write_file(tmp_path, b"x")
    assert caught.value.filename == str(tmp_path)
    with pytest.raises(FileTransferError, match=r"/proc/version"):
        io.write_file("/proc/version", b"x").wait()


_WRITER = """
import sys
import torch
from ds_ops.io import AsyncIO, IOSettings
shared, same, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
with AsyncIO(IOSettings(block_bytes=8192)) as io:
    for i in range(rank, 60, 2):
        io.write(shared, torch.full((5003,), i, dtype=torch.uint8), 5003 * i)
        io.write_file(same, torch.full((100_000,), rank + 1, dtype=torch.uint8)).wait()
"""


@pytest.mark.slow
def test_two_processes_on_one_file(tmp_path: Path) -> None:
    """Neighbouring ranges all arrive; of the same range, every byte is from one or the other, and the length is right."""
    shared, same = tmp_path / "shared", tmp_path / "same"
    command = [sys.executable, "-c", _WRITER, str(shared), str(same)]
    jobs = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    assert [job.wait(100) for job in jobs] == [0, 0]
    assert shared.read_bytes() == b"".join(bytes([i]) * 5003 for i in range(60))
    data = same.read_bytes()
    assert len(data) == 100_000
    assert set(data) <= {1, 2}


@pytest.mark.parametrize(
    "memory",
    [torch.zeros(4, 4).t(), torch.zeros(2, device="meta"), memoryview(b"abcdef")[::2]],
    ids=["strided", "meta", "view"],
)
def test_memory_that_cannot_be_transferred_is_refused(io: AsyncIO, tmp_path: Path, memory: object) -> None:
    with pytest.raises(KernelError, match="contiguous"):
        io.write_file(tmp_path / "x", memory)
    with pytest.raises(KernelError, match="writable"):
        io.read(tmp_path / "x", b"read only") if (tmp_path / "x").write_bytes(b"123456789") else None


def test_bad_settings_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        IOSettings(block_bytes=1000, queue_depth=0, workers=99, backend="tape")  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in ("block_bytes", "queue_depth", "workers", "'tape'"))


def test_descriptors_and_threads_are_given_back(tmp_path: Path) -> None:
    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def cycle() -> tuple[int, int]:
        for backend in WORKING:
            io = AsyncIO(IOSettings(block_bytes=BLOCK, workers=3, backend=backend))  # type: ignore[arg-type]
            io.write_file(tmp_path / "x", pattern(100000)).wait()
            with pytest.raises(FileTransferError):
                io.read(tmp_path / "x", bytearray(200000)).wait()
            io.close()
            with pytest.raises(KernelError, match="closed"):
                io.read(tmp_path / "x", bytearray(1))
        return counts()

    files, threads = cycle()  # torch starts its own threads on first use
    found, until = cycle(), time.monotonic() + 150
    # A joined thread leaves /proc a little later, so that the first count may have had one more.
    while (found[0] != files or found[1] > threads) and time.monotonic() < until:
        time.sleep(0.01)
        found = counts()
    assert found[0] == files
    assert found[1] <= threads


REFUSES = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <sys/syscall.h>

/* io_uring_enter takes what it is given, and has no memory when it shall wait. */
long syscall(long number, ...) {
  static long (*real)(long, ...);
  va_list list;
  long a[6];
  int i;
  va_start(list, number);
  for (i = 0; i < 6; ++i) a[i] = va_arg(list, long);
  va_end(list);
  if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  if (number == SYS_io_uring_enter && a[1]) return real(number, a[0], a[1], 0L, 0L, 0L, 0L);
  if (number == SYS_io_uring_enter) { errno = ENOMEM; return -1; }
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
"""

READS = """
import os, sys, threading, time
from ds_ops.io import AsyncIO, IOSettings
pipe = sys.argv[1]
def write():
    with open(pipe, "wb") as end:
        time.sleep(0.3)  # the read is with the kernel, and the ring has failed
        end.write(bytes(range(100)))
thread = threading.Thread(target=write)
thread.start()
memory = bytearray(100)
io = AsyncIO(IOSettings(backend="io_uring", direct=False))
io.read(pipe, memory).wait()
thread.join()
assert memory == bytes(range(100)), memory
"""


@pytest.mark.skipif("io_uring" not in WORKING or shutil.which("cc") is None, reason="needs io_uring and a compiler")
def test_a_ring_that_fails_ends_no_transfer_that_the_kernel_still_has(tmp_path: Path) -> None:
    (tmp_path / "refuses.c").write_text(REFUSES)
    library, pipe = tmp_path / "refuses.so", tmp_path / "pipe"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "refuses.c", "-ldl"], check=True)
    os.mkfifo(pipe)
    env = os.environ | {"LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", READS, pipe], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
