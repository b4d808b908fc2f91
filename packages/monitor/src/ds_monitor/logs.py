"""What the ds packages say through `logging`: nothing, until the job asks.

Each package logs to `logging.getLogger(__name__)` under its import name (`ds_zero`, `ds_comm`, ...), with a NullHandler
at the top. `configure_logging` gives all of them one handler; the root logger and other libraries are left alone.
"""

from __future__ import annotations

import logging
import sys
from typing import IO

__all__ = ["PACKAGES", "configure_logging"]

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


class _Once(logging.Filter):
    """Let a warning through the first time only: the same line at each of 10,000 steps says nothing new."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[str, int, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        key = (record.name, record.levelno, record.getMessage())
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


def configure_logging(level: int | str = logging.WARNING, rank: int = 0, *, stream: IO[str] | None = None) -> None:
    """Show the log of the ds packages on `stream` (standard error by default).

    Rank 0 shows `level` and above, each warning once; other ranks show errors only, marked with their rank, because
    what all ranks say needs saying once. Calling again replaces the earlier choice.
    """
    handler = _Handler(sys.stderr if stream is None else stream)
    handler.setFormatter(logging.Formatter(_FORMAT if rank == 0 else f"[rank {rank}] {_FORMAT}"))
    handler.addFilter(_Once())
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
