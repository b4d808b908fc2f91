"""Attributes and methods of upstream's classes that only pass a question on to another object of ours."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from functools import cache, reduce
from operator import attrgetter, itemgetter
from pkgutil import get_data
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


@cache
def attributes_of(kind: str) -> Mapping[str, Callable[[Any], Any]]:
    """Return a part of `attributes.toml`: functions of the owner, by upstream's names of what they tell."""
    table = tomllib.loads((get_data(__package__ or "", "attributes.toml") or b"").decode())
    return {name: _answer_at(text) for name, text in table[kind].items()}


def _answer_at(text: str) -> Callable[[Any], Any]:
    path, _, state = text.removeprefix("not ").partition(" is ")
    steps = [itemgetter(axis) if axis else attrgetter(name) for name, axis in re.findall(r"(\w+)|\[(\w+)\]", path)]

    def answer(owner: Any) -> Any:
        value = reduce(lambda at, step: step(at), steps, owner)
        if state:
            return (value is None) is (state == "None")
        return not value if text.startswith("not ") else value

    return answer
