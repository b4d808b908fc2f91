"""Experts over two ranks against DeepSpeed's MoE layer, against a loop by hand on one rank, and against the copies they need.

Engines are alive at once and take turns (`turns.py`). All have the same weights and tokens, and their losses are compared first.
"""

from __future__ import annotations

from dataclasses import replace

import records
import tables
from meetings import Meeting, compared

MEETINGS = [
    Meeting("zipf", 2, ["ours@shm", "ours", "deepspeed", "ours_drop@shm", "deepspeed_drop"],
            [("ours@shm", "deepspeed", ">= 3.0"), ("ours", "deepspeed", ">= 3.0"), ("ours_drop@shm", "deepspeed_drop", ">= 1.0")], 8, 6),
    Meeting("balanced", 2, ["ours@shm", "ours", "deepspeed"], [("ours@shm", "deepspeed", ">= 1.1"), ("ours", "deepspeed", ">= 1.1")], 8, 6),
    Meeting("balanced", 2, ["moving@shm", "least@shm", "copies@shm"],
            [("moving@shm", "copies@shm", "<= 1.3"), ("moving@shm", "least@shm", "<= 1.1"), ("least@shm", "copies@shm", "<= 1.3")], 8, 6),
    *(Meeting(config, 1, ["ours", "loop", "deepspeed"], [("ours", "loop", "<= 1.05"), ("ours", "deepspeed", ">= 1.0")], 8, 6)
      for config in ("balanced", "zipf")),
]  # fmt: skip


def main() -> None:
    args = records.parser_of("moe", __doc__, cycles=8, steps=6).parse_args()
    meetings = [replace(one, cycles=args.cycles, steps=args.steps) for one in MEETINGS]
    lines = list(compared("moe", meetings, computes_less=["copies@shm", "least@shm"]))
    records.write("moe", others=max(line["others"] for line in lines), lines=lines)
    tables.fill("moe")


if __name__ == "__main__":
    main()
