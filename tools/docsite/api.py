"""The API pages, made when the site is built: what a package offers, in the order in which people need it.

docs/reference/api.toml names the groups of a package, what is used first first; what it does not name follows by kind. Each entry is the
signature and docstring (mkdocstrings), the options behind `**options` with their defaults, an example out of a page or a test, and its source.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docsite.examples import Use, find_uses, first_block, relative
from docsite.generated import projects
from repo import ROOT
from repo.imports import BLOCKS, parse, walk
from repo.projects import Project

__all__ = ["GROUPS", "Module", "api_pages", "option_table", "public_modules"]

GROUPS = ROOT / "docs" / "reference" / "api.toml"
_IMPORT = re.compile(r"^\s*(?:from (ds_\w+(?:\.\w+)*) import|import (ds_\w+(?:\.\w+)*))", re.MULTILINE)
_FIELDS = re.compile(r"^ *\w+: The fields of `(\w+)`", re.MULTILINE)
_KINDS = ("functions", "classes", "errors", "constants")


@dataclass(frozen=True, slots=True)
class Module:
    """A module whose names users import, and the names.

    Attributes:
        homes: Name -> the path of its definition; the name's own path where that could not be told.
    """

    name: str
    homes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Group:
    title: str
    names: Sequence[str]


def public_modules(project: Project) -> list[Module]:
    """The package itself, then every module of it that a page of docs/ or a README tells to import."""
    names = sorted(name for name in _imported() if name.startswith(f"{project.module}."))
    found = [_module(name) for name in [project.module, *names]]
    return [module for module in found if module.homes]


@cache
def _imported() -> frozenset[str]:
    texts = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "packages").glob("*/README.md")]
    return frozenset(a or b for file in texts for a, b in _IMPORT.findall(file.read_text()))


@cache
def api_pages(source: str = "") -> dict[str, str]:
    """One page a package; a symbol is shown once, in the first module that offers it.

    Args:
        source: Where the repository can be read, up to the path of a file.
    """
    pages = {}
    groups = tomllib.loads(GROUPS.read_text())
    uses = find_uses()
    index = ["# API", "", "The public names of every package, those that people need first at the top of its page.", ""]
    index += ["| package | begin with | names |", "|---|---|---|"]
    for project in projects():
        if project.opt_in:  # the facade has DeepSpeed's names: reference/deepspeed-surface.md
            continue
        chosen = [_Group(row["title"], row["names"]) for row in groups.get(project.name, ())]
        writer = _Writer(uses, source)
        pages[f"reference/api/{project.name}.md"] = writer.page(project, chosen)
        first = chosen[0].names[:3] if chosen else ()
        links = ", ".join(f"[`{name}`]({project.name}.md#{project.module}.{name})" for name in first)
        index.append(f"| [`{project.name}`]({project.name}.md) | {links} | {len(writer.shown)} |")
    pages["reference/api/index.md"] = "\n".join(index) + "\n"
    return pages


def option_table(symbol: str, value: object) -> list[str]:
    """Return the options of a function that takes the fields of a dataclass as keywords; nothing for others."""
    match = _FIELDS.search(inspect.getdoc(value) or "") if callable(value) else None
    if match is None:
        return []
    record = getattr(sys.modules[getattr(value, "__module__", "")], match[1])
    meanings = _attributes(inspect.getdoc(record) or "")
    lines = [f"Options of `{symbol}`, all by keyword:", "", "| option | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(record):
        if field.name.startswith("_"):
            continue
        default = f"`{field.default!r}`" if field.default is not dataclasses.MISSING else f"`{_made(field)}`"
        if field.default is not dataclasses.MISSING and dataclasses.is_dataclass(field.default):
            default = "off"
        lines.append(f"| `{field.name}` | {default} | {meanings.get(field.name, '').replace('|', chr(92) + '|')} |")
    return [*lines, ""]


def _made(field: dataclasses.Field[object]) -> str:
    return f"{getattr(field.default_factory, '__name__', 'default')}()"


def _attributes(doc: str) -> dict[str, str]:
    """Name -> text of the section `Attributes:`."""
    rows = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", doc.partition("Attributes:")[2], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in rows}


def _module(name: str) -> Module:
    module = importlib.import_module(name)
    return Module(name, {symbol: _home(name, module, symbol) for symbol in getattr(module, "__all__", ())})


def _home(name: str, module: object, symbol: str) -> str:
    """Where the object is defined: the site shows it from there. Constants are looked up in the imports of `name`."""
    value = getattr(module, symbol)
    if isinstance(value, type) or callable(value):
        home, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if home and qualified and home.startswith("ds_") and "<" not in qualified:
            return f"{home}.{qualified}"
    file = getattr(module, "__file__", None)
    return _imports_of(Path(file)).get(symbol, f"{name}.{symbol}") if file else f"{name}.{symbol}"


@cache
def _imports_of(file: Path) -> Mapping[str, str]:
    """Name -> the path from which `file` imports it, first of all."""
    found: dict[str, str] = {}
    for node in walk(parse(file)):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, f"{node.module}.{alias.name}")
    return found


def _kind(module: str, symbol: str) -> str:
    value = getattr(sys.modules[module], symbol)
    if isinstance(value, type):
        return "errors" if issubclass(value, BaseException) else "classes"
    return "functions" if callable(value) else "constants"


class _Writer:
    """Writes the page of one package.

    Attributes:
        shown: Definitions that have their place already.
    """

    def __init__(self, uses: Mapping[str, Sequence[Use]], source: str) -> None:
        self.uses, self.source = uses, source
        self.shown: set[str] = set()

    def page(self, project: Project, groups: Sequence[_Group]) -> str:
        """Return the whole page.

        Raises:
            ValueError: a group names what the package does not offer.
        """
        readme = (project.folder / "README.md").read_text()
        lines = [
            f"# {project.name}",
            "",
            f"`import {project.module}` · [README](../../packages/{project.folder.name}.md)",
        ]
        if example := first_block(readme):
            lines += ["", "```python", example.rstrip(), "```"]
        modules = public_modules(project)
        package = modules[0]
        for group in groups:
            if unknown := [name for name in group.names if name not in package.homes]:
                raise ValueError(f"docs/reference/api.toml: {project.name} does not offer {', '.join(unknown)}")
            lines += ["", f"## {group.title}", ""]
            for symbol in group.names:
                lines += self._entry(package, symbol)
        for module in modules:
            listed = {name for group in groups for name in group.names} if module is package else set()
            rest = sorted(set(module.homes) - listed, key=lambda name: (_KINDS.index(_kind(module.name, name)), name))
            if rest:
                more = "Other names of " if listed else ""
                lines += ["", f"## {more}{module.name}", ""]
            for symbol in rest:
                lines += self._entry(module, symbol)
        return "\n".join(lines) + "\n"

    def _entry(self, module: Module, symbol: str) -> list[str]:
        home, path = module.homes[symbol], f"{module.name}.{symbol}"
        anchor = f'<span id="{path}"></span>' if home != path else ""
        if home in self.shown:
            return [anchor, f"`{symbol}`: see [`{home}`][{home}].", ""]
        self.shown.add(home)
        lines = [anchor, ""] if anchor else []
        lines += [f"::: {home}", ""]
        lines += option_table(symbol, getattr(sys.modules[module.name], symbol))
        return [*lines, *self._example(path, home), self._source(home), ""]

    def _example(self, path: str, home: str) -> list[str]:
        uses = self.uses.get(path) or self.uses.get(home) or ()
        if not uses:
            return []
        pages = [use for use in uses if use.title]
        lines = []
        if statement := uses[0].statement:
            lines += ["```python", statement, "```", ""]
        if pages:
            links = [f"[{use.title}]({relative(use.page, 'reference/api')})" for use in pages[:3]]
            lines += [f"Used in {', '.join(links)}.", ""]
        elif lines:
            lines += [f"From `{uses[0].page}`.", ""]
        return lines

    def _source(self, home: str) -> str:
        """Where the definition is; a link where the repository can be read."""
        name, _, symbol = home.rpartition(".")
        while name:
            module = sys.modules.get(name)
            if module is not None and getattr(module, "__file__", None):
                path = Path(str(module.__file__)).relative_to(ROOT).as_posix()
                line = _line_of(getattr(module, symbol, None))
                at, hash_ = (f":{line}", f"#L{line}") if line else ("", "")
                return f"Source: [`{path}{at}`]({self.source}{path}{hash_})" if self.source else f"Source: `{path}{at}`"
            name, _, symbol = name.rpartition(".")
        return ""


def _line_of(value: object) -> int:
    """Return the first line of a function or class, that of its decorators if it has any; 0 of other values."""
    value = inspect.unwrap(value) if callable(value) else None
    if isinstance(value, type):
        file = getattr(sys.modules.get(value.__module__), "__file__", None)
        return _class_lines(Path(file)).get(value.__qualname__, 0) if file else 0
    code = getattr(value, "__code__", None)
    return code.co_firstlineno if code else 0


@cache
def _class_lines(file: Path) -> Mapping[str, int]:
    """Qualified name -> first line of every class of `file`. `inspect.getsourcelines` parses the file again for each."""
    lines: dict[str, int] = {}

    def enter(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = prefix
            if isinstance(child, ast.ClassDef):
                lines.setdefault(prefix + child.name, min([child.lineno, *(d.lineno for d in child.decorator_list)]))
                inside = f"{prefix}{child.name}."
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inside = f"{prefix}{child.name}.<locals>."
            if isinstance(child, BLOCKS):
                enter(child, inside)

    enter(parse(file), "")
    return lines
