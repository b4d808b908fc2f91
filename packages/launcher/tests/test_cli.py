"""`ds`: its commands are found without importing them; mistakes are told in one line."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ds_config.command_discovery import help_line, load_command, source_file
from ds_config.errors import ConfigError
from ds_config.explain_command import explanations
from ds_launcher.cli import main
from ds_launcher.commands import ssh
from ds_launcher.shim import LOCAL_RANK_WORD, wrapped

if TYPE_CHECKING:
    from conftest import Sandbox


def package(folder: Path, help_text: str, body: str = "") -> None:
    """A package with a command `trap` whose modules must not be imported, and its metadata."""
    (folder / "trap").mkdir()
    (folder / "trap/__init__.py").write_text("raise RuntimeError('the package was imported')\n")
    (folder / "trap/cli.py").write_text(f"raise RuntimeError('imported')\n\n{help_text}\n{body}")
    info = folder / "trap-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trap\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ds.commands]\ntrap = trap.cli\n")


def test_help_lists_commands_without_importing_them_or_torch(box: Sandbox) -> None:
    package(box.folder, 'HELP: str = (\n    "show a "\n    "trap"\n)')
    code = (
        "import sys\n"
        "from ds_launcher.cli import main\n"
        "status = main(['--help'])\n"
        "heavy = {'torch', 'pydantic', 'trap', 'numpy', 'ds_launcher.commands'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**box.env, "PYTHONPATH": str(box.folder)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert lines["trap"] == "show a trap"
    assert lines["run"] == "start a training script on several ranks, here or on many hosts"
    assert {"report", "hosts"} <= set(lines)
    assert lines["env"] == "the same as `ds report --quick`"


@pytest.mark.parametrize("text", ["", "HELP = compute()", "HELP = 3", "HELP = ("])
def test_a_command_whose_help_cannot_be_read_is_listed_all_the_same(box: Sandbox, text: str) -> None:
    package(box.folder, text)
    done = box.ds("--help", env={"PYTHONPATH": str(box.folder)})
    assert done.returncode == 0
    assert "  trap" in done.stdout.splitlines()


def test_the_literal_is_the_modules_own() -> None:
    import ds_launcher.commands.hosts
    import ds_launcher.commands.report
    import ds_launcher.commands.run

    for module in (ds_launcher.commands.report, ds_launcher.commands.hosts, ds_launcher.commands.run):
        assert help_line(module.__name__) == module.HELP
        assert source_file(module.__name__) == Path(module.__file__)
    assert source_file("no_such_package.cli") is None
    assert source_file("sys") is None
    assert help_line("sys") == ""


def test_a_command_answers_without_its_package_until_it_needs_it(box: Sandbox) -> None:
    package(box.folder, 'HELP = "show a trap"')
    (box.folder / "trap/cli.py").write_text(
        "from dataclasses import dataclass\n"
        "HELP = 'show a trap'\n"
        "@dataclass(slots=True)\nclass Seen:\n    number: int = 3\n"
        "def register(parser):\n    parser.add_argument('--deep')\n"
        "def main(args):\n    import trap\n    return Seen().number\n"
    )
    there = {"PYTHONPATH": str(box.folder)}
    shown = box.ds("trap", "--help", env=there)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "--deep" in shown.stdout
    assert "the package was imported" in box.ds("trap", env=there).stderr


def test_a_command_whose_package_is_there_is_a_part_of_it() -> None:
    import ds_launcher.commands.hosts

    assert load_command("ds_launcher.commands.hosts") is ds_launcher.commands.hosts
    assert load_command("json").dumps(1) == "1"


def test_an_unknown_command_names_the_nearest(box: Sandbox) -> None:
    done = box.ds("rnu")
    assert done.returncode == 2
    assert "no command `rnu`; did you mean `ds run`?" in done.stderr
    assert box.ds("xyzzy").stderr.count("did you mean") == 0


def test_without_words_it_shows_the_overview_and_fails(box: Sandbox) -> None:
    done = box.ds()
    assert done.returncode == 2
    assert done.stdout.startswith("usage: ds <command>")
    assert box.ds("--version").stdout.startswith("ds 0.")


def test_errors_have_no_traceback(box: Sandbox) -> None:
    done = box.ds("hosts", "--hostfile", "nowhere")
    assert done.returncode == 1
    assert done.stderr.startswith("ds hosts: ConfigError: the hostfile nowhere cannot be read")
    assert "ds explain launch-hostfile" in done.stderr
    assert "Traceback" not in done.stderr


def test_hosts_shows_slots_and_the_ranks_they_get(box: Sandbox) -> None:
    box.file("hosts").write_text("n1 slots=2\nlonger-2 slots=4\n")
    done = box.ds("hosts", "-H", "hosts", "-e", "longer-2:0")
    assert done.stdout.splitlines() == [
        "n1        slots 0,1  ranks 0-1",
        "longer-2  slots 1,2,3  ranks 2-4",
        "2 hosts, 5 ranks",
    ]
    assert "gpu02  slots 0  ranks 1-1" in box.ds("hosts", env={"SLURM_JOB_NODELIST": "gpu[01-02]"}).stdout


def test_the_shim_adds_our_variables_beside_torchruns() -> None:
    env = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "3", "GROUP_WORLD_SIZE": "4"}
    command, given = wrapped(["python", "t.py", LOCAL_RANK_WORD, "--", "x"], env)
    assert command == ["python", "t.py", "--local_rank=1", "--", "x"]
    assert {name: given[name] for name in ("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")} == {
        "LOCAL_SIZE": "2",
        "CROSS_RANK": "3",
        "CROSS_SIZE": "4",
    }
    assert wrapped(["python"], {})[0] == ["python"]


def test_ssh_runs_a_command_on_every_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("n1 slots=2\nn2 slots=4\n")
    (tmp_path / "ssh").write_text("#!/bin/sh\necho $3 does $4; exit 3\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    parser = argparse.ArgumentParser()
    ssh.register(parser)
    assert ssh.main(parser.parse_args(["-f", f"{tmp_path}/hosts", "nvidia-smi", "-L"])) == 3
    assert capsys.readouterr().out == "n1: n1 does nvidia-smi -L\nn2: n2 does nvidia-smi -L\n"
    assert ssh.main(parser.parse_args(["-f", f"{tmp_path}/hosts", "-e", "n1", "--dry-run", "ls", "-l"])) == 0
    assert capsys.readouterr().out == "ssh -o BatchMode=yes n2 'ls -l'\n"
    assert ssh.main(parser.parse_args(["-f", f"{tmp_path}/hosts", "--json", "ls"])) == 3
    told = json.loads(capsys.readouterr().out)
    assert told[1] == {"host": "n2", "status": 3, "stdout": "n2 does ls\n", "stderr": ""}
    assert ssh.main(parser.parse_args(["-f", f"{tmp_path}/hosts", "-e", "n1", "--dry-run", "--json", "ls"])) == 0
    assert json.loads(capsys.readouterr().out) == [{"host": "n2", "argv": ["ssh", "-o", "BatchMode=yes", "n2", "ls"]}]
    with pytest.raises(ConfigError, match="no command"):
        ssh.main(parser.parse_args(["-f", f"{tmp_path}/hosts"]))


def test_explain_says_what_an_error_means(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "  ds explain launch-port"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("launch-port\n\n")
    assert len(told.split()) > 10


def test_explain_lists_all_and_knows_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    listed = capsys.readouterr().out.split()
    assert listed == sorted(explanations())
    assert main(["explain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == explanations()
    assert main(["explain", "--json", "launch-port"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["launch-port"]
    assert main(["explain", listed[0] + "x"]) == 1
    assert f"did you mean `{listed[0]}`?" in capsys.readouterr().err


def test_a_plan_as_json_shows_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts").write_text("n1 slots=2\nn2 slots=2\n")
    words = ["--hostfile", str(tmp_path / "hosts"), "-x", "WANDB_API_KEY=hush", "train.py"]
    assert main(["run", "--dry-run", "--json", *words]) == 0
    text = capsys.readouterr().out
    told = json.loads(text)
    assert [process["name"] for process in told["processes"]] == ["host n1", "host n2"]
    assert told["processes"][0]["secrets"]["WANDB_API_KEY"] == told["watch"]["key"] == "..."
    assert "+ WANDB_API_KEY=..." in told["variables"]
    assert "hush" not in text
    assert main(["run", "--json", "train.py"]) == 1
    assert "without --dry-run" in capsys.readouterr().err


def test_hosts_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts").write_text("n1 slots=2\nn2 slots=3\n")
    assert main(["hosts", "-H", str(tmp_path / "hosts"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows == [
        {"host": "n1", "slots": [0, 1], "first_rank": 0},
        {"host": "n2", "slots": [0, 1, 2], "first_rank": 2},
    ]
