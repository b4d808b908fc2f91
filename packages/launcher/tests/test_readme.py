"""The README's snippet runs; its commands exist."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from ds_launcher.commands.run import register
from ds_launcher.launch_options import options_of

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "# rank 3\n" in shown
    assert "WORLD_SIZE=4" in shown


def test_the_command_lines_are_understood() -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    runs = [words[2:] for words in lines if words[:2] == ["ds", "run"]]
    assert len(runs) == 5
    for words in runs:
        parser = argparse.ArgumentParser(exit_on_error=False)
        register(parser)
        assert options_of(parser.parse_args(words)).script == "train.py"


def test_every_error_code_has_a_section() -> None:
    source = Path(__file__).parents[1] / "src"
    codes = {code for path in source.rglob("*.py") for code in re.findall(r'code="(launch-[a-z-]+)"', path.read_text())}
    page = Path(__file__).parents[3] / "docs/reference/errors.d/launcher.md"
    if not page.exists():
        pytest.skip("not in a checkout of the repository")
    assert codes == set(re.findall(r"^## (\S+)$", page.read_text(), re.MULTILINE))
