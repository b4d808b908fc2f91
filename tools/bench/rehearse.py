"""Rehearsals beside the real runs of the same, and curves over worlds that are not there: ours, FSDP2, DDP, DeepSpeed.

usage: nox -s bench -- rehearse [--only true|curves|hosts] [--engines ENGINE ...]

`true`: two ranks, a core each, over links that are measured before; each engine's real step and its rehearsed one, in turns. `curves`: the same
worker from 2 to 1,024 ranks over links that are scaled so that communication takes as large a share of computing as on H100s with 400 Gb/s
a rank. `hosts`: two hosts, which are network namespaces with a link of 1 and of 10 Gb/s (root only), in fp32 and bf16, beside what the bytes allow
by the rehearsal over such a link. The model is that of `nox -s bench -- zero` (17 M parameters, 1 x 32 tokens). Writes docs/benchmarks/data/rehearse.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from unittest import mock

import records
from bench_page import filled, markdown_table
from peers import python_of
from quiet import Watch
from tables import HEADS, WORDS
from turns import Ranks, first_in_line, meet

from ds_comm.rehearsal.fabric import as_json, fabric_from
from ds_comm.rehearsal.rehearse_cli import rehearse
from ds_config.errors import DsError

PAGE = records.PAGES / "rehearse.md"
WORKER = Path(__file__).parent / "workers" / "zero.py"
MODE_WORKER = WORKER.with_name("modes.py")
ENGINES = ["ddp", "fsdp2", "ours1", "ours2", "ours3", "deepspeed1", "deepspeed3"]
WORLDS = [2, 8, 32, 128, 512, 1024]
LINKS = "inside=4.5,20;between=3.6,60"
"""A rank's share: an H100 computes the 3 G model of the issue in 485 ms beside 50 GB/s; this model takes 250 ms here, of which gradients are 68 MB."""
ROUNDS, TURNS, STEPS = 4, 1, 10
KEEPS = {"MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""glibc gives the end of its heap back and takes it again, up to 40 MB a step, or does not, by where it put things: up to a third of a step of stage 3."""
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
"""For peaks of memory: what is freed is no longer resident, so that holes of the heap do not count."""
PAYLOAD = 1448 / 1538
"""Of what a link carries: the rest is Ethernet's, IP's and TCP's."""
HOST_ENGINES = {
    "comm": ["ddp", "fsdp2", "ours1", "ours2", "ours3", "deepspeed1", "deepspeed2", "deepspeed3"],
    "comm_bf16": ["fsdp2", "ours1", "ours2", "ours3", "ours3_int8", "ours3_int8_int4", "deepspeed2", "deepspeed3"],
}


def measured_links(backend: str, folder: Path) -> Path:
    """What two ranks over a backend take, as `ds comm bench` measures it.

    Not a core each: gloo's thread and the rank's own would wait for each other's slices of one core, 4 ms for a message of 1 MB.
    """
    file = folder / f"{backend}.json"
    command = [sys.executable, "-m", "ds_comm.cli", "bench", "--nproc", "2", "--backends", backend, "--torch"]
    sizes = ["--sizes", "4K", "64K", "1M", "4M", "8M", "16M", "30M", "64M", "--seconds", "0.5", "--json", str(file)]
    environ = os.environ | KEEPS  # as the steps that are timed: gloo allocates in a collective
    with subprocess.Popen([*command, *sizes], stdout=subprocess.DEVNULL, env=environ, start_new_session=True) as bench:
        first_in_line(bench.pid)  # as the ranks
        if bench.wait():
            raise RuntimeError(f"ds comm bench over {backend} ended with {bench.returncode}")
    return file


def real_ranks(engine: str, backend: str, allocator: Mapping[str, str]) -> Ranks:
    """Two ranks of an engine, a core each, that make steps when they are told to."""
    with mock.patch.dict(os.environ, allocator, BENCH_MEMORY="private"):
        return Ranks(_command(engine, backend), 2, interactive=True, hosts=Cores())


def rehearsed_rank(engine: str, backend: str, allocator: Mapping[str, str], links: str, folder: Path) -> Ranks:
    """The rehearsal of one of two ranks of an engine, on one core, that makes steps when it is told to."""
    order = {"world_size": 2, "rank": 0, "steps": 10**6, "warm_up": 2, "fabric": as_json(fabric_from(links, None))}
    paper = folder / "order.json"
    paper.write_text(json.dumps(order | {"out": str(folder / "seen.json"), "messages": str(folder)}))
    python, *words = _command(engine, backend)
    with lent_sources(engine), mock.patch.dict(os.environ, allocator, BENCH_MEMORY="private"):
        script = [python, "-m", "ds_comm.rehearsal.rehearsed_script", str(paper), *words]
        return Ranks(script, 1, interactive=True, hosts=Cores())


class Cores:
    """Hosts of `turns.Ranks` that are cores of this one."""

    address = "127.0.0.1"

    def command(self, rank: int, command: list[str]) -> list[str]:
        """What runs `command` on the core of a rank."""
        return ["taskset", "-c", str(sorted(os.sched_getaffinity(0))[rank]), *command]


def _command(engine: str, backend: str) -> list[str]:
    return [python_of(engine), str(WORKER), f"{engine}@{backend}", "comm", "0"]


@contextlib.contextmanager
def lent_sources(engine: str) -> Iterator[None]:
    """Inside, a peer's interpreter finds the sources of ds-comm, which it does not have."""
    sources = [records.ROOT / "packages" / name / "src" for name in ("comm", "config", "monitor", "accel", "ops")]
    lent = {"PYTHONPATH": os.pathsep.join(map(str, sources))} if engine.startswith("deepspeed") else {}
    with mock.patch.dict(os.environ, lent):
        yield


MODES = WORDS["modes"]


def rehearsed(engine: str, links: str, world: int, config: str = "comm") -> dict:
    """One rehearsal on one core."""
    python = python_of(engine)
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        script, args = (MODE_WORKER, [engine]) if engine in MODES else (WORKER, [engine, config, "1000000"])
        with lent_sources(engine):
            result = rehearse(script, args, world_size=world, links=links, steps=STEPS, warm_up=3, python=python)
    finally:
        os.sched_setaffinity(0, before)
    return {
        "step_ms": result.step_s * 1e3,
        "exposed_ms": result.exposed_s * 1e3,
        "least_ms": result.least_s * 1e3,
        "sent_mb": result.wire_bytes / 1e6,
        "peak_mb": result.memory["host_peak"] / 1e6,
    }


def true_lines(engines: list[str]) -> list[dict]:
    """Real ranks, the same once more, and a rehearsed one, alive at once, in turns of some steps, in rounds; links measured anew in each.

    The host's own speed changes by a third within minutes, and so does what the links of one measurement say. How far two real runs of the
    same are from each other is what no rehearsal can be closer to.
    """
    lines = []
    for backend in ("gloo", "shm"):
        watch = Watch()
        runs: dict[str, list[tuple[dict, dict, dict]]] = {
            engine: [] for engine in engines if backend == "gloo" or not engine.startswith("deepspeed")
        }
        memory: dict[str, tuple[float, float]] = {}
        for _ in range(ROUNDS):
            with tempfile.TemporaryDirectory() as folder:
                place = str(measured_links(backend, Path(folder))), Path(folder)
                for engine in list(runs):
                    twice = {"again": partial(real_ranks, engine, backend, KEEPS)}
                    found = meet(_real_and_rehearsed(engine, backend, KEEPS, *place) | twice, TURNS, STEPS)
                    if len(found) < 3:
                        del runs[engine]
                        continue
                    runs[engine] += zip(found["real"], found["again"], found["rehearsed"], strict=True)
                    if engine not in memory:
                        most = meet(_real_and_rehearsed(engine, backend, GIVES_BACK, *place), 1, 4)
                        memory[engine] = (most["real"][-1]["peak_mb"], most["rehearsed"][-1]["peak_mb"])
        lines += [_true_line(engine, backend, runs[engine], memory[engine], watch.others()) for engine in runs]
    return lines


def _true_line(
    engine: str,
    backend: str,
    runs: list[tuple[dict, dict, dict]],
    memory: tuple[float, float],
    others: float | None,
) -> dict:
    quotients = [2 * rehearsed["ms"] / (real["ms"] + again["ms"]) - 1 for real, again, rehearsed in runs]
    repeats = [again["ms"] / real["ms"] - 1 for real, again, _ in runs]
    real_ms = statistics.median(turn["ms"] for real, again, _ in runs for turn in (real, again))
    error, apart = statistics.median(quotients), statistics.mean(map(abs, repeats))
    shown, of_real = (", ".join(f"{100 * q:+.0f}" for q in sorted(found)) for found in (quotients, repeats))
    print(
        f"{engine}@{backend}: real {real_ms:.1f} ms (again {of_real} %), rehearsed {100 * error:+.1f} % ({shown}); "
        f"{memory} MB",
        flush=True,
    )
    line = {"kind": "true", "engine": engine, "backend": backend, "others": others, "real_ms": real_ms, "error": error}
    return line | {"apart": apart, "real_mb": memory[0], "rehearsed_mb": memory[1]}


def _real_and_rehearsed(
    engine: str, backend: str, allocator: Mapping[str, str], links: str, folder: Path
) -> dict[str, Callable[[], Ranks]]:
    return {
        "real": partial(real_ranks, engine, backend, allocator),
        "rehearsed": partial(rehearsed_rank, engine, backend, allocator, links, folder),
    }


def curve_lines(engines: list[str]) -> list[dict]:
    lines = []
    for world in WORLDS:
        for engine in [*engines, *(mode for mode in MODES if world >= 8)]:
            watch = Watch()
            try:
                seen = rehearsed(engine, LINKS, world)
            except DsError as error:
                print(f"{engine}, {world} ranks failed: {error}")
                continue
            print(f"{engine}, {world} ranks: {seen['step_ms']:.1f} ms, least {seen['least_ms']:.1f}", flush=True)
            lines.append(
                {"kind": "curve", "engine": engine, "world": world, "links": LINKS, "others": watch.others()} | seen
            )
    return lines


class TwoHosts:
    """Two network namespaces with names and shared memory of their own, and a core each; the link is shaped to `gbits`."""

    address = "10.77.0.1"

    def __init__(self, gbits: int) -> None:
        self.end()
        for name in ("bench0", "bench1"):
            _ip("netns", "add", name)
        _ip("link", "add", "bench0", "netns", "bench0", "type", "veth", "peer", "name", "bench1", "netns", "bench1")
        for rank, name in enumerate(("bench0", "bench1")):
            _ip("-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", name)
            for device in (name, "lo"):
                _ip("-n", name, "link", "set", device, "up")
            shape = f"tc qdisc add dev {name} root tbf rate {gbits}gbit burst 1mb latency 100ms".split()
            _ip("netns", "exec", name, *shape)

    def command(self, rank: int, command: list[str]) -> list[str]:
        """What runs `command` on the host of a rank."""
        name = f"bench{rank}"
        names = " ".join(f"{key}={name}" for key in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "DS_COMM_INTERFACE"))
        script = f"hostname {name}; mount -t tmpfs tmpfs /dev/shm; export {names}; exec taskset -c {rank} {shlex.join(command)}"
        return ["ip", "netns", "exec", name, "unshare", "-u", "-m", "sh", "-c", script]

    @staticmethod
    def end() -> None:
        """Take the namespaces away."""
        for name in ("bench0", "bench1"):
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True)


