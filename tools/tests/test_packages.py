"""Every package folder is complete, and says the truth about what it needs."""

from __future__ import annotations

import re

from repo import dependencies
from repo.dependencies import changelog_version, problems, range_problems, torch_at_load
from repo.layers import read
from repo.projects import closure, requirement_name


def test_dependencies_are_what_is_imported(project, projects):
    assert problems(project, projects) == []


def test_tests_need_only_what_the_isolated_environment_has(project, projects):
    assert dependencies.test_problems(project, projects) == []


def test_sibling_ranges_fit_the_tree(project, projects):
    assert range_problems(project, projects) == []


def test_changelog_begins_with_the_version(project):
    assert changelog_version(project) == project.version


def test_folder_is_complete(project):
    missing = [
        name
        for name in ("README.md", "CHANGELOG.md", f"src/{project.module}/__init__.py", f"src/{project.module}/py.typed")
        if not (project.folder / name).is_file()
    ]
    assert missing == []
    assert project.opt_in or project.name == f"ds-{project.folder.name}"


def test_readme_has_a_snippet(project):
    text = (project.folder / "README.md").read_text()
    assert re.search(r"^```python$", text, re.MULTILINE), "README.md shows no runnable ```python block"


def test_has_tests(project):
    files = list((project.folder / "tests").rglob("test_*.py"))
    assert files, f"{project.name} has no tests"


def test_torch_free_packages_do_not_import_it_at_load(project):
    if project.folder.name in read().without_torch:
        assert torch_at_load(project) == []


def test_no_package_needs_itself_through_others(projects):
    assert sorted(closure(projects, projects)) == sorted(projects)


def test_every_package_is_in_the_meta_package(projects):
    above = {"ds-engine", "ds-tune", *(name for name, project in projects.items() if project.opt_in)}
    assert set(closure(["ds-engine"], projects)) >= set(projects) - above


def test_what_is_opt_in_is_needed_by_nobody(projects):
    opt_in = {name for name, project in projects.items() if project.opt_in}
    needed = {requirement_name(text) for project in projects.values() for text in project.dependencies}
    assert not opt_in & needed
