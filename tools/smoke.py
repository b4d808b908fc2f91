"""Import each module named on the command line from what is installed, and say its version.

usage: python -P tools/smoke.py ds_config ds_zero ...
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from ds_config.installed import version_of

CHECKOUT = Path(__file__).resolve().parents[1]


def main(modules: list[str]) -> int:
    for name in modules:
        module = importlib.import_module(name)
        where = Path(str(module.__file__))
        if where.is_relative_to(CHECKOUT / "packages"):
            sys.stderr.write(f"{name} was imported from the checkout, not from its wheel: {where}\n")
            return 1
        sys.stdout.write(f"{name} {version_of(name)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
