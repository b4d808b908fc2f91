"""The two errors of a name that exists upstream and not here, and who raises which: attribute access, or an import."""

from __future__ import annotations

from deepspeed._surface import Missing
from ds_config.errors import UnsupportedError

__all__ = ["UnsupportedImportError", "UnsupportedNameError", "missing"]


class UnsupportedNameError(UnsupportedError, AttributeError):
    """The name exists upstream and not here; `hasattr` answers False."""


class UnsupportedImportError(UnsupportedError, ImportError):
    """The same for `import`, so that a guarded import takes its other way."""


def missing(kind: type[UnsupportedError], name: str, row: Missing) -> UnsupportedError:
    """Build the error for a refused name, with the reason and the replacement."""
    return kind(f"{name} is not here: {row.why}", code="compat-missing", fix=f"Use {row.instead}.")
