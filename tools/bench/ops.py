"""`nox -s bench -- ops`: CPU kernels of ds-ops beside torch, DeepSpeed's CPUAdam and the memory's own limit.

Three processes (ours, torch alone, the peer) stay alive and answer in turn, so that every round has seen the same
machine. A ratio is the median over rounds of (their time / our time); a rate is the best round. The limit is a STREAM
triad of the same round and process: 12 bytes an element, stores past the cache or not, whichever was faster. A second
limit, of the same processes: what a pass that only reads and one that only writes reach (best rounds, huge pages).

How fast memory from malloc is depends on which physical pages a process happened to get (a tenth and more between two
starts of the same program), so all processes are started again several times, in another order each time.
"""

from __future__ import annotations

import datetime
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import peers
import records
from in_turn import Answering, ratio
from meetings import WORKERS

N = 34_000_000
LIMITS = ("triad", "triad_nt", "read", "write")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ours against others on one piece of work. bytes: what one element must move at least; read: how many of them it reads."""

    name: str
    ours: str
    others: tuple[str, ...]
    bytes: float
    read: float


COMPARISONS = (
    Comparison("AdamW, one flat tensor", "flat_ours", ("flat_deepspeed", "flat_torch_fused", "flat_torch_foreach"), 28, 16),
    Comparison("the same, parameters and gradients from malloc", "flat_ours_malloc", ("flat_deepspeed", "flat_torch_fused"), 28, 16),
    Comparison("AdamW, 88 tensors", "list_ours", ("list_deepspeed", "list_torch_fused", "list_torch_foreach"), 28, 16),
    Comparison("the same, parameters and gradients from malloc", "list_ours_malloc", ("list_deepspeed", "list_torch_fused"), 28, 16),
    Comparison("norm, unscale, clip, AdamW, cast, zero", "fused_ours", ("fused_deepspeed", "fused_torch"), 32, 16),
    Comparison("sum of squares", "pass_norm", ("pass_torch_norm",), 4, 4),
    Comparison("copy fp32", "pass_copy", ("pass_torch_copy",), 8, 4),
    Comparison("cast fp32 to bf16", "pass_cast", ("pass_torch_cast",), 6, 4),
    Comparison("fill fp32: nothing but writing", "pass_fill", ("pass_torch_fill",), 4, 0),
)  # fmt: skip


class Worker(Answering):
    """A process that has prepared some cases."""

    def __init__(self, python: Path, threads: int, cases: list[str]) -> None:
        self.cases = cases
        path = f"{python.parent}:{os.environ['PATH']}"
        super().__init__([python, WORKERS / "ops_worker.py", threads, *cases], OMP_NUM_THREADS=str(threads), PATH=path)


def measure(
    threads: int, rounds: int, restarts: int, peer: Path | None, comparisons: tuple[Comparison, ...]
) -> dict[str, list[float]]:
    """Seconds a call of every case, one entry per round."""
    times: dict[str, list[float]] = {}
    for group in comparisons:
        for start in range(restarts):
            jobs = jobs_of(group, peer)
            turn = start % len(jobs)
            workers = [Worker(python, threads, cases) for python, cases in jobs[turn:] + jobs[:turn]]
            for _ in range(-(-rounds // restarts)):
                for worker in workers:
                    for case in worker.cases:
                        key = case if case not in LIMITS else f"{group.ours}/{case}"
                        times.setdefault(key, []).append(worker.ask(case))
            for worker in workers:
                worker.close()
    return times


def jobs_of(group: Comparison, peer: Path | None) -> list[tuple[Path, list[str]]]:
    """The processes of a comparison: an interpreter and the cases it prepares."""
    theirs = [c for c in group.others if "deepspeed" in c]
    others = [c for c in group.others if c not in theirs]
    jobs = [(Path(sys.executable), [group.ours, *LIMITS]), (Path(sys.executable), others)]
    if peer:
        jobs.append((peer, theirs))
    return [(python, cases) for python, cases in jobs if cases]


def rows(threads: int, times: dict[str, list[float]], comparisons: tuple[Comparison, ...]) -> list[dict[str, object]]:
    """One row per comparison: our rate, the limit's, and the ratios."""
    out: list[dict[str, object]] = []
    for c in comparisons:
        ours = times[c.ours]
        limit = [min(a, b) for a, b in zip(times[f"{c.ours}/triad"], times[f"{c.ours}/triad_nt"], strict=True)]
        read, write = (4 * N / min(times[f"{c.ours}/{name}"]) / 1e9 for name in ("read", "write"))
        row: dict[str, object] = {
            "work": c.name,
            "case": c.ours,
            "date": datetime.datetime.now().isoformat(timespec="minutes"),
            "load": os.getloadavg()[0],
            "rounds": len(ours),
            "threads": threads,
            "melements_s": N / min(ours) / 1e6,
            "gb_s": c.bytes * N / min(ours) / 1e9,
            "triad_gb_s": 12 * N / min(limit) / 1e9,
            "read_gb_s": read,
            "write_gb_s": write,
            "most_melements_s": 1e3 / max(c.read / read, (c.bytes - c.read) / write),
            "share_of_triad": statistics.median(c.bytes * b / (12 * a) for a, b in zip(ours, limit, strict=True)),
            "share_of_triad_best": c.bytes * min(limit) / (12 * min(ours)),
        }
        for other in c.others:
            if other in times:
                name = other.split("_", 1)[1]
                row[f"x_{name}"] = ratio(times, other, c.ours)
                row[f"x_{name}_best"] = min(times[other]) / min(ours)
        out.append(row)
    return out


def table(all_rows: list[dict[str, object]]) -> str:
    """The rows as text."""
    lines = []
    for r in all_rows:
        ratios = ", ".join(
            f"{v:.2f}x {k[2:]} (best {r[k + '_best']:.2f}x)"
            for k, v in r.items()
            if k.startswith("x_") and not k.endswith("_best")
        )
        lines.append(
            f"{r['threads']} thr | {r['work']:48} | {r['melements_s']:5.0f} M/s {r['gb_s']:5.1f} GB/s | "
            f"{100 * float(str(r['share_of_triad'])):3.0f} % of triad, at most {r['most_melements_s']:5.0f} M/s by "
            f"{r['read_gb_s']:.1f} GB/s read and {r['write_gb_s']:.1f} written | {ratios}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = records.parser_of("ops", __doc__)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--restarts", type=int, default=3, help="of all processes, in another order each time")
    parser.add_argument("--no-peer", action="store_true", help="without DeepSpeed's environment")
    parser.add_argument(
        "--only", default="", help="comparisons whose case name starts with this; rows of others are kept"
    )
    args = parser.parse_args()
    peer = None if args.no_peer else peers.ensure("deepspeed")
    chosen = tuple(c for c in COMPARISONS if c.ours.startswith(args.only))
    done: list[dict[str, object]] = []
    for threads in args.threads:
        for c in chosen:
            part = rows(threads, measure(threads, args.rounds, args.restarts, peer, (c,)), (c,))
            print(table(part), flush=True)
            done += part
    records.write("ops", elements=N, rows=merged(records.read("ops").get("rows", []), done))


def merged(old: list[dict[str, object]], new: list[dict[str, object]]) -> list[dict[str, object]]:
    """The old rows with those measured now in their place, sorted by threads, then as COMPARISONS has them."""
    by_key = {(row["threads"], row["case"]): row for row in [*old, *new] if "case" in row}
    order = [c.ours for c in COMPARISONS]
    return [by_key[key] for key in sorted(by_key, key=lambda k: (k[0], order.index(str(k[1]))))]


if __name__ == "__main__":
    main()
