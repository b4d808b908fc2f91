"""The facade is not in the development environment: its tests import it from the checkout, unless it was installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).resolve().parents[1] / "src"
if importlib.util.find_spec("deepspeed") is None:
    sys.path.insert(0, str(SOURCE))


@pytest.fixture(scope="module", autouse=True)
def _no_group_left():
    """End the group that the facade makes by itself in pytest's own process: `initialize` and `zero.Init` start without a launcher."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
