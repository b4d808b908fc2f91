"""The fenced blocks of a tutorial, as steps: which file to write, what to run, what must be seen. Pure.

    ```python title="train.py"      a file of that name
    ```sh                           commands; they must succeed
    ```sh title="exits with 86"     commands that end with that status
    ```sh title="not run here: ..." shown only; so is every block without a title that is no `sh` and follows no `sh`
    ```text                         after `sh`: lines that the output has, in this order; `...` stands for any lines
    <!-- picture: loss.png -> img/quickstart.png -->   a file that is there now; the page shows the copy

Numbers of the output may differ from those of the page: digits count as one sign each run of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Expect", "Picture", "Run", "Step", "Write", "missing", "steps"]

_PART = re.compile(
    r"^```(?P<language>\w*)(?P<info>[^\n]*)\n(?P<code>.*?)^```$"
    r"|^<!-- picture: (?P<made>\S+) -> (?P<shown>\S+) -->$",
    re.MULTILINE | re.DOTALL,
)
_TITLE = re.compile(r'title="([^"]*)"')
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class Write:
    """Write `text` to the file `name`."""

    line: int
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Run:
    """Run shell commands that end with `status`."""

    line: int
    text: str
    status: int


@dataclass(frozen=True, slots=True)
class Expect:
    """What the output of the last commands has."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A file that was made, and its copy beside the page."""

    line: int
    made: str
    shown: str


Step = Write | Run | Expect | Picture


def steps(page: str) -> Iterator[Step]:
    """The steps of a page, in order.

    Raises:
        ValueError: a block of Python has no title: nobody would run it.
    """
    after_run = False
    for match in _PART.finditer(page):
        line = page[: match.start()].count("\n") + 1
        if match["made"]:
            yield Picture(line, match["made"], match["shown"])
            continue
        found = _TITLE.search(match["info"])
        title = found[1] if found else ""
        language, code = match["language"], match["code"]
        if language == "sh":
            after_run = not title.startswith("not run here")
            if after_run:
                status = re.fullmatch(r"exits with (\d+)", title)
                yield Run(line, code, int(status[1]) if status else 0)
        elif title and not title.startswith("not run here"):
            yield Write(line, title, code)
        elif language == "text" and after_run:
            yield Expect(line, code)
        elif language == "python" and not title:
            raise ValueError(f"line {line}: a block of Python needs a title, the name of its file")


def missing(expected: str, output: str) -> list[str]:
    """Lines of `expected` that `output` does not have in that order, numbers aside."""
    lines = iter([_plain(line) for line in output.splitlines()])
    lost = []
    for line in expected.splitlines():
        wanted = _plain(line)
        if wanted in ("", "..."):
            continue
        head = wanted.removesuffix(" ...")
        if not any(got == wanted or (head != wanted and got.startswith(head)) for got in lines):
            lost.append(line)
            break  # the output is used up
    return lost


def _plain(line: str) -> str:
    return _NUMBER.sub("#", " ".join(line.split()))
