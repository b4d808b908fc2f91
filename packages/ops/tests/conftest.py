"""Shared by the tests of ds_ops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_ops import _native


def _ulps(a: Tensor, b: Tensor) -> int:
    """The largest distance between two tensors of one dtype, counted in representable values."""
    if a.numel() == 0:
        return 0
    wide, low = {4: (torch.int32, -(2**31)), 2: (torch.int16, -(2**15))}[a.element_size()]
    x, y = (t.detach().contiguous().view(wide).long() for t in (a, b))
    x, y = (torch.where(t < 0, low - t, t) for t in (x, y))
    return int((x - y).abs().max())


@pytest.fixture
def ulps() -> Callable[[Tensor, Tensor], int]:
    return _ulps


@pytest.fixture
def native() -> None:
    """For tests of native kernels; skipped, with the reason, where this installation has none."""
    loaded = _native.load("_cpu")
    if loaded.module is None:
        pytest.skip(loaded.reason)


@pytest.fixture(params=["native", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with native kernels and with the reference."""
    if request.param == "native" and _native.load("_cpu").module is None:
        pytest.skip(_native.load("_cpu").reason)
    monkeypatch.setenv("DS_OPS", "reference" if request.param == "reference" else "")
    return request.param


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
