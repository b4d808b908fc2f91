"""Pages that exist only on the site, made when it is built: API, command line, READMEs, changelogs.

Each function returns {path below docs/: text}. Nothing here needs mkdocs.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from repo import ROOT
from repo.layers import read
from repo.projects import Project, load

__all__ = ["Module", "api_pages", "changelog_page", "cli_page", "from_readme", "public_modules", "readme_pages"]

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_IMPORT = re.compile(r"^\s*(?:from (ds_\w+(?:\.\w+)*) import|import (ds_\w+(?:\.\w+)*))", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Module:
    """A module whose names users import, and the names.

    Attributes:
        homes: Name -> the path of its definition; the name's own path where that could not be told.
    """

    name: str
    homes: Mapping[str, str]


def _projects() -> list[Project]:
    level = {name: i for i, row in enumerate(read().packages) for name in row}
    return sorted(load().values(), key=lambda project: (-level[project.folder.name], project.name))


# ---- API -------------------------------------------------------------------------------------------------------------


def public_modules(project: Project) -> list[Module]:
    """The package itself, then every module of it that a page of docs/ or a README tells to import."""
    texts = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "packages").glob("*/README.md")]
    told = {a or b for file in texts for a, b in _IMPORT.findall(file.read_text())}
    names = sorted(name for name in told if name.startswith(f"{project.module}."))
    found = [_module(name) for name in [project.module, *names]]
    return [module for module in found if module.homes]


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
    if file:
        for node in ast.walk(ast.parse(Path(file).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                for alias in node.names:
                    if (alias.asname or alias.name) == symbol:
                        return f"{node.module}.{alias.name}"
    return f"{name}.{symbol}"


def _source(home: str, source: str) -> str:
    """Where the file is that defines `home`; a link where the repository can be read."""
    name = home
    while name := name.rpartition(".")[0]:
        module = sys.modules.get(name)
        if module is not None and getattr(module, "__file__", None):
            path = Path(str(module.__file__)).relative_to(ROOT).as_posix()
            return f"Defined in [`{path}`]({source}{path})." if source else f"Defined in `{path}`."
    return ""


def api_pages(source: str = "") -> dict[str, str]:
    """One page a package; a symbol is shown once, in the first module that offers it.

    Args:
        source: Where the repository can be read, up to the path of a file.
    """
    pages = {}
    index = ["# API", "", "The public names of every package: what `__all__` of its modules says.", ""]
    for project in _projects():
        if project.opt_in:  # the facade has DeepSpeed's names: reference/deepspeed-surface.md
            continue
        shown: set[str] = set()
        lines = [
            f"# {project.name}",
            "",
            f"`import {project.module}` · [README](../../packages/{project.folder.name}.md)",
        ]
        for module in public_modules(project):
            lines += ["", f"## {module.name}", ""]
            for symbol, home in sorted(module.homes.items()):
                anchor = f'<span id="{module.name}.{symbol}"></span>'
                if home in shown:
                    lines += [
                        anchor if home != f"{module.name}.{symbol}" else "",
                        f"`{symbol}`: see [`{home}`][{home}].",
                        "",
                    ]
                    continue
                shown.add(home)
                lines += [anchor, ""] if home != f"{module.name}.{symbol}" else []
                lines += [f"::: {home}", "", _source(home, source), ""]
        pages[f"reference/api/{project.name}.md"] = "\n".join(lines) + "\n"
        index.append(f"- [`{project.name}`]({project.name}.md): {len(shown)} names")
    pages["reference/api/index.md"] = "\n".join(index) + "\n"
    return pages


# ---- command line ----------------------------------------------------------------------------------------------------


def cli_page() -> str:
    """Every command of `ds` with its options, from the parsers."""
    from ds_launcher.discovery import commands

    lines = [
        "# Command line",
        "",
        "`ds --help` lists the commands of the packages that are installed. This page is made from their parsers.",
        "",
    ]
    for name, point in commands().items():
        module = importlib.import_module(point.module)
        parser = argparse.ArgumentParser(prog=f"ds {name}", description=module.HELP)
        module.register(parser)
        lines += _command(parser, f"ds {name}", 2)
    return "\n".join(lines) + "\n"


def _command(parser: argparse.ArgumentParser, name: str, depth: int) -> list[str]:
    lines = ["#" * depth + f" `{name}`", ""]
    lines += [_text(parser.description or ""), ""] if parser.description else []
    rows = [_row(action) for action in parser._actions if _is_shown(action)]
    if rows:
        lines += ["| argument | default | meaning |", "|---|---|---|", *rows, ""]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub, child in action.choices.items():
                lines += _command(child, f"{name} {sub}", depth + 1)
    return lines


def _is_shown(action: argparse.Action) -> bool:
    hidden = isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    return not hidden and action.help is not argparse.SUPPRESS


def _row(action: argparse.Action) -> str:
    value = action.metavar if isinstance(action.metavar, str) else (action.dest.upper() if action.nargs != 0 else "")
    if action.choices:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    name = ", ".join(action.option_strings) or (value or action.dest)
    taken = f" {value}" if action.option_strings and action.nargs != 0 else ""
    is_silent = action.default is None or action.default is False or action.default in (argparse.SUPPRESS, [])
    default = "" if is_silent else f"`{action.default}`"
    formatter = argparse.HelpFormatter(prog="ds")
    told = formatter._expand_help(action) if action.help else ""
    return f"| `{name}{taken}` | {default} | {_text(told)} |".replace("`|", "`\\|")


def _text(text: str) -> str:
    flat = " ".join(text.split())
    return re.sub(r"([<>|*])", r"\\\1", flat) if "`" not in flat else flat.replace("|", "\\|")


# ---- READMEs and changelogs ------------------------------------------------------------------------------------------


def from_readme(text: str, folder: PurePosixPath, page: PurePosixPath, source: str = "") -> str:
    """The text of a file in `folder` with its links rewritten for the page at `page` (both from the repository's top).

    Args:
        source: Where the repository can be read, up to the path of a file; empty: such links become plain text.
    """

    def replaced(match: re.Match[str]) -> str:
        target, _, anchor = match["target"].partition("#")
        if "://" in target or not target or target.startswith("mailto:"):
            return match[0]
        path = PurePosixPath(*_resolved([*folder.parts, *PurePosixPath(target).parts]))
        there = _on_site(path)
        hash_ = f"#{anchor}" if anchor else ""
        if there is None:
            return f"[{match['text']}]({source}{path}{hash_})" if source else match["text"]
        return f"[{match['text']}]({_relative(there, page.parent)}{hash_})"

    parts, last = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(replaced, text[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*parts, _LINK.sub(replaced, text[last:])])


def _resolved(parts: Iterable[str]) -> list[str]:
    out: list[str] = []
    for part in parts:
        if part == "..":
            out.pop()
        elif part != ".":
            out.append(part)
    return out


def _on_site(path: PurePosixPath) -> PurePosixPath | None:
    """The page of docs/ that shows the file at `path` of the repository."""
    match path.parts:
        case ("README.md",):
            return PurePosixPath("docs/index.md")
        case ("docs", *_) if path.suffix in (".md", ".svg", ".png"):
            return path
        case ("packages", name) | ("packages", name, "README.md"):
            return PurePosixPath(f"docs/packages/{name}.md")
        case ("packages", _, "CHANGELOG.md"):
            return PurePosixPath("docs/changelog.md")
        case ("CONTRIBUTING.md",):
            return PurePosixPath("docs/developing/contributing.md")
    return None


def _relative(path: PurePosixPath, folder: PurePosixPath) -> str:
    a, b = path.parts, folder.parts
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return "/".join([*[".."] * (len(b) - common), *a[common:]])


def readme_pages(source: str = "") -> dict[str, str]:
    """READMEs of the packages and CONTRIBUTING.md as pages."""
    pages = {}
    for project in _projects():
        name = project.folder.name
        text = (project.folder / "README.md").read_text()
        pages[f"packages/{name}.md"] = from_readme(
            text, PurePosixPath("packages", name), PurePosixPath("docs/packages", f"{name}.md"), source
        )
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    there = PurePosixPath("docs/developing/contributing.md")
    pages["developing/contributing.md"] = from_readme(contributing, PurePosixPath(), there, source)
    return pages


def changelog_page(source: str = "") -> str:
    """All changelogs, one section a package."""
    lines = ["# Changelog", "", "Every package has its own version and its own list of changes.", ""]
    for project in _projects():
        text = (project.folder / "CHANGELOG.md").read_text()
        folder, page = PurePosixPath("packages", project.folder.name), PurePosixPath("docs/changelog.md")
        body = re.sub(r"^# .*\n", "", from_readme(text, folder, page, source), count=1)
        body = re.sub(r"^## (.*)$", rf"### {project.name} \1", body, flags=re.MULTILINE)
        lines += [f"## {project.name}", "", body.strip(), ""]
    return "\n".join(lines) + "\n"
