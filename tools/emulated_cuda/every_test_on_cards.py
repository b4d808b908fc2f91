"""pytest -p every_test_on_cards: every test has cuda as torch's default device, and ranks have NCCL.

Tests that name the CPU, numpy or another backend fail for that; what is of interest are errors inside the packages.
EMULATED_CUDA_BACKEND names the backend: cpu:gloo,cuda:nccl by default.
"""

import dataclasses
import os

import pytest
import torch

from ds_testing import plugin
from ds_testing.spec import World

BACKEND = os.environ.get("EMULATED_CUDA_BACKEND", "cpu:gloo,cuda:nccl")
_on_cards = plugin._on_cards


def on_cards(item, spec):
    spec = _on_cards(item, spec)
    if spec.backend not in ("gloo", None):
        pytest.skip("a backend of its own")
    backend = None if spec.backend is None else BACKEND
    return dataclasses.replace(spec, device="cuda", cards=torch.cuda.device_count(), backend=backend)


plugin._on_cards = on_cards


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    if isinstance(getattr(getattr(item, "obj", None), plugin.ATTRIBUTE, None), World):
        return (yield)
    torch.set_default_device("cuda")
    try:
        return (yield)
    finally:
        torch.set_default_device(None)
