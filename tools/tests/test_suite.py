"""What `tests` adds to pytest's arguments, and what `tests --changed` runs."""

from __future__ import annotations

import subprocess

import pytest

from repo import ROOT
from repo.suite import above, changed_files, folders_of, side_by_side

BY_FILE = ["--dist", "loadfile", "--no-loadscope-reorder"]


@pytest.mark.parametrize(
    ("arguments", "cores", "added"),
    [
        ([], 2, ["-n", "4", *BY_FILE]),
        (["packages/zero", "-k", "stage"], 1, ["-n", "2", *BY_FILE]),
        ([], 64, ["-n", "8", *BY_FILE]),
        (["-n0"], 2, []),
        (["-n", "3"], 2, []),
        (["--pdb"], 2, []),
        (["-p", "no:xdist"], 2, []),
    ],
)
def test_files_run_side_by_side_unless_asked_otherwise(arguments, cores, added):
    assert side_by_side(arguments, cores) == added


@pytest.mark.parametrize("name", ["few_cases.txt", "long_files.txt"])
def test_lists_name_files_and_functions_that_are_there(name):
    """A name that a file or a function had before would change nothing, and be seen by nobody."""
    lines = [line.split() for line in (ROOT / "tools/repo" / name).read_text().splitlines() if not line.startswith("#")]
    gone = []
    for number, place in lines:
        assert float(number) > 0
        path, _, function = place.partition("::")
        file = ROOT / path
        if not file.is_file() or (function and f"def {function.rpartition('::')[2]}(" not in file.read_text()):
            gone.append(place)
    assert gone == []
    assert name != "few_cases.txt" or {number for number, _ in lines} == {"0.25", "1", "2"}
    assert len({place for _, place in lines}) == len(lines) > 0


def test_what_is_above_a_package(projects):
    assert above({"deepspeed"}, projects) == ["deepspeed"]
    assert above({"ds-pipe"}, projects) == ["deepspeed", "ds-engine", "ds-pipe", "ds-tune"]
    assert above({"ds-config"}, projects) == sorted(projects)


@pytest.mark.parametrize(
    ("changed", "run"),
    [
        ([], []),
        (["docs/index.md"], ["tools/tests"]),
        (["packages/pipe/src/ds_pipe/x.py"], ["compat", "engine", "pipe", "tune", "tests-integration/pipe"]),
        (["packages/pipe/tests/world/test_x.py"], ["pipe"]),
        (["tests-integration/ckpt/test_families.py"], ["tests-integration/ckpt"]),
        (["packages/compat/README.md"], ["compat"]),
        (["constraints.txt", "docs/index.md"], ["."]),
        (["tools/ds-testing/src/ds_testing/pool.py"], ["."]),
    ],
)
def test_a_change_runs_its_packages_and_those_above(projects, changed, run):
    found = folders_of(changed, projects)
    shown = [folder.removeprefix("packages/") for folder in found if folder != "tools/tests"]
    assert shown == [folder for folder in run if folder != "tools/tests"]
    assert ("tools/tests" in found) == (bool(changed) and run != ["."])
    assert all((ROOT / folder).exists() for folder in found)


def test_native_sources_are_the_package_that_is_built_from_them(projects):
    assert "packages/ops" in folders_of(["native/ops/x.cpp"], projects)


def test_changed_files_are_committed_uncommitted_and_new(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    git("init", "-q", "-b", "main")
    for name in ("kept", "edited"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-qm", "one")
    git("checkout", "-qb", "mine")
    (tmp_path / "committed").write_text("2")
    git("add", ".")
    git("commit", "-qm", "two")
    (tmp_path / "edited").write_text("3")
    (tmp_path / "new").write_text("4")
    assert changed_files("main", tmp_path) == ["committed", "edited", "new"]
    with pytest.raises(ValueError, match="nowhere"):
        changed_files("nowhere", tmp_path)
