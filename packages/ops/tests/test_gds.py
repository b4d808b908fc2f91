"""GPUDirect Storage against a stand-in for its library, compiled from the functions of its API reference; host memory plays the device's."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_config.errors import KernelError, UnsupportedError
from ds_ops import gds, io_engines
from ds_ops.io import AsyncIO, FileTransferError, IOSettings

# As cufile.h declares them. A handle is the descriptor and 7000; transfers are short, to be continued.
STAND_IN = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>
typedef struct { int err; int cu_err; } CUfileError_t;
typedef struct { int type; union { int fd; void *handle; } handle; const void *fs_ops; } CUfileDescr_t;
typedef void *CUfileHandle_t;
int handles, driver_error, refuse, fail_at = -1, fail_with, most = 1000;
CUfileError_t cuFileDriverOpen(void) { CUfileError_t e = {driver_error, 0}; return e; }
CUfileError_t cuFileHandleRegister(CUfileHandle_t *fh, CUfileDescr_t *d) {
  CUfileError_t e = {d->type == 1 ? refuse : 5011, 0};
  if (!e.err) { *fh = (void *)(long)(d->handle.fd + 7000); __sync_fetch_and_add(&handles, 1); }
  return e;
}
void cuFileHandleDeregister(CUfileHandle_t fh) { __sync_fetch_and_sub(&handles, 1); }
static ssize_t move(CUfileHandle_t fh, char *p, size_t n, off_t at, int write) {
  int fd = (int)((long)fh - 7000);
  if (fail_at >= 0 && at + (off_t)n > fail_at) {
    if (fail_with >= 5000) return -fail_with;
    errno = fail_with;
    return -1;
  }
  if (n > (size_t)most) n = most;
  return write ? pwrite(fd, p, n, at) : pread(fd, p, n, at);
}
ssize_t cuFileRead(CUfileHandle_t fh, void *p, size_t n, off_t at, off_t in) { return move(fh, (char *)p + in, n, at, 0); }
ssize_t cuFileWrite(CUfileHandle_t fh, const void *p, size_t n, off_t at, off_t in) { return move(fh, (char *)p + in, n, at, 1); }
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in of the library")
    folder = tmp_path_factory.mktemp("cufile")
    (folder / "cufile.c").write_text(STAND_IN)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "libcufile.so", "cufile.c"], cwd=folder, check=True)
    return folder / "libcufile.so"


@pytest.fixture
def knobs(stand_in: Path) -> Iterator[Any]:
    """Set a variable of the stand-in: `knobs("fail_at", 5)`; read it: `knobs("handles")`."""
    library = ctypes.CDLL(str(stand_in))
    before = {"driver_error": 0, "refuse": 0, "fail_at": -1, "fail_with": 0}

    def knob(name: str, value: int | None = None) -> int:
        variable = ctypes.c_int.in_dll(library, name)
        if value is not None:
            variable.value = value
        return variable.value

    yield knob
    for name, value in before.items():
        knob(name, value)


@pytest.fixture
def io(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncIO]:
    library = gds.CuFile(str(stand_in))
    monkeypatch.setattr(io_engines, "find_library", lambda: library)
    monkeypatch.setattr(io_engines, "GdsEngine", lambda *a: gds.GdsEngine(*a, kind="cpu"))
    # O_DIRECT would refuse the stand-in's short, unaligned transfers.
    with AsyncIO(IOSettings(block_bytes=8192, queue_depth=4, backend="gds", direct=False)) as engine:
        yield engine


def test_bytes_go_both_ways_in_blocks(io: AsyncIO, knobs: Any, tmp_path: Path) -> None:
    data = torch.randint(0, 256, (100_001,), dtype=torch.uint8)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 200_000)
    io.write_file(path, data, sync=True).wait()
    assert path.read_bytes() == data.numpy().tobytes()
    back = torch.empty(50_000, dtype=torch.uint8)
    io.read(path, back, offset=777).wait()
    assert torch.equal(back, data[777:50_777])
    io.write(path, torch.zeros(0)).wait()
    assert path.stat().st_size == 100_001
    assert knobs("handles") == 0


def test_descriptors_are_given_back(io: AsyncIO, tmp_path: Path) -> None:
    io.write_file(tmp_path / "a", torch.ones(3)).wait()  # threads are there now
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        io.write_file(tmp_path / "a", torch.ones(30_000)).wait()
    assert len(os.listdir("/proc/self/fd")) <= before  # others' may have been given back meanwhile


@pytest.mark.parametrize(
    ("code", "says"), [(errno.EIO, "Input/output"), (errno.ENOSPC, "No space"), (5030, "error 5030")]
)
def test_what_the_library_says_is_raised_with_file_and_byte(
    io: AsyncIO, knobs: Any, tmp_path: Path, code: int, says: str
) -> None:
    knobs("fail_with", code)
    knobs("fail_at", 20_000)
    with pytest.raises(FileTransferError, match=says) as caught:
        io.write(tmp_path / "file", torch.zeros(40_000, dtype=torch.uint8)).wait()
    assert caught.value.filename == str(tmp_path / "file")
    assert 8192 <= caught.value.offset <= 20_000
    assert knobs("handles") == 0


def test_a_file_that_ends_early(io: AsyncIO, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 10_000)
    with pytest.raises(FileTransferError, match="ends at byte 10000") as caught:
        io.read(tmp_path / "short", torch.empty(30_000, dtype=torch.uint8)).wait()
    assert caught.value.code == "io-end-of-file"


def test_a_file_that_the_library_refuses(io: AsyncIO, knobs: Any, tmp_path: Path) -> None:
    knobs("refuse", 5017)
    with pytest.raises(FileTransferError, match="cuFile error 5017"):
        io.write(tmp_path / "file", torch.ones(9)).wait()


@pytest.mark.parametrize("memory", [b"bytes", torch.ones(4, 4).t(), torch.ones(3, device="meta")])
def test_other_memory_is_refused(io: AsyncIO, tmp_path: Path, memory: object) -> None:
    with pytest.raises(KernelError) as caught:
        io.write(tmp_path / "file", memory)
    assert caught.value.code == "io-memory"


def test_without_the_library_the_error_says_what_was_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gds, "LIBRARIES", ("libcufile-is-not-here.so",))
    with pytest.raises(UnsupportedError, match="libcufile-is-not-here") as caught:
        AsyncIO(IOSettings(backend="gds"))
    assert caught.value.code == "io-gds"
    assert gds.why_not()
    other = tmp_path / "libother.so"
    other.write_text("not a library")
    with pytest.raises(UnsupportedError, match="does not load"):
        gds.CuFile(str(other))


def test_a_driver_that_does_not_start(stand_in: Path, knobs: Any) -> None:
    knobs("driver_error", 5001)
    with pytest.raises(UnsupportedError, match="does not start: error 5001"):
        gds.CuFile(str(stand_in))
