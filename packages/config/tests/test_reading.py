"""Every kind of source, and every way in which one can be bad."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from ds_config import Document, Origin, read
from ds_config.errors import ConfigError

TEXT = '{\n  // comment\n  "a": {"b": [1,\n 2]},\n}'


def test_a_file_its_text_and_base64_give_the_same_data(tmp_path: Path) -> None:
    file = tmp_path / "cfg.json"
    file.write_text(TEXT, encoding="utf-8")
    encoded = base64.urlsafe_b64encode(TEXT.encode()).decode()
    expected = {"a": {"b": [1, 2]}}
    for source, name in [(file, str(file)), (str(file), str(file)), (TEXT, "text"), (encoded, "base64")]:
        document = read(source)
        assert document.data == expected
        assert document.name == name
        assert document.lines[("a", "b", 1)] == 4
    assert read(encoded.rstrip("=")).data == expected
    assert read(expected) == Document(expected, "dict")


def test_a_document_is_returned_as_it_is() -> None:
    document = read(TEXT)
    assert read(document) is document


def test_origins_fall_back_to_what_is_around() -> None:
    document = read(TEXT)
    assert document.origin(("a", "b", 1)) == Origin("text", 4)
    assert document.origin(("a", "b", 7, "x")) == Origin("text", 3)
    assert document.origin(("unknown",)) == Origin("text")
    assert read({"a": 1}).origin(("a",)) == Origin("dict")


def test_byte_order_mark_and_hjson_without_braces(tmp_path: Path) -> None:
    file = tmp_path / "cfg.hjson"
    file.write_bytes(b"\xef\xbb\xbfstage: 2\ndevice: cpu\n")
    assert read(file).data == {"stage": 2, "device": "cpu"}
    assert read("stage: 2\ndevice: cpu").data == {"stage": 2, "device": "cpu"}


def test_all_duplicate_keys_are_named_with_both_lines() -> None:
    with pytest.raises(ConfigError) as caught:
        read('{"a": 1,\n"a": 2,\n"b": {"c": 1,\n "c": 1}}')
    assert caught.value.code == "config-duplicate-key"
    assert "text:2 a: given twice in one object: first at line 1, again at line 2" in caught.value.message
    assert "text:4 b.c: given twice in one object: first at line 3, again at line 4" in caught.value.message
    assert len(caught.value.issues) == 2


def test_keys_that_are_no_strings() -> None:
    with pytest.raises(ConfigError, match=r"a\[0\]: has the key 1 of type int"):
        read({"a": [{1: 2}]})


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "ds_confg.json")
    assert caught.value.code == "config-source"
    assert f"Did you mean {tmp_path / 'ds_config.json'}?" in caught.value.fix
    with pytest.raises(ConfigError, match="working directory"):
        read(str(tmp_path / "other" / "x.json"))
    with pytest.raises(ConfigError, match="Check the path"):
        read(str(tmp_path / "zzz"))


def test_unreadable_sources(tmp_path: Path) -> None:
    binary = tmp_path / "x.json"
    binary.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read(binary)
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="a configuration of type int"):
        read(3)  # type: ignore[arg-type]
    listed = tmp_path / "list.json"
    listed.write_text("[1]")
    with pytest.raises(ConfigError, match="a configuration is an object, found a list") as caught:
        read(listed)
    assert caught.value.code == "config-syntax"


def test_base64_of_something_else_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("[1]", "hello", json.dumps("{")):
        with pytest.raises(ConfigError, match="there is no configuration file"):
            read(base64.urlsafe_b64encode(text.encode()).decode())
    # A file wins over a name that happens to decode.
    name = base64.urlsafe_b64encode(b"{}aa").decode().rstrip("=")
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text('{"from": "file"}')
    assert read(name).data == {"from": "file"}
