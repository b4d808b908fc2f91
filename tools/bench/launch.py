"""What starting two ranks costs: `ds run` against `torchrun`.

usage: nox -s bench -- launch [REPEATS]

Two scripts: one that does nothing (all of the time is the launcher's) and one that imports torch, joins a gloo group and
passes a barrier. Whole commands, alternating; medians and minima, in seconds.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "benchmarks" / "data" / "launch.json"
SCRIPTS = {
    "empty script": "pass\n",
    "gloo barrier": (
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\ndist.destroy_process_group()\n"
    ),
}


def launchers() -> dict[str, list[str]]:
    """The commands compared, without the script."""
    folder = Path(sys.executable).parent
    return {
        "ds run": [str(folder / "ds"), "run", "--nproc", "2"],
        "torchrun": [str(folder / "torchrun"), "--standalone", "--nproc-per-node", "2"],
    }


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, check=True)
    return time.perf_counter() - start


def main(repeats: int = 5) -> int:
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for title, code in SCRIPTS.items():
            path = Path(folder) / "script.py"
            path.write_text(code)
            times: dict[str, list[float]] = {name: [] for name in launchers()}
            for turn in range(repeats + 1):
                for name, command in launchers().items():
                    value = seconds([*command, str(path)])
                    if turn:  # the first warms the file cache
                        times[name].append(value)
            medians = {name: statistics.median(values) for name, values in times.items()}
            rows[title] = {
                **{f"{name}_median_s": round(value, 2) for name, value in medians.items()},
                **{f"{name}_min_s": round(min(values), 2) for name, values in times.items()},
                "ratio": round(medians["torchrun"] / medians["ds run"], 1),
            }
            print(f"{title}: {rows[title]}")
    machine = {"python": platform.python_version(), "machine": platform.machine(), "date": time.strftime("%Y-%m-%d")}
    DATA.parent.mkdir(parents=True, exist_ok=True)
    DATA.write_text(json.dumps({"repeats": repeats, **machine, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
