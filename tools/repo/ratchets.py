"""The ratchets: numbers and lists that may grow, but never unseen.

tools/ratchets/*.json hold the state that was last agreed to. Names of configuration keys must be equal
to the tree's. Sizes may shrink silently, and need an update of the file when one grows or a new one enters the ten largest.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repo import ROOT
from repo.imports import BLOCKS, modules
from repo.projects import load
from repo.wording import wording

__all__ = ["RATCHETS", "Ratchet", "compare", "config_keys", "sizes"]

_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_Counted = ast.Module | ast.stmt
FOLDER = ROOT / "tools" / "ratchets"
_KEPT = 10


@dataclass(frozen=True, slots=True)
class Ratchet:
    """One file of tools/ratchets: how to measure it, how to compare it."""

    file: Path
    measure: Callable[[], Any]
    differences: Callable[[Any, Any], list[str]]


def compare(ratchet: Ratchet) -> list[str]:
    """What the tree has and the file does not say; empty when they agree."""
    return ratchet.differences(json.loads(ratchet.file.read_text()), ratchet.measure())


def config_keys() -> list[str]:
    """Every configuration key as a dotted path, from the engine's composed model."""
    from ds_config import keys
    from ds_engine import Config

    return sorted({".".join(map(str, key.path)) for key in keys(Config)})


def sizes() -> dict[str, dict[str, int]]:
    """The ten largest of each kind: code lines of modules and functions, parameters, attributes of classes."""
    files, functions = dict[str, _Counted](), dict[str, _Counted]()
    parameters, attributes = dict[str, int](), dict[str, int]()
    for project in load().values():
        for module in modules(project):
            files[module.name] = module.tree
            for name, node in _definitions(module.tree, module.name):
                if isinstance(node, ast.ClassDef):
                    attributes[name] = _num_attributes(node)
                else:
                    functions[name] = node
                    parameters[name] = _num_parameters(node)
    return {
        "modules": longest(files),
        "functions": longest(functions),
        "parameters": _largest(parameters),
        "attributes": _largest(attributes),
    }


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, _Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            name = f"{prefix}.{child.name}"
            yield name, child
            yield from _definitions(child, name)
        elif isinstance(child, BLOCKS):
            yield from _definitions(child, prefix)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, BLOCKS):
            yield child
            yield from _statements(child)


def longest(nodes: Mapping[str, _Counted]) -> dict[str, int]:
    """Return the code lines of the ten longest. To write the code of all takes seconds: the bound says which may be among them."""
    lines: dict[str, int] = {}
    for bound, name in sorted(((most_code_lines(node), name) for name, node in nodes.items()), reverse=True):
        if len(lines) >= _KEPT and bound < sorted(lines.values())[-_KEPT]:
            break
        lines[name] = code_lines(nodes[name])
    return _largest(lines)


def code_lines(node: ast.AST) -> int:
    """Lines as `ast.unparse` writes them: formatting, comments and blank lines do not count."""
    return len(ast.unparse(node).splitlines())


def most_code_lines(node: _Counted) -> int:
    """Bound `code_lines` from above by the lines of the source, in which ruff gives each statement and decorator one of its own.

    `def f(): ...` takes three where it is written: an empty line before it, and its body's.
    """
    inside = [node, *_statements(node)]
    definitions = [inner for inner in inside if isinstance(inner, _Definition)]
    blocks: Sequence[ast.stmt] = node.body if isinstance(node, ast.Module) else [node]
    span = sum((block.end_lineno or block.lineno) - _first_line(block) + 1 for block in blocks)
    return span + 2 * len(definitions)


def _first_line(node: ast.stmt) -> int:
    return min((node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))))


def _num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    return sum(argument.arg not in ("self", "cls") for argument in arguments)


def _num_attributes(node: ast.ClassDef) -> int:
    """Attributes set on self anywhere in the class, and annotated fields of its body."""
    assigned = {
        target.attr
        for inner in _statements(node)
        if isinstance(inner, ast.Assign | ast.AnnAssign)
        for target in (inner.targets if isinstance(inner, ast.Assign) else [inner.target])
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }
    return len(assigned | {ast.unparse(inner.target) for inner in node.body if isinstance(inner, ast.AnnAssign)})


def _largest(values: Mapping[str, int]) -> dict[str, int]:
    ordered = sorted(values.items(), key=lambda item: (-item[1], item[0]))
    return dict(ordered[:_KEPT])


def _different_names(agreed: list[str], found: list[str]) -> list[str]:
    gone, new = sorted(set(agreed) - set(found)), sorted(set(found) - set(agreed))
    return [f"gone: {name}" for name in gone] + [f"new: {name}" for name in new]


def _grown(agreed: dict[str, dict[str, int]], found: dict[str, dict[str, int]]) -> list[str]:
    lines = []
    for kind, values in found.items():
        smallest = min(agreed[kind].values(), default=0)
        for name, value in values.items():
            before = agreed[kind].get(name, smallest)
            if value > before:
                lines.append(f"{kind}: {name} has {value}, agreed {before}")
    return lines


def _worse(agreed: dict[str, float], numbers: dict[str, float]) -> list[str]:
    return [
        f"{name}: {value:g}, agreed {agreed.get(name, 0):g}"
        for name, value in numbers.items()
        if value > agreed.get(name, 0)
    ]


RATCHETS: Mapping[str, Ratchet] = {
    "config_keys": Ratchet(FOLDER / "config_keys.json", config_keys, _different_names),
    "sizes": Ratchet(FOLDER / "sizes.json", sizes, _grown),
    "wording": Ratchet(FOLDER / "wording.json", wording, _worse),
}
