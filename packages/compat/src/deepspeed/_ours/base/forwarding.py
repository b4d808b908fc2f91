"""Attributes and methods of upstream's classes that only pass a question on to another object of ours."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any


def reads(path: str, meaning: str) -> Any:
    """Build a property that returns the attribute at `path` ("state.step")."""
    return property(attrgetter(path), doc=meaning)


def method(function: Callable[..., Any], meaning: str) -> Any:
    """Return `function` as a method of this meaning: the docstring of a lambda."""
    function.__doc__ = meaning
    return function


def tells(path: str, meaning: str) -> Any:
    """Build a method without arguments that returns the attribute at `path`."""
    return method(lambda self: attrgetter(path)(self), meaning)


def calls(path: str, meaning: str, *names: str) -> Any:
    """Build a method that calls the one at `path` with its arguments, by place where upstream has another name for them.

    Args:
        names: Upstream's names of the arguments, in their order.
    """

    def call(self: Any, *args: Any, **options: Any) -> Any:
        placed = [options.pop(name) for name in names[len(args) :] if name in options]
        return attrgetter(path)(self)(*args, *placed, **options)

    return method(call, meaning)


def answers(constant: Any, meaning: str) -> Any:
    """Build a method that returns `constant`, whatever it is given: upstream's has nothing to do here."""
    return method(lambda self, *args, **options: constant, meaning)
