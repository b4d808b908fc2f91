"""Puts the stubs of the facade's modules into its wheel: the modules themselves are made by a finder and are no files."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StubsHook(BuildHookInterface):
    """Called by hatchling for the target `wheel`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the stubs and name them to the builder. An editable install goes without: its folder is the source."""
        if version == "editable":
            return
        package = ModuleType("deepspeed")  # its own __init__ needs packages that a build has not
        package.__path__ = [str(Path(self.root, "src", "deepspeed"))]
        sys.modules["deepspeed"] = package
        folder = Path(tempfile.mkdtemp(prefix="deepspeed-stubs-"))
        for path in importlib.import_module("deepspeed._stubs").write(folder):
            build_data["force_include"][str(folder / path)] = f"deepspeed/{path.as_posix()}"
