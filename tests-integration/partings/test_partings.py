"""Jobs whose ranks part, drawn: each ends soon and says who and where; none that is only slow is ended.

Sixty are drawn from stages, transports, numbers of ranks, moments and kinds, always the same ones; a sample runs by
default, all of them with `-m slow`. Where ranks that differ still do the same collectives (a branch at stage 0), the job may as well
finish: then every rank does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from ds_comm.shm import shm_group

HERE = Path(__file__).parent


def load(name: str) -> Any:
    """A file of ds-comm's tests: processes that share one import of torch, and ports that nobody else takes."""
    path = HERE.parents[1] / "packages/comm/tests" / name
    spec = importlib.util.spec_from_file_location(f"comm_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DEADLINE_S = 3.0
GRACE_S = 5.0  # to say where everyone is and end
KINDS = ["stuck", "slow", "gone", "branch", "order", "shape", "hook", "loader", "scheduler", "killed"]
DIFFER = ("branch", "order")  # whose jobs may finish
RAISE = ("hook", "loader", "scheduler")
MOMENTS = ["forward", "backward", "before the update", "between steps"]
BEFORE = "before they met"  # nobody knows then where a rank is, only that it did not come
TRANSPORTS = ["gloo", "gloo+private", *([] if shm_group.available() else ["shm", "shm+private"])]


@dataclass(frozen=True)
class Parting:
    stage: int
    transport: str
    ranks: int
    who: int
    moment: str
    kind: str

    def __str__(self) -> str:
        return f"stage {self.stage}, {self.transport}, rank {self.who} of {self.ranks} is {self.kind} at {self.moment}"


def drawn(count: int, seed: int) -> list[Parting]:
    rng, found = random.Random(seed), []
    for number in range(count):
        ranks = rng.choice([2, 2, 3, 4])
        found.append(
            Parting(
                rng.randrange(4),
                rng.choice(TRANSPORTS),
                ranks,
                rng.randrange(ranks),
                rng.choice(MOMENTS),
                KINDS[number % len(KINDS)],  # each kind equally often
            )
        )
    return found


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made = load("conftest.py").Forked(tmp_path_factory.mktemp("partings"))
    yield made
    made.close()


def commands(parting: Parting, port: int, dumps: Path, deadline_s: float) -> list[tuple[list[str], dict[str, str]]]:
    words = {name: value for name, value in asdict(parting).items() if name != "ranks"} | {"deadline_s": deadline_s}
    env = {
        "WORLD_SIZE": str(parting.ranks),
        "LOCAL_WORLD_SIZE": str(parting.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_COMM_DUMP_DIR": str(dumps),
    }
    return [
        ([str(HERE / "rank.py"), json.dumps(words)], {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(parting.ranks)
    ]


def clock(output: str, word: str) -> float | None:
    found = re.search(rf"^{word} ([\d.]+)$", output, re.M)
    return None if found is None else float(found.group(1))


def judge(parting: Parting, ends: Sequence[Any], deadline_s: float) -> list[str]:
    """What is wrong with how the ranks of a job ended."""
    wrong: list[str] = []
    finished = ["finished" in end.output for end in ends]
    parted = clock(ends[parting.who].output, "PART")
    if parted is None:
        return [f"it did not come to its parting: {[end.output for end in ends]}"]
    if parting.kind == "slow" or (parting.kind in DIFFER and all(finished)):
        if not all(finished) or any(end.code for end in ends):
            wrong.append(f"it was ended: {[end.output for end in ends]}")
        return wrong
    crowd = max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)) / 2)
    for rank, end in enumerate(ends):
        if rank == parting.who and parting.moment == BEFORE:
            continue  # nobody watches it yet
        # took_s runs from just before the fork; START is just after it.
        began = clock(end.output, "START") or parted
        late_s = end.took_s - (parted - began)
        if late_s > (deadline_s + GRACE_S) * crowd:
            wrong.append(f"rank {rank} ended {late_s:.1f} s after the parting")
        if rank == parting.who and parting.kind not in ("stuck", *DIFFER, "shape"):
            continue
        if end.code == 0:
            wrong.append(f"rank {rank} ended well")
        lines = [line for line in end.output.splitlines() if line.startswith("[ds-comm]") or "CommError" in line]
        others = [r for r in range(parting.ranks) if r != rank] if rank == parting.who else [parting.who]
        named = any(re.search(rf"rank {other}\b", line) for line in lines for other in others)
        placed = any(
            re.search(r"rank\.py:\d+ in|#\d+|has ended|\bpost\[|_(gather|scatter|reduce)", line) for line in lines
        )
        if not (named and (placed or parting.moment == BEFORE)):
            wrong.append(f"rank {rank} does not say who and where: {end.output[-600:]}")
        if parting.kind in RAISE and not any("ValueError: boom" in line for line in lines):
            wrong.append(f"rank {rank} does not say what was raised: {lines}")
    return wrong


def run(forked: Any, partings: Sequence[Parting], folder: Path, deadline_s: float = DEADLINE_S) -> None:
    ports = load("divergence/test_divergence.py").free_ports(len(partings))
    ends = iter(
        forked([c for one, port in zip(partings, ports, strict=True) for c in commands(one, port, folder, deadline_s)])
    )
    wrong = {str(one): judge(one, [next(ends) for _ in range(one.ranks)], deadline_s) for one in partings}
    told = "\n".join(f"{name}:\n  " + "\n  ".join(found) for name, found in wrong.items() if found)
    assert not told, told


@pytest.mark.timeout(400)
def test_a_sample(forked: Any, tmp_path: Path) -> None:
    every = drawn(60, seed=19)
    run(forked, [every[number] for number in (0, 12, 25, 38)], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_before_they_met(forked: Any, tmp_path: Path) -> None:
    kinds = [("stuck", 0), ("stuck", 1), ("gone", 0), ("gone", 1), ("killed", 2)]
    run(forked, [Parting(1, TRANSPORTS[-1], 3, who, BEFORE, kind) for kind, who in kinds], tmp_path, deadline_s=20.0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, 60, 6))
def test_sixty(forked: Any, tmp_path: Path, first: int) -> None:
    run(forked, drawn(60, seed=19)[first : first + 6], tmp_path)
