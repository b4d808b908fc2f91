"""Planning a save and a load by world size, 2 to 16,384 ranks with 4,000 pieces each: one rank's time, memory, messages and bytes.

usage: nox -s bench -- ckpt_scale [--worlds N ...] [--layouts flat mesh replica]

No tensor, no other rank: the rank that plans most is run for real, with what the others would have sent it. Routes are run hop by hop,
each taking in what it gives away: layouts look the same from every rank. One process for each row; memory is its peak beyond what it had
before it began. Layouts: `flat` cuts 4,000 tensors over all ranks; `mesh` has tensor 8 x pipeline 16 x data, flat over data;
`replica` holds 1,000 tensors on every rank, and cuts 3,000.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ckpt_page

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "benchmarks" / "data" / "ckpt_scale.json"
PICTURE = ROOT / "docs" / "benchmarks" / "img" / "ckpt-scale.svg"
PIECES = 4000
WORLDS = [2, 16, 128, 1024, 4096, 10000, 16384]
PERIOD = 4


class Layout:
    """Who holds what. `shards(rank)` are a rank's, `held(name)` the ranks that hold a tensor, with its shard there."""

    def __init__(self, kind: str, world: int, tensors_of: int = 0) -> None:
        self.kind, self.world = kind, world
        self.tensor = min(8, world) if kind == "mesh" else 1
        self.stages = min(16, max(1, world // self.tensor)) if kind == "mesh" else 1
        self.data = max(1, world // (self.tensor * self.stages))
        self.world = self.tensor * self.stages * self.data
        # As much for each rank whatever their number: 16,384 to 32,768 elements a piece.
        of = tensors_of or world
        self.shapes = [(64 * of, 256), (256, 64 * of), (128 * of, 256), (16384 * of,)]
        self.names = [[f"param/layers.{s}.block.{i}.weight" for i in range(PIECES)] for s in range(self.stages)]

    def shard(self, stage: int, index: int, rank: int) -> Any:
        from ds_comm.placement import Box, Interval, TensorShard

        shape = self.shapes[index % PERIOD]
        t, d = rank % self.tensor, rank // (self.tensor * self.stages)
        dim = index % 2 if len(shape) == 2 else 0
        side = shape[dim] // self.tensor
        box = Box(
            tuple(t * side if i == dim else 0 for i in range(len(shape))),
            tuple(side if i == dim else n for i, n in enumerate(shape)),
        )
        numel = box.numel
        if self.kind == "replica" and index % 4 == 0:
            part = Interval(0, numel)
        else:
            part = Interval(numel * d // self.data, numel * (d + 1) // self.data)
        return TensorShard(self.names[stage][index], shape, "float32", box, part)

    def written(self, rank: int) -> list[Any]:
        """The shards of a rank that it writes: of what all hold, a share falls to each of sixteen."""
        writers = list(range(0, self.world, -(-self.world // 16)))
        own = enumerate(self.shards(rank))
        whole = [self.kind == "replica" and i % 4 == 0 for i in range(PIECES)]
        return [s for i, s in own if s.numel and (not whole[i] or writers[i // 4 % len(writers)] == rank)]

    def stage(self, rank: int) -> int:
        return rank // self.tensor % self.stages

    def shards(self, rank: int) -> list[Any]:
        return [self.shard(self.stage(rank), i, rank) for i in range(PIECES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--layouts", nargs="+", default=["flat", "mesh", "replica"])
    parser.add_argument("--one", nargs=2, metavar=("LAYOUT", "WORLD"), help="one row, here, as JSON")
    parser.add_argument("--picture", action="store_true", help="only draw what is recorded")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(row(args.one[0], int(args.one[1]))))
        return
    if not args.picture:
        kept = json.loads(DATA.read_text())["rows"] if DATA.is_file() else []
        # A part of the rows a call, where one call takes too long.
        rows = [r for r in kept if r["layout"] not in args.layouts or r["asked"] not in args.worlds]
        for layout in args.layouts:
            for world in args.worlds:
                command = [sys.executable, __file__, "--one", layout, str(world)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                rows.append(json.loads(done.stdout))
                print(told(rows[-1]), flush=True)
        rows.sort(key=lambda r: (r["layout"], r["world"]))
        record = {"machine": machine(), "pieces": PIECES, "rows": rows}
        DATA.write_text(json.dumps(record, indent=1) + "\n")
    PICTURE.write_text(picture(json.loads(DATA.read_text())["rows"]))
    ckpt_page.fill()


def machine() -> dict[str, str]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }


def told(r: dict[str, Any]) -> str:
    return (
        f"{r['layout']:8} {r['world']:6} ranks: {r['planners']:4} planners, plan {r['plan_s']:.2f} s, {r['plan_mb']:.0f} MB, "
        f"{r['messages']} messages, {r['sent_mb']:.1f} MB sent; index {r['index_mb']:.1f} MB; load {r['load_s']:.2f} s, {r['load_mb']:.0f} MB, "
        f"leaves {r['leaves_same']} the same layout, {r['leaves_other']} another"
    )


class Meter:
    """Seconds of processor for what runs inside, so that others on the machine do not count."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, action: Callable[[], Any]) -> Any:
        start = time.process_time()
        out = action()
        self.seconds += time.process_time() - start
        return out


class Memory:
    """The most memory that was resident since this was made, beyond what was then, in MB."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before = _status("VmRSS")

    def peak_mb(self) -> float:
        return (_status("VmHWM") - self._before) / 1000


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def row(kind: str, world: int) -> dict[str, Any]:
    """One rank's part in a save and a load."""
    from ds_ckpt.coordinator import hops, moving, pack, unpack
    from ds_ckpt.save_planner import described, entries_of, num_planners, planned, planner_of

    layout, asked = Layout(kind, world), world
    world = layout.world
    count = num_planners(PIECES, world)
    loads: dict[int, list[tuple[int, int]]] = {}
    for stage, names in enumerate(layout.names):
        for index, name in enumerate(names):
            loads.setdefault(planner_of(name, count, world), []).append((stage, index))
    busiest = max(loads, key=lambda rank: len(loads[rank]))
    memory, meter = Memory(), Meter()
    # What it tells, and what passes by.
    own = layout.shards(busiest)
    messages = meter(lambda: described(own, count, world))
    sent = 0
    held = [(to, busiest, data) for to, data in messages.items()]
    for step in hops(world):
        going, held = meter(lambda step=step, held=held: moving(held, busiest, world, step))
        data = meter(lambda going=going: pack(going))
        sent += len(data)
        held += [((to + step) % world, source, text) for to, source, text in meter(lambda data=data: unpack(data))]
    del held
    # What it plans.
    came = {}
    for rank in range(world):
        mine = [layout.shard(s, i, rank) for s, i in loads[busiest] if s == layout.stage(rank)]
        if mine:
            came[rank] = described(mine, count, world)[busiest]
    answers, table = meter(lambda: planned(came, busiest, world))
    sent += sum(map(len, answers.values())) * len(hops(world)) // 2
    items = meter(lambda: entries_of({busiest: _answer_like(own, layout, busiest)}, own, busiest))
    plan_mb = memory.peak_mb()
    return {
        "layout": kind,
        "asked": asked,
        "world": world,
        "planners": count,
        "shards_planned": sum(text.count(b"],[") + 1 for text in came.values()),
        "tensors_planned": len(table),
        "plan_s": meter.seconds,
        "plan_mb": plan_mb,
        "messages": 2 * len(hops(world)) + 4 * len(hops(world)),
        "sent_mb": sent / 1e6,
        "entries": len(items),
        **manifest_row(kind, world),
    }


def _answer_like(own: list[Any], layout: Layout, rank: int) -> bytes:
    """All of a rank's shards given to it to write."""
    rows = [[i, 0, s.numel, [s.box.offset[0], rank], None, s.interval.start] for i, s in enumerate(own)]
    return json.dumps(rows, separators=(",", ":")).encode()


def manifest_row(kind: str, world: int) -> dict[str, Any]:
    """The index and the leaves, in processes of their own."""
    return in_own_process("manifests", kind, world)


def in_own_process(name: str, *arguments: object) -> dict[str, Any]:
    """What a function of this file returns where nothing was in memory before."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import ckpt_scale, json; "
    code += f"print(json.dumps(ckpt_scale.{name}(*{arguments!r})))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def manifests(kind: str, world: int) -> dict[str, Any]:
    """Write the index as rank 0 does, and read it as one rank does."""
    from ds_ckpt.checkpoint_index import CheckpointIndex, encode_index

    layout = Layout(kind, world)
    kinds = {s.name: (s.dtype, s.shape) for stage in range(layout.stages) for s in layout.shards(stage * layout.tensor)}
    entries = tuple(_entry(layout, rank) for rank in range(layout.world))
    writing = Meter()
    index = CheckpointIndex(1, "2026-01-01T00:00:00+00:00", "ds-ckpt", 2**24, kinds, entries, {}, {})
    data = writing(partial(encode_index, index))
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(data)
        file.flush()
        found = in_own_process("reading", kind, world, file.name)
    return {"index_mb": len(data) / 1e6, "index_s": writing.seconds, **found}


def reading(kind: str, world: int, path: str) -> dict[str, Any]:
    """Read an index, choose leaves, and plan a load as one rank does."""
    from ds_ckpt.checkpoint_index import decode_index, decode_leaf, encode_leaf, entry_of
    from ds_ckpt.manifest_merge import join, select
    from ds_ckpt.save_plan import plan_load

    layout, meter = Layout(kind, world), Meter()
    own = layout.shards(layout.world // 3)
    memory = Memory()
    read = meter(lambda: decode_index(Path(path).read_bytes()))
    chosen = meter(lambda: select(read, own))
    leaves, leaf_bytes = [], 0
    for entry in chosen:
        leaf = _leaf(layout, int(entry.name[5:10]))
        text = encode_leaf(leaf)
        true = entry_of(leaf, entry.name, text)
        leaves.append(meter(partial(decode_leaf, text, true, read, entry.name)))
        leaf_bytes += len(text)
    manifest = meter(lambda: join(read, leaves, whole=False))
    plan = meter(lambda: plan_load(own, manifest))
    load_mb = memory.peak_mb()
    filled = sum(run.nbytes for block in plan for run in block.runs)
    if filled != sum(s.numel * 4 for s in own):
        raise SystemExit(f"{filled} bytes planned of {sum(s.numel * 4 for s in own)}")
    other = Layout(kind, max(2, layout.world * 3 // 4), world)
    return {
        "load_s": meter.seconds,
        "load_mb": load_mb,
        "leaves_same": len(chosen),
        "leaves_other": len(select(read, other.shards(other.world // 3))),
        "leaves_mb": leaf_bytes / 1e6,
    }


def _leaf(layout: Layout, rank: int) -> Any:
    from ds_ckpt.checkpoint_index import Leaf
    from ds_ckpt.records import FileRecord, PartRecord, PieceRecord, TensorRecord

    at, tensors = 4096, {}
    for shard in layout.written(rank):
        blocks = -(-shard.numel * 4 // 2**24)
        piece = PieceRecord(0, at, shard.numel, ("0123abcd",) * blocks, shard.interval.start)
        tensors[shard.name] = TensorRecord(shard.dtype, shard.shape, (PartRecord(shard.box, (piece,)),))
        at += shard.numel * 4
    return Leaf((FileRecord(f"data-{rank:05d}.safetensors", at, 4096, "0123abcd"),), tensors)


def _entry(layout: Layout, rank: int) -> Any:
    """The index entry of a rank's leaf: tensors of one shape and place have the same bounds, so that a few stand for all."""
    from ds_ckpt.checkpoint_index import LeafEntry
    from ds_ckpt.zone_maps import bounds_of, zones_of

    if layout.kind == "replica" and rank % -(-layout.world // 16) == 0:
        written = layout.written(rank)
        found = ((s.name, s.shape, bounds_of(s.shape, s.box, s.interval.start, s.interval.stop)) for s in written)
        return LeafEntry(
            f"leaf-{rank:05d}.json",
            500_000,
            "0123abcd",
            ((f"data-{rank:05d}.safetensors", 10**9, False),),
            zones_of(found),
        )
    stage = layout.stage(rank)
    period = PERIOD
    order = sorted(range(PIECES), key=lambda i: layout.names[stage][i])
    ends = {i % period: i for i in reversed(order)}, {i % period: i for i in order}
    pieces = []
    for several in ends:
        for index in several.values():
            s = layout.shard(stage, index, rank)
            if s.numel and not (layout.kind == "replica" and index % 4 == 0):
                pieces.append((s.name, s.shape, bounds_of(s.shape, s.box, s.interval.start, s.interval.stop)))
    name = f"data-{rank:05d}.safetensors"
    return LeafEntry(f"leaf-{rank:05d}.json", 500_000, "0123abcd", ((name, 10**9, False),), zones_of(pieces))


def picture(rows: list[dict[str, Any]]) -> str:
    """Four small plots over the world size: seconds, memory, index, messages of one rank."""
    plots = [
        ("planning a save, s", "plan_s", 2.0),
        ("its memory, MB", "plan_mb", 200.0),
        ("index that a rank reads, MB", "index_mb", 20.0),
        ("planning a load, s", "load_s", 2.0),
    ]
    colours = {"flat": "#1f6fb4", "mesh": "#d2691e", "replica": "#3a8f3a"}
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 470" font-family="sans-serif" font-size="12">']
    out.append('<rect width="760" height="470" fill="white"/>')
    worlds = sorted({r["world"] for r in rows})
    for number, (title, key, limit) in enumerate(plots):
        left, top = 60 + number % 2 * 370, 40 + number // 2 * 215
        high = max(limit, max(r[key] for r in rows)) * 1.1

        def x(world: int, left: int = left) -> float:
            return left + 300 * (world.bit_length() - 1 + world / (1 << (world.bit_length() - 1)) - 2) / 13

        def y(value: float, top: int = top, high: float = high) -> float:
            return top + 150 - 150 * value / high

        out.append(f'<text x="{left}" y="{top - 10}" font-weight="bold">{title}</text>')
        out.append(f'<path d="M{left},{top} v150 h300" fill="none" stroke="#444"/>')
        out.append(f'<path d="M{left},{y(limit):.1f} h300" stroke="#b00" stroke-dasharray="5 4"/>')
        out.append(f'<text x="{left - 6}" y="{y(limit) + 4:.1f}" text-anchor="end" fill="#b00">{limit:g}</text>')
        out.append(f'<text x="{left - 6}" y="{top + 154}" text-anchor="end">0</text>')
        for world in worlds:
            if world in (2, 128, 1024, 16384):
                out.append(f'<text x="{x(world):.1f}" y="{top + 166}" text-anchor="middle">{world}</text>')
        for layout, colour in colours.items():
            mine = sorted((r["world"], r[key]) for r in rows if r["layout"] == layout)
            line = " ".join(f"{x(w):.1f},{y(v):.1f}" for w, v in mine)
            out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for i, (layout, colour) in enumerate(colours.items()):
        out.append(f'<text x="{60 + 90 * i}" y="460" fill="{colour}">{layout}</text>')
    out.append('<text x="700" y="460" text-anchor="end">ranks; dashed: the limit</text></svg>')
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    main()
