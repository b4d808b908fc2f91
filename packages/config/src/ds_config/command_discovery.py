"""The commands of `ds`: entry points of the group `ds.commands`, found and described without importing any of them.

An entry point's value is a module with `HELP` (a string literal), `register(parser)` and `main(args) -> int`. Importing its package
may cost seconds (torch), and a broken package must not break `ds --help`; so the one line of help is read out of the module's
source: the literal that is assigned to HELP at the top level. A module whose source cannot be found is listed without help.

For the same reason the module itself is loaded from its file, without its package: `ds X --help` costs what the module imports at its
top. What it needs of its package it imports where it needs it, in its functions.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from ds_config.command_help import CommandParser

__all__ = ["ALIASES", "GROUP", "commands", "help_line", "load_command", "parser_of", "source_file"]

GROUP = "ds.commands"
ALIASES: Mapping[str, tuple[str, ...]] = {
    "bench": ("comm", "bench"),
    "doctor": ("report", "--notable"),
    "env": ("report", "--quick"),
}
"""Shorter names of what other words say."""
_ASSIGNED = re.compile(r"^HELP\s*(?::\s*[^=\n]+)?=\s*", re.MULTILINE)


def commands() -> dict[str, EntryPoint]:
    """Return the installed commands by name, sorted. Reads package metadata only."""
    return {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)}


def source_file(module: str) -> Path | None:
    """Find the source file of a module without importing its packages."""
    path: Sequence[str] | None = None
    for name in (parts := module.split("."))[:-1]:
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.submodule_search_locations is None:
            return None
        path = list(spec.submodule_search_locations)
    # Asked by the last part only: with a path given, that is what the finder looks for.
    spec = PathFinder.find_spec(parts[-1], path)
    return Path(spec.origin) if spec is not None and spec.origin is not None and spec.origin.endswith(".py") else None


def load_command(module: str) -> ModuleType:
    """Load the module of a command, if possible without importing its package.

    The package is imported only if that happened before, or if the module has no source file.
    """
    package = module.partition(".")[0]
    file = None if package == module or package in sys.modules else source_file(module)
    spec = None if file is None else spec_from_file_location(module, file)
    if spec is None or spec.loader is None:
        return importlib.import_module(module)
    loaded = module_from_spec(spec)
    # Known by its name while it runs, as classes in it may ask; not after: who imports it then gets it as a part of its package.
    sys.modules[module] = loaded
    try:
        spec.loader.exec_module(loaded)
    finally:
        sys.modules.pop(module, None)
    return loaded


def parser_of(name: str, module: ModuleType | None = None) -> argparse.ArgumentParser:
    """Build the argument parser of an installed command.

    Args:
        module: The command's module, if already loaded.
    """
    module = load_command(commands()[name].module) if module is None else module
    parser = CommandParser(prog=f"ds {name}", description=module.HELP)
    module.register(parser)
    return parser


def help_line(module: str) -> str:
    """Return the literal assigned to HELP in the module's source; empty when there is none."""
    file = source_file(module)
    if file is None:
        return ""
    text = file.read_text(encoding="utf-8")
    match = _ASSIGNED.search(text)
    if match is None:
        return ""
    literal = _first_expression(text[match.end() :])
    return literal if isinstance(literal, str) else ""


def _first_expression(text: str) -> object:
    """Evaluate the literal that `text` begins with; None when there is none.

    Parses no more lines than the literal has.
    """
    lines = text.splitlines()
    for count in range(1, min(len(lines), 12) + 1):
        try:
            return ast.literal_eval("\n".join(lines[:count]))
        except (SyntaxError, ValueError):
            continue
    return None
