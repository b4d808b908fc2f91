"""`ds` is there with every single package, and says what is not."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ds_config.ds_command import PROVIDERS, main, run_package

PACKAGES = Path(__file__).parents[2]
PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text())["project"] for path in sorted(PACKAGES.glob("*/pyproject.toml"))
}


def modules() -> dict[str, str]:
    """Module of each command of the repository."""
    return {
        name: module
        for project in PROJECTS.values()
        for name, module in project.get("entry-points", {}).get("ds.commands", {}).items()
    }


def test_the_package_that_all_others_need_brings_the_command() -> None:
    """Only ds-launcher had it, and six READMEs taught it."""
    assert [name for name, project in PROJECTS.items() if "ds" in project.get("scripts", {})] == ["config"]
    for project in PROJECTS.values():
        assert project["name"] == "ds-config" or any(one.startswith("ds-") for one in project["dependencies"])
    brought = {
        project["name"]: tuple(project["entry-points"]["ds.commands"])
        for project in PROJECTS.values()
        if "ds.commands" in project.get("entry-points", {})
    }
    assert {name: set(words) for name, words in PROVIDERS.items()} == {
        name: set(words) for name, words in brought.items()
    }


def test_a_command_that_is_not_installed_names_its_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ds_config.ds_command.commands", dict)
    assert main(["ckpt", "list"]) == 2
    assert (
        "no command `ckpt` in this installation; it comes with ds-ckpt: pip install ds-ckpt" in capsys.readouterr().err
    )
    assert main(["doctor"]) == 2
    assert "it comes with ds-launcher" in capsys.readouterr().err


def test_each_package_and_each_command_module_answers_python_m() -> None:
    """`python -m ds_data.cli check FILE` printed nothing, with exit status 0."""
    for folder in PACKAGES.glob("*/src/ds_*"):
        assert (folder / "__main__.py").is_file(), folder
    for name, module in modules().items():
        file = next(PACKAGES.glob(f"*/src/{module.replace('.', '/')}.py"))
        text = file.read_text()
        assert f'sys.exit(ds(["{name}", *sys.argv[1:]]))' in text or "__main__" in text, file


def test_python_m_of_a_package_runs_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_package("ds_config", ["comm-hang"]) == 0
    assert "comm-hang" in capsys.readouterr().out
    assert run_package("ds_config", ["explain", "comm-hang"]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "ds_config.explain_command", "comm-hang"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.splitlines()[:1]) == (0, ["comm-hang"])
    capsys.readouterr()
    monkeypatch.setattr("ds_config.ds_command.commands", dict)
    assert run_package("ds_config", []) == 0
    assert "no commands of its own" in capsys.readouterr().out
    assert run_package("ds_config", ["comm-hang"]) == 2
