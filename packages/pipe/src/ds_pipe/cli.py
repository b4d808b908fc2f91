"""`ds pipe show schedule`: what a schedule does, what it costs, as text and as a picture. `ds pipe trace`: the same of a run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_config.errors import DsError, PlanError

if TYPE_CHECKING:
    from ds_pipe.actions import Program
    from ds_pipe.costs import Costs
    from ds_pipe.schedule_timing import Span
    from ds_pipe.trace import Trace

__all__ = ["HELP", "NAMES", "main", "register"]

HELP = "show pipeline schedules and what they cost"
NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipe-v", "listed", "inference")
"""Names of `ds_pipe.SCHEDULES` and two more: the package imports torch; `ds pipe --help` does not."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    commands = parser.add_subparsers(dest="what", required=True)
    show = commands.add_parser("show", help="print a schedule").add_subparsers(dest="subject", required=True)
    schedule = show.add_parser("schedule", help="its actions over time, bubble and activations")
    schedule.add_argument("--stages", type=int, required=True, help="ranks of the pipeline")
    schedule.add_argument("--microbatches", type=int, required=True, help="of one step")
    schedule.add_argument("--name", default="1f1b", choices=NAMES, help="of the schedule")
    schedule.add_argument("--virtual", type=int, default=2, help="stages a rank, for interleaved")
    measured = schedule.add_mutually_exclusive_group()
    measured.add_argument(
        "--trace", type=Path, metavar="FILE", help="take the costs, in seconds, of a measured step (ds_pipe.Trace.save)"
    )
    measured.add_argument(
        "--costs",
        nargs="+",
        metavar="F,I,W",
        type=_three,
        help="forward, input gradient and weight gradient of every stage, or one for all; default 1,1,1",
    )
    schedule.add_argument("--transfer", type=float, default=0.0, help="time of a message between ranks")
    schedule.add_argument("--cap", type=float, help="for listed: microbatches whose activations a rank may hold")
    schedule.add_argument("--actions", action="store_true", help="also print the program as text, with its transfers")
    schedule.add_argument("--png", type=Path, help="draw it into this file")
    schedule.add_argument(
        "--json", action="store_true", help="print JSON; --actions adds the program with its transfers"
    )
    trace = commands.add_parser("trace", help="a measured step beside the planned one")
    trace.add_argument("file", type=Path, help="what ds_pipe.Trace.save wrote")
    trace.add_argument("--png", type=Path, help="draw both into this file")
    trace.add_argument("--json", action="store_true", help="print JSON; times in seconds")


