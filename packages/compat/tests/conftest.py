"""The facade is not in the development environment: its tests import it from the checkout, unless it was installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
if importlib.util.find_spec("deepspeed") is None:
    sys.path.insert(0, str(SOURCE))