def host_lines() -> list[dict]:
    lines = []
    for gbits in (1, 10):
        link = f"inside={gbits / 8 * PAYLOAD:.4f},60"
        for config, engines in HOST_ENGINES.items():
            watch, hosts = Watch(), TwoHosts(gbits)

            def ranks(engine: str, config: str = config, hosts: TwoHosts = hosts) -> Ranks:
                return Ranks(
                    [python_of(engine), str(WORKER), f"{engine}@gloo", config, "0"], 2, interactive=True, hosts=hosts
                )

            try:
                seen = meet({engine: partial(ranks, engine) for engine in engines}, 3, 8)
            finally:
                hosts.end()
            others = watch.others()
            for engine, turns in seen.items():
                line = {"kind": "hosts", "engine": engine, "config": config, "gbits": gbits, "others": others}
                line |= {"step_ms": statistics.median(turn["ms"] for turn in turns)}
                line |= {"least_ms": rehearsed(engine, link, 2, config)["least_ms"]}
                print(
                    f"{engine}, {config}, {gbits} Gb/s: {line['step_ms']:.0f} ms, least {line['least_ms']:.0f}",
                    flush=True,
                )
                lines.append(line)
    return lines


def name_of(engine: str) -> str:
    """How pages call an engine."""
    peer = engine.removeprefix("deepspeed")
    return (WORDS["rehearse"] | MODES).get(engine) or (
        f"DeepSpeed, stage {peer}" if peer != engine else f"ds-zero, stage {engine[-1]}"
    )


