"""`ds elastic`: the batch sizes that the `elasticity` section of a configuration comes to."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

__all__ = ["HELP", "main", "register"]

HELP = "show the batch size that elasticity finds, and the numbers of ranks it suits"


def register(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("config", help="JSON or HJSON configuration with an elasticity section that is enabled")
    parser.add_argument(
        "--world-size", dest="world", type=int, default=0, metavar="N", help="what N ranks get (default: all numbers)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def main(args: argparse.Namespace) -> int:
    """Print it; 1 when no size suits what was asked."""
    # The section's model needs pydantic; `ds --help` must not.
    from ds_config.errors import DsError

    try:
        sizes = _told(args.config, args.world)
    except DsError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(sizes, indent=1))
    elif args.world:
        print(
            f"{args.world} ranks: train batch size {sizes['train']}, microbatches of {sizes['micro']}, "
            f"{sizes['accumulation']} a step on each rank"
        )
    else:
        ranks = ", ".join(map(str, sizes["ranks"]))
        print(f"train batch size {sizes['train']}, on any of {len(sizes['ranks'])} numbers of ranks: {ranks}")
    return 0


def _told(file: str, world: int) -> dict[str, Any]:
    from ds_config.errors import ConfigError
    from ds_engine.config import load_config
    from ds_engine.elastic_batch import elastic_batch, elastic_counts

    section = load_config(file).elasticity
    if not section.enabled:
        raise ConfigError(
            f"{file} has no elasticity section that is enabled",
            code="elasticity-section",
            fix='Add one: "elasticity": {"enabled": true, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}.',
        )
    if not world:
        batch, counts = elastic_counts(section)
        return {"train": batch, "ranks": list(counts)}
    request = elastic_batch(section, world)
    train, micro = request.train or 0, request.micro or 1
    share = section.model_parallel_size if section.version >= 0.2 else 1
    return {"world": world, "train": train, "micro": micro, "accumulation": train // (world // share * micro)}


if __name__ == "__main__":
    from ds_config.ds_command import main as ds

    sys.exit(ds(["elastic", *sys.argv[1:]]))
