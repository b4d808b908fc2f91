"""Every fenced Python block of every page and README runs. The blocks of one page run in order and share their names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ds_testing import world
from repo import ROOT
from repo.projects import load

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)


def _pages() -> list[str]:
    command = ["git", "ls-files", "-co", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    # Tutorials are files and commands, followed one by one in `nox -s docs`: minutes each.
    return [name for name in sorted(listed) if not name.startswith("docs/tutorials/") and _blocks(ROOT / name)]


def _blocks(page: Path) -> list[str]:
    if not page.is_file():
        return []
    return [match["code"] for match in _FENCE.finditer(page.read_text()) if match["language"] == "python"]


@world(1, backend=None)
@pytest.mark.parametrize("name", _pages())
def test_page(name, tmp_path, monkeypatch):
    """In a worker, because a snippet may start process groups and threads; what it leaves behind fails the test."""
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    module = ModuleType("snippets")
    monkeypatch.setitem(sys.modules, "snippets", module)  # classes made in a snippet look their module up
    for project in load().values():
        if project.opt_in and project.folder == (ROOT / name).parent:
            monkeypatch.syspath_prepend(project.source.parent)
    text = (ROOT / name).read_text()
    for match in _FENCE.finditer(text):
        if match["language"] == "python":
            line = text[: match.start()].count("\n") + 1
            code = re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
            exec(compile("\n" * line + code, str(ROOT / name), "exec", dont_inherit=True), vars(module))


def test_blocks_do_not_hide_behind_another_language():
    """`py`, `python3` or `pycon` would be coloured on the page and run by nobody."""
    command = ["git", "grep", "-nE", "^ *```(py|python3|pycon|ipython)\\b", "--", "*.md"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout == ""


def test_the_fence_reader(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n```python\nx = 1\n```\n```sh\nno\n```\n    ```python title='t'\n    y = 2\n    ```\n")
    assert _blocks(page) == ["x = 1\n", "    y = 2\n"]
