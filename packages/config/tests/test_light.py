"""Importing the package, its errors and its reader does nothing and brings nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ds_config


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200).stdout


@pytest.mark.parametrize(
    "statement", ["import ds_config", "import ds_config.errors", "from ds_config import read, nearest, Provenance"]
)
def test_no_pydantic_no_torch(statement: str) -> None:
    assert (
        run(f"import sys\n{statement}\nprint([m for m in ('pydantic', 'torch', 'hjson', 'json') if m in sys.modules])")
        == "[]\n"
    )


def test_models_do_not_bring_torch() -> None:
    assert (
        run("import sys\nfrom ds_config import *\nprint('torch' in sys.modules, 'pydantic' in sys.modules)")
        == "False True\n"
    )


def test_import_has_no_side_effect() -> None:
    code = """
import os, sys, threading
before, seen = dict(os.environ), []
def hook(event, args):
    if event in ("subprocess.Popen", "socket.__new__", "os.fork", "os.putenv", "os.mkdir", "os.remove", "os.rename"):
        seen.append(event)
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        seen.append((event, args[0]))
sys.dont_write_bytecode = True
sys.addaudithook(hook)
from ds_config import *
print(seen, dict(os.environ) == before, threading.active_count())
"""
    assert run(code) == "[] True 1\n"


def test_every_public_name_resolves() -> None:
    for name in ds_config.__all__:
        assert getattr(ds_config, name) is not None
    assert set(ds_config.__all__) <= set(dir(ds_config))
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        ds_config.nonsense  # noqa: B018
