"""Errors of ours that are what upstream raises, too, so that `except AssertionError` of a program written for it goes on working."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ds_config.errors import ConfigError, DsError, PlanError, UnsupportedError

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


def out_of_order(what: str, fix: str, builtin: type[Exception] = AssertionError) -> DsError:
    """Build the error for a call at the wrong time ("compat-call-order"), where upstream asserts, or raises `builtin`."""
    return also(PlanError, builtin)(what, code="compat-call-order", fix=fix)


def wrong_argument(what: str, fix: str, builtin: type[Exception] = ConfigError) -> DsError:
    """Build the error for an argument that cannot be meant ("compat-argument"), where upstream raises `builtin`."""
    return also(ConfigError, builtin)(what, code="compat-argument", fix=fix)


def not_supported(what: str, fix: str) -> DsError:
    """Build the error for an argument that upstream takes and this facade does not ("compat-argument")."""
    return UnsupportedError(what, code="compat-argument", fix=fix)


def _plain(kind: type[DsError], message: str, code: str, fix: str) -> DsError:
    return kind(message, code=code, fix=fix)


@contextmanager
def _translated(builtin: type[Exception], codes: frozenset[str]) -> Iterator[None]:
    try:
        yield
    except DsError as error:
        if isinstance(error, builtin) or (codes and error.code not in codes):
            raise
        twin = also(type(error), builtin)(error.message, code=error.code, fix=error.fix)
        twin.__dict__.update(error.__dict__)
        raise twin from error.__cause__


def raising(builtin: type[Exception], *codes: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let errors of ours that leave the decorated function be `builtin`, too.

    Args:
        codes: Only those with one of these codes; all when none is named.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            with _translated(builtin, frozenset(codes)):
                return function(*args, **options)

        return call

    return decorate
