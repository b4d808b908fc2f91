"""Compiled training against eager training of the same stage and against torch.compile with FSDP2: time, memory, time to compile.

Engines are alive at once and take turns (`turns.py`). All have the same weights and tokens; losses after four steps are compared first.
"""

from __future__ import annotations

import os
import tempfile

import records
import tables
from meetings import Met

# engines that take turns; the first one is what the others are compared with
MEETINGS = {"shm": ["compiled@shm", "eager@shm", "fsdp2"], "gloo": ["compiled", "kept", "eager", "fsdp2"]}


def main() -> None:
    parser = records.parser_of("compile", __doc__)
    parser.add_argument("meetings", nargs="*", choices=[*MEETINGS, []])
    parser.add_argument("--cycles", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    for name in args.meetings or MEETINGS:
        meetings = records.read("compile").get("meetings", {})
        records.add("compile", meetings=meetings | {name: measured(MEETINGS[name], args.cycles, args.steps)})
    tables.fill("compile")


def measured(engines: list[str], cycles: int, steps: int) -> dict[str, dict]:
    """What each engine said of itself, and its median step; with a cache that is empty at first, then what a second start takes."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        met = Met("compile", engines, [], cycles, steps)
        cold, first = dict(met.first), engines[0]
        again = met.start(first)
        again.answers()
        again.end()
    rows = {}
    for engine in met.turns:
        facts = {name: max(one[name] for one in cold[engine]) for name in cold[engine][0] if name != "losses"}
        loss = max(one["losses"][-1] for one in cold[engine])
        rows[engine] = {**facts, "loss": loss, "ms": met.ms(engine), "of": met.beside(first, engine)}
    rows[first]["warm_compile_s"] = max(one["compile_s"] for one in met.first[first])
    return rows


if __name__ == "__main__":
    main()
