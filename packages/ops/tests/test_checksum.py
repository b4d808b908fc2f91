"""Checksums equal zlib's at every level, copies are copies, and a mapped file that cannot be read says so."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ops import _native, checksum
from ds_ops.mapped import MappedFile

NATIVE = _native.load("_cpu").module
LEVELS = range(NATIVE.crc32_best() + 1) if NATIVE else []
DATA = np.random.default_rng(0).integers(0, 256, 70_000, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=150, deadline=None)
@given(
    start=st.integers(0, 99),
    nbytes=st.one_of(st.integers(0, 1100), st.sampled_from([16384, 16385, 40_000])),
    value=st.integers(0, 2**32 - 1),
    skew=st.integers(0, 65),
)
def test_every_level_is_zlib(level: int, start: int, nbytes: int, value: int, skew: int) -> None:
    assert NATIVE is not None
    part = memoryview(DATA)[start : start + nbytes]
    expected = zlib.crc32(part, value)
    assert NATIVE.crc32(part, value, level) == expected
    target = bytearray(skew + nbytes + 3)
    assert NATIVE.copy_crc32(memoryview(target)[skew : skew + nbytes], part, value, level) == expected
    assert target == bytes(skew) + bytes(part) + bytes(3)


@pytest.mark.parametrize("native", [True, False])
def test_with_and_without_native_code(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    if not native:
        monkeypatch.setattr(checksum, "_KERNELS", None)
    assert checksum.crc32(b"123456789") == 0xCBF43926
    first = checksum.crc32(DATA[:333])
    assert checksum.crc32(memoryview(DATA)[333:], first) == zlib.crc32(DATA)
    target = bytearray(len(DATA))
    assert checksum.copy_crc32(target, DATA, 7) == zlib.crc32(DATA, 7)
    assert target == DATA
    assert checksum.copy_crc32(bytearray(), b"", 5) == 5
    with pytest.raises(ValueError):
        checksum.copy_crc32(bytearray(3), b"four")


def test_memory_that_cannot_be_written_is_refused() -> None:
    with pytest.raises((BufferError, ValueError, TypeError)):
        checksum.copy_crc32(memoryview(b"constant"), b"variable")  # type: ignore[arg-type]


@pytest.mark.skipif(NATIVE is None, reason="no native module here")
def test_a_level_this_machine_does_not_have_is_refused() -> None:
    assert NATIVE is not None
    with pytest.raises(ValueError, match="does not have"):
        NATIVE.crc32(b"x", 0, 3)


@pytest.fixture(params=[True, False], ids=["native", "python"])
def mapped(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MappedFile:
    if not request.param:
        monkeypatch.setattr("ds_ops.mapped._native.load", lambda name: _native.Loaded(None, "not here"))
    path = tmp_path / "file"
    path.write_bytes(DATA)
    if tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14):
        pytest.skip("kernels before 5.14 cannot map safely")
    return MappedFile(path)


def test_views_are_the_bytes_of_the_file(mapped: MappedFile) -> None:
    assert mapped.nbytes == len(DATA)
    for offset, nbytes in [(0, len(DATA)), (1, 5000), (4095, 2), (len(DATA), 0), (69_999, 1)]:
        view = mapped.view(offset, nbytes)
        assert view == DATA[offset : offset + nbytes]
        assert view.readonly
    for offset, nbytes in [(-1, 1), (0, len(DATA) + 1), (5, -1)]:
        with pytest.raises(ValueError, match=r"of .* which has 70000"):
            mapped.view(offset, nbytes)
    kept = mapped.view(3, 4)
    mapped.close()
    assert kept == DATA[3:7]


def test_a_file_cut_after_it_was_opened_is_an_error_and_not_a_signal(mapped: MappedFile, tmp_path: Path) -> None:
    os.truncate(tmp_path / "file", 8192)
    assert mapped.view(0, 8192) == DATA[:8192]
    with pytest.raises(OSError, match="cannot be read") as caught:
        mapped.view(8000, 9000)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / "file"))


def test_what_is_in_the_page_cache_is_seen_without_reading(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(DATA * 10)
    assert MappedFile(path).cached(0, len(DATA) * 10)  # just written, or there is nobody to ask
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = MappedFile(path)
    if mapped.cached(400_000, 5000):
        pytest.skip("this file system keeps its files in memory, or there is no native module")
    assert not mapped.cached(400_000, 5000)  # asking has not read it
    mapped.view(400_000, 5000)
    assert mapped.cached(400_000, 5000)


def test_empty_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert MappedFile(tmp_path / "empty").view(0, 0) == b""
    with pytest.raises(FileNotFoundError):
        MappedFile(tmp_path / "none")
