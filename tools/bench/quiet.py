"""How much of the machine others took while an engine was measured: a page says it beside the figures."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from repo.measuring import Spent, others

__all__ = ["Watch"]


class Watch:
    """Counts from when it is made; its children must have ended when it is asked."""

    def __init__(self) -> None:
        self._before = Spent.now()

    def others(self) -> float:
        """The share of all processors that others took."""
        return round(others(self._before, Spent.now(), os.cpu_count() or 1), 3)
