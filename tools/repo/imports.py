"""Every import statement of a package, read from its source without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from repo.projects import Project

__all__ = ["Import", "Module", "imports", "modules", "test_modules"]


@dataclass(frozen=True, slots=True)
class Module:
    """One source file: its dotted name, its path, its syntax tree, and all nodes of that."""

    name: str
    path: Path
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
    for path in sorted(project.source.rglob("*.py")):
        parts = path.relative_to(project.source.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(_module(name, path))
    return found


def test_modules(project: Project) -> list[Module]:
    """All Python files under a package's tests, under their own stems."""
    files = sorted((project.folder / "tests").rglob("*.py"))
    return [_module(path.stem, path) for path in files]


def _module(name: str, path: Path) -> Module:
    facts = path.stat()
    return Module(name, path, *_parsed(path, facts.st_mtime_ns, facts.st_size))


@cache
def _parsed(path: Path, mtime_ns: int, size: int) -> tuple[ast.Module, tuple[ast.AST, ...]]:
    """Parse a file once in a process, as long as it stays what it is: 800 files take seconds, and every check reads them."""
    tree = ast.parse(path.read_text(), str(path))
    return tree, tuple(ast.walk(tree))


def imports(module: Module) -> list[Import]:
    """All imports of a module, at any depth."""
    return list(_walk(module, module.tree, deferred=False, typing_only=False))


def _walk(module: Module, node: ast.AST, *, deferred: bool, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            for target in _targets(module, child):
                yield Import(target, module.name, module.path, child.lineno, deferred, typing_only)
            continue
        inside = deferred or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
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
