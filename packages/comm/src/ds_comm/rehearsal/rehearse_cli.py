"""`ds rehearse`: what a step of a training script takes on a cluster that is not there."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_config.errors import CommError, ConfigError

if TYPE_CHECKING:
    from ds_comm.rehearsal.rehearsal_report import RehearsalResult

__all__ = ["HELP", "main", "register", "rehearse", "run_rank"]

HELP = "run a training script as one rank of a world that is not there: step, waits, memory"
_MOST_POINTS = 64


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--world", type=int, default=0, help="ranks of the world")
    parser.add_argument("--nodes", type=int, default=0, help="nodes; default: as many as the links' node size makes")
    parser.add_argument(
        "--links",
        default="",
        help="a preset (h100-ib400, ...), a file of `ds comm bench --json`, or inside=GB/s,us;between=GB/s,us",
    )
    parser.add_argument("--rank", default="0", help="ranks to rehearse one after the other: numbers, first, last")
    parser.add_argument("--steps", type=int, default=8, help="steps to measure")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before those")
    parser.add_argument(
        "--sweep", metavar="world=8..1024", help="repeat with the world doubled from one size to the other"
    )
    parser.add_argument(
        "--compare", action="append", default=[], metavar="KEY=A,B",
        help="repeat with each value of a configuration key (zero_optimization.stage=1,2,3; short: stage, tp, pp, ep) or of an argument of the script (--KEY=A,B)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results there; -: print them instead")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace of the last rank for Perfetto")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the results (needs matplotlib)")
    parser.add_argument("script", help="the training script, which stays as it is")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def main(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from ds_comm.rehearsal.rehearsal_report import table

    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise CommError(
            f"a rehearsal in a world of {os.environ['WORLD_SIZE']} real processes",
            code="rehearsal-ranks",
            fix="Start one process: it stands for all ranks.",
        )
    results = []
    for point in _points(args):
        result = rehearse(args.script, **point, trace=args.trace)
        results.append(result)
        place = f"{result.label} world {result.world_size} rank {result.rank}".strip()
        print(f"{place}: {result.step_s * 1e3:.1f} ms", file=sys.stderr, flush=True)
    if args.json is not None:
        text = json.dumps([asdict(result) for result in results], indent=1)
        if args.json == Path("-"):
            print(text)
        else:
            args.json.write_text(text)
    if args.json != Path("-") and results:
        print(table(results))
    if args.picture is not None:
        from ds_comm.rehearsal.rehearsal_picture import draw

        draw(results, args.picture)
    return 0


def rehearse(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    world_size: int,
    links: str,
    rank: int = 0,
    node_size: int | None = None,
    steps: int = 8,
    warm_up: int = 2,
    changes: Mapping[str, Any] | None = None,
    label: str = "",
    trace: Path | None = None,
    python: str = sys.executable,
) -> RehearsalResult:
    """Run a script in a process of its own as one rank of a world that is not there, and return what a step took.

    Args:
        arguments: Of the script.
        links: As `fabric_from` takes them.
        node_size: Ranks of a node; None: the links'.
        steps, warm_up: Steps that are measured, and those before.
        changes: Values by dotted key, laid over the configuration that the script gives to ds-engine.
        label: What the result is called.
        trace: Where a trace for Perfetto is written.
        python: The interpreter that runs the script, where ds-comm can be imported.
    Raises:
        ConfigError: such links are not known ("rehearsal-links").
        CommError: the script failed, or made too few steps ("rehearsal-script").
    """
    from ds_comm.rehearsal.fabric import as_json, fabric_from
    from ds_comm.rehearsal.rehearsal_report import result_from, trace_events

    fabric = fabric_from(links, node_size)
    order = {"world_size": world_size, "steps": steps, "warm_up": warm_up, "label": label}
    order |= {"fabric": as_json(fabric), "python": python}
    with tempfile.TemporaryDirectory(prefix="ds-rehearse-") as folder:
        seen = run_rank((script, arguments), rank, order, dict(changes or {}), Path(folder))
    result = result_from(seen)
    if result is None:
        raise CommError(
            f"{script} made {len(seen['steps'])} steps as rank {rank} of {world_size}; {warm_up} warm up",
            code="rehearsal-script",
            fix="Let it train longer, or ask for a smaller --warm-up. A step is a backward and then an optimizer's step.",
        )
    if trace is not None:
        trace.write_text(json.dumps(trace_events(seen)))
    return result


def run_rank(
    command: tuple[str | Path, Sequence[str]],
    rank: int,
    order: Mapping[str, Any],
    changes: Mapping[str, Any],
    folder: Path,
) -> dict[str, Any]:
    """Run the script as one rank, after the ranks whose messages it needs; return what was seen.

    Args:
        command: The script and its arguments.
        order: What `rehearsed_script` reads, but for the rank and the paths.
        changes: Values by dotted key, laid over the configuration that the script gives to ds-engine.
        folder: For messages and results; the caller's.
    Raises:
        CommError: the script failed ("rehearsal-script").
    """
    waiting = [rank]
    while True:
        seen = _run_once(command, waiting[-1], order, changes, folder)
        if seen["missing"] is not None and seen["missing"] not in waiting and len(waiting) < _MOST_POINTS:
            waiting.append(seen["missing"])
        elif seen["error"]:
            raise _failed(command[0], waiting[-1], seen["error"])
        elif len(waiting) == 1:
            return seen
        else:
            waiting.pop()


def _run_once(
    command: tuple[str | Path, Sequence[str]],
    rank: int,
    order: Mapping[str, Any],
    changes: Mapping[str, Any],
    folder: Path,
) -> dict[str, Any]:
    script, arguments = command
    out, paper = folder / f"seen-{rank}.json", folder / "order.json"
    paper.write_text(json.dumps({**order, "rank": rank, "out": str(out), "messages": str(folder)}))
    environ = {**os.environ}
    if changes:
        trial = {"changes": dict(changes), "start_step": 2**30, "end_step": 2**30 + 1}
        (folder / "trial.json").write_text(json.dumps(trial))
        environ["DS_TRIAL"] = str(folder / "trial.json")
    words = [order["python"], "-m", "ds_comm.rehearsal.rehearsed_script", str(paper), str(script), *arguments]
    done = subprocess.run(words, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if not out.exists():
        ending = f"\nended by signal {-done.returncode}" if done.returncode < 0 else ""
        raise _failed(script, rank, done.stderr + ending)
    seen: dict[str, Any] = json.loads(out.read_text())
    return seen


def _failed(script: str | Path, rank: int, text: str) -> CommError:
    last = "\n".join(text.strip().splitlines()[-12:])
    return CommError(
        f"{script} failed as rank {rank} of the rehearsal:\n{last}",
        code="rehearsal-script",
        fix="Run it with one process first; what reads other ranks' values cannot be rehearsed.",
    )


_SHORT = {
    "stage": "zero_optimization.stage",
    "tp": "tensor_parallel.autotp_size",
    "pp": "pipeline.stages",
    "ep": "moe.ep_size",
}


def _points(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the arguments of `rehearse` for all that was asked for.

    Raises:
        ConfigError: a world, links or a list of values is missing or wrong ("rehearsal-arguments").
    """
    if not args.links:
        raise _wrong(
            "--links is missing", "Name a preset such as h100-ib400, or a file that `ds comm bench --json` wrote."
        )
    chosen = [(world, values) for world in _worlds(args) for values in itertools.product(*map(_axis, args.compare))]
    if len(chosen) > _MOST_POINTS:
        raise _wrong(f"{len(chosen)} rehearsals", f"Ask for at most {_MOST_POINTS}.")
    for world, values in chosen:
        if args.nodes and world % args.nodes:
            raise _wrong(f"{world} ranks on {args.nodes} nodes", "Take a number of nodes that divides the world.")
        for rank in _ranks(args.rank, world):
            words = [f"{name}={value}" for name, value in values if name.startswith("--")]
            changes = {_SHORT.get(name, name): _value(value) for name, value in values if not name.startswith("--")}
            yield {
                "world_size": world,
                "rank": rank,
                "links": args.links,
                "node_size": world // args.nodes if args.nodes else None,
                "steps": args.steps,
                "warm_up": args.warm_up,
                "changes": changes,
                "label": " ".join(f"{name}={value}" for name, value in values),
                "arguments": [*args.arguments, *words],
            }


