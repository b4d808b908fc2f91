"""`import ds_engine` is nothing but names."""

import subprocess
import sys

import pytest

import ds_engine


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_and_help_load_neither_torch_nor_pydantic_and_print_nothing() -> None:
    code = """
import sys, ds_engine
assert 'torch' not in sys.modules and 'pydantic' not in sys.modules
import argparse
from ds_engine import cli_config, cli_plan
for command in (cli_plan, cli_config):
    command.register(argparse.ArgumentParser())
    assert command.HELP
assert 'torch' not in sys.modules
"""
    assert run(code) == ""


def test_every_public_name_is_there() -> None:
    assert all(hasattr(ds_engine, name) for name in ds_engine.__all__)
    assert set(dir(ds_engine)) >= set(ds_engine.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="initialise"):
        ds_engine.initialise  # noqa: B018
