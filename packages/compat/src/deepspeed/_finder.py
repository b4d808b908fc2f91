"""The modules of this package, made from the table of `deepspeed._surface` when they are imported: there are no files of them.

A module is empty at first: `__getattr__` looks a name up in its rows when it is first used. Every module has a `__path__`, so
that `from module import name` of a name without a row, or of a refused one, comes to the finder as "module.name", which raises
the reason; as an attribute a refused name raises an AttributeError, and `hasattr` is false. The path is where upstream's files
would be. Only `accelerator` has some, all empty and never read: programs list the devices by them.

`python -m module` runs the row `main` of a module.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import MutableMapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from deepspeed._errors import UnsupportedImportError, UnsupportedNameError, missing
from deepspeed._surface import SURFACE, ConstantRow, Missing

__all__ = ["TableFinder", "fill", "install", "resolve"]


def install() -> None:
    """Let `import` find the modules of the table. Again does nothing."""
    if not any(isinstance(finder, TableFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TableFinder())  # before the one of files: the stubs' folders are no packages


def fill(module: str, namespace: MutableMapping[str, object]) -> None:
    """Give a module's namespace `__all__`, `__getattr__` and `__dir__` of its rows."""
    there = sorted(name for name, row in SURFACE[module].items() if not isinstance(row, Missing))
    namespace["__all__"] = there
    namespace["__getattr__"] = partial(resolve, module)
    namespace["__dir__"] = lambda: sorted({*namespace, *there})


def resolve(module: str, name: str) -> object:
    """Return the object that the table maps `module.name` to, and cache the object in the module, unless its home says that it changes (`LIVE`).

    Raises:
        UnsupportedNameError: the name exists upstream and not here ("compat-missing").
        AttributeError: the name is unknown here and upstream.
    """
    row = SURFACE[module].get(name)
    path = f"{module}.{name}"
    if isinstance(row, Missing):
        raise missing(UnsupportedNameError, path, row)
    if row is not None:
        if isinstance(row, ConstantRow):
            value, live = row.value, False
        else:
            value, live = _at(row), name in getattr(sys.modules[row.partition(":")[0]], "LIVE", ())
        if not live:
            setattr(sys.modules[module], name, value)
        return value
    refused = _refused(path) if path in SURFACE else _undecided(module, name)
    if refused is not None:
        raise missing(UnsupportedNameError, path, refused)
    if path not in SURFACE and module == "deepspeed.zero":  # upstream's is that module under a shorter name
        return resolve("deepspeed.runtime.zero", name)
    if path not in SURFACE:
        raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=sys.modules.get(module))
    return importlib.import_module(path)  # which makes it an attribute, too


def _undecided(module: str, name: str) -> Missing | None:
    """Return the reason why a name without a row is refused; None for a private name, or one that upstream does not have."""
    if name.startswith("_"):
        return None
    refused: Missing | None = importlib.import_module("deepspeed._surface.upstream_names").refused_name(module, name)
    return refused


def _at(row: str) -> object:
    home, _, attribute = row.partition(":")
    source: object = importlib.import_module(home)
    return getattr(source, attribute) if attribute else source


def _refused(module: str) -> Missing | None:
    """Return the reason why a module cannot be imported; None if the module or a submodule has names here."""
    rows = [row for home in SURFACE if f"{home}.".startswith(f"{module}.") for row in SURFACE[home].values()]
    reasons = [row for row in rows if isinstance(row, Missing)]
    return reasons[0] if reasons and len(reasons) == len(rows) else None


class TableFinder:
    """Finds the modules of the table, and refuses what the table refuses."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the table; None for any other name.

        Raises:
            UnsupportedImportError: a refused module or name ("compat-missing").
        """
        if not fullname.startswith("deepspeed."):
            return None
        home, _, name = fullname.rpartition(".")
        row = SURFACE.get(home, {}).get(name)
        refused = row if isinstance(row, Missing) else _refused(fullname) if fullname in SURFACE else None
        if refused is not None:
            raise missing(UnsupportedImportError, fullname, refused)
        if fullname in SURFACE or (name == "__main__" and "main" in SURFACE.get(home, {})):
            spec = ModuleSpec(fullname, TableLoader(), is_package=name != "__main__")  # type: ignore[arg-type]  # importlib.abc takes 13 ms
            if name == "__main__":
                spec.origin = f"{home.rpartition('.')[2]}.py"  # of which `python -m` makes sys.argv[0]
            if spec.submodule_search_locations is not None:
                spec.submodule_search_locations.append(
                    os.path.join(os.path.dirname(__file__), *fullname.split(".")[1:])
                )
            return spec
        undecided = _undecided(home, name) if home in SURFACE else None
        if undecided is not None:
            raise missing(UnsupportedImportError, fullname, undecided)
        return None


class TableLoader:
    """Makes an empty module that knows its rows; and the program of a module that has `main`."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, so that Python creates the module object in the default way."""

    def exec_module(self, module: ModuleType) -> None:
        """Fill `module`."""
        module.__doc__ = f"Names of `{module.__name__}`; what each is here: `deepspeed._surface`."
        fill(module.__name__, vars(module))

    def get_code(self, fullname: str) -> CodeType:
        """Return the code that `python -m` runs: a call of the package's `main`."""
        home = fullname.removesuffix(".__main__")
        return compile(f"import sys\nfrom {home} import main\nsys.exit(main())\n", f"<{fullname}>", "exec")
