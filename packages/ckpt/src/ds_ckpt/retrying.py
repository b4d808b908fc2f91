"""Asking a store again when it did not answer: waits grow, and differ between the ranks that were refused together."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import ds_monitor
from ds_config.errors import CheckpointError
from ds_config.option_checks import check_options

__all__ = ["IncompleteError", "RetryPolicy", "transient"]

_T = TypeVar("_T")
_CLIENTS: Final = ("aiohttp", "aiobotocore", "botocore", "google", "azure", "requests", "urllib3", "httpx")
_FINAL: Final = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)


class IncompleteError(OSError):
    """A store sent or kept another number of bytes than it was asked for."""


def transient(error: Exception) -> bool:
    """Whether asking again may help: no answer, a broken one, or the store's own trouble; not what it says is so."""
    if isinstance(error, _FINAL):
        return False
    return isinstance(error, OSError | TimeoutError) or type(error).__module__.partition(".")[0] in _CLIENTS


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long to ask.

    Attributes:
        attempts: Times that a request is made.
        first_s, limit_s: The wait after the first failure, doubled after each further one up to the limit; from half of it to all.
    """

    attempts: int = 7
    first_s: float = 0.1
    limit_s: float = 10.0

    def __post_init__(self) -> None:
        check_options(self, attempts=">= 1", first_s=">= 0", limit_s=">= 0")

    def __call__(self, what: str, ask: Callable[[], _T]) -> _T:
        """Call `ask` until the store answers, at most `attempts` times, and return the answer.

        Raises:
            CheckpointError: "ckpt-store": no answer in all attempts; the last error is the cause. Errors that a retry
            does not
                change are raised unchanged.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                return ask()
            except Exception as error:
                if not transient(error):
                    raise
                if attempt == self.attempts:
                    raise CheckpointError(
                        f"the store failed {attempt} times to {what}; last: {type(error).__name__}: {str(error)[:300]}",
                        code="ckpt-store",
                        fix="See whether it can be reached from here; nothing was published, and earlier checkpoints are untouched.",
                    ) from error
                wait_s = min(self.limit_s, self.first_s * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
                ds_monitor.event("ckpt.store_retry", what=what, attempt=attempt, wait_s=wait_s, why=str(error)[:300])
                time.sleep(wait_s)
        raise CheckpointError(f"attempts is {self.attempts}", code="ckpt-store", fix="Use 1 or more.")
