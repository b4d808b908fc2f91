"""A stage that is killed in the middle of a step: every other rank ends within the deadline and five seconds, and names it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_comm.shm import shm_group

HERE = Path(__file__).parent
DEADLINE_S, GRACE_S = 3.0, 5.0
CASES = [  # backend, schedule, ranks, who, moment
    ("gloo", "1f1b", 3, 1, "forward"),
    ("gloo", "zb-h1", 2, 1, "backward"),
    ("shm", "1f1b", 3, 2, "backward"),
    ("shm", "zb-h1", 3, 0, "forward"),
]


def load(name: str) -> Any:
    """A file of ds-comm's tests: processes that share one import of torch, and ports that nobody else takes."""
    path = HERE.parents[1] / "packages/comm/tests" / name
    spec = importlib.util.spec_from_file_location(f"comm_for_pipe_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made = load("conftest.py").Forked(tmp_path_factory.mktemp("killed"))
    yield made
    made.close()


def clock(output: str, word: str) -> float:
    found = re.search(rf"^{word} ([\d.]+)$", output, re.M)
    assert found is not None, f"no {word} in {output}"
    return float(found.group(1))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case[1:3] == ("1f1b", 3) else pytest.mark.slow) for case in CASES],
    ids=lambda case: "-".join(map(str, case)),
)
def test_the_others_name_it(forked: Any, case: tuple[str, str, int, int, str], tmp_path: Path) -> None:
    backend, schedule, ranks, who, moment = case
    if backend == "shm" and (missing := shm_group.available()):
        pytest.skip(str(missing))
    words = json.dumps(
        {"backend": backend, "schedule": schedule, "who": who, "moment": moment, "deadline_s": DEADLINE_S}
    )
    port = load("divergence/test_divergence.py").free_ports(1)[0]
    env = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
           "DS_COMM_DUMP_DIR": str(tmp_path)}  # fmt: skip
    script = str(HERE / "killed_rank.py")
    ends = forked([([script, words], {**env, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(ranks)])
    parted = clock(ends[who].output, "PART")
    crowd = max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)) / 2)
    for rank, end in enumerate(ends):
        if rank == who:
            continue
        late_s = end.took_s - (parted - clock(end.output, "START"))
        assert late_s <= (DEADLINE_S + GRACE_S) * crowd, f"rank {rank} ended {late_s:.1f} s after"
        assert end.code != 0
        assert "finished" not in end.output
        lines = [line for line in end.output.splitlines() if line.startswith("[ds-comm]") or "CommError" in line]
        assert any(re.search(rf"rank {who}\b", line) for line in lines), f"rank {rank}: {end.output[-1500:]}"
