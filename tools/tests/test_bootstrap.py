"""The first contact: what the bootstrap says when the machine does not fit, and that it never leaves the environment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from repo import ROOT, install

BOOTSTRAP = ROOT / "tools" / "bootstrap.py"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BOOTSTRAP), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [(), ("lint",), ("--help",)])
def test_says_how_to_use_it(arguments):
    done = _run(*arguments)
    assert done.returncode == 2
    assert "usage: python3 tools/bootstrap.py {quickstart|tests}" in done.stderr


def test_a_package_that_is_not_here_is_named():
    done = _run("install", "zeroo")
    assert done.returncode == 2
    assert "there is no package zeroo here." in done.stderr
    assert "tune, zero." in done.stderr


def test_one_package_is_installed_with_those_that_it_needs(monkeypatch, capsys):
    steps = []
    monkeypatch.setattr(install, "_step", lambda label, tool, python, *folders: steps.append((python, folders)))
    install.install_packages(["zero"], "some-python")
    ((python, folders),) = steps
    assert python == "some-python"
    assert [Path(folder).name for folder in folders] == ["config", "monitor", "accel", "ops", "comm", "zero"]
    assert "compiles C++" in capsys.readouterr().err


def test_an_installation_says_that_it_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(install, "_SIGN_EVERY_S", 0.01)
    with install._signs_of_life("ds-ops"):
        deadline = time.monotonic() + 150
        while time.monotonic() < deadline and "still installing ds-ops" not in (err := capsys.readouterr().err):
            time.sleep(0.02)
    assert "still installing ds-ops" in err


def test_an_old_python_is_told_so():
    """The file is compiled with today's Python, so the version is pretended; its syntax is checked below."""
    code = f"import sys, runpy; sys.version_info = (3, 9, 2); sys.argv = ['b', 'tests']; runpy.run_path({str(BOOTSTRAP)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "This is Python 3.9; 3.11 or newer is needed." in done.stderr


def test_the_file_parses_on_old_pythons():
    compile_with = "import ast, sys; ast.parse(open(sys.argv[1]).read(), feature_version=(3, 7))"
    subprocess.run([sys.executable, "-c", compile_with, str(BOOTSTRAP)], check=True)


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Every command the bootstrap would run; `calls.fail` are words that make one fail."""

    class Calls(list):
        fail: tuple[str, ...] = ()

    seen = Calls()

    def run(command, **options):
        seen.append(command)
        failed = any(word in command for word in seen.fail)
        return subprocess.CompletedProcess(command, int(failed), stdout="True 3.11.7\n", stderr="")

    monkeypatch.setattr(install.subprocess, "run", run)
    monkeypatch.setattr(install, "ENVIRONMENT", tmp_path / ".venv")
    return seen


def test_makes_an_environment_and_installs_only_into_it(calls):
    calls.fail = ("import nox",)
    python = install.ensure_environment()
    assert [sys.executable, "-m", "venv"] == list(calls[0][:3])
    installs = [command for command in calls if "install" in command]
    assert installs
    assert all(command[0] == python for command in installs)


def test_without_ensurepip_the_hosts_pip_works_on_the_environment(calls, tmp_path):
    real = install.subprocess.run

    def run(command, **options):
        done = real(command, **options)
        plain_venv = list(command[1:3]) == ["-m", "venv"] and "--without-pip" not in command
        own_pip = command[0] != sys.executable and command[1:3] == ("-m", "pip")
        return subprocess.CompletedProcess(command, 1) if plain_venv or own_pip or "import nox" in command else done

    install.subprocess.run = run  # undone by the fixture's monkeypatch
    python = install.ensure_environment()
    installs = [command for command in calls if "install" in command]
    assert installs
    assert all(command[:5] == [sys.executable, "-m", "pip", "--python", python] for command in installs)


def test_no_pip_at_all_is_an_error_with_a_fix(calls):
    calls.fail = ("pip", "import nox")
    with pytest.raises(install.InstallError, match="has no pip"):
        install.ensure_environment()


def test_no_network_is_an_error_with_a_fix(calls):
    calls.fail = ("install", "import nox")
    with pytest.raises(install.InstallError, match="no network") as error:
        install.ensure_environment()
    assert "PIP_INDEX_URL" in error.value.fix
    attempts = [command for command in calls if "install" in command]
    assert any("uv" in word for word in attempts[0])
    assert not any("uv" in word for word in attempts[1]), "the second attempt does without uv"


def test_an_existing_environment_is_reused(calls, tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    install.ensure_environment()
    assert not any("venv" in command[1:3] for command in calls)
    assert not any("install" in command for command in calls)


def test_a_broken_environment_is_not_touched(calls, tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    calls.fail = (str(tmp_path / ".venv" / "bin" / "python"),)
    with pytest.raises(install.InstallError, match="does not work") as error:
        install.ensure_environment()
    assert "Remove that folder" in error.value.fix


def test_uv_is_used_where_it_is_and_told_where_to_look(tmp_path, monkeypatch):
    (tmp_path / "uv").touch()
    monkeypatch.setenv("PIP_FIND_LINKS", "/some/wheels")
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    tool = install.installer(str(tmp_path / "python"))
    assert tool.command == (str(tmp_path / "uv"), "pip")
    assert tool.environ["UV_FIND_LINKS"] == "/some/wheels"


def test_pip_takes_over_where_uv_is_missing_or_fails(tmp_path, monkeypatch):
    assert install.installer(str(tmp_path / "python")).command[1:3] == ("-m", "pip")
    (tmp_path / "uv").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "uv").chmod(0o755)
    (tmp_path / "python").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    (tmp_path / "python").chmod(0o755)
    python = str(tmp_path / "python")
    install._step("things", install.installer(python), python, "thing==1")
    assert (tmp_path / "asked").read_text().split()[:3] == ["-m", "pip", "--disable-pip-version-check"]
    assert "thing==1" in (tmp_path / "asked").read_text()


def test_no_machine_is_named_in_the_repository():
    """No host of an index and no folder of a machine may stand in what the bootstrap reads."""
    files = [BOOTSTRAP, *Path(ROOT / "tools" / "repo").glob("*.py"), ROOT / "noxfile.py", ROOT / "constraints.txt"]
    for file in files:
        text = file.read_text()
        assert "http://" not in text.replace("http://www.w3.org/", ""), file  # a name of XML, not an address
        assert "https://" not in text, file


def test_ci_runs_the_readme_command():
    text = (ROOT / ".ci" / "run").read_text()
    command = "python3 tools/bootstrap.py tests"
    assert command in text
    assert command in (ROOT / "README.md").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
