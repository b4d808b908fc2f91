"""Runs a client script on two ranks with our facade and with DeepSpeed, each in an environment of its own (`nox -s clients`).

The sample that needs neither (test_sample.py) imports the facade from the checkout.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
PYTHONS = {"ours": "DS_CLIENTS_PYTHON", "upstream": "DS_PEER_PYTHON"}
TABLE = "DS_CLIENTS_TABLE"
"""Names a file that collects, test by test, how far losses are apart, step times and peak memory of both."""

if importlib.util.find_spec("deepspeed") is None:
    sys.path.insert(0, str(ROOT / "packages" / "compat" / "src"))


class Client:
    """Starts scripts; results are the JSON that rank 0 wrote.

    Args:
        folder: Where results, models and checkpoints go.
        case: The name under which `both` records what it saw.
    """

    def __init__(self, folder: Path, case: str) -> None:
        self.folder, self._case = folder, case

    def run(
        self, who: str, script: str, *, launcher: tuple[str, ...] | None = None, ranks: int = 2, **options: Any
    ) -> dict[str, Any]:
        """One script with the interpreter of `who`.

        Args:
            launcher: The command that starts ranks, its program from that environment; None is torchrun.
        Raises:
            AssertionError: it failed; with the end of what it printed.
        """
        python = Path(os.environ[PYTHONS[who]])
        out = self.folder / f"{script}-{who}.json"
        out.unlink(missing_ok=True)
        words = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        if launcher is None:
            start = [str(python), "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
            start += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
        else:
            start = [str(python.parent / launcher[0]), *launcher[1:]]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
        environ["PATH"] = f"{python.parent}{os.pathsep}{environ.get('PATH', '')}"
        environ.pop("PYTHONPATH", None)
        command = [*start, str(SCRIPTS / f"{script}.py"), "--out", str(out), *words]
        code, said = _finished(command, environ)
        assert code == 0, said[-6000:]
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    def both(self, script: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The same script with ours, then with upstream's."""
        ours, upstream = self.run("ours", script, **options), self.run("upstream", script, **options)
        if TABLE in os.environ:
            self._record(Path(os.environ[TABLE]), {"ours": ours, "upstream": upstream})
        return ours, upstream

    def _record(self, file: Path, found: dict[str, dict[str, Any]]) -> None:
        rows = json.loads(file.read_text())["rows"] if file.exists() else {}
        row: dict[str, Any] = {"steps": len(found["ours"]["losses"])}
        for who, values in found.items():
            row[who] = {
                "last_loss": round(values["losses"][-1], 7),
                # The first steps also compile, allocate and open connections.
                "step_ms": round(1e3 * statistics.median(values["seconds"][2:]), 2),
                "peak_mib": round(values["peak_bytes"] / 2**20),
            }
        pairs = zip(found["ours"]["losses"], found["upstream"]["losses"], strict=True)
        row["largest_difference"] = max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)
        rows[self._case] = row
        file.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def _finished(command: list[str], environ: dict[str, str]) -> tuple[int, str]:
    """Exit code and stderr. DeepSpeed compiles its operations when it first uses them, hence the limit."""
    process = subprocess.Popen(
        command,
        env=environ,
        cwd=SCRIPTS,
        text=True,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        _, said = process.communicate(timeout=400)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, said


@pytest.fixture
def client(tmp_path, request):
    missing = [name for name in PYTHONS.values() if name not in os.environ]
    if missing:
        pytest.skip(f"needs the environments of `nox -s clients` ({', '.join(missing)} not set)")
    return Client(tmp_path, request.node.name.removeprefix("test_"))