def tables_of(lines: list[dict]) -> dict[str, str]:
    """The tables of the page by the comments that they stand between."""
    tables, by_kind = (
        {},
        {kind: [line for line in lines if line["kind"] == kind] for kind in ("true", "curve", "hosts")},
    )
    head = HEADS["rehearse"]
    rows = [[name_of(line["engine"]), line["backend"], f"{line['real_ms']:.1f}",
             f"{100 * line['apart']:.1f} %", f"{100 * line['error']:+.1f} %",
             f"{line['real_mb']:.0f}", f"{100 * (line['rehearsed_mb'] / line['real_mb'] - 1):+.1f} %",
             "" if line["others"] is None else f"{100 * line['others']:.1f} %"] for line in by_kind["true"]]  # fmt: skip
    tables["true"] = markdown_table(head, rows)
    steps = {(line["engine"], line["world"]): line for line in by_kind["curve"]}
    engines, worlds = dict.fromkeys(line["engine"] for line in by_kind["curve"]), sorted({key[1] for key in steps})
    rows = [[name_of(engine), *(_beside_least(steps.get((engine, world))) for world in worlds)] for engine in engines]
    tables["curve"] = markdown_table(["ranks", *map(str, worlds)], rows)
    for config, title in (("comm", "fp32"), ("comm_bf16", "bf16")):
        chosen = {(line["engine"], line["gbits"]): line for line in by_kind["hosts"] if line["config"] == config}
        rows = [[name_of(engine), *(_beside_least(chosen.get((engine, gbits))) for gbits in (1, 10))]
                for engine in dict.fromkeys(engine for engine, _ in chosen)]  # fmt: skip
        tables[f"hosts {title}"] = markdown_table([title, "1 Gb/s", "10 Gb/s"], rows)
    return tables


def _beside_least(line: dict | None) -> str:
    return "" if line is None else f"{line['step_ms']:.0f} ({line['step_ms'] / line['least_ms']:.2f})"


def show(lines: list[dict]) -> None:
    """Write the tables into the page."""
    text = PAGE.read_text()
    for name, table in tables_of(lines).items():
        text = filled(text, f"{name} begin", f"{name} end", table)
    PAGE.write_text(text)


def main() -> None:
    parser = records.parser_of("rehearse", __doc__)
    parser.add_argument("--only", choices=("true", "curves", "hosts"))
    parser.add_argument("--engines", nargs="+", default=ENGINES)
    args = parser.parse_args()
    kept = records.read("rehearse").get("lines", [])
    kinds = {"true": "true", "curves": "curve", "hosts": "hosts"}
    lines = [line for line in kept if args.only and line["kind"] != kinds[args.only]]
    for kind, measure in {"true": true_lines, "curves": curve_lines}.items():
        lines += measure(args.engines) if args.only in (None, kind) else []
    lines += host_lines() if args.only in (None, "hosts") else []
    records.write("rehearse", lines=lines)
    show(lines)


if __name__ == "__main__":
    main()
