"""Token files: written, appended to, merged, read; both tables of formats; damaged indexes."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_config.errors import ConfigError
from ds_data.cli import main, register
from ds_data.codes import TABLES, smallest_int_dtype
from ds_data.file_checks import check_tokens
from ds_data.token_index import TokenIndex, pack_index, parse_index
from ds_data.token_writer import TokenWriter, write_items
from ds_data.tokens import TokenFile

ITEMS = [[1, 2, 3], [], [4], [5, 6, 7, 8]]


def lists(file: TokenFile) -> list[list[Any]]:
    return [item.tolist() for item in file]


@pytest.mark.parametrize(("table", "name"), [(t, d.str) for t in TABLES for d in TABLES[t].values()])
def test_every_format_of_both_tables_goes_round(tmp_path: Path, table: Any, name: str) -> None:
    file = write_items(tmp_path / "a", ITEMS, name, table=table)
    assert lists(file) == ITEMS
    assert file.dtype == np.dtype(name)
    if name != "<f4":  # 4 bytes as well as u32 of the other table
        assert TokenFile(tmp_path / "a").dtype == np.dtype(name), "the table is found out"


def test_bytes_are_megatrons(tmp_path: Path) -> None:
    """Written out by hand from the description of the layout."""
    write_items(tmp_path / "a", [[258, 3], [4]], np.uint16)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3)
    body = struct.pack("<2i", 2, 1) + struct.pack("<2q", 0, 4) + struct.pack("<3q", 0, 1, 2)
    assert (tmp_path / "a.idx").read_bytes() == head + body
    assert (tmp_path / "a.bin").read_bytes() == bytes([2, 1, 3, 0, 4, 0])
    write_items(tmp_path / "b", [[258, 3], [4]], np.uint16, table="deepspeed")
    assert (tmp_path / "b.idx").read_bytes()[17] == 6


def test_documents_of_several_items(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "a", np.int32) as out:
        out.add([1, 2], ends_document=False)
        out.add([3], ends_document=False)
        out.end_document()
        out.add([4, 5, 6], ends_document=False)
    file = TokenFile(tmp_path / "a.bin")
    assert file.index.documents.tolist() == [0, 2, 3]
    assert file.document_sizes.tolist() == [3, 3]
    assert file.get(2, 1).tolist() == [5, 6]
    assert file.get(2, 0, 1).tolist() == [4]
    with pytest.raises(IndexError):
        file.get(2, 1, 3)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 250), max_size=5), max_size=6),
    st.lists(st.lists(st.integers(0, 250), max_size=5), max_size=6),
)
def test_append_and_merge_equal_writing_at_once(
    tmp_path_factory: pytest.TempPathFactory, first: list[list[int]], second: list[list[int]]
) -> None:
    at = tmp_path_factory.mktemp("t")
    whole = write_items(at / "whole", first + second, np.uint8)
    write_items(at / "a", first, np.uint8)
    write_items(at / "b", second, np.uint16)
    with TokenWriter(at / "merged", np.uint8) as out:
        out.merge(at / "a")
        out.merge(at / "b")
    with TokenWriter(at / "a", np.uint8, append=True) as out:
        for item in second:
            out.add(item)
    for name in ("merged", "a"):
        file = TokenFile(at / name)
        assert lists(file) == lists(whole)
        assert file.fingerprint == whole.fingerprint
        assert (at / f"{name}.idx").read_bytes() == (at / "whole.idx").read_bytes()


def interrupted(path: Path, append: bool) -> None:
    with TokenWriter(path, np.int32, append=append) as out:
        out.add([9] * 1000)
        assert lists(TokenFile(path)) == ITEMS
        raise KeyboardInterrupt


def test_what_is_not_finished_does_not_exist(tmp_path: Path) -> None:
    write_items(tmp_path / "a", ITEMS, np.int32)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    for append in (False, True):
        with pytest.raises(KeyboardInterrupt):
            interrupted(tmp_path / "a", append)
        assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before
    # A killed append leaves values that no item holds; the next one overwrites them.
    with open(tmp_path / "a.bin", "ab") as file:
        file.write(b"\x07" * 10)
    assert lists(TokenFile(tmp_path / "a")) == ITEMS
    with TokenWriter(tmp_path / "a", np.int32, append=True) as out:
        out.add([9])
    assert lists(TokenFile(tmp_path / "a")) == [*ITEMS, [9]]


def test_values_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "a", np.uint16) as out:
        for bad in ([-1], [65536], [0.5]):
            with pytest.raises(ConfigError, match="do not fit") as error:
                out.add(bad)
            assert error.value.code == "data-range"
        out.add(np.array([65535], np.int64))
    assert lists(TokenFile(tmp_path / "a")) == [[65535]]
    with pytest.raises(ConfigError, match="appended") as error:
        TokenWriter(tmp_path / "a", np.int32, append=True)
    assert error.value.code == "data-dtype"
    with pytest.raises(ConfigError, match="no code"):
        TokenWriter(tmp_path / "b", np.uint64)
    chosen = [smallest_int_dtype(low, high) for low, high in ((0, 255), (0, 256), (-1, 127), (-200, 0))]
    assert chosen == [np.dtype(n) for n in ("u1", "u2", "i1", "i2")]


def legacy(items: list[list[int]], code: int, dtype: str) -> tuple[bytes, bytes]:
    """The older layout, written out by hand."""
    offsets = np.cumsum([0, *map(len, items)])
    head = b"TNTIDX\x00\x00" + struct.pack("<6Q", 1, code, np.dtype(dtype).itemsize, len(items), len(items), 2)
    parts = [np.arange(len(items) + 1), offsets, np.array([*map(len, items)]), np.array([0, len(items)])]
    data = b"".join(np.array(item, dtype).tobytes() for item in items)
    return head + b"".join(part.astype("<i8").tobytes() for part in parts), data


@pytest.mark.parametrize(("code", "dtype"), [(4, "<i4"), (8, "<u2"), (6, "<u2"), (6, "<f4"), (7, "<f8")])
def test_the_older_layout_is_read(tmp_path: Path, code: int, dtype: str) -> None:
    index, data = legacy(ITEMS, code, dtype)
    (tmp_path / "a.idx").write_bytes(index)
    (tmp_path / "a.bin").write_bytes(data)
    file = TokenFile(tmp_path / "a")
    assert lists(file) == ITEMS
    assert file.dtype == np.dtype(dtype)
    assert file.index.documents.tolist() == [0, 4]


def test_10000_damaged_indexes(tmp_path: Path) -> None:
    """Whatever an index says: it is refused with a message, or no item leaves the file."""
    random = np.random.default_rng(0)
    write_items(tmp_path / "a", [random.integers(0, 9, n) for n in (3, 0, 7, 2, 9)], np.uint16)
    sound, size = np.fromfile(tmp_path / "a.idx", np.uint8), (tmp_path / "a.bin").stat().st_size
    old = np.frombuffer(legacy(ITEMS, 4, "<i4")[0], np.uint8)
    refused = read = 0
    for trial in range(10_000):
        source, data = ((sound, size), (old, 32))[trial % 2]
        raw = source.copy()
        for _ in range(random.integers(1, 5)):
            kind = random.integers(4)
            at = random.integers(len(raw)) if len(raw) else 0
            if kind == 0 and len(raw):
                raw[at] = random.integers(256)
            elif kind == 1 and len(raw):
                raw[at] ^= 1 << random.integers(8)
            elif kind == 2:
                raw = raw[:at]
            else:
                word = random.choice(np.array([0, 1, 2**31 - 1, 2**62, 2**63 - 1, -1, -(2**63)]))
                raw[at : at + 8] = np.frombuffer(np.int64(word).tobytes(), np.uint8)[: len(raw[at : at + 8])]
        try:
            index = parse_index(raw, data)
        except ConfigError as error:
            refused += error.code in ("data-index", "data-dtype") and bool(error.fix)
            continue
        read += 1
        count = data // index.dtype.itemsize
        assert ((index.starts >= 0) & (index.sizes >= 0) & (index.starts + index.sizes <= count)).all()
        assert ((index.bounds >= 0) & (index.bounds <= len(index))).all()
    assert refused + read == 10_000
    assert read > 20


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        TokenFile(tmp_path / "none")
    assert error.value.code == "data-file"
    (tmp_path / "a.idx").write_bytes(b"PK\x03\x04 something else")
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="begins with") as error:
        TokenFile(tmp_path / "a")
    assert error.value.code == "data-index"
    write_items(tmp_path / "b", [], np.int32)
    assert len(TokenFile(tmp_path / "b")) == 0


def test_modes_of_multimodal_files() -> None:
    index = TokenIndex(np.dtype("<i4"), np.array([1, 2]), np.array([0, 1]), np.array([0, 2]), np.array([0, 1], np.int8))
    read = parse_index(np.frombuffer(pack_index(index, "megatron"), np.uint8), 12)
    assert read.modes is not None
    assert read.modes.tolist() == [0, 1]


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import argparse
    import json

    write_items(tmp_path / "a", ITEMS, np.uint16)
    report = check_tokens(tmp_path / "a")
    assert (report.items, report.tokens, report.empty, report.high) == (4, 8, 1, 8)
    assert not report.problems
    parser = argparse.ArgumentParser()
    register(parser)
    assert main(parser.parse_args(["check", str(tmp_path / "a")])) == 0
    assert main(parser.parse_args(["check", str(tmp_path / "a"), "--vocabulary", "8"])) == 1
    assert "ids go up to 8" in capsys.readouterr().out
    assert main(parser.parse_args(["check", str(tmp_path / "a"), "--json"])) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["items"], told["tokens"], told["problems"]) == (4, 8, [])
    (tmp_path / "a.idx").write_bytes((tmp_path / "a.idx").read_bytes()[:-3])
    assert main(parser.parse_args(["check", str(tmp_path / "a")])) == 1
    assert "cut short" in capsys.readouterr().err


def test_files_of_megatron_core_are_read_and_ours_by_it(tmp_path: Path) -> None:
    """Beside the published writer and reader, where megatron-core is installed."""
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")
    torch = pytest.importorskip("torch")

    for dtype in (np.uint16, np.int32):
        builder = indexed.IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=dtype)
        for item in ITEMS:
            builder.add_item(torch.tensor(item, dtype=torch.int64))
            builder.end_document()
        builder.finalize(str(tmp_path / "m.idx"))
        assert lists(TokenFile(tmp_path / "m")) == ITEMS
        write_items(tmp_path / "o", ITEMS, dtype)
        theirs = indexed.IndexedDataset(str(tmp_path / "o"))
        assert [theirs[i].tolist() for i in range(len(theirs))] == ITEMS
        assert (tmp_path / "o.idx").read_bytes() == (tmp_path / "m.idx").read_bytes()