def main(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    try:
        _trace(args) if args.what == "trace" else _show(args)
    except DsError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _show(args: argparse.Namespace) -> None:
    from ds_pipe.costs import Costs
    from ds_pipe.program_passes import add_comms, mark_reduce
    from ds_pipe.programs import placement_of
    from ds_pipe.schedule_timing import simulate
    from ds_pipe.show import as_gantt, as_table
    from ds_pipe.trace import Trace
    from ds_pipe.verify import verify

    rank_of = placement_of(args.name, args.stages, args.virtual)
    if args.trace:
        costs, rank_of = _of_trace(Trace.load(args.trace), args, rank_of)
    else:
        rows = args.costs or [(1.0, 1.0, 1.0)]
        costs = Costs.measured(rows * len(rank_of) if len(rows) == 1 else rows, args.transfer)
    program = _program(args, costs, rank_of)
    full = add_comms(mark_reduce(program, every_backward=False)) if args.name != "inference" else add_comms(program)
    report, timing = verify(full, costs), simulate(program, costs)
    if args.png:
        title = f"{args.name}: bubble {report.bubble:.1%}, activations {max(report.peak_activations)}"
        as_gantt([(title, timing.ranks)], args.png)
    if args.json:
        summary = {"name": args.name, "stages": len(rank_of), "microbatches": args.microbatches, **asdict(report)}
        program_text = {"program": str(full).splitlines()} if args.actions else {}
        print(json.dumps({**summary, "ranks": _rows(timing.ranks), **program_text}, indent=1))
        return
    print(as_table(timing.ranks))
    activations = ", ".join(str(n) for n in report.peak_activations)
    print(
        f"{args.name}: {args.stages} ranks, {len(rank_of)} stages, {args.microbatches} microbatches, verified\n"
        f"one step {report.span:g}, bubble {report.bubble:.1%}; steps in a row {report.period:g} each\n"
        f"activations held at most, by rank (of one stage and microbatch each): {activations}; messages {report.sends}"
    )
    if args.actions:
        print(full)
    if args.png:
        print(f"drawn: {args.png}")


def _rows(ranks: Sequence[Sequence[Span]]) -> list[list[dict[str, Any]]]:
    """Return the spans of every rank as plain data."""
    return [[{"begin": begin, "end": end, "action": str(action)} for begin, end, action in row] for row in ranks]


def _of_trace(trace: Trace, args: argparse.Namespace, rank_of: tuple[int, ...]) -> tuple[Costs, tuple[int, ...]]:
    """Return the costs of the traced step, and the rank of every stage under the schedule.

    `list_scheduled` leaves stages on the ranks where they were measured.
    """
    from ds_pipe.costs import Costs

    owners = trace.program.owners()
    there = tuple(owners[stage] for stage in range(trace.program.stages))
    wanted = there if args.name == "listed" else rank_of
    if len(trace.ranks) != args.stages or len(wanted) != len(there):
        raise PlanError(
            f"{args.trace} is a step of {len(there)} stages on {len(trace.ranks)} ranks; "
            f"{args.name} was asked for with {len(wanted)} stages on {args.stages} ranks",
            code="pipe-trace",
            fix=f"Pass --stages {len(trace.ranks)}, and a schedule with as many stages a rank.",
        )
    costs = trace.costs()
    rows = list(zip(costs.forward, costs.input_grad, costs.weight_grad, strict=True))
    return Costs.measured(rows, args.transfer), wanted


def _trace(args: argparse.Namespace) -> None:
    from ds_pipe.show import as_gantt, as_table
    from ds_pipe.trace import Trace

    trace = Trace.load(args.file)
    plan, origin = trace.planned(), min((row[0][0] for row in trace.computing if row), default=0.0)
    measured = [[(begin - origin, end - origin, action) for begin, end, action in row] for row in trace.computing]
    costs = trace.costs()
    stages = list(zip(costs.forward, costs.input_grad, costs.weight_grad, strict=True))
    if args.png:
        of_run = f"measured: {1e3 * trace.span:.1f} ms, bubble {trace.bubble:.1%}"
        on_paper = f"planned: {1e3 * plan.span:.1f} ms, bubble {plan.bubble:.1%}"
        as_gantt([(of_run, measured), (on_paper, plan.ranks)], args.png)
    if args.json:
        summary = {
            "measured": {"span": trace.span, "bubble": trace.bubble, "ranks": _rows(measured)},
            "planned": {"span": plan.span, "bubble": plan.bubble, "ranks": _rows(plan.ranks)},
            "stages": [dict(zip(("forward", "input_grad", "weight_grad"), row, strict=True)) for row in stages],
        }
        print(json.dumps(summary, indent=1))
        return
    print(f"measured: {1e3 * trace.span:.2f} ms, bubble {trace.bubble:.1%}\n{as_table(measured)}")
    print(
        f"on paper, each pass at its stage's median and transfers at nothing: {1e3 * plan.span:.2f} ms, "
        f"bubble {plan.bubble:.1%}\n{as_table(plan.ranks)}"
    )
    print("stage  forward ms  input gradient ms  weight gradient ms")
    for stage, row in enumerate(stages):
        print(f"{stage:>5}  " + "  ".join(f"{1e3 * value:.3f}" for value in row))
    if args.png:
        print(f"drawn: {args.png}")


def _program(args: argparse.Namespace, costs: Costs, rank_of: tuple[int, ...]) -> Program:
    from ds_pipe.programs import list_scheduled, make_program

    if args.name == "listed":
        return list_scheduled(args.microbatches, costs, rank_of, float("inf") if args.cap is None else args.cap)
    return make_program(args.name, args.stages, args.microbatches, args.virtual)


def _three(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers F,I,W")
    return values


if __name__ == "__main__":
    from ds_config.ds_command import main as ds

    sys.exit(ds(["pipe", *sys.argv[1:]]))
