"""Errors of ours that are what upstream raises, too, so that `except AssertionError` of a program written for it goes on working."""

from __future__ import annotations

import builtins
import functools
import tomllib
from collections.abc import Callable
from pkgutil import get_data
from typing import Any

from ds_config import errors
from ds_config.errors import ConfigError, DsError, UnsupportedError

_twins: dict[tuple[type, type], type[DsError]] = {}


def also(kind: type[DsError], builtin: type[Exception]) -> type[DsError]:
    """Return the subclass of `kind` that is a `builtin`, too; `kind` itself if already a subclass of `builtin`."""
    if issubclass(kind, builtin):
        return kind
    if (kind, builtin) in _twins:
        return _twins[kind, builtin]
    there: dict[str, Any] = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        # Other processes make the plain class again: this one is in no module.
        "__reduce__": lambda error: (_plain, (kind, error.message, error.code, error.fix)),
    }
    _twins[kind, builtin] = twin = type(kind.__name__, (kind, builtin), there)
    return twin


@functools.cache
def _rows() -> dict[str, dict[str, str]]:
    return tomllib.loads((get_data(__package__ or "", "refusals.toml") or b"").decode())


def refused(name: str, *values: object) -> DsError:
    """Build the error of a row of `refusals.toml`; its texts show the values."""
    row = _rows()[name]
    kind: type[DsError] = getattr(errors, row["kind"])
    if "upstream" in row:
        kind = also(kind, getattr(builtins, row["upstream"]))
    return kind(row["what"].format(*values), code=row["code"], fix=row["fix"].format(*values))


def wrong_argument(what: str, fix: str, builtin: type[Exception] = ConfigError) -> DsError:
    """Build the error for an argument that cannot be meant ("compat-argument"), where upstream raises `builtin`."""
    return also(ConfigError, builtin)(what, code="compat-argument", fix=fix)


def not_supported(what: str, fix: str) -> DsError:
    """Build the error for an argument that upstream takes and this facade does not ("compat-argument")."""
    return UnsupportedError(what, code="compat-argument", fix=fix)


def _plain(kind: type[DsError], message: str, code: str, fix: str) -> DsError:
    return kind(message, code=code, fix=fix)


def _twin(error: DsError, builtin: type[Exception]) -> DsError:
    twin = also(type(error), builtin)(error.message, code=error.code, fix=error.fix)
    twin.__dict__.update(error.__dict__)
    return twin


def raising(builtin: type[Exception], *codes: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let errors of ours that leave the decorated function be `builtin`, too.

    Args:
        codes: Only those with one of these codes; all when none is named.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            except DsError as error:
                if isinstance(error, builtin) or (codes and error.code not in codes):
                    raise
                raise _twin(error, builtin) from error.__cause__

        return call

    return decorate
