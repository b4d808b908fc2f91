"""What starting two ranks costs: `ds run` beside torchrun and DeepSpeed's launcher; writes docs/benchmarks/launch.md.

usage: nox -s bench -- launch [REPEATS [beside-others]]

Three scripts: one that does nothing (all of the time is the launcher's), one that imports torch, and one that joins a gloo group and
passes a barrier. Whole commands, alternating; wall and processor seconds of everything that was started, medians. `ds run --start spawn`
shows what sharing one import of torch brings. DeepSpeed is in an environment of its own (DS_PEER_PYTHON names a ready one).
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peers import ensure

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "benchmarks" / "data" / "launch.json"
PAGE = ROOT / "docs" / "benchmarks" / "launch.md"
SCRIPTS = {
    "empty": "pass\n",
    "import torch": "import torch\n",
    "gloo barrier": (
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\ndist.destroy_process_group()\n"
    ),
}
OURS, PEERS = "ds run", ("torchrun", "DeepSpeed")


def launchers() -> dict[str, list[str]]:
    """The commands compared, without the script."""
    folder = Path(sys.executable).parent
    peer = Path(os.environ.get("DS_PEER_PYTHON") or ensure("deepspeed")).parent
    return {
        OURS: [str(folder / "ds"), "run", "--nproc", "2"],
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
    commands = launchers()
    with tempfile.TemporaryDirectory() as folder:
        for title, code in SCRIPTS.items():
            path = Path(folder) / "script.py"
            path.write_text(code)
            taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
            for turn in range(repeats + 1):
                for name, command in commands.items():
                    value = seconds([*command, str(path)])
                    if turn:  # the first warms the file cache
                        taken[name].append(value)
            rows[title] = {
                name: {
                    "wall_s": round(statistics.median(wall for wall, _ in values), 2),
                    "cpu_s": round(statistics.median(cpu for _, cpu in values), 2),
                }
                for name, values in taken.items()
            }
            print(f"{title}: {rows[title]}", flush=True)
    return rows


def page(data: dict) -> str:
    """The page, from the record."""
    lines = [
        "# Launch time\n",
        "![Starting two ranks: ds run, torchrun, DeepSpeed](img/launch.svg)\n",
        "What starting and ending two ranks on one host costs: wall and processor seconds of whole commands.\n",
        "| script | launcher | wall s | processor s | wall, of DeepSpeed's | processor, of DeepSpeed's |",
        "|---|---|---|---|---|---|",
    ]
    for script, rows in data["rows"].items():
        peer = rows["DeepSpeed"]
        for name, row in rows.items():
            shares = " | ".join(f"{row[key] / peer[key]:.2f}" for key in ("wall_s", "cpu_s"))
            lines.append(f"| {script} | `{name}` | {row['wall_s']:.2f} | {row['cpu_s']:.2f} | {shares} |")
    lines.append(
        "\n## How it was measured\n\n"
        f"`nox -s bench -- launch`; record `data/launch.json`. Alternating, medians of {data['repeats']}, one OpenMP thread a rank. "
        f"{data['machine']}, {data['cores']} shared cores, Python {data['python']}, {data['date']}. "
        f"{'**Other work ran on the machine.** ' if data['beside_others'] else ''}"
        "\n\n## Limitations\n\n"
        "`ds run` imports torch once: its keeper imports what the script imports of torch, numpy and this project's packages, and "
        "forks the ranks before threads and devices exist. `--start spawn` makes each rank a new process, as the others do; a script "
        "that imports none of these, a module (`-m`), a single rank, bound OpenMP threads or a library that leaves a thread "
        "behind is started so, too.\n\n"
        "[Notes of the laboratory](../decisions/measured/launch.md): what was tried, further tables, causes.\n"
    )
    return "\n".join(lines)


def main(repeats: int = 5, beside_others: str = "") -> int:
    """Measure, write the record and the page, which says so where other work ran on the machine."""
    data = {
        "repeats": repeats,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "date": time.strftime("%Y-%m-%d"),
        "beside_others": beside_others == "beside-others",
        "rows": measured(repeats),
    }
    DATA.write_text(json.dumps(data, indent=1) + "\n")
    PAGE.write_text(page(data))
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2]), *sys.argv[2:3]))
