"""The layer table holds between packages, and no package's files import each other in a circle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from repo.layers import Layers, circle, contracts, folder_circles, named_upward, read
from repo.projects import read_project

LAYERS = read()


def _lint(folder: Path, text: str, sources: list[Path]) -> subprocess.CompletedProcess[str]:
    (folder / "contracts.ini").write_text(text)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))}
    program = Path(sys.executable).with_name("lint-imports")
    command = [str(program), "--no-cache", "--config", "contracts.ini"]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200, check=False)


def test_contracts_hold(tmp_path, projects):
    text = contracts(LAYERS, projects)
    done = _lint(tmp_path, text, [project.source.parent for project in projects.values()])
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_package_has_a_row(projects):
    listed = {name for row in LAYERS.packages for name in row}
    assert {project.folder.name for project in projects.values()} <= listed


def test_no_circle_inside(project):
    around = circle(project)
    assert around == [], " -> ".join([*around, around[0]])


def test_no_circle_of_folders(project):
    assert folder_circles(project) == []


def test_no_string_names_a_module_above(projects):
    assert named_upward(LAYERS, projects) == []


# ---- the machinery, on packages written for it -----------------------------------------------------------------------


def _write(root: Path, name: str, files: dict[str, str]) -> None:
    source = root / "packages" / name / "src" / f"ds_{name}"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text("")
    for file, text in files.items():
        (source / file).write_text(text)
    (root / "packages" / name / "pyproject.toml").write_text(
        f'[build-system]\nrequires = []\nbuild-backend = "hatchling.build"\n[project]\nname = "ds-{name}"\nversion = "0.1.0"\n'
    )


@pytest.fixture
def two_packages(tmp_path):
    _write(tmp_path, "low", {"a.py": "", "b.py": "from ds_low import a\n"})
    _write(tmp_path, "high", {"c.py": "import ds_low.b\n"})
    return {f"ds-{name}": read_project(tmp_path / "packages" / name) for name in ("low", "high")}


LAYERS_OF_TWO = Layers((("low",), ("high",)), ())


def _lint_two(folder, projects):
    return _lint(folder, contracts(LAYERS_OF_TWO, projects), [p.source.parent for p in projects.values()])


def test_downward_imports_are_allowed(tmp_path, two_packages):
    done = _lint_two(tmp_path, two_packages)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("package", "file", "text"),
    [
        ("low", "a.py", "import ds_high.c\n"),
        ("low", "a.py", "def f():\n    import ds_high\n"),
    ],
    ids=["upward", "upward inside a function"],
)
def test_upward_imports_are_found(tmp_path, two_packages, package, file, text):
    (two_packages[f"ds-{package}"].source / file).write_text(text)
    assert _lint_two(tmp_path, two_packages).returncode == 1


def test_a_circle_is_named(two_packages):
    low = two_packages["ds-low"]
    assert circle(low) == []
    (low.source / "a.py").write_text("def f():\n    from ds_low import b\n")
    assert circle(low) == ["ds_low.a", "ds_low.b"]


def test_a_circle_of_folders_is_named(two_packages):
    low = two_packages["ds-low"]
    for folder, text in (("one", "from ds_low.two import b\n"), ("two", "")):
        (low.source / folder).mkdir()
        (low.source / folder / "__init__.py").write_text("")
        (low.source / folder / ("a.py" if text else "b.py")).write_text(text)
    assert folder_circles(low) == []
    (low.source / "two" / "c.py").write_text("import ds_low.one.a\n")
    assert folder_circles(low) == ["one <-> two"]
    assert circle(low) == []


def test_a_module_above_that_a_string_names_is_found(two_packages):
    assert named_upward(LAYERS_OF_TWO, two_packages) == []
    (two_packages["ds-low"].source / "a.py").write_text('def f():\n    return __import__("ds_high.c")\n')
    (two_packages["ds-high"].source / "d.py").write_text('NAME = "ds_low.a"\n')
    assert named_upward(LAYERS_OF_TWO, two_packages) == ["ds_low.a:2 names ds_high.c"]
