"""Configurations as people write them: each ends in a plan or in an error that names the key, and no key is dropped.

`recipes/expected.json` says of each file how it ends and what becomes of every key that is not simply used.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_config import classify, dotted
from ds_config.config_file import read
from ds_config.errors import ConfigError, DsError, UnsupportedError
from ds_engine import Config, Shapes, load_config, make_plan
from ds_pipe import PipelineSpec

FOLDER = Path(__file__).parent / "recipes"
EXPECTED: dict[str, dict[str, Any]] = json.loads((FOLDER / "expected.json").read_text())
AUTO = json.loads((FOLDER / "auto.json").read_text())


def leaves(value: Any, path: tuple[str, ...] = ()) -> list[str]:
    """Every key of a document that holds no object."""
    if isinstance(value, dict) and value:
        return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]
    return [dotted(path)]


def ended(name: str) -> DsError | None:
    """How a recipe ends: the error, or None for a plan."""
    expected = EXPECTED[name]
    (path,) = FOLDER.glob(f"{name}.*json")
    shapes = Shapes((), ())
    if cut := expected.get("staging"):
        shapes = replace(shapes, stages=cut["ranks"], staging=PipelineSpec("1f1b", **cut))
    try:
        plan = make_plan(load_config(path, auto=AUTO.get(expected.get("auto", ""))), shapes, expected["world"])
    except DsError as error:
        return error
    assert str(plan.batch.train) in str(plan)
    return None


def test_there_are_sixty() -> None:
    files = {path.stem for path in FOLDER.glob("*json")} - {"expected", "auto"}
    assert files == set(EXPECTED)
    assert len(files) >= 60


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_recipe_ends_as_expected(name: str) -> None:
    error, expected = ended(name), EXPECTED[name]
    (path,) = FOLDER.glob(f"{name}.*json")
    found: dict[str, list[str]] = {}
    for report in classify(Config, path):
        assert report.why or report.kind in ("used", "unknown")
        found.setdefault(report.kind, []).append(dotted(report.path))

    listed = [key for names in found.values() for key in names]
    assert sorted(listed) == sorted(leaves(read(path).data)) or "zero_optimization" in listed  # every key, each once
    for kind, names in expected["keys"].items():
        assert set(names) <= set(found.get(kind, [])), (
            f"{kind}: expected.json says otherwise; correct it when a key is built"
        )

    assert (error.code if error else "plan") == expected["outcome"]
    if found.get("unknown"):
        assert isinstance(error, ConfigError)
    elif found.get("not built"):
        assert isinstance(error, UnsupportedError)
    for key in [*found.get("unknown", []), *found.get("not built", [])]:
        assert any(section in str(error) for section in sections(key)), key


def sections(key: str) -> list[str]:
    """A key and the sections it stands in, below the outermost ones."""
    parts = key.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def test_accelerate_says_never_with_infinity() -> None:
    assert load_config({"train_batch_size": 8, "steps_per_print": float("inf")}).steps_per_print is None
