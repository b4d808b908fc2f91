"""Every import statement of a package, read from its source without running it."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from repo.projects import Project

__all__ = [
    "BLOCKS",
    "Import",
    "Module",
    "collector_paused",
    "imports",
    "modules",
    "num_parsed",
    "parse",
    "test_modules",
    "walk",
]

BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)
"""Nodes that may have statements inside: a search for statements needs no others."""


@dataclass(frozen=True, slots=True)
class Module:
    """One source file: its dotted name, its path, its time and size, its syntax tree, and all nodes of that."""

    name: str
    path: Path
    version: tuple[int, int]
    tree: ast.Module
    nodes: tuple[ast.AST, ...]


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module.

    Attributes:
        target: Absolute dotted name; `from a import b` counts as `a` and, where that is a module, as `a.b`.
        importer: Dotted name of the importing module.
        deferred: Inside a function: runs when that is called.
        typing_only: Under `if TYPE_CHECKING`.
    """

    target: str
    importer: str
    path: Path
    line: int
    deferred: bool
    typing_only: bool

    @property
    def top(self) -> str:
        return self.target.split(".")[0]


def modules(project: Project) -> list[Module]:
    """All modules of a package, in alphabetical order of their files."""
    found = []
    with collector_paused():
        for path in sorted(project.source.rglob("*.py")):
            parts = path.relative_to(project.source.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(_module(name, path))
    return found


def test_modules(project: Project) -> list[Module]:
    """All Python files under a package's tests, under their own stems. They are parsed at each call: one check reads them, once."""
    files = sorted((project.folder / "tests").rglob("*.py"))
    with collector_paused():
        return [Module(path.stem, path, _version(path), *_parsed.__wrapped__(path, _version(path))) for path in files]


def _module(name: str, path: Path) -> Module:
    return Module(name, path, _version(path), *_parsed(path, _version(path)))


def _version(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_mtime_ns, facts.st_size


@cache
def _parsed(path: Path, version: tuple[int, int]) -> tuple[ast.Module, tuple[ast.AST, ...]]:
    """Parse a file once in a process, as long as it stays what it is: 800 files take seconds, and every check reads them."""
    tree = parse(path)
    return tree, tuple(walk(tree))


def walk(node: ast.AST) -> list[ast.AST]:
    """Return what `ast.walk` yields, in its order, in half of its time."""
    found = [node]
    for inner in found:  # grows
        for value in vars(inner).values():
            if isinstance(value, list):
                found.extend([item for item in value if isinstance(item, ast.AST)])
            elif isinstance(value, ast.AST):
                found.append(value)
    return found


def num_parsed() -> int:
    """Return how many files are kept."""
    return _parsed.cache_info().currsize


def parse(path: Path) -> ast.Module:
    """Parse a file without looking for garbage meanwhile."""
    with collector_paused():
        return ast.parse(path.read_text(), str(path))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Make no garbage collection inside: a tree is many new objects, none of them garbage, and to look at them takes longer than to parse."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


_IMPORTS: dict[tuple[str, Path, tuple[int, int]], list[Import]] = {}


def imports(module: Module) -> list[Import]:
    """All imports of a module, at any depth."""
    key = module.name, module.path, module.version
    if key not in _IMPORTS:
        _IMPORTS[key] = list(_walk(module, module.tree, deferred=False, typing_only=False))
    return _IMPORTS[key]


def _walk(module: Module, node: ast.AST, *, deferred: bool, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            for target in _targets(module, child):
                yield Import(target, module.name, module.path, child.lineno, deferred, typing_only)
            continue
        if not isinstance(child, BLOCKS):
            continue
        inside = deferred or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        typing = typing_only or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
        yield from _walk(module, child, deferred=inside, typing_only=typing)


def _targets(module: Module, node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    package = module.name.split(".")
    if module.path.stem != "__init__":
        package = package[:-1]
    base = package[: len(package) - node.level + 1] if node.level else []
    source = ".".join(base + ([node.module] if node.module else []))
    return [source, *(f"{source}.{alias.name}" for alias in node.names)]
