"""`import ds_inference` is nothing but names."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ds_inference


def test_importing_loads_no_torch() -> None:
    code = "import sys, ds_inference; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_public_name_is_there() -> None:
    assert all(hasattr(ds_inference, name) for name in ds_inference.__all__)
    assert set(dir(ds_inference)) >= set(ds_inference.__all__)
    with pytest.raises(AttributeError, match="lode"):
        ds_inference.lode  # noqa: B018
