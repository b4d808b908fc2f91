"""Command-line arguments of training scripts."""

from __future__ import annotations

import argparse

__all__ = ["add_config_arguments"]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed`, `--deepspeed_config FILE` and `--local_rank` to a script's parser, and return it.

    Launchers of the DeepSpeed family pass them. `--deepspeed` changes nothing: passing the configuration is what counts.
    """
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="accepted for compatibility, changes nothing")
    group.add_argument("--deepspeed_config", metavar="FILE", help="JSON or HJSON configuration")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", metavar="FILE", help=argparse.SUPPRESS)
    group.add_argument("--local_rank", type=int, default=-1, help="accepted for compatibility; LOCAL_RANK is used")
    return parser
