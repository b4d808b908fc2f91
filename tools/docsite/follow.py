"""Follow tutorials as a newcomer does: in an empty folder, block by block, as they stand.

usage: python tools/docsite/follow.py [--update] [PAGE ...]     (PAGE: a name below docs/tutorials; all without one)

`--update` copies the pictures that a page made over those that it shows.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from docsite.blocks import Expect, Picture, Run, Write, missing, steps
from repo import ROOT

__all__ = ["FollowError", "follow", "main"]

FOLDER = ROOT / "docs" / "tutorials"
_LIMIT_S = 300


class FollowError(Exception):
    """A page does not do what it says."""


def follow(page: Path, folder: Path, *, update: bool = False) -> None:
    """Do what the page says, in `folder`.

    Raises:
        FollowError: a command failed, an output or a picture is missing; with the line of the page.
    """
    groups: list[int] = []
    try:
        _follow(page, folder, groups, update=update)
    finally:
        for group in groups:  # a server that a page left running, or a command that failed before the page ended it
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def _follow(page: Path, folder: Path, groups: list[int], *, update: bool) -> None:
    output, state = "", folder / ".state"
    state.write_text("")
    for step in steps(page.read_text()):
        at = f"{page.name}:{step.line}"
        match step:
            case Write(name=name, text=text):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)
            case Run(text=text, status=status):
                output = _run(text, status, folder, at, groups)
                (folder / f".output-{step.line}").write_text(output)
            case Expect(text=text):
                if lost := missing(text, output):
                    raise FollowError(f"{at}: the output does not have\n  {lost[0]}\nIt was:\n{output}")
            case Picture(made=made, shown=shown):
                if not (folder / made).is_file():
                    raise FollowError(f"{at}: {made} was not made")
                if update:
                    (page.parent / shown).parent.mkdir(exist_ok=True)
                    shutil.copyfile(folder / made, page.parent / shown)
                if not (page.parent / shown).is_file():
                    raise FollowError(f"{at}: {shown} is not there; run this with --update")


def _run(text: str, status: int, folder: Path, at: str, groups: list[int]) -> str:
    # What a block exports, and where it went, holds for the next one.
    script = f"set -a; . {folder}/.state; set +a\nset -eo pipefail\ntrap 'export -p > {folder}/.state' EXIT\n{text}"
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environ = {**os.environ, "PATH": programs, "DS": str(ROOT), "PYTHONUNBUFFERED": "1", "COLUMNS": "100"}
    began = subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env=environ,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    groups.append(began.pid)
    try:
        output, _ = began.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise FollowError(f"{at}: still running after {_LIMIT_S} s:\n{error.stdout!r}") from error
    if began.returncode != status:
        raise FollowError(f"{at}: ended with {began.returncode}, not {status}:\n{output}")
    return output


def main(argv: list[str] | None = None) -> int:
    """Follow pages; 1 where one does not do what it says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--update", action="store_true", help="copy the pictures over those that pages show")
    parser.add_argument("--show", action="store_true", help="leave the folder and say where it is")
    parser.add_argument("pages", nargs="*", help="names below docs/tutorials, without .md")
    args = parser.parse_args(argv)
    failed = 0
    for name in args.pages or sorted(file.stem for file in FOLDER.glob("*.md")):
        folder, began = Path(tempfile.mkdtemp(prefix=f"follow-{name}-")), time.monotonic()
        try:
            follow(FOLDER / f"{name}.md", folder, update=args.update)
            verdict = "ok"
        except (FollowError, ValueError) as error:
            failed, verdict = failed + 1, f"FAILED\n{error}"
        print(f"{name}: {verdict} ({time.monotonic() - began:.0f} s)", flush=True)
        if args.show:
            print(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
