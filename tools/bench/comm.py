"""Ranks of one host: `shm` against gloo and against one memcpy, shared arenas, DDP's overhead, and the recorder's.

usage: nox -s bench -- comm [MODE ...]      MODE: collectives arena ddp recorder

Each row says which share of the machine other processes took; it is tried up to four times, and the quietest counts.
Two ranks with one thread each; variants alternate inside one pair of processes, the slower rank counts, medians.
"""

from __future__ import annotations

import sys

import records
import tables
from meetings import answer_of

MODES = ["collectives", "arena", "ddp", "recorder"]


def main(words: list[str]) -> None:
    """Run and write one mode after the other, and then the page."""
    parser = records.parser_of("comm", __doc__)
    parser.add_argument("modes", nargs="*", metavar="MODE")
    words = parser.parse_args(words).modes
    if wrong := [word for word in words if word not in MODES]:
        sys.exit(f"{', '.join(wrong)}: not one of {', '.join(MODES)}")
    for mode in words or MODES:
        records.add("comm", **{mode: answer_of("comm", mode)})
    tables.fill("comm")


if __name__ == "__main__":
    main(sys.argv[1:])
