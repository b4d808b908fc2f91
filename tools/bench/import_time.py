"""What importing costs: `import ds_engine` and `import deepspeed` (the facade) beyond `import torch`, and `ds --help`.

usage: nox -s bench -- import_time [REPEATS]

Each time is that of a new process, bytecode compiled before, alternating between the cases; medians, in milliseconds.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import records
from in_turn import in_turn, seconds

# Timed inside the process: starting Python itself is the same for all.
_IMPORT = "import time; s = time.perf_counter(); import {}; print((time.perf_counter() - s) * 1e3)"
_BEYOND = "import torch, time; s = time.perf_counter(); import {}; print((time.perf_counter() - s) * 1e3)"
_SOURCE = records.ROOT / "packages" / "compat" / "src"  # not installed where we develop
_FACADE = f"import sys; sys.path.insert(0, {str(_SOURCE)!r}); " + _BEYOND.format("deepspeed{}")
CASES = {
    "import torch": [sys.executable, "-c", _IMPORT.format("torch")],
    "import ds_engine, after torch": [sys.executable, "-c", _BEYOND.format("ds_engine")],
    "first use of ds_engine, after torch": [sys.executable, "-c", _BEYOND.format("ds_engine; ds_engine.initialize")],
    "import ds_zero, after torch": [sys.executable, "-c", _BEYOND.format("ds_zero")],
    "import deepspeed (the facade), after torch": [sys.executable, "-c", _FACADE.format("")],
    "first use of the facade, after torch": [sys.executable, "-c", _FACADE.format("; deepspeed.initialize")],
    "import ds_config": [sys.executable, "-c", _IMPORT.format("ds_config")],
    "import ds_monitor": [sys.executable, "-c", _IMPORT.format("ds_monitor")],
    "import ds_launcher": [sys.executable, "-c", _IMPORT.format("ds_launcher")],
}
HELP = [str(Path(sys.executable).with_name("ds")), "--help"]


def inside_ms(command: list[str]) -> float:
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main(repeats: int = 9) -> int:
    measures = {name: partial(inside_ms, command) for name, command in CASES.items()}
    help_ms = {
        "ds --help, whole process": lambda: (
            1e3 * seconds(partial(subprocess.run, HELP, capture_output=True, check=True))
        )
    }
    # The first round compiles bytecode and warms the file cache.
    times = in_turn(measures | help_ms, repeats)
    rows = {
        name: {"median_ms": round(statistics.median(v), 1), "min_ms": round(min(v), 1)} for name, v in times.items()
    }
    for name, row in rows.items():
        print(f"{name:<44} {row['median_ms']:8.1f} ms   (min {row['min_ms']:.1f})")
    records.write("import_time", repeats=repeats, rows=rows)
    return 0


if __name__ == "__main__":
    parser = records.parser_of("import_time", __doc__)
    parser.add_argument("repeats", nargs="?", type=int, default=9)
    sys.exit(main(**vars(parser.parse_args())))
