"""Whole lines, and a screen that nobody reads does not stop anything."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ds_launcher.output import LineSplitter, Screen


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=10))
def test_lines_do_not_depend_on_how_the_bytes_arrive(data: bytes, cuts: list[int]) -> None:
    splitter, lines, last = LineSplitter(), [], 0
    for cut in [*sorted(cuts), len(data)]:
        lines += splitter.feed(data[last:cut])
        last = max(last, min(cut, len(data)))
    lines += splitter.finish()
    expected = data.split(b"\n")
    assert lines == (expected if expected[-1] else expected[:-1])


def test_an_endless_line_comes_in_pieces() -> None:
    splitter = LineSplitter()
    pieces = splitter.feed(b"x" * 200_000)
    assert [len(piece) for piece in pieces] == [65536] * 3
    assert len(splitter.finish()[0]) == 200_000 - 3 * 65536


def test_screen_writes_in_order(tmp_path: Path) -> None:
    with FileIO(tmp_path / "out", "w") as out, FileIO(tmp_path / "err", "w") as err:
        screen = Screen({"out": out, "err": err})  # type: ignore[dict-item]
        screen.line("err", b"ds run: ", b"before the start")
        screen.start()
        for i in range(100):
            screen.line("out", b"[rank1] ", str(i).encode())
        screen.finish(5)
    assert (tmp_path / "err").read_text() == "ds run: before the start\n"
    assert (tmp_path / "out").read_text() == "".join(f"[rank1] {i}\n" for i in range(100))


def test_a_screen_nobody_reads_fills_up_without_blocking() -> None:
    reading, writing = os.pipe()
    with FileIO(reading) as reader, FileIO(writing, "w") as out:
        screen = Screen({"out": out})  # type: ignore[dict-item]
        screen.start()
        for _ in range(100):
            screen.raw("out", b"x" * 65536)
        assert screen.full
        assert not screen.finish(0.05)
        left = 100 * 65536
        while left:
            left -= len(reader.read(65536) or b"")
        assert screen.finish(5)
        assert not screen.full


def test_a_reader_that_left_is_forgotten() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with FileIO(writing, "w") as out:
        screen = Screen({"out": out})  # type: ignore[dict-item]
        screen.start()
        screen.line("out", b"", b"nobody hears this")
        screen.finish(5)
        assert not screen._thread.is_alive()


def test_output_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    """A full disk behind `> log` took the output of a job in silence."""
    with FileIO("/dev/full", "w") as out, FileIO(tmp_path / "err", "w") as err:
        screen = Screen({"out": out, "err": err})  # type: ignore[dict-item]
        screen.start()
        for _ in range(3):
            screen.line("out", b"", b"loss 0.5")
        screen.finish(5)
    assert (tmp_path / "err").read_text() == "ds run: output of the job is lost from here on: No space left on device\n"
