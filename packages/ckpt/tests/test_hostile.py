"""Checkpoints from someone else: only typed errors, bounded memory, no code, no path outside the directory."""

import contextlib
import json
import os
import random
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ds_ckpt
from ds_ckpt.convert.deepspeed_layout import write_universal
from ds_ckpt.convert.huggingface import write_hf
from ds_ckpt.convert.tensor_source import TensorEntry, TensorSource, write_checkpoint
from ds_ckpt.crc import crc32
from ds_ckpt.format import decode, encode
from ds_ckpt.jsontext import parse
from ds_config.errors import CheckpointError, DsError


def _checkpoint():
    storage = ds_ckpt.MemoryStorage()
    state = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.zeros(0, 2), "c": torch.tensor(7), "d": torch.ones(5)}
    ds_ckpt.save(ds_ckpt.CheckpointRef(storage, "x"), ds_ckpt.full_shards(state), {"step": 1}, aliases={"e": "a"})
    return storage, state


STORAGE, STATE = _checkpoint()
GOOD = bytes(STORAGE.checkpoints["x"]["manifest.json"])
DATA = bytes(STORAGE.checkpoints["x"]["data-00000.safetensors"])


def sealed(body):
    """A manifest with this JSON object behind a correct first line: mutations must get past the checksum."""
    text = json.dumps({k: v for k, v in body.items() if k not in ("format", "version", "crc32")})[1:].encode() + b"\n"
    return f'{{"format":"ds-ckpt","version":1,"crc32":"{crc32(text):08x}",\n'.encode() + text


def _places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))


def _put(value, path, new):
    if not path:
        return new
    out = dict(value) if isinstance(value, dict) else list(value)
    out[path[0]] = _put(value[path[0]], path[1:], new)
    return out


ODD = [
    None, True, -1, 0, 1, 2, 3, 4096, 2**31, 2**53, 2**62, 2**63, 10**18, 1.5, "", "a", "..", "../x", "/etc/passwd", "a/b",
    "manifest.json", "float32", "int8", "bfloat16", "00000000", "x" * 5000, "\u0000", [], [0], [1, 2], [3, 4], [2**62, 4],
    [0] * 100, {}, {"a": 1}, [[]],
]  # fmt: skip


OUTCOMES = {
    "ok", "ckpt-manifest-invalid", "ckpt-damaged", "ckpt-not-found", "ckpt-file-truncated", "ckpt-block-damaged", "ckpt-shard",
}  # fmt: skip


def _mutated(rng):
    body = json.loads(GOOD)
    places = [p for p in _places(body) if p and p[0] not in ("format", "version", "crc32")]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        path = rng.choice(places)
        try:
            if rng.random() < 0.15:
                parent = body
                for key in path[:-1]:
                    parent = parent[key]
                del parent[path[-1]]
            else:
                body = _put(body, path, rng.choice(ODD))
        except (KeyError, IndexError, TypeError):
            continue
    return body


def _try(manifest):
    """Decode and, where that works, load what it says from the real data: a typed error or exactly the stored bytes."""
    storage = ds_ckpt.MemoryStorage()
    storage.checkpoints["x"] = {"manifest.json": manifest, "data-00000.safetensors": DATA}
    at = ds_ckpt.CheckpointRef(storage, "x")
    try:
        found = decode(manifest)
        targets = {n: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for n, t in found.tensors.items()}
        ds_ckpt.load(at, ds_ckpt.full_shards(targets))
        ds_ckpt.verify(at)
    except CheckpointError as error:
        return error.code
    return "ok"


# DS_FUZZ=100000 for a long run.
COUNT = int(os.environ.get("DS_FUZZ", "4000"))


def test_mutated_manifests_are_refused_with_a_code_or_load():
    rng, codes = random.Random(0), {}
    for _ in range(COUNT):
        code = _try(sealed(_mutated(rng)))
        codes[code] = codes.get(code, 0) + 1
    assert set(codes) <= OUTCOMES
    assert codes["ckpt-manifest-invalid"] > 0.6 * COUNT
    assert codes["ok"] > 0.003 * COUNT  # mutated meta, sequence or aliases


def test_mutated_manifests_allocate_next_to_nothing():
    rng = random.Random(1)
    tracemalloc.start()
    for _ in range(300):
        _try(sealed(_mutated(rng)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 2**20


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(GOOD)), st.integers(0, len(GOOD)), st.binary(max_size=12))
def test_a_manifest_with_bytes_replaced(start, stop, new):
    low, high = sorted((start, stop))
    changed = GOOD[:low] + new + GOOD[high:]
    if changed != GOOD:
        with pytest.raises(CheckpointError):
            decode(changed)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(GOOD)), st.integers(0, len(GOOD)), st.binary(max_size=12))
def test_a_manifest_with_bytes_replaced_and_the_checksum_corrected(start, stop, new):
    head, _, text = GOOD.partition(b"\n")
    low, high = sorted((min(start, len(text)), min(stop, len(text))))
    text = text[:low] + new + text[high:]
    head = f'{{"format":"ds-ckpt","version":1,"crc32":"{crc32(text):08x}",'.encode()
    assert _try(head + b"\n" + text) in OUTCOMES


