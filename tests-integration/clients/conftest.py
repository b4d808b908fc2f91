"""Runs a client script on two ranks with our facade and with DeepSpeed, each in an environment of its own (`nox -s clients`)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
PYTHONS = {"ours": "DS_CLIENTS_PYTHON", "upstream": "DS_PEER_PYTHON"}


class Client:
    """Starts scripts; results are the JSON that rank 0 wrote."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, who: str, script: str, *, ranks: int = 2, **options: Any) -> dict[str, Any]:
        """One script under torchrun with the interpreter of `who`.

        Raises:
            AssertionError: it failed; with the end of what it printed.
        """
        out = self._folder / f"{script}-{who}.json"
        words = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        command = [os.environ[PYTHONS[who]], "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
        command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", str(SCRIPTS / f"{script}.py")]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
        environ.pop("PYTHONPATH", None)
        done = subprocess.run(
            [*command, "--out", str(out), *words], env=environ, capture_output=True, text=True, timeout=170
        )
        assert done.returncode == 0, done.stderr[-6000:]
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    def both(self, script: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The same script with ours, then with upstream's."""
        return self.run("ours", script, **options), self.run("upstream", script, **options)


@pytest.fixture
def client(tmp_path):
    missing = [name for name in PYTHONS.values() if name not in os.environ]
    if missing:
        pytest.skip(f"needs the environments of `nox -s clients` ({', '.join(missing)} not set)")
    return Client(tmp_path)
