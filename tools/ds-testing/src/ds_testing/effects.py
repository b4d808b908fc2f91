"""What importing a module does to the process and the machine, besides defining names."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

__all__ = ["ImportEffects", "import_effects"]


@dataclass(frozen=True, slots=True)
class ImportEffects:
    """Attributes:
    effects: One line for each file written, thread, process or socket made, and each setting changed.
    modules: Names of all modules that are loaded afterwards, those of the baseline too.
    """

    effects: tuple[str, ...]
    modules: frozenset[str]


def import_effects(module: str, *, baseline: tuple[str, ...] = ()) -> ImportEffects:
    """Import `module` in a new process and listen.

    Args:
        baseline: Modules imported before, whose own effects are not ours to answer for (`torch`).
    Raises:
        RuntimeError: the import failed; with the child's traceback.
    """
    command = [sys.executable, "-B", "-m", "ds_testing.import_probe", module, *baseline]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"importing {module} failed:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    return ImportEffects(tuple(found["effects"]), frozenset(found["modules"]))