def _worlds(args: argparse.Namespace) -> list[int]:
    if args.sweep:
        name, _, span = args.sweep.partition("=")
        first, dots, last = span.partition("..")
        if (
            name != "world"
            or not first.isdigit()
            or (dots and not last.isdigit())
            or not 0 < int(first) <= int(last or first)
        ):
            raise _wrong(f"--sweep {args.sweep}", "Write world=8..1024.")
        return list(itertools.takewhile(lambda n: n <= int(last or first), (int(first) << i for i in range(32))))
    if args.world < 1:
        raise _wrong(f"--world {args.world}", "Say how many ranks the world has.")
    return [args.world]


def _ranks(text: str, world: int) -> list[int]:
    named = {"first": 0, "last": world - 1, "middle": world // 2}
    ranks = []
    for word in text.split(","):
        if word not in named and not word.isdigit():
            raise _wrong(f"--rank {text}", "Write numbers, first, middle or last, with commas between them.")
        ranks.append(named.get(word, int(word) if word.isdigit() else 0))
    if max(ranks) >= world:
        raise _wrong(f"--rank {text} of a world of {world}", "Ranks begin with 0.")
    return ranks


def _axis(text: str) -> list[tuple[str, str]]:
    name, equals, values = text.rpartition("=")
    if not equals or not name or not values:
        raise _wrong(f"--compare {text}", "Write KEY=A,B.")
    return [(name, value) for value in values.split(",")]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _wrong(problem: str, fix: str) -> ConfigError:
    return ConfigError(f"ds rehearse: {problem}", code="rehearsal-arguments", fix=fix)


if __name__ == "__main__":
    from ds_config.ds_command import main as ds

    sys.exit(ds(["rehearse", *sys.argv[1:]]))
