"""How the code reads: names that stand for one thing, docstrings that begin with a verb, no riddling locals.

Measured over packages/*/src. The numbers are ratchets (tools/ratchets/wording.json): they only go down, or up for the verbs.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from repo.imports import modules, walk
from repo.projects import load

__all__ = ["FORBIDDEN", "begins_with_verb", "forbidden_names", "stale_entries", "unresolved", "wording"]

FORBIDDEN = frozenset(
    [
        "told",
        "said",
        "found",
        "asked",
        "made",
        "mine",
        "own",
        "theirs",
        "given",
        "taken",
        "kept",
        "held",
        "seen",
        "lent",
    ]
)
"""Names that say how a value came, not what it holds."""

_VERBS = Path(__file__).parents[1] / "ratchets" / "verbs.txt"
_ANYWHERE = {"__init__", "_torch", "config", "cli", "errors", "optim", "__main__"}  # every package may have one
_LONGEST = 10  # lines that a forbidden local may live
_SECTION = re.compile(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^    ([a-z_*][\w, *`]*):(?: |$)", re.MULTILINE)
_SPAN = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def _verbs() -> frozenset[str]:
    return frozenset(_VERBS.read_text().split())


def begins_with_verb(docstring: str) -> bool:
    """Return whether the first word is a verb of verbs.txt, imperative or third person; "Whether" counts."""
    match = re.match(r"[`*]*([A-Za-z]+)", docstring)
    if match is None:
        return False
    word = match[1].lower()
    stems = {word, word.removesuffix("s"), word.removesuffix("es"), word[:-3] + "y" if word.endswith("ies") else word}
    return word == "whether" or bool(stems & _verbs())


def forbidden_names(function: Function) -> Iterator[str]:
    """Yield parameters of `function` that FORBIDDEN lists, and such locals that live more than ten lines."""
    spec = function.args
    for argument in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs):
        if argument.arg in FORBIDDEN:
            yield argument.arg
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for node in walk(function):
        if isinstance(node, ast.Name) and node.id in FORBIDDEN:
            if isinstance(node.ctx, ast.Store):
                first[node.id] = min(node.lineno, first.get(node.id, node.lineno))
            last[node.id] = max(node.lineno, last.get(node.id, node.lineno))
    yield from (name for name, line in first.items() if last[name] - line > _LONGEST)


def wording() -> dict[str, float]:
    """Measure the five numbers of the ratchet."""
    classes: Counter[str] = Counter()
    stems: Counter[str] = Counter()
    forbidden = spoken = verbs = 0
    for project in load().values():
        for module in modules(project):
            stems[module.name.rsplit(".", 1)[-1]] += 1
            for node in module.nodes:
                if isinstance(node, ast.ClassDef):
                    classes[node.name] += 1
                    forbidden += sum(name in FORBIDDEN for name in _fields(node))
                elif isinstance(node, Function):
                    forbidden += len(list(forbidden_names(node))) + (node.name in FORBIDDEN)
                    text = ast.get_docstring(node)
                    if text and not any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
                        spoken += 1
                        verbs += begins_with_verb(text)
    return {
        "class names of several classes": sum(count > 1 for count in classes.values()),
        "module names of several modules": sum(c > 1 for name, c in stems.items() if name not in _ANYWHERE),
        "forbidden names": forbidden,
        "docstrings without a verb, percent": round(100 * (1 - verbs / max(spoken, 1)), 1),
        "names in backticks that do not resolve": len(unresolved()),
    }


def _fields(node: ast.ClassDef) -> set[str]:
    annotated = {
        inner.target.id
        for inner in node.body
        if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name)
    }
    stored = {
        inner.attr
        for inner in walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    }
    return annotated | stored


@cache
def unresolved() -> tuple[str, ...]:
    """List `Name` and `module.Name` of docstrings whose first part looks like ours and which nothing defines."""
    defined: set[str] = set(dir(builtins))
    own: dict[str, set[str]] = defaultdict(set)
    texts: list[tuple[str, str]] = []
    for project in load().values():
        for module in modules(project):
            names = {module.name.rsplit(".", 1)[-1]}
            for node in module.nodes:
                if isinstance(node, ast.ClassDef | Function):
                    names.add(node.name)
                    if text := ast.get_docstring(node):
                        texts.append((f"{module.name}.{node.name}", text))
                elif isinstance(node, ast.Name):
                    names.add(node.id)
                elif isinstance(node, ast.Attribute):
                    names.add(node.attr)
                elif isinstance(node, ast.alias):
                    names.update((node.asname or node.name).split("."))
                elif isinstance(node, ast.arg | ast.keyword):
                    names.add(node.arg or "")
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names.update(re.findall(r"\w+", node.value) if len(node.value) < 80 else ())
            own[module.name] |= names
            defined |= names
    return tuple(
        f"{place}: `{match[1]}`"
        for place, text in texts
        for match in _SPAN.finditer(text)
        if re.match(r"_?[A-Z][a-z]|ds_\w+\.", match[1]) and not all(part in defined for part in match[1].split("."))
    )


def stale_entries(node: ast.ClassDef | Function) -> list[str]:
    """List what the sections Args and Attributes of a docstring explain and the function or class does not have."""
    entries = {
        name.strip(" *`")
        for section in _SECTION.finditer(ast.get_docstring(node) or "")
        for entry in _ENTRY.finditer(section[1])
        for name in entry[1].split(",")
    }
    if not entries:
        return []
    inside = walk(node) if isinstance(node, ast.ClassDef) else walk(node.args)
    names: set[str] = set()
    for inner in inside:
        if isinstance(inner, ast.arg):
            names.add(inner.arg)
        elif isinstance(inner, Function):
            names.add(inner.name)
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            names.add(inner.id)
        elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            names.add(inner.attr)
    return sorted(entries - names)
