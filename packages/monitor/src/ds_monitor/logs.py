"""What the ds packages say through `logging`.

Each package logs to `logging.getLogger(__name__)` under its import name (`ds_zero`, `ds_comm`, ...). A job that configures no logging
sees warnings once, on rank 0, and what its configuration asks for (`ds_config.saying`). `configure_logging` gives all packages
one handler of another level or place; the root logger and other libraries are left alone.
"""

from __future__ import annotations

import logging
import sys
from typing import IO

from ds_config.saying import Once, log_requested, speak

__all__ = ["PACKAGES", "configure_logging", "log_requested"]

PACKAGES = tuple(
    f"ds_{name}"
    for name in [
        "config",
        "monitor",
        "launcher",
        "accel",
        "ops",
        "comm",
        "zero",
        "pipe",
        "moe",
        "parallel",
        "ckpt",
        "data",
        "compress",
        "inference",
        "engine",
        "compat",
    ]
)
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Handler(logging.StreamHandler[IO[str]]):
    """Ours, so that a second call finds and replaces it."""


def configure_logging(level: int | str = logging.WARNING, rank: int = 0, *, stream: IO[str] | None = None) -> None:
    """Show the log of the ds packages on `stream` (standard error by default).

    Rank 0 shows `level` and above, each warning once; other ranks show errors only, marked with their rank, because
    what all ranks say needs saying once. Calling again replaces the earlier choice.
    """
    handler = _Handler(sys.stderr if stream is None else stream)
    handler.setFormatter(logging.Formatter(_FORMAT if rank == 0 else f"[rank {rank}] {_FORMAT}"))
    handler.addFilter(Once())
    shown = logging.getLevelName(level) if isinstance(level, str) else level
    if not isinstance(shown, int):
        raise ValueError(f"log level {level!r} is not one of DEBUG, INFO, WARNING, ERROR, CRITICAL")
    for name in PACKAGES:
        logger = logging.getLogger(name)
        for old in [h for h in logger.handlers if isinstance(h, _Handler)]:
            logger.removeHandler(old)
        logger.addHandler(handler)
        logger.setLevel(shown if rank == 0 else max(shown, logging.ERROR))
        logger.propagate = False  # a root handler of the user's would show every line twice


speak(*PACKAGES)
