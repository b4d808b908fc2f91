"""Programs that a launcher starts as several processes, and that make no process group themselves."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
LOOP = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[0]
EACH_ITS_OWN = "import os, torch\ntorch.manual_seed(int(os.environ['RANK']))\n"
SCRIPTS = {
    "shard": EACH_ITS_OWN + LOOP + "import torch.distributed as dist\n"
    "print(dist.get_world_size(), optimizer.last.norm, float(model[0].weight.sum()))\n",
    "init": EACH_ITS_OWN + "import ds_zero, torch.distributed as dist\n"
    "with ds_zero.Init():\n"
    "    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 1))\n"
    "with ds_zero.GatheredParameters(model.parameters()):\n"
    "    print(dist.get_world_size(), float(model[0].weight.sum()))\n",
}


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run(script: str, ranks: int, folder: Path) -> list[str]:
    """What each rank prints, started as torchrun starts it."""
    path = folder / "train.py"
    path.write_text(script)
    job = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port()),
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(path)],
            env=os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    printed = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * ranks
    return [text.splitlines()[-1] for text in printed]


@pytest.mark.parametrize("name", SCRIPTS)
def test_ranks_without_a_group_train_one_model(name: str, tmp_path: Path) -> None:
    first, second = run(SCRIPTS[name], 2, tmp_path)
    assert first == second
    assert first.startswith("2 ")


@pytest.mark.slow
def test_one_rank_needs_no_group(tmp_path: Path) -> None:
    script = LOOP + "import torch.distributed as dist\nprint(dist.is_initialized())\n"
    assert run(script, 1, tmp_path) == ["False"]
