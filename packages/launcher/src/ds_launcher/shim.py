"""`python -m ds_launcher.shim [--local-rank-arg] -- COMMAND...`: become COMMAND with our variables beside torchrun's."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

__all__ = ["main", "wrapped"]

_OURS = {"LOCAL_SIZE": "LOCAL_WORLD_SIZE", "CROSS_RANK": "GROUP_RANK", "CROSS_SIZE": "GROUP_WORLD_SIZE"}


def wrapped(argv: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that replace this process."""
    options, command = argv[: argv.index("--")], list(argv[argv.index("--") + 1 :])
    if "--local-rank-arg" in options:
        command.append(f"--local_rank={env['LOCAL_RANK']}")
    return command, {**env, **{ours: env[source] for ours, source in _OURS.items() if source in env}}


def main(argv: list[str]) -> None:
    """Does not return."""
    command, env = wrapped(argv, os.environ)
    os.execvpe(command[0], command, env)


if __name__ == "__main__":
    main(sys.argv[1:])
