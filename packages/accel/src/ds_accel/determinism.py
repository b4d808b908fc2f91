"""Deterministic mode: two runs with the same seed and the same ranks give the same bits, and what cannot do so raises."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ds_config.errors import DsError

__all__ = ["deterministic"]

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_FIXED = (":4096:8", ":16:8")


@contextmanager
def deterministic(*, warn_only: bool = False) -> Iterator[None]:
    """Run a block with torch's deterministic algorithms. Afterwards all settings are as before.

    cuDNN does not try algorithms out (`benchmark`), and on CUDA cuBLAS has fixed workspaces, which it reads from the environment when it starts.
    Random numbers are the program's own affair (`torch.manual_seed`, `RngStreams`).

    Args:
        warn_only: Warn of an operation without a deterministic algorithm; otherwise torch raises RuntimeError there.
    Raises:
        DsError: CUDA was started with other cuBLAS workspaces ("accel-deterministic").
    """
    workspace = os.environ.get(_CUBLAS)
    if torch.cuda.is_available() and workspace not in _FIXED and torch.cuda.is_initialized():
        raise DsError(
            f"CUDA runs already, with {_CUBLAS} {workspace!r}",
            code="accel-deterministic",
            fix=f"Set {_CUBLAS}={_FIXED[0]} before the program starts, or enter deterministic() before the first use of CUDA.",
        )
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, fixed = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    if workspace not in _FIXED:
        os.environ[_CUBLAS] = _FIXED[0]
    try:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, fixed
        if workspace is None:
            os.environ.pop(_CUBLAS, None)
        else:
            os.environ[_CUBLAS] = workspace
