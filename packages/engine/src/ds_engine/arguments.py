"""Command-line arguments of training scripts."""

from __future__ import annotations

import argparse

__all__ = ["add_config_arguments"]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config FILE` to a script's parser, and return it. `--deepspeed` changes nothing.

    Launchers of the DeepSpeed family also pass `--local_rank=N`. A script may have that option itself, added before or after
    this; where it has none, N is taken all the same and is `args.local_rank`.
    """
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="accepted for compatibility, changes nothing")
    group.add_argument("--deepspeed_config", metavar="FILE", help="JSON or HJSON configuration")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", metavar="FILE", help=argparse.SUPPRESS)
    # A longer name: argparse takes `--local_rank` for its abbreviation, unless the script has an option of just that name.
    names = ("--local_rank_of_launcher", "--local-rank-of-launcher")
    group.add_argument(*names, dest="local_rank", type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser
