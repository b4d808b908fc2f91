"""Engines that are alive at once and take turns: what one does is compared with what another did some seconds before.

The speed of a virtual machine changes by a third within minutes, so that two processes timed one after the other differ by more
than what is measured. Each engine is a set of ranks (`workers/zero.py` with 0 steps) that sleeps until it is told to go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol, TypeVar

_T = TypeVar("_T")
LIMIT_S = 240
"""Ranks that have not answered by then are killed."""


class RankFailedError(Exception):
    """A rank ended; the end of what it wrote is the message."""


class Hosts(Protocol):
    """Hosts of one rank each."""

    address: str

    def command(self, rank: int, command: list[str]) -> list[str]:
        """What runs `command` on the host of a rank."""


def first_in_line(pid: int) -> None:
    """Let the session of a process go before others of the machine, where the kernel groups by sessions and lets us say so."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("-15")


class Ranks:
    """The processes of one engine: `command` once per rank, with the variables that torch's rendezvous wants.

    `hosts`: what goes before the command of each rank, which is then the one rank of a host of its own; the first is where they meet.
    """

    def __init__(self, command: list[str], world: int, *, interactive: bool, hosts: Hosts | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = port = str(probe.getsockname()[1])
        env = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env |= {"WORLD_SIZE": str(world)}
        env |= {"DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore", "LOCAL_SIZE": str(world)}
        if hosts is not None:
            env |= {"MASTER_ADDR": hosts.address, "LOCAL_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        self._errors: list[IO[str]] = []
        for _ in range(world):
            self._errors.append(tempfile.TemporaryFile("w+"))  # noqa: SIM115 (they live as long as the ranks)
        self.processes = [
            subprocess.Popen(
                command if hosts is None else hosts.command(r, command),
                env=env | {"RANK": str(r), "LOCAL_RANK": str(r if hosts is None else 0)},
                text=True, stderr=self._errors[r], stdout=subprocess.PIPE,
                stdin=subprocess.PIPE if interactive else subprocess.DEVNULL,
                start_new_session=True,  # the kernel shares processors between sessions, see `burst` of the worker
            )
            for r in range(world)
        ]  # fmt: skip
        # From the start, so that a run is short; the rank itself says it again around what is timed.
        for p in self.processes:
            first_in_line(p.pid)

    def answers(self) -> list[dict]:
        """The next line of JSON of every rank.

        Raises:
            RankFailedError: a rank closed its output first, or was killed because no answer came in time.
        """
        limit = threading.Timer(LIMIT_S, lambda: [p.kill() for p in self.processes])
        limit.start()
        try:
            return [self.answer(r) for r in range(len(self.processes))]
        finally:
            limit.cancel()

    def answer(self, rank: int) -> dict:
        """The next line of JSON of one rank."""
        out = self.processes[rank].stdout
        assert out is not None
        for line in out:
            if line.startswith("{"):
                return json.loads(line)
        self._errors[rank].seek(0)
        raise RankFailedError(f"rank {rank}: {self._errors[rank].read().strip().splitlines()[-1:]}")

    def go(self, first: int, count: int) -> dict[str, float]:
        """Let the ranks make so many steps together; medians over all but the first quarter.

        A step ends when its slowest rank has ended. The first steps of a turn find another engine's data in the caches, which between
        steps of training is not so.
        """
        for p in self.processes:
            assert p.stdin is not None
            p.stdin.write(f"{first} {count}\n")
            p.stdin.flush()
        answers, skip = self.answers(), -(-count // 4)
        steps = zip(*(a["ms"] for a in answers), strict=True)
        used = statistics.mean(statistics.median(a["cpu_ms"][skip:]) for a in answers)
        peak = max(a.get("peak_mb", 0.0) for a in answers)
        return {"ms": statistics.median([max(ranks) for ranks in steps][skip:]), "cpu_ms": used, "peak_mb": peak}

    def end(self) -> None:
        for p in self.processes:
            p.kill()
            p.communicate()
        for file in self._errors:
            file.close()
        # DeepSpeed's shared buffers outlive it: 69 MB a rank and run, until the machine has no memory left.
        for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{self._port}_*"):
            left.unlink(missing_ok=True)


class Told(Ranks):
    """Ranks whose first lines are facts about the engine: `keep` is given them."""

    def __init__(self, command: list[str], world: int, keep: Callable[[list[dict]], None]) -> None:
        super().__init__(command, world, interactive=True)
        self._keep: Callable[[list[dict]], None] | None = keep

    def answers(self) -> list[dict]:
        found = super().answers()
        if self._keep is not None:
            self._keep(found)
            self._keep = None
        return found


def meet(start: dict[str, Callable[[], Ranks]], cycles: int, count: int) -> dict[str, list[dict[str, float]]]:
    """{engine: what each cycle took}; in every cycle every engine has one turn of `count` steps, in an order drawn anew.

    A first cycle is not counted. An engine that fails leaves, and is not in the result.
    """
    alive: dict[str, Ranks] = {}
    found: dict[str, list[dict[str, float]]] = {}
    order = random.Random(0)
    try:
        for engine, make in start.items():
            alive[engine] = make()
        for engine in list(start):
            _or_leave(alive, engine, lambda ranks: ranks.answers())
        for cycle in range(cycles + 1):
            for engine in order.sample(sorted(alive), len(alive)):
                took = _or_leave(alive, engine, lambda ranks, at=cycle * count: ranks.go(at, count))
                if cycle and took is not None:
                    found.setdefault(engine, []).append(took)
        return {e: found[e] for e in start if e in alive}
    finally:
        for ranks in alive.values():
            ranks.end()


def _or_leave(alive: dict[str, Ranks], engine: str, act: Callable[[Ranks], _T]) -> _T | None:
    try:
        return act(alive[engine])
    except (RankFailedError, BrokenPipeError) as error:
        print(f"  {engine} left: {error}")
        alive.pop(engine).end()
        return None
