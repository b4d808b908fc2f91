"""Runs one host's part of a job whose ranks are started again after a failure and whose hosts may come and go.

A process of its own below the keeper: it imports torch, whose elastic agent does the meeting of hosts, the numbering of
ranks and the restarts. The agent sets torchrun's variables; `ds_launcher.shim` adds ours in each rank.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from ds_launcher.blame import closing_lines, exit_status, explain

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """`python -m ds_launcher.elastic SPEC`: SPEC is the JSON that `ds_launcher.job` makes."""
    spec = json.loads(argv[0])
    if spec["log_dir"]:
        return _run(spec, Path(spec["log_dir"]))
    with tempfile.TemporaryDirectory(prefix="ds-run-") as folder:
        return _run(spec, Path(folder))


def _run(spec: dict[str, Any], folder: Path) -> int:
    # Here, in the agent's process, torch is needed; `ds run` itself never imports it.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=spec["min_nodes"],
        max_nodes=spec["max_nodes"],
        nproc_per_node=spec["nproc"],
        run_id=spec["run_id"],
        role="default",
        rdzv_backend="c10d",
        rdzv_endpoint=spec["endpoint"],
        max_restarts=spec["max_restarts"],
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), tee=Std.ALL),
        log_line_prefix_template="[rank${rank}] ",
    )
    shim = [sys.executable, "-P", "-m", "ds_launcher.shim", *(["--local-rank-arg"] if spec["local_rank_arg"] else [])]
    try:
        elastic_launch(config, shim[0])(*shim[1:], "--", *spec["command"])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        _say(f"rank {rank} failed first ({explain(failure.exitcode)}); no restart is left")
        written = sorted(folder.glob(f"**/attempt_*/{failure.local_rank}/stderr.log"), key=lambda p: p.stat().st_mtime)
        lines = written[-1].read_bytes().splitlines() if written else []
        sys.stderr.buffer.write(b"".join(line + b"\n" for line in closing_lines(lines)))
        return exit_status(failure.exitcode)
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"ds run: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
