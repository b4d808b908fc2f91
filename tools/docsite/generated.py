"""Pages that exist only on the site, made when it is built: command line, READMEs, changelogs. Those of the API are made by `api`.

Each function returns {path below docs/: text}. Nothing here needs mkdocs.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from repo import ROOT
from repo.layers import read
from repo.projects import Project, load

__all__ = ["changelog_page", "cli_page", "from_readme", "projects", "readme_pages"]

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def projects() -> list[Project]:
    """Return all packages, the highest layer first."""
    level = {name: i for i, row in enumerate(read().packages) for name in row}
    return sorted(load().values(), key=lambda project: (-level[project.folder.name], project.name))


# ---- command line ----------------------------------------------------------------------------------------------------


def cli_page() -> str:
    """Every command of `ds` with its options, from the parsers."""
    from ds_config.command_discovery import commands

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
    for project in projects():
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
    for project in projects():
        text = (project.folder / "CHANGELOG.md").read_text()
        folder, page = PurePosixPath("packages", project.folder.name), PurePosixPath("docs/changelog.md")
        body = re.sub(r"^# .*\n", "", from_readme(text, folder, page, source), count=1)
        body = re.sub(r"^## (.*)$", rf"### {project.name} \1", body, flags=re.MULTILINE)
        lines += [f"## {project.name}", "", body.strip(), ""]
    return "\n".join(lines) + "\n"