@given(
    st.recursive(
        st.integers() | st.text() | st.none(), lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=9
    )
)
def test_any_json_is_refused_or_understood(value):
    with pytest.raises(CheckpointError):
        decode(sealed(value if isinstance(value, dict) else {"meta": value}))


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b'{"a":' * 100_000, b'{"a":1,"a":2}', b"NaN", b"Infinity", b"1" * 5000, b"\xff\xfe", b"", b'{"a":1e99999999}x'],
)  # fmt: skip
def test_json_that_is_too_much(text):
    with pytest.raises(CheckpointError) as caught:
        parse(text, "here")
    assert caught.value.code == "ckpt-manifest-invalid"


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/b", "..", ".", ".hidden", "", "manifest.json", "x\n", "a\\b"]
)
def test_no_file_name_leaves_the_directory(name):
    with pytest.raises(CheckpointError, match="files") as caught:
        decode(sealed(_put(json.loads(GOOD), ("files", 0, "name"), name)))
    assert caught.value.code == "ckpt-manifest-invalid"


def test_pieces_that_overlap_or_leave_holes_are_refused():
    body = json.loads(GOOD)
    at = ("tensors", "a", "parts", 0, "pieces", 0, "at")
    for shift, word in ((4, "hole|overlap"), (-4, "hole|overlap"), (48, "hole|overlap")):
        old = body["tensors"]["a"]["parts"][0]["pieces"][0]["at"]
        with pytest.raises(CheckpointError, match=word):
            decode(sealed(_put(body, at, old + shift)))


def test_a_claimed_petabyte_costs_nothing():
    body = json.loads(GOOD)
    body = _put(body, ("tensors", "a", "shape"), [2**40, 4])
    with pytest.raises(CheckpointError):
        decode(sealed(body))
    body["block_bytes"] = 2**40
    body["files"][0]["nbytes"] = 2**50
    with pytest.raises(CheckpointError):
        decode(sealed(body))


def test_a_newer_version_says_so():
    with pytest.raises(CheckpointError) as caught:
        decode(GOOD.replace(b'"version":1', b'"version":2'))
    assert caught.value.code == "ckpt-version"


def test_encode_and_decode_are_inverse():
    assert encode(decode(GOOD)) == GOOD


def test_loading_runs_no_code(tmp_path, crash):
    """The load path under an audit hook: no unpickling, no compile, no exec, no subprocess, nothing opened elsewhere."""
    ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards(STATE), {"step": 1})
    tensors = [(name, list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in STATE.items()]
    answer, _ = crash.trial(tmp_path, audited="a", tensors=tensors)
    assert answer["status"] == 0, answer
    found = json.loads(answer["answer"])
    assert found["seen"] == []
    assert len(found["opened"]) >= 4
    assert all(path.startswith(str(tmp_path)) for path in found["opened"])
    assert (found["meta"], found["found"], found["files"]) == ({"step": 1}, str(tmp_path / "a"), 1)


def test_a_checkpoint_holds_no_executable_file(tmp_path):
    ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards(STATE), {})
    assert all(not p.stat().st_mode & 0o111 for p in (tmp_path / "a").iterdir())


PARTS = st.lists(st.sampled_from(["..", ".", "a", "etc", "w.0", "\\", "", "x" * 30]), min_size=1, max_size=6)


def _folder(root):
    """Everything below `root`, with its content."""
    return {path: path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


@settings(max_examples=300, deadline=None)
@given(
    parts=PARTS,
    sign=st.sampled_from(["/", "\\", "", "."]),
    absolute=st.booleans(),
    state=st.sampled_from(["exp_avg", "..", "a\\b"]),
)
def test_converting_names_of_a_stranger_writes_nothing_outside_the_folder(
    tmp_path_factory, parts, sign, absolute, state
):
    root = tmp_path_factory.mktemp("convert")
    name = ("/" if absolute else "") + sign.join(parts)
    entry = TensorEntry((2,), "float32", lambda: torch.ones(2))
    entries = {f"param/{name}": entry, f"optim/{name}/{state}": entry}
    source = TensorSource(entries, meta={"optimizer": {"groups": [{"lr": 1.0}]}})
    before = _folder(root)
    target = root / "deep" / "er" / "out"
    for write in (
        lambda: write_universal(source, target, "t", allow_pickle=True),
        lambda: write_hf(source, target / "hf"),
        lambda: write_checkpoint(source, target / "own"),
    ):
        with contextlib.suppress(DsError):
            write()
    outside = {path for path in _folder(root) if target not in (path, *path.parents) and path not in target.parents}
    assert outside == set(before)


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "a/b", "..", "a\\b"])
def test_such_a_name_is_refused_before_anything_is_written(tmp_path, name):
    entry = TensorEntry((2,), "float32", lambda: torch.ones(2))
    source = TensorSource(
        {f"param/{name}": entry, f"optim/{name}/exp_avg": entry}, meta={"optimizer": {"groups": [{}]}}
    )
    with pytest.raises(CheckpointError, match="leads out of it") as caught:
        write_universal(source, tmp_path / "u", "t", allow_pickle=True)
    assert caught.value.code == "ckpt-foreign"
    assert not (tmp_path / "u").exists()


@pytest.mark.parametrize("state", ["..", "", "a\\b"])
def test_nor_is_a_state_of_such_a_name(tmp_path, state):
    entry = TensorEntry((2,), "float32", lambda: torch.ones(2))
    source = TensorSource({"param/w": entry, f"optim/w/{state}": entry}, meta={"optimizer": {"groups": [{}]}})
    with pytest.raises(CheckpointError, match="leads out of it"):
        write_universal(source, tmp_path / "u", "t", allow_pickle=True)
    with pytest.raises(CheckpointError, match="leads out of it"):
        write_universal(
            TensorSource({"param/w": entry}, meta={"optimizer": {"groups": [{}]}}),
            tmp_path / "u",
            "../t",
            allow_pickle=True,
        )
