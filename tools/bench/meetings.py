"""Engines of one layer or model that are alive at once and take turns (`turns.py`): what each said first, and what its turns took."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from peers import python_of
from quiet import Watch
from turns import Ranks, Told, meet

WORKERS = Path(__file__).with_name("workers")


def answer_of(worker: str, *words: object, ranks: int = 2, python: object = sys.executable) -> dict[str, Any]:
    """What rank 0 of a fresh job says at its end."""
    command = [str(python), str(WORKERS / f"{worker}.py"), *map(str, words)]
    job = Ranks(command, ranks, interactive=False)
    try:
        return job.answer(0)
    finally:
        job.end()


class Met:
    """One meeting, from its begin to its end. `first`: facts of every rank of an engine; `turns`: what each cycle took; `others`: of the machine."""

    def __init__(
        self, worker: str, engines: Sequence[str], words: Sequence[str], cycles: int, steps: int, ranks: int = 2
    ) -> None:
        self._worker, self._words, self._ranks = WORKERS / f"{worker}.py", words, ranks
        self.first: dict[str, list[dict[str, Any]]] = {}
        watch = Watch()
        self.turns = meet({engine: partial(self.start, engine) for engine in engines}, cycles, steps)
        self.others = watch.others()

    def start(self, engine: str) -> Ranks:
        """The ranks of an engine, DeepSpeed's in its own environment."""
        command = [python_of(engine), str(self._worker), engine, *self._words]
        return Told(command, self._ranks, lambda found: self.first.update({engine: found}))

    def ms(self, engine: str) -> float:
        """The median step."""
        return statistics.median(turn["ms"] for turn in self.turns[engine])

    def beside(self, mine: str, peer: str) -> float | None:
        """A step over one of the peer of the same moment; None where one of them failed."""
        if mine not in self.turns or peer not in self.turns:
            return None
        pairs = zip(self.turns[mine], self.turns[peer], strict=True)
        return statistics.median(a["ms"] / b["ms"] for a, b in pairs)

    def rows(self, peer: str, within: float = 1e-5, computes_less: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
        """What each engine took and kept in all its ranks, also beside the peer; losses are compared with the peer's, or the last engine's."""
        whole = [engine for engine in self.turns if engine not in computes_less]
        base, rows = peer if peer in self.turns else whole[-1], {}
        for engine in self.turns:
            facts = self.first[engine]
            rows[engine] = {
                "ms": self.ms(engine),
                "mb": sum(float(one["mb"]) for one in facts),
                "of_deepspeed": self.beside(engine, peer),
                "losses": facts[0]["losses"],
                "alike": engine in computes_less or self.alike(engine, base, within),
            }
            print(f"{engine}: {rows[engine]}", flush=True)
        return rows

    def alike(self, engine: str, other: str, within: float = 1e-5) -> bool:
        """Whether the first losses agree."""
        pairs = zip(*(self.first[e][0]["losses"] for e in (engine, other)), strict=True)
        return all(abs(a - b) <= within * abs(b) for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Who meets, and who is compared: (ours, peer, aim). The aim is ">= x" the peer's speed, or "<= x" of its time, or "" for none."""

    config: str
    ranks: int
    engines: Sequence[str]
    pairs: Sequence[tuple[str, str, str]]
    cycles: int
    steps: int


def compared(worker: str, meetings: Iterable[Meeting], computes_less: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A line of the record for every pair. `computes_less`: peers that do a part of the work, whose losses are not compared."""
    for one in meetings:
        met = Met(worker, one.engines, [one.config], one.cycles, one.steps, one.ranks)
        print(f"{one.config}, {one.ranks} rank(s): " + ", ".join(f"{e} {met.ms(e):.2f} ms" for e in met.turns))
        for ours, peer, aim in one.pairs:
            faster = aim.startswith(">=")
            of = met.beside(peer, ours) if faster else met.beside(ours, peer)
            if of is None:
                print(f"  {ours} beside {peer}: one of them failed")
                continue
            alike = peer in computes_less or met.alike(ours, peer)
            said = f"{of:.2f} x the {'speed' if faster else 'time'} of {peer} (aim {aim or 'none'})"
            print(f"  {ours}: {said}{'' if alike else ', LOSSES DIFFER'}", flush=True)
            yield {"config": one.config, "ranks": one.ranks, "ours": ours, "peer": peer, "ratio": of, "aim": aim,
                   "ms": [met.ms(ours), met.ms(peer)], "mb": [met.first[e][0].get("mb") for e in (ours, peer)],
                   "alike": alike, "others": met.others}  # fmt: skip
