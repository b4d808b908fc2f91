"""What the repository knows about itself: its packages, how they are installed, and the checks over all of them.

Standard library only, so that `tools/bootstrap.py` can use it before anything is installed. Not shipped.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["ROOT"]

ROOT = Path(__file__).resolve().parents[2]
