"""Data sets of MosaicML Streaming: folders that its MDSWriter 0.13.0 wrote (`mds/`), and what is no data set."""

from __future__ import annotations

import json
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_config.errors import ConfigError
from ds_data import MdsSamples, MdsSequences, RankSlice, TokenLoader

HERE = Path(__file__).parent / "mds"


def written() -> list[dict[str, Any]]:
    """The samples that were given to MDSWriter."""
    rng = np.random.default_rng(0)
    return [
        {
            "tokens": np.arange(i, i + 8, dtype=np.int32),
            "free": rng.integers(0, 99, (2, i + 1)).astype([np.uint16, np.int64][i % 2]),
            "typed": rng.random((i + 1, 2)).astype(np.float32),
            "raw": bytes([i] * i),
            "words": "wört " * i,
            "n": -i,
            "h": np.float16(i / 3),
            "u": np.uint8(i),
            "j": {"a": [i, None]},
            "big": 10**30 + i,
            "f": i / 7,
            "d": Decimal(i) / 4,
        }
        for i in range(7)
    ]


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            assert found[name].dtype == value.dtype
            np.testing.assert_array_equal(found[name], value)
        else:
            assert found[name] == value
            assert type(found[name]) is type(value)


@pytest.mark.parametrize("compression", ["plain", "gz", "bz2", "zstd"])
def test_what_mdswriter_wrote_is_read(compression: str) -> None:
    if compression == "zstd":
        pytest.importorskip("zstandard")
    samples = MdsSamples(HERE / compression)
    assert len(samples) == 7
    assert len(samples.shards) > 1
    for found, expected in zip(samples, written(), strict=True):
        check(found, expected)
    check(samples[-1], written()[-1])
    assert [s["n"] for s in samples[1:6:2]] == [-1, -3, -5]
    with pytest.raises(IndexError):
        samples[7]


def test_threads_and_processes_open_shards_themselves() -> None:
    samples = MdsSamples(HERE / "gz")
    with ThreadPoolExecutor(4) as threads:
        assert [s["n"] for s in threads.map(samples.__getitem__, range(7))] == [-i for i in range(7)]
    again = pickle.loads(pickle.dumps(samples))
    assert not again._opened
    check(again[3], written()[3])
    assert again.fingerprint == samples.fingerprint != MdsSamples(HERE / "plain").fingerprint


def test_token_loader_reads_sequences_of_it() -> None:
    data = MdsSequences(MdsSamples(HERE / "plain"), 8)
    loader = TokenLoader(data, RankSlice(0, 1, 7), shuffle=False, threads=0)
    batch = next(iter(loader))
    assert torch.equal(batch["input_ids"], torch.arange(7)[:, None] + torch.arange(8))
    assert torch.equal(batch["labels"][:, :-1], batch["input_ids"][:, 1:])
    assert (batch["labels"][:, -1] == -100).all()
    assert torch.equal(batch["position_ids"][3], torch.arange(8))
    assert not batch["document_ids"].any()
    assert data[-1]["input_ids"].tolist() == list(range(6, 14))
    with pytest.raises(ConfigError, match="data-mds"):
        MdsSequences(MdsSamples(HERE / "plain"), 9)[0]
    with pytest.raises(ConfigError, match="no column 'text'"):
        MdsSequences(MdsSamples(HERE / "plain"), 8, column="text")


def test_tokens_that_are_bytes(tmp_path: Path) -> None:
    rows = [np.arange(i, i + 4, dtype=np.uint16).tobytes() for i in range(3)]
    head = np.array([3, *(20 + 12 * i for i in range(4))], "<u4").tobytes()
    body = b"".join(np.uint32(8).tobytes() + row for row in rows)
    (tmp_path / "shard.00000.mds").write_bytes(head + body)
    index = json.loads((HERE / "plain" / "index.json").read_text())
    entry = index["shards"][0] | {
        "column_names": ["tokens"],
        "column_encodings": ["bytes"],
        "column_sizes": [None],
        "samples": 3,
    }
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [entry]}))
    data = MdsSequences(MdsSamples(tmp_path), 4, dtype=np.uint16)
    assert data.batch([2, 0])["input_ids"].tolist() == [[2, 3, 4, 5], [0, 1, 2, 3]]


def test_a_data_set_below_a_url(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.put(str(HERE / "bz2"), "/mds-corpus", recursive=True)
    try:
        samples = MdsSamples("memory://mds-corpus", tmp_path)
        assert not list(tmp_path.rglob("*.bz2"))  # copied when first read
        check(samples[4], written()[4])
        assert len(list(tmp_path.rglob("*.bz2"))) == 1
        with pytest.raises(ConfigError, match="cache="):
            MdsSamples("memory://mds-corpus")
        with pytest.raises(ConfigError, match="there is no memory://mds-nothing"):
            MdsSamples("memory://mds-nothing", tmp_path)
    finally:
        memory.rm("/mds-corpus", recursive=True)


def changed(tmp_path: Path, **values: Any) -> Path:
    folder = tmp_path / f"changed{len(list(tmp_path.iterdir()))}"
    shutil.copytree(HERE / "plain", folder)
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0] |= values
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    index = json.loads((HERE / "plain" / "index.json").read_text())
    kinds = index["shards"][0]["column_encodings"]
    raw = index["shards"][0]["raw_data"]
    for code, values in (
        ("data-mds", {"column_encodings": ["pkl", *kinds[1:]]}),  # would run code
        ("data-mds", {"column_encodings": ["jpeg", *kinds[1:]]}),
        ("data-mds", {"format": "json"}),
        ("data-mds", {"raw_data": raw | {"basename": "../secret"}}),
    ):
        with pytest.raises(ConfigError, match=code):
            MdsSamples(changed(tmp_path, **values))
    with pytest.raises(ConfigError, match="data-mds"):
        MdsSamples(
            changed(
                tmp_path, zip_data={"basename": "shard.00000.mds"}, compression="br", raw_data=raw | {"basename": "x"}
            )
        )[0]
    with pytest.raises(ConfigError, match="data-file"):
        MdsSamples(tmp_path)


def test_damaged_shards_are_refused_or_harmless(tmp_path: Path) -> None:
    folder = changed(tmp_path)
    shard = folder / "shard.00000.mds"
    whole = shard.read_bytes()
    rng = np.random.default_rng(1)
    shard.unlink()
    with pytest.raises(ConfigError, match="data-file"):
        MdsSamples(folder)[0]
    for cut in (0, 3, 4, 11, len(whole) // 2):
        shard.write_bytes(whole[:cut] or b"\0")
        with pytest.raises(ConfigError, match="data-file"):
            MdsSamples(folder)[0]
    refused = 0
    for _ in range(200):
        spoilt = bytearray(whole)
        spoilt[int(rng.integers(0, 40))] ^= int(rng.integers(1, 256))
        shard.write_bytes(spoilt)
        try:
            MdsSamples(folder)[0]
        except ConfigError as error:
            refused += error.code == "data-file"
    assert refused > 20
