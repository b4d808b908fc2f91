"""Ranks that do not do the same: both end, soon, and each says who waits for what and where the other is."""

from __future__ import annotations

import os
import random
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ds_comm.shm import shm_group
from ds_comm.watch.dumps import read_dumps, render
from ds_comm.watch.watchdog import EXIT_CODE

DEADLINE_S = 2.0  # from the end of a warm-up, so that it is for Python code only and not for making connections
REPEATS = int(os.environ.get("DS_COMM_DIVERGENCE_REPEATS", "5"))


@dataclass(frozen=True)
class Case:
    name: str
    backend: str = "gloo"
    world: int = 2


@dataclass(frozen=True)
class Outcome:
    codes: list[int]
    outputs: list[str]
    took_s: float


Run = Callable[[list[tuple[list[str], dict[str, str]]]], list[Any]]  # conftest.Forked


def diverge(forked: Run, cases: Sequence[Case], dumps: Path) -> list[Outcome]:
    """Each case with its number of ranks, all at the same time: they mostly wait."""
    ports = free_ports(len(cases))
    commands = [command for case, port in zip(cases, ports, strict=True) for command in ranks_of(case, port, dumps)]
    ends = iter(forked(commands))
    outcomes = []
    for case in cases:
        ended = [next(ends) for _ in range(case.world)]
        codes, outputs = [end.code for end in ended], [end.output for end in ended]
        outcomes.append(Outcome(codes, outputs, max(end.took_s for end in ended)))
    return outcomes


