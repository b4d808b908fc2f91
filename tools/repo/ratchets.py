"""The ratchets: numbers and lists that may grow, but never unseen.

tools/ratchets/*.json hold the state that was last agreed to. Names of configuration keys must be equal
to the tree's. Sizes may shrink silently, and need an update of the file when one grows or a new one enters the ten largest.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repo import ROOT
from repo.imports import modules
from repo.projects import load
from repo.wording import wording

__all__ = ["RATCHETS", "Ratchet", "compare", "config_keys", "sizes"]

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
    found: dict[str, dict[str, int]] = {"modules": {}, "functions": {}, "parameters": {}, "attributes": {}}
    for project in load().values():
        for module in modules(project):
            found["modules"][module.name] = _code_lines(module.tree)
            for name, node in _definitions(module.tree, module.name):
                if isinstance(node, ast.ClassDef):
                    found["attributes"][name] = _num_attributes(node)
                else:
                    found["functions"][name] = _code_lines(node)
                    found["parameters"][name] = _num_parameters(node)
    return {kind: _largest(values) for kind, values in found.items()}


def _definitions(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}.{child.name}"
            yield name, child
            yield from _definitions(child, name)
        else:
            yield from _definitions(child, prefix)


def _code_lines(node: ast.AST) -> int:
    """Lines as `ast.unparse` writes them: formatting, comments and blank lines do not count."""
    return len(ast.unparse(node).splitlines())


def _num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    return sum(argument.arg not in ("self", "cls") for argument in arguments)


def _num_attributes(node: ast.ClassDef) -> int:
    """Attributes set on self anywhere in the class, and annotated fields of its body."""
    assigned = {
        target.attr
        for inner in ast.walk(node)
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
