"""Module attributes from the table of `deepspeed._surface`, loaded when they are first used.

Every public module of this package is one line: it asks here for its names. A name is what the table says it is, a
submodule, a name that exists upstream and not here, or unknown.
"""

from __future__ import annotations

import dis
import importlib
import sys
from collections.abc import Callable
from types import ModuleType

from deepspeed._surface import SURFACE, Missing
from ds_config.errors import UnsupportedError

__all__ = ["UnsupportedImportError", "UnsupportedNameError", "names", "resolve"]

_IMPORT_FROM = dis.opmap["IMPORT_FROM"]


class UnsupportedNameError(UnsupportedError, AttributeError):
    """The name exists upstream and not here; `hasattr` answers False."""


class UnsupportedImportError(UnsupportedError, ImportError):
    """The same for `import`, so that a guarded import takes its other way."""


def names(module: str) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a module of the facade.

    Raises:
        UnsupportedImportError: nothing of what upstream has in this module, or below it, is here ("compat-missing").
    """
    rows = SURFACE[module]
    there = sorted(name for name, row in rows.items() if not isinstance(row, Missing))
    missing = [row for row in rows.values() if isinstance(row, Missing)]
    below = [row for other in SURFACE if other.startswith(f"{module}.") for row in SURFACE[other].values()]
    if missing and not there and all(isinstance(row, Missing) for row in below):
        raise _missing(UnsupportedImportError, module, missing[0])

    def get(name: str) -> object:
        value = resolve(module, name, imported=_by_import(sys._getframe(1).f_code.co_code, sys._getframe(1).f_lasti))
        setattr(sys.modules[module], name, value)
        return value

    return there, get, lambda: sorted({*vars(sys.modules[module]), *there})


def resolve(module: str, name: str, *, imported: bool = False) -> object:
    """What the table says `module.name` is.

    Args:
        imported: Whether `from module import name` asks: then the error for a missing name is an ImportError.
    Raises:
        UnsupportedNameError, UnsupportedImportError: the name exists upstream and not here ("compat-missing").
        AttributeError: the name is unknown here and upstream.
    """
    row = SURFACE[module].get(name)
    if isinstance(row, Missing):
        raise _missing(UnsupportedImportError if imported else UnsupportedNameError, f"{module}.{name}", row)
    if row is not None:
        home, _, attribute = row.partition(":")
        found: object = importlib.import_module(home)
        return getattr(found, attribute) if attribute else found
    if f"{module}.{name}" in SURFACE:
        return _submodule(f"{module}.{name}", imported)
    raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=sys.modules.get(module))


def _submodule(name: str, imported: bool) -> ModuleType:
    try:
        return importlib.import_module(name)
    except UnsupportedImportError as error:
        if imported:
            raise
        raise UnsupportedNameError(error.message, code=error.code, fix=error.fix) from error


def _missing(kind: type[UnsupportedError], name: str, row: Missing) -> UnsupportedError:
    return kind(f"{name} is not here: {row.why}", code="compat-missing", fix=f"Use {row.instead}.")


def _by_import(code: bytes, at: int) -> bool:
    # `from m import x` turns an AttributeError into "cannot import name", without our reason; anything else it lets through.
    return 0 <= at < len(code) and code[at] == _IMPORT_FROM