def ranks_of(case: Case, port: int, dumps: Path) -> list[tuple[list[str], dict[str, str]]]:
    words = [str(Path(__file__).with_name("ranks.py")), case.name, case.backend, str(DEADLINE_S)]
    env = {
        "WORLD_SIZE": str(case.world),
        "LOCAL_WORLD_SIZE": str(case.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_COMM_DUMP_DIR": str(dumps),
    }
    return [(words, {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(case.world)]


def free_ports(count: int) -> list[int]:
    """Ports below those that the system hands out itself: it gives these to the connections of worlds that start meanwhile."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    for port in random.sample(range(max(1024, first - 12000), first), k=4000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"{count} free ports were needed below {first}, {len(found)} found")


def lines(output: str) -> list[str]:
    """What the watchdog said, or the error of the operation: one line each."""
    return [line for line in output.splitlines() if line.startswith("[ds-comm]") or "CommError:" in line]


# case: what rank 0 says, what rank 1 says (None: it says nothing of others, it is the one that ended)
MATRIX = {
    "skips a submodule": (
        r"rank 0 waits since .* for all_reduce\[layers\.1\] #11 float32\[8\] of group 'world' at .*ranks\.py:\d+ in forward; "
        r"rank 1 came with all_reduce\[layers\.2\] #11 .* instead and is at .*ranks\.py:\d+ in forward",
        r"rank 1 waits since .* for all_reduce\[layers\.2\] #11 .*rank 0 came with all_reduce\[layers\.1\] #11",
    ),
    "one forward fewer": (
        r"rank 0 waits .* all_reduce\[layers\.0\] #16 .* rank 1 came with barrier\[save\] #16 .* in save",
        r"rank 1 waits .* barrier\[save\] #16 .* rank 0 came with all_reduce\[layers\.0\] #16 .* in forward",
    ),
    "shorter loader": (
        r"rank 0 waits .* all_reduce\[layers\.0\] #16 .*; rank 1 has ended \(process \d+ exited\)",
        None,
    ),
    "raises": (
        r"rank 0 waits .* all_reduce\[layers\.0\] #10 .*; rank 1 has ended \(ValueError: boom in forward at .*ranks\.py:\d+",
        r"ValueError: boom in forward",
    ),
    "saves alone": (
        r"rank 0 waits .* all_reduce\[layers\.0\] #10 .* rank 1 came with barrier\[save\] #10",
        r"rank 1 waits .* barrier\[save\] #10 .* rank 0 came with all_reduce\[layers\.0\] #10",
    ),
    "another shape": (
        r"rank 0 waits .* float32\[8\] .* rank 1 came with .* float32\[9\]",
        r"rank 1 waits .* float32\[9\] .* rank 0 came with .* float32\[8\]",
    ),
    "another dtype": (
        r"rank 0 waits .* float32\[8\] .* rank 1 came with .* float64\[8\]",
        r"rank 1 waits .* float64\[8\] .* rank 0 came with .* float32\[8\]",
    ),
    "another root": (
        None,
        r"broadcast\[layers\.0\] #10",
    ),
    "sleeps": (
        r"rank 0 waits .* all_reduce\[layers\.0\] #10 .*; rank 1 did not come: it is at .*ranks\.py:\d+ in run",
        r"rank 1 is at .*ranks\.py:\d+ in run and did not come to all_reduce\[layers\.0\] #10 .*, for which rank 0 waits",
    ),
    "is killed": (
        r"rank 0 waits .* all_reduce\[layers\.0\] #10 .*; rank 1 has ended \(its process \d+ died without a word\), last in "
        r"all_reduce\[layers\.2\] #9",
        None,
    ),
    "rank 0 ends first": (
        None,
        r"rank 1 waits .* all_reduce\[layers\.0\] #10 .*; rank 0 has ended \(process \d+ exited\)",
    ),
    "both receive": (
        r"rank 0 waits .* recv\[activations\] .*; rank 1 did not come: it waits for recv\[activations\]",
        r"rank 1 waits .* recv\[activations\] .*; rank 0 did not come: it waits for recv\[activations\]",
    ),
}


_STUCK = r"rank 1 did not come: it is at .*ranks\.py:\d+ in shared_memory"
MATRIX |= {
    "shared memory number": (
        rf"rank 0 waits since .* for post\[layers\.1\] #2 of group 'world' at .*ranks\.py:\d+ in shared_memory; {_STUCK}",
        r"rank 1 is at .*ranks\.py:\d+ in shared_memory and did not come to post\[layers\.1\] #2 .*, for which rank 0 waits",
    ),
    "shared memory arena": (
        rf"rank 0 waits since .* for barrier\[layers\.1\] #2 of group 'world' .*; {_STUCK}",
        r"rank 1 is at .*ranks\.py:\d+ in shared_memory and did not come to barrier\[layers\.1\] #2 .*, for which rank 0 waits",
    ),
    "shared memory channel": (
        rf"rank 0 waits since .* for recv\[hidden\] of group 'world' .*; {_STUCK}",
        r"rank 1 is at .*ranks\.py:\d+ in shared_memory",
    ),
    "shared memory number, gone": (
        r"rank 0 waits since .* for post\[layers\.1\] #2 .*; rank 1 has ended \(process \d+ exited\)",
        None,
    ),
    "shared memory number, other": (
        r"rank 0 waits since .* for post\[layers\.1\] #2 .*; rank 1 came with post\[layers\.2\] #2 .* instead",
        r"rank 1 waits since .* for post\[layers\.2\] #2 .*; rank 0 came with post\[layers\.1\] #2 .* instead",
    ),
}


FINE = ["asks for patience", "finishes early", "shared memory, slow"]


@pytest.fixture(scope="module")
def outcomes(forked: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    cases = [Case("sleeps", world=4), *map(Case, [*MATRIX, *FINE])]
    if not shm_group.available():
        cases += [Case(name, "shm") for name in [*MATRIX, *FINE]]
    return dict(zip(cases, diverge(forked, cases, tmp_path_factory.mktemp("dumps")), strict=True))


@pytest.mark.parametrize("case", MATRIX)
def test_both_ranks_end_and_name_each_other(outcomes: dict[Case, Outcome], case: str) -> None:
    outcome = outcomes[Case(case)]
    assert outcome.took_s < 60, "no hang; how soon is measured by the benchmark"
    for rank, expected in enumerate(MATRIX[case]):
        if expected is not None:
            assert outcome.codes[rank] != 0
            assert re.search(expected, outcome.outputs[rank]), outcome.outputs[rank]


@pytest.mark.skipif(bool(shm_group.available()), reason=f"no shm: {shm_group.available()}")
@pytest.mark.parametrize("case", MATRIX)
def test_on_shared_memory_they_do_as_well(outcomes: dict[Case, Outcome], case: str) -> None:
    outcome = outcomes[Case(case, "shm")]
    assert outcome.took_s < 60
    for rank, expected in enumerate(MATRIX[case]):
        if expected is not None:
            assert outcome.codes[rank] != 0
            (line,) = lines(outcome.outputs[rank]) or [outcome.outputs[rank]]
            assert re.search(rf"rank {rank} .*rank {1 - rank} |boom in forward", line), outcome.outputs[rank]


@pytest.mark.parametrize("case", ["skips a submodule", "sleeps", "another shape"])
def test_what_the_watchdog_ends_has_its_exit_code_and_one_line(outcomes: dict[Case, Outcome], case: str) -> None:
    outcome = outcomes[Case(case)]
    assert outcome.codes == [EXIT_CODE, EXIT_CODE]
    for output in outcome.outputs:
        (line,) = lines(output)
        assert re.search(r"ds explain comm-(hang|mismatch)$", line)


def test_four_ranks_name_the_one_that_did_not_come(outcomes: dict[Case, Outcome]) -> None:
    outcome = outcomes[Case("sleeps", world=4)]
    assert outcome.codes == [EXIT_CODE] * 4
    for rank in (0, 2, 3):
        (line,) = lines(outcome.outputs[rank])
        assert re.search(rf"rank {rank} waits .*; rank 1 did not come", line), line
        assert line.count("did not come") == 1


@pytest.mark.parametrize("case", FINE)
def test_what_is_no_hang_is_left_alone(outcomes: dict[Case, Outcome], case: str) -> None:
    for found, outcome in outcomes.items():
        if found.name == case:
            assert outcome.codes == [0, 0], outcome.outputs
            assert outcome.outputs == ["finished\n", "finished\n"]


ISSUE = ["skips a submodule", "one forward fewer", "shorter loader", "raises", "saves alone", "another shape"]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_no_repeat_hangs(forked: Run, tmp_path: Path) -> None:
    """The recorded 100 repeats are DS_COMM_DIVERGENCE_REPEATS=100; `-s` shows how soon they ended."""
    cases = [
        Case(name, backend) for name in ISSUE for backend in (["gloo"] if shm_group.available() else ["gloo", "shm"])
    ]
    times = []
    for repeat in range(REPEATS):
        for case, outcome in zip(cases, diverge(forked, cases, tmp_path), strict=True):
            times.append(outcome.took_s)
            assert outcome.took_s < 60, (repeat, case)
            ended_first = 1 if case.name in ("shorter loader", "raises") else None
            for rank, (code, output) in enumerate(zip(outcome.codes, outcome.outputs, strict=True)):
                if rank != ended_first:
                    assert code != 0, (repeat, case, rank)
                    assert any(re.search(rf"rank {rank} .*rank {1 - rank} ", line) for line in lines(output)), output
                    assert re.search(r"all_reduce|barrier", output), output
    times.sort()
    print(
        f"{len(times)} worlds of two diverged and ended; median {times[len(times) // 2]:.1f} s, last {times[-1]:.1f} s"
    )


_STEP = r"ranks\.py:\d+ in step"
TORCH = {
    "torch sleeps": (
        rf"rank 0 waits .* for all_reduce\[torch\] #4 float32\[8\] of group '1' at .*{_STEP}; rank 1 did not come: it is at .*called_by_torch",
        r"rank 1 is at .*called_by_torch and did not come to all_reduce\[torch\] #4",
    ),
    "torch ddp sleeps": (
        rf"rank 0 waits .* of group 'world' at .*{_STEP}; rank 1 did not come: it is at .*called_by_torch",
        rf"rank 1 is at .*called_by_torch and did not come to .*\[torch\] .*, for which rank 0 waits at .*{_STEP}",
    ),
    "torch other": (
        r"rank 0 waits .* for all_reduce\[torch\] #4 .*; rank 1 came with broadcast\[torch\] #4",
        r"rank 1 waits .* for broadcast\[torch\] #4 .*; rank 0 came with all_reduce\[torch\] #4",
    ),
}


@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("gloo", ["torch sleeps", "torch ddp sleeps", "torch works"]),
        pytest.param("shm", ["torch ddp sleeps"], marks=pytest.mark.slow),
        pytest.param("gloo", [*TORCH, "torch asks", "torch works"], marks=pytest.mark.slow),
        pytest.param("shm", ["torch sleeps", "torch ddp sleeps", "torch asks", "torch works"], marks=pytest.mark.slow),
    ],
)
def test_what_torch_calls_is_watched(forked: Run, backend: str, names: list[str], tmp_path: Path) -> None:
    """DDP and torch's own functions, after a plain `init_process_group`: they hung without a word.

    Over shm DDP crashed, too, when the other rank had ended. That calls differ shm says itself.
    """
    if backend == "shm" and (why := shm_group.available()):
        pytest.skip(f"no shm backend here: {why}")
    cases = [Case(name, backend) for name in names]
    outcomes = dict(zip([case.name for case in cases], diverge(forked, cases, tmp_path), strict=True))
    for name, outcome in outcomes.items():
        shown = "\n".join(outcome.outputs)
        assert outcome.codes == [EXIT_CODE if name in TORCH else 0] * 2, shown
        for output, wanted in zip(outcome.outputs, TORCH.get(name, ()), strict=name in TORCH):
            assert re.search(wanted, "\n".join(lines(output))), f"{wanted}\n{shown}"
    if "torch sleeps" not in outcomes:
        return
    text = render(read_dumps(tmp_path, re.search(r"--job (\S+)", outcomes["torch sleeps"].outputs[0])[1]))
    assert re.search(
        r"group '1': ranks differ at #4\n(.*\n)*.*#4   <- differs\n +rank 0: all_reduce\[torch\].* waits", text
    ), text
    assert "rank 1: did not come" in text
