"""Strict configuration models, JSON/HJSON reading with origins, and the error classes of every ds package.

Names are loaded when they are first used: `import ds_config` and `ds_config.errors` cost under a millisecond, while the
models import pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_config.classifying import KeyReport, classify
    from ds_config.config_file import Document, read
    from ds_config.did_you_mean import nearest
    from ds_config.errors import ConfigError, DsError, UnsupportedConfigError, UnsupportedError
    from ds_config.explaining import explain
    from ds_config.file_check import USE_DEFAULT, examine, load, validate
    from ds_config.issues import Issue
    from ds_config.key_schema import json_schema
    from ds_config.layers import layered
    from ds_config.origin import Origin, Provenance
    from ds_config.parse import KeyPath, dotted
    from ds_config.schema_fields import Alias, Deprecated, NoEffect, Unsupported
    from ds_config.shape import Key, keys
    from ds_config.strict_model import StrictModel

__all__ = [
    "USE_DEFAULT",
    "Alias",
    "ConfigError",
    "Deprecated",
    "Document",
    "DsError",
    "Issue",
    "Key",
    "KeyPath",
    "KeyReport",
    "NoEffect",
    "Origin",
    "Provenance",
    "StrictModel",
    "Unsupported",
    "UnsupportedConfigError",
    "UnsupportedError",
    "classify",
    "dotted",
    "examine",
    "explain",
    "json_schema",
    "keys",
    "layered",
    "load",
    "nearest",
    "read",
    "validate",
]

_HOMES = {
    "file_check": ("USE_DEFAULT", "examine", "load", "validate"),
    "classifying": ("KeyReport", "classify"),
    "errors": ("ConfigError", "DsError", "UnsupportedConfigError", "UnsupportedError"),
    "explaining": ("explain",),
    "schema_fields": ("Alias", "NoEffect", "Deprecated", "Unsupported"),
    "issues": ("Issue",),
    "strict_model": ("StrictModel",),
    "did_you_mean": ("nearest",),
    "origin": ("Origin", "Provenance"),
    "parse": ("KeyPath", "dotted"),
    "config_file": ("Document", "read"),
    "layers": ("layered",),
    "key_schema": ("json_schema",),
    "shape": ("Key", "keys"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
