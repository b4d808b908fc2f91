"""Sizes are read and written one way in all packages."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_config.sizes import bytes_text, parse_bytes, positive_size, size_argument


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("4096", 4096), ("64K", 65536), ("16m", 16 << 20), ("1GiB", 1 << 30), ("5GB", 5 * 10**9), ("500 MB", 500 * 10**6),
     ("1.5K", 1536), ("2.5kb", 2500), ("7B", 7), ("1T", 1 << 40), ("9007199254740993", 9007199254740993)],
)  # fmt: skip
def test_a_size_is_read(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "K", "1X", "-1", "1e9", "1 2", "0x10", "1KK", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size: write bytes, or 64K"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (3 << 30, "3 GiB"),
        (-2048, "-2 KiB"),
        (1 << 60, "1024 PiB"),
    ],
)
def test_a_size_is_written(value: int, text: str) -> None:
    assert bytes_text(value) == text


@given(st.integers(0, 2**59))
def test_what_is_written_is_read_back_to_a_thousandth(value: int) -> None:
    assert abs(parse_bytes(bytes_text(value)) - value) <= value * 1e-3


def test_as_an_argument_of_a_command_line() -> None:
    assert size_argument("0") == 0
    assert positive_size("4K") == 4096
    for refused, text in ((size_argument, "big"), (positive_size, "big"), (positive_size, "0")):
        with pytest.raises(argparse.ArgumentTypeError, match=r"no size|size of 0"):
            refused(text)
