"""`python -m ds_launcher.shim COMMAND...`: become COMMAND with our variables beside torchrun's, and the rank for `LOCAL_RANK_WORD`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

__all__ = ["LOCAL_RANK_WORD", "main", "wrapped"]

LOCAL_RANK_WORD = "--local_rank=$LOCAL_RANK"
"""Stands in a command for the argument with the rank's own number, which is not known where the command is made."""

_OURS = {"LOCAL_SIZE": "LOCAL_WORLD_SIZE", "CROSS_RANK": "GROUP_RANK", "CROSS_SIZE": "GROUP_WORLD_SIZE"}


def wrapped(argv: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that replace this process."""
    command = [f"--local_rank={env['LOCAL_RANK']}" if word == LOCAL_RANK_WORD else word for word in argv]
    return command, {**env, **{ours: env[source] for ours, source in _OURS.items() if source in env}}


def main(argv: list[str]) -> None:
    """Does not return."""
    command, env = wrapped(argv, os.environ)
    os.execvpe(command[0], command, env)


if __name__ == "__main__":
    main(sys.argv[1:])
