"""Messages and bytes of one rank in what a job says beside tensors, by world size: rendezvous, watchdog, agreement, saves.

usage: nox -s bench -- control_plane [--worlds N ...]

No other rank runs. What talks to the job's store runs for real on a store in this process that counts requests, set up as the other ranks would
have left it. What ranks tell each other runs for real with the others' half made up: a rank gets as much as it gives, since all do the
same. The last column is what the same agreement takes as an all-gather, which is how it was.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import ckpt_page
import torch.distributed as dist

from ds_ckpt.coordinator import Coordinator, pack, unpack
from ds_ckpt.save_planner import described, num_planners
from ds_comm.launch import LaunchedProcess
from ds_comm.placement import Box, Interval, TensorShard
from ds_comm.store_rendezvous import _ALL, _roll_call
from ds_comm.watch.alarms import SideChannel

DATA = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "data" / "control_plane.json"
WORLDS = [2, 16, 128, 1024, 4096, 10000]
SAID = {
    "same": [1234567890, 1234567890],
    "aliases": {},
    "clash": None,
    "changed": False,
    "most": 4000,
    "token": "0" * 24,
}


class CountingStore(dist.Store):
    """A store in this process; every call of it is one request to the server of the job."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.inner, self.requests, self.nbytes = store, 0, 0

    def _count(self, *texts: object) -> None:
        self.requests += 1
        self.nbytes += sum(len(str(text)) for text in texts)

    def set(self, key: str, value: str) -> None:  # type: ignore[override]
        self._count(key, value)
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self._count(key)
        found: bytes = self.inner.get(key)
        self.nbytes += len(found)
        return found

    def add(self, key: str, amount: int) -> int:
        self._count(key)
        return int(self.inner.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        self._count(*keys)
        return bool(self.inner.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        self._count(*keys)
        self.inner.wait(keys, timeout or timedelta(seconds=5))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._count(key, desired)
        found: bytes = self.inner.compare_set(key, expected, desired)
        return found

    def append(self, key: str, value: str) -> None:  # type: ignore[override]
        self._count(key, value)
        self.inner.append(key, value)

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)


class OneRank(Coordinator):
    """A rank of many that gets what it gives."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.messages, self.nbytes = rank, size, 0, 0

    def swap(self, data: bytes, to: int, source: int) -> bytes:
        self.messages += 1
        self.nbytes += len(data)
        return data

    def routed(self, messages: dict[int, bytes]) -> None:
        """A route in which others are as this rank is, seen from where they are."""
        from ds_ckpt.coordinator import hops, moving

        held = [(to, self.rank, data) for to, data in messages.items()]
        for step in hops(self.size):
            going, held = moving(held, self.rank, self.size, step)
            came = unpack(self.swap(pack(going), 0, 0))
            held += [((to + step) % self.size, source, data) for to, source, data in came]


def rendezvous(world: int) -> tuple[int, int]:
    store = CountingStore(dist.HashStore())
    store.inner.add("arrived", world - 2)  # all but this rank and the last one, who says so meanwhile
    store.inner.set("end", _ALL)
    launch = LaunchedProcess(rank=world // 3, world_size=world, **_launch_rest())
    _roll_call(store, launch, time.monotonic() + 5)
    return store.requests, store.nbytes


def _launch_rest() -> dict[str, Any]:
    import dataclasses

    given = {"rank", "world_size"}
    rest: dict[str, Any] = {}
    for f in dataclasses.fields(LaunchedProcess):
        if f.name not in given and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            rest[f.name] = {"int": 0, "str": ""}.get(str(f.type))
    return rest


def watchdog(world: int) -> tuple[int, int]:
    """One tick: who left, is there an alarm, another rank's state, and one's own."""
    store = CountingStore(dist.HashStore())
    side = SideChannel(store, 0)
    side._open = store  # without the prefix, whose calls do not come by here
    other = SideChannel(store, 1)
    other._open = store
    other.tell(
        "state", {"pause_until_s": 0.0, "digests": {str(g): {str(b): 2**31 for b in range(8)} for g in range(6)}}
    )
    store.requests, store.nbytes = 0, 0
    side.left(0)
    side.alarm()
    side.ask("state", 1)
    side.tell("state", {"pause_until_s": 0.0, "digests": {str(g): {str(b): 2**31 for b in range(8)} for g in range(6)}})
    return store.requests, store.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS)
    rows = [row(world) for world in parser.parse_args().worlds]
    DATA.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "rows": rows}, indent=1) + "\n")
    ckpt_page.fill()
    for found in rows:
        print(json.dumps(found))


def row(world: int) -> dict[str, Any]:
    agreed = OneRank(world // 3, world)
    agreed.spread(SAID, lambda mine, theirs: mine)
    settled = OneRank(world // 3, world)
    settled.settle(lambda: None)
    planning = OneRank(world // 3, world)
    shards = [
        TensorShard(
            f"param/layers.{i}.weight", (64 * world, 256), "float32", Box.whole((64 * world, 256)), Interval(0, 16384)
        )
        for i in range(4000)
    ]
    count = num_planners(len(shards), world)
    planning.routed(described(shards, count, world))
    leaf = OneRank(world // 3, world)
    leaf.routed({0: b"x" * 400})
    met, ticked = rendezvous(world), watchdog(world)
    return {
        "world": world,
        "rendezvous requests": met[0],
        "rendezvous bytes": met[1],
        "watchdog requests a second": ticked[0],
        "watchdog bytes a second": ticked[1],
        "agreement messages": settled.messages,
        "agreement bytes": settled.nbytes,
        "save without a new plan, messages": agreed.messages + 6 * settled.messages + leaf.messages,
        "save without a new plan, bytes": agreed.nbytes + 6 * settled.nbytes + leaf.nbytes,
        "new plan messages": planning.messages * 2,
        "new plan bytes": planning.nbytes * 2,
        "agreement bytes as an all-gather": world * len(json.dumps(SAID)),
        "new plan bytes as an all-gather": world * sum(map(len, described(shards, 1, world).values())),
    }


if __name__ == "__main__":
    main()
