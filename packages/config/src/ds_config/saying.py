"""What a script sees that has not configured logging: warnings, errors, and what its configuration asked to have logged.

Every ds package logs to the logger of its import name. `speak(name)` gives that logger a handler of last resort: as long as no other
handler would get a record, rank 0 writes it to standard error, each warning once; other ranks write errors only. As soon as the job
configures logging (`logging.basicConfig`, `ds_monitor.configure_logging`), this handler is still.
"""

from __future__ import annotations

import logging
import os
import sys

__all__ = ["FORMAT", "LastResort", "Once", "log_requested", "speak", "this_rank"]

FORMAT = "[%(asctime)s] [%(levelname)s] [%(name)s] %(message)s"
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def this_rank() -> int:
    """Return the rank that the launcher set for this process; 0 without a launcher."""
    text = next((os.environ[name] for name in _RANKS if os.environ.get(name, "").isdecimal()), "0")
    return int(text)


class Once(logging.Filter):
    """Let a warning through the first time only: the same line at each of 10,000 steps says nothing new."""

    def __init__(self) -> None:
        super().__init__()
        self._logged: set[tuple[str, int, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        key = (record.name, record.levelno, record.getMessage())
        new = key not in self._logged
        self._logged.add(key)
        return new


class LastResort(logging.Handler):
    """Writes records that no other handler takes; see the top of this file."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORMAT))
        self._once = Once()

    def emit(self, record: logging.LogRecord) -> None:
        if not _others(record.name) and (this_rank() == 0 or record.levelno >= logging.ERROR):
            self.write(record)

    def write(self, record: logging.LogRecord) -> None:
        """Write `record` to standard error, a warning only once."""
        # Looked up now: notebooks and tests replace it. A process without a terminal may have none.
        if sys.stderr is not None and self._once.filter(record):
            sys.stderr.write(self.format(record) + "\n")


_LAST_RESORT = LastResort()


def _others(name: str) -> bool:
    """Whether some other handler gets what is logged to `name`."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(not isinstance(handler, LastResort | logging.NullHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def speak(*names: str) -> None:
    """Let the loggers `names` be written where logging is not configured."""
    for name in names:
        logger = logging.getLogger(name)
        if _LAST_RESORT not in logger.handlers:
            logger.addHandler(_LAST_RESORT)


def log_requested(logger: logging.Logger, text: str) -> None:
    """Write what the configuration asked to have logged: an INFO record, written to standard error of rank 0 where INFO goes nowhere."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", text)
    elif this_rank() == 0:
        _LAST_RESORT.write(logger.makeRecord(logger.name, logging.INFO, "", 0, text, (), None))
