"""`ds plan`: what a configuration would do with a model on any number of ranks, on a laptop."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_engine.plan import Plan

__all__ = ["HELP", "main", "register"]

HELP = "show what a configuration does with a model on any number of ranks"


def register(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("config", help="JSON or HJSON configuration; with --fit the model, or its parameters, as 7B")
    parser.add_argument(
        "--world-size", dest="world", type=int, default=1, metavar="N", help="number of ranks (default 1)"
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="package.module:function or file.py:function that makes it, a folder of safetensors, or a config.json",
    )
    parser.add_argument(
        "--fit",
        metavar="8x80GB",
        help="no configuration: which ZeRO stages and tiers fit these devices (4x8x80GB: of four hosts)",
    )
    parser.add_argument(
        "--links",
        metavar="LINKS",
        help="also show bytes by link and the least step: a preset (h100-ib400, ...), a file of `ds comm bench --json`, or "
        "inside=GB/s,us;between=GB/s,us",
    )
    parser.add_argument(
        "--nodes", type=int, default=0, metavar="N", help="nodes; default: as many as the links' node size makes"
    )
    parser.add_argument(
        "--tokens", type=int, default=0, metavar="N", help="tokens of a rank's microbatch, for the least step"
    )
    parser.add_argument(
        "--tflops",
        type=float,
        default=0.0,
        metavar="T",
        help="what a device reaches, in 10**12 a second, for the least step",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def main(args: argparse.Namespace) -> int:
    """Print the plan; 1 when the configuration does not fit."""
    # Planning a model needs torch; `ds --help` must not.
    from ds_config.errors import DsError
    from ds_engine.config import load_config
    from ds_engine.memory_fit import cluster_of, fit_table, fits_of, numel_of, shapes_of_numbers
    from ds_engine.models import shapes_from
    from ds_engine.plan import Shapes
    from ds_engine.planner import make_plan

    try:
        if args.fit:
            cluster, numel = cluster_of(args.fit), numel_of(args.config)
            shapes = shapes_from(args.config) if numel is None else shapes_of_numbers(numel)
            table = [{**asdict(row), "fits": row.fits} for row in fits_of(cluster, shapes)]
            print(json.dumps(table, indent=2) if args.json else fit_table(cluster, shapes))
            return 0
        shapes = shapes_from(args.model) if args.model else Shapes((), ())
        plan = make_plan(load_config(args.config), shapes, args.world)
        rows = plan.rows() | (_traffic(plan, args) if args.links else {})
    except DsError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(
        json.dumps(rows, indent=2)
        if args.json
        else "\n".join(f"{name:<{max(map(len, rows))}}  {text}" for name, text in rows.items())
    )
    if not args.model:
        print("no model was given, so nothing above counts parameters or memory: add --model MODEL", file=sys.stderr)
    return 0


def _traffic(plan: Plan, args: argparse.Namespace) -> dict[str, str]:
    from ds_comm.rehearsal import fabric_from
    from ds_config.errors import PlanError
    from ds_engine.plan_messages import traffic_rows

    if args.nodes and args.world % args.nodes:
        raise PlanError(
            f"{args.world} ranks do not divide over {args.nodes} nodes",
            code="plan-nodes",
            fix="Give a number of nodes that divides --world-size.",
        )
    fabric = fabric_from(args.links, args.world // args.nodes if args.nodes else None)
    return traffic_rows(plan, fabric, args.tokens, args.tflops * 1e12)


if __name__ == "__main__":
    from ds_config.ds_command import main as ds

    sys.exit(ds(["plan", *sys.argv[1:]]))
