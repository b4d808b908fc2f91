"""How a worker gets the test's function: import by path, once per file, with pytest's readable asserts."""

from __future__ import annotations

import ast
import importlib.util
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from _pytest.assertion.rewrite import rewrite_asserts

from ds_testing.protocol import Source

__all__ = ["ArgumentReader", "function", "module"]


def module(source: Source) -> ModuleType:
    """Import `source`, under the name it has in the pytest process so that pickles by reference find it."""
    if source.name in sys.modules:
        return sys.modules[source.name]
    spec = importlib.util.spec_from_file_location(source.name, source.path)
    if spec is None:
        raise ImportError(f"{source.path} is not a Python file")
    made = importlib.util.module_from_spec(spec)
    text = Path(source.path).read_bytes()
    tree = ast.parse(text, source.path)
    rewrite_asserts(tree, text, source.path)
    sys.modules[source.name] = made
    try:
        exec(compile(tree, source.path, "exec", dont_inherit=True), made.__dict__)
    except BaseException:
        del sys.modules[source.name]
        raise
    return made


def function(source: Source, qualname: str) -> Callable[..., object]:
    """The test's function; a method of a test class comes bound to a fresh instance, as pytest does it."""
    *classes, name = qualname.split(".")
    owner: Any = module(source)
    if classes:
        owner = reduce(getattr, classes, owner)()
    found: Callable[..., object] = getattr(owner, name)
    return found


class ArgumentReader(pickle.Unpickler):
    """Unpickles arguments that refer to names of the test's file or of a conftest.py above it."""

    def __init__(self, data: bytes, sources: Sequence[Source]) -> None:
        super().__init__(io.BytesIO(data))
        self._sources = {source.name: source for source in sources}

    def find_class(self, module_name: str, name: str) -> Any:
        if module_name in self._sources:  # its parents may be folders that nothing can import
            return reduce(getattr, name.split("."), module(self._sources[module_name]))
        return super().find_class(module_name, name)
