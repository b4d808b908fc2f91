"""The `ds` command line, and a launcher that leaves no process behind."""

from __future__ import annotations

import logging

__all__: list[str] = []

logging.getLogger(__name__).addHandler(logging.NullHandler())
