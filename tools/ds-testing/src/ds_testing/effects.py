"""What importing a module does to the process and the machine, besides defining names."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ImportEffects", "import_effects", "import_effects_each"]


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
    return import_effects_each([module], baseline=baseline)[module]


def import_effects_each(modules: Sequence[str], *, baseline: tuple[str, ...] = ()) -> dict[str, ImportEffects]:
    """As `import_effects`, by module: each in a process of its own, with one import of `baseline` for all."""
    command = [sys.executable, "-B", "-m", "ds_testing.import_probe", ",".join(modules), *baseline]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"importing {', '.join(modules)} failed:\n{done.stderr}")
    found = [json.loads(line) for line in done.stdout.splitlines()[-len(modules) :]]
    return {
        module: ImportEffects(tuple(one["effects"]), frozenset(one["modules"]))
        for module, one in zip(modules, found, strict=True)
    }
