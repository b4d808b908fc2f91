"""Tensor and sequence shards on two ranks: beside DeepSpeed's and torch's, and ways of sharing a sequence beside one another.

Engines of a configuration are alive at once and take turns (`turns.py`). All have the same weights and inputs, and their losses are
compared first. Writes its data; `docs/benchmarks/parallel.md` shows them.
"""

from __future__ import annotations

from dataclasses import replace

import records
import tables
from meetings import Meeting, compared

MEETINGS = [
    Meeting("exchange", 2, ["ours@shm", "ours", "deepspeed"],
            [("ours@shm", "deepspeed", "<= 0.5"), ("ours", "deepspeed", "<= 1.0")], 8, 8),
    Meeting("ulysses", 2, ["ours@shm", "ours", "deepspeed"],
            [("ours@shm", "deepspeed", "<= 1.0"), ("ours", "deepspeed", "<= 1.0")], 8, 6),
    Meeting("tensor", 2, ["ours@shm", "ours", "torch", "deepspeed", "half"],
            [("ours@shm", "torch", "<= 0.7"), ("ours@shm", "deepspeed", "<= 0.7"), ("ours", "torch", "<= 1.0"), ("ours", "deepspeed", "<= 1.0"),
             ("ours@shm", "half", "")], 8, 4),
    Meeting("long", 2, ["ours@shm", "ring@shm", "zigzag@shm"],
            [("ring@shm", "ours@shm", ""), ("zigzag@shm", "ours@shm", "")], 4, 3),
    Meeting("loss", 1, ["tiled", "whole"], [("tiled", "whole", "<= 1.1")], 3, 2),
]  # fmt: skip


def main() -> None:
    parser = records.parser_of("parallel", __doc__)
    parser.add_argument("configs", nargs="*", default=[one.config for one in MEETINGS])
    parser.add_argument(
        "--cycles", type=int, help="turns of each engine; by default as many as the configuration is short"
    )
    args = parser.parse_args()
    for one in [one for one in MEETINGS if one.config in args.configs]:
        lines = [line for line in records.read("parallel").get("lines", []) if line["config"] != one.config]
        lines += compared("parallel", [replace(one, cycles=args.cycles or one.cycles)], computes_less=["half"])
        order = [one.config for one in MEETINGS]
        records.add("parallel", lines=sorted(lines, key=lambda line: order.index(line["config"])))
    tables.fill("parallel")


if __name__ == "__main__":
    main()
