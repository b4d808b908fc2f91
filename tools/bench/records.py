"""The records of benchmarks, docs/benchmarks/data/NAME.json: facts with the date and the machine they are of."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "benchmarks"


def parser_of(name: str, about: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Return the parser of a benchmark, which knows these numbers, with their defaults, as `--cycles 5`."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"nox -s bench -- {name}", description=about, formatter_class=raw)
    for option, default in numbers.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    return parser


def file_of(name: str) -> Path:
    """Return where the record of a benchmark is."""
    return PAGES / "data" / f"{name}.json"


def read(name: str) -> dict[str, Any]:
    """Return what a benchmark wrote last; empty where it was never run."""
    found: dict[str, Any] = json.loads(file_of(name).read_text()) if file_of(name).is_file() else {}
    return found


def write(name: str, **facts: Any) -> None:
    """Write a record anew."""
    stamp = {"date": time.strftime("%Y-%m-%d"), "machine": machine()}
    file_of(name).write_text(json.dumps(stamp | facts, indent=1) + "\n")
    print(f"written: {file_of(name).name}", flush=True)


def add(name: str, **parts: Any) -> None:
    """Write parts of a record and leave its others as they are."""
    write(name, **(read(name) | {"date": time.strftime("%Y-%m-%d"), "machine": machine()} | parts))


def machine() -> str:
    """Return what a page says of the machine."""
    said = [platform.machine(), f"{os.cpu_count()} cores", f"kernel {platform.release()}"]
    return ", ".join([*said, f"Python {platform.python_version()}", f"torch {version('torch')}"])
