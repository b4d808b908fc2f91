"""`import ds_engine` is nothing but names."""

import subprocess
import sys


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_loads_neither_torch_nor_pydantic_and_prints_nothing() -> None:
    code = "import sys, ds_engine; assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    assert run(code) == ""


def test_every_public_name_is_there() -> None:
    code = "import ds_engine; print(all(hasattr(ds_engine, n) for n in ds_engine.__all__), set(dir(ds_engine)) >= set(ds_engine.__all__))"
    assert run(code) == "True True\n"


def test_an_unknown_name_is_an_attribute_error() -> None:
    code = """
import ds_engine
try:
    ds_engine.initialise
except AttributeError as error:
    print(error)
"""
    assert "initialise" in run(code)


def test_help_of_the_commands_needs_no_torch() -> None:
    code = """
import argparse, sys
from ds_engine import cli_config, cli_plan
for command in (cli_plan, cli_config):
    command.register(argparse.ArgumentParser())
    assert command.HELP
assert 'torch' not in sys.modules
"""
    assert run(code) == ""
