"""What starting two ranks costs: `ds run` beside torchrun and DeepSpeed's launcher; writes the table of docs/benchmarks/launch.md.

usage: nox -s bench -- launch [REPEATS [beside-others]]

Three scripts: one that does nothing (all of the time is the launcher's), one that imports torch, and one that joins a gloo group and
passes a barrier. Whole commands, alternating; wall and processor seconds of everything that was started, medians. `ds run --start spawn`
shows what sharing one import of torch brings. DeepSpeed is in an environment of its own (DS_PEER_PYTHON names a ready one).
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import records
import tables
from in_turn import in_turn
from peers import ensure

SCRIPTS = {
    "empty": "pass\n",
    "import torch": "import torch\n",
    "gloo barrier": (
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\ndist.destroy_process_group()\n"
    ),
}


def launchers() -> dict[str, list[str]]:
    """The commands compared, without the script."""
    folder = Path(sys.executable).parent
    peer = Path(os.environ.get("DS_PEER_PYTHON") or ensure("deepspeed")).parent
    return {
        "ds run": [str(folder / "ds"), "run", "--nproc", "2"],
        "ds run --start spawn": [str(folder / "ds"), "run", "--nproc", "2", "--start", "spawn"],
        "torchrun": [str(folder / "torchrun"), "--standalone", "--nproc-per-node", "2"],
        "DeepSpeed": [str(peer / "deepspeed"), "--num_gpus", "2", "--no_local_rank", "--master_port", "29617"],
    }


def seconds(command: list[str]) -> tuple[float, float]:
    """Wall, and processor time of the command with all its descendants (each is waited for by its parent)."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    path = f"{Path(command[0]).parent}:{os.environ['PATH']}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PATH": path}
    subprocess.run(command, env=env, capture_output=True, check=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """Script -> launcher -> medians."""
    rows: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for title, code in SCRIPTS.items():
            path = Path(folder) / "script.py"
            path.write_text(code)
            measures = {name: partial(seconds, [*command, str(path)]) for name, command in launchers().items()}
            taken = in_turn(measures, repeats)  # the first round warms the file cache
            rows[title] = {
                name: {
                    "wall_s": round(statistics.median(wall for wall, _ in values), 2),
                    "cpu_s": round(statistics.median(cpu for _, cpu in values), 2),
                }
                for name, values in taken.items()
            }
            print(f"{title}: {rows[title]}", flush=True)
    return rows


def main(repeats: int = 5, beside_others: str = "") -> int:
    """Measure, write the record and the page, which says so where other work ran on the machine."""
    records.write("launch", repeats=repeats, beside_others=beside_others == "beside-others", rows=measured(repeats))
    tables.fill("launch")
    return 0


if __name__ == "__main__":
    parser = records.parser_of("launch", __doc__)
    parser.add_argument("repeats", nargs="?", type=int, default=5)
    parser.add_argument("beside_others", nargs="?", choices=("beside-others",), default="")
    sys.exit(main(**vars(parser.parse_args())))
