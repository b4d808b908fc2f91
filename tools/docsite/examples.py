"""Where pages and tests use a public name: the statement as an example, and the page to read on. Blocks of pages are run by tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from repo import ROOT
from repo.imports import collector_paused, walk

__all__ = ["Use", "find_uses", "first_block", "relative"]

_BLOCK = re.compile(r"^(?P<indent> *)```python[^\n]*\n(?P<code>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_MOST_LINES = 12
_UNFIT = ("return", "yield", "@", "raise", "global", "nonlocal", "assert")


@dataclass(frozen=True, slots=True)
class Use:
    """A use of a name on a page.

    Attributes:
        page: Path of the page below docs/, or of the test below the repository.
        title: The page's heading; empty of a test.
        statement: The statement that uses the name; empty where it is longer than an example should be.
    """

    page: PurePosixPath
    title: str
    statement: str


@cache
def find_uses() -> Mapping[str, list[Use]]:
    """Return the uses of every public name, `module.name`: one for each page, those with the shortest statement first."""
    found: dict[str, dict[PurePosixPath, Use]] = {}
    for page, text in _pages():
        title = _TITLE.search(text)
        imported: dict[str, str] = {}  # what a block imports holds for the later ones of its page
        for match in _BLOCK.finditer(text):
            code = re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
            for name, statement in _used(code, imported):
                use = Use(page, title[1] if title else page.stem, statement)
                there = found.setdefault(name, {}).get(page)
                if there is None or 0 < len(statement) < (len(there.statement) or len(statement) + 1):
                    found[name][page] = use
    shown = {name: sorted(uses.values(), key=_rank) for name, uses in found.items()}
    return {**_tested(), **shown}


def _tested() -> dict[str, list[Use]]:
    """Return for every name that tests use the shortest statement that does."""
    found: dict[str, Use] = {}
    for file in sorted(ROOT.glob("packages/*/tests/**/test_*.py")):
        path = PurePosixPath(file.relative_to(ROOT).as_posix())
        with collector_paused():
            uses = [use for use in _used(file.read_text(), {}, longest=_MOST_LINES) if use[1]]
        for name, statement in uses:
            if (
                not statement.startswith(_UNFIT)
                and "raises" not in statement
                and (name not in found or len(statement) < len(found[name].statement))
            ):
                found[name] = Use(path, "", statement)
    return {name: [use] for name, use in found.items()}


def first_block(readme: str) -> str:
    """Return the code of the first Python block; empty where there is none."""
    match = _BLOCK.search(readme)
    return match["code"] if match else ""


def _rank(use: Use) -> tuple[bool, bool, int, str]:
    is_readme = use.page.parts[0] == "packages"
    return (not use.statement, is_readme, len(use.statement), str(use.page))


def _pages() -> Iterator[tuple[PurePosixPath, str]]:
    docs = ROOT / "docs"
    files = [docs / "index.md", docs / "getting-started.md"]
    for folder in ("tutorials", "how-to", "concepts"):
        files += sorted((docs / folder).glob("*.md"))
    for file in files:
        yield PurePosixPath(file.relative_to(docs).as_posix()), file.read_text()
    for file in sorted((ROOT / "packages").glob("*/README.md")):
        yield PurePosixPath("packages", f"{file.parent.name}.md"), file.read_text()


def _used(code: str, imported: dict[str, str], *, longest: int | None = None) -> Iterator[tuple[str, str]]:
    """Yield (name, statement) of each use. `imported`, local name -> full name, grows by what the block imports.

    Args:
        longest: Leave out statements with more lines than this; None for all, of which those too long for an example are empty.
    """
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return
    for node in walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ds_"):
            imported.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    lines = code.splitlines()
    for statement in _statements(tree):
        count = (statement.end_lineno or statement.lineno) - statement.lineno + 1
        if longest is not None and count > longest:
            continue
        shown = ""
        if count <= _MOST_LINES:
            rows = lines[statement.lineno - 1 : statement.end_lineno]
            shown = "\n".join(
                row[statement.col_offset :] if not row[: statement.col_offset].strip() else row for row in rows
            )
        for node in walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _dotted(node).startswith("ds_"):
                yield _dotted(node), shown
            elif isinstance(node, ast.Name) and node.id in imported:
                yield imported[node.id], shown


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in walk(tree):
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        if isinstance(node, ast.stmt) and not is_import and not isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def relative(page: PurePosixPath, folder: str) -> str:
    """Return the link to a page of docs/ from a page in `folder`, such as `reference/api`."""
    return "../" * len(Path(folder).parts) + str(page)
