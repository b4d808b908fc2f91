"""Machine code of the kernels, compiled without a device: registers, spills and shared memory stay what `triton_resources.json` has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
RECORDED = Path(__file__).parent / "triton_resources.json"


def compiled(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "ds_ops.triton_kernels.ahead_of_time", str(RECORDED), *options]
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, capture_output=True, text=True, env=environ, check=False)


@pytest.mark.slow
def test_a_kernel_takes_what_is_recorded() -> None:
    done = compiled("--only", "gate", "--architecture", "90")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kernels compiled" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_kernel_takes_what_is_recorded() -> None:
    done = compiled()
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_kernel_spills() -> None:
    assert [name for name, one in json.loads(RECORDED.read_text()).items() if one["spills"]] == []
