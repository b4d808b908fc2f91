"""Configurations of any size, depth and content: one error that says what to do, without work that grows with the square."""

import os
import sys

import pytest
from pydantic import Field

from ds_config import StrictModel
from ds_config.errors import ConfigError
from ds_config.file_check import load


class Inner(StrictModel):
    lr: float = 0.1
    options: dict[str, object] = Field(default_factory=dict)


class Outer(StrictModel):
    KEYS_COMMAND = "ds config key"
    size: int = 1
    batch_size: int = 1
    inner: Inner = Inner()
    anything: object = None


def _nested(depth):
    value = 1
    for _ in range(depth):
        value = {"a": value}
    return {"anything": value}


def _in_itself():
    value = {}
    value["anything"] = {"again": value}
    return value


def _wide():
    value = {}
    for _ in range(40):  # 2 ** 40 objects, none of them twice
        value = {"a": value, "b": value}
    return {"anything": value}


SOURCES = {
    "unknown keys": {f"word{i}": i for i in range(50_000)},
    "unknown keys of a section": {"inner": {"options": {}, **{f"word{i}": i for i in range(50_000)}}},
    "a long name": {"x" * 1_000_000: 1},
    "long names": {"x" * 3000 + str(i): 1 for i in range(1000)},
    "nested": _nested(5000),
    "in itself": _in_itself(),
    "wide": _wide(),
    "lists": {"anything": [[[[]]]] * 10, "size": [[]]},
    "digits": {"size": 10**5000},
    "digits for a float": {"inner": {"lr": 10**5000}},
    "digits for anything": {"anything": 10**5000},
    "digits in a list": {"size": [10**5000]},
    "digits in text": '{"size": ' + "9" * 350 + "}",
    "a large text": '{"a": "' + "x" * 10_000_000 + '"}',
    "brackets": "{" * 100_000,
    "lists in text": '{"anything": ' + "[" * 100_000 + "}",
    "keys in text": "{" + ",".join(f'"word{i}": {i}' for i in range(20_000)) + "}",
    "the same key": "{" + ",".join('"size": 1' for _ in range(20_000)) + "}",
    "a zero byte": "a\0b",
    "a long path": "x" * 5000,
    "surrogates": {"\ud800": 1},
}


LIMIT = 4_000_000
"""Calls; the widest of these takes 2.6 million, and with the square of its 20,000 keys it would be hundreds."""


def calls_of(function):
    """How many functions, of Python's and of C, are called meanwhile: the same on a slow machine."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("name", SOURCES)
def test_an_error_of_ours_without_much_work(name):
    def raises():
        with pytest.raises(ConfigError) as caught:
            load(Outer, SOURCES[name])
        assert len(str(caught.value)) < 50_000

    assert calls_of(raises) < LIMIT


def test_files_that_are_none(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "latin").write_bytes(b'{"a": "\xe9"}')
    for name in ("pipe", "zero", "latin", "."):
        with pytest.raises(ConfigError) as caught:
            load(Outer, tmp_path / name)
        assert caught.value.code == "config-source"


def test_many_unknown_keys_are_counted():
    with pytest.raises(ConfigError) as caught:
        load(Outer, {f"word{i}": i for i in range(1000)})
    assert len(caught.value.issues) == 1000
    assert "and 900 more" in str(caught.value)


def test_a_number_in_quotation_marks():
    with pytest.raises(ConfigError, match=r'inner\.lr: found "1e-4", .* Write 1e-4 without quotation marks\.'):
        load(Outer, {"inner": {"lr": "1e-4"}})
