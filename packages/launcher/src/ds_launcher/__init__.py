"""The `ds` command line, and a launcher that leaves no process behind."""

from __future__ import annotations

__all__: list[str] = []
