"""Run by ckpt.py: export a checkpoint as `ds ckpt export` does, and say how much memory that took.

usage: ckpt_export.py CHECKPOINT OUT
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from ds_ckpt import cli


def peak() -> int:
    # Not getrusage's figure: a process inherits that from the one it was forked from.
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


parser = argparse.ArgumentParser()
cli.register(parser)
args = parser.parse_args(["export", *sys.argv[1:3], "--max-shard-size", "2GB"])
before, start = peak(), time.perf_counter()
status = cli.main(args)
print(json.dumps({"status": status, "seconds": time.perf_counter() - start, "before": before, "peak": peak()}))
