"""Run DeepSpeed's own unit tests against the facade that this Python imports, and write docs/reference/conformance.md.

    python run.py TESTS_DIR [--results FILE] [--files PATTERN] [--page]

TESTS_DIR is the `tests` folder of a DeepSpeed checkout (about 0.19.6); nothing of it is kept here. Only the ids of `ids.txt` run:
those that pass with DeepSpeed itself on a host without accelerators. Results are added to FILE; what is in it is not run again.
`--page` only writes the page from FILE. `reasons.toml` says why an id cannot apply, or what it waits for.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "reference" / "conformance.md"
FILE_S, EXPECTED_S = 900, 200
Results = dict[str, tuple[str, str]]


def main() -> int:
    """Run, write the page; 0 when every id passed or has a reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="?")
    parser.add_argument("--results", default="conformance.jsonl", type=Path)
    parser.add_argument("--files", default="*")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))
    ids = [line.strip() for line in (HERE / "ids.txt").read_text().splitlines() if line.strip()]
    if not given.page:
        if given.tests is None:
            parser.error("which tests? Give the `tests` folder of a DeepSpeed checkout")
        run(
            Path(given.tests),
            [name for name in ids if fnmatch.fnmatch(name.split("::")[0], given.files)],
            given.results,
        )
    found, reasons = read(given.results), tomllib.loads((HERE / "reasons.toml").read_text())
    PAGE.write_text(page(ids, found, reasons))
    bad = [name for name in ids if found.get(name, ("not run", ""))[0] != "passed" and why(name, reasons) is None]
    print(
        f"{sum(found.get(name, ('', ''))[0] == 'passed' for name in ids)} of {len(ids)} pass; without a reason: {len(bad)}"
    )
    return 1 if bad else 0


def run(tests: Path, ids: Sequence[str], results: Path) -> None:
    """Each file in a process group of its own, with a time limit; what a killed run leaves open is "not run"."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / "tests"
        shutil.copytree(tests, scratch)
        done = read(results)
        reasons = tomllib.loads((HERE / "reasons.toml").read_text())
        # What is expected not to pass comes last and by itself: a failing test may leave DeepSpeed's pool of processes waiting for ever.
        wanted = collections.defaultdict(list)
        for name in ids:
            if name not in done:
                wanted[why(name, reasons) is not None, name.split("::")[0]].append(name)
        for (expected, file), names in sorted(wanted.items()):
            Path(folder, "wanted.txt").write_text("\n".join(names))
            environ = os.environ | {
                "PYTHONPATH": f"{HERE}{os.pathsep}{scratch}", "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "8", "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CONFORMANCE_IDS": f"{folder}/wanted.txt",
                "CONFORMANCE_OUT": str(results.resolve()),
            }  # fmt: skip
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-o",
                "addopts=",  # theirs leave out whole kinds of tests, of which the list has some
                "-p",
                "recorder",
                "-p",
                "no:cacheprovider",
                "--timeout=120",
                file,
            ]
            process = subprocess.Popen(command, cwd=scratch, env=environ, start_new_session=True)
            try:
                process.wait(limit := EXPECTED_S if expected else FILE_S)
            except subprocess.TimeoutExpired:
                print(f"{file}: took longer than {limit} s")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def read(results: Path) -> Results:
    """Id -> (how it ended, why). A file that cannot be imported counts for all its ids."""
    found: Results = {}
    for line in results.read_text().splitlines() if results.is_file() else ():
        row = json.loads(line)
        found[row["id"]] = (row["outcome"], row["why"])
    return found


def why(name: str, reasons: Mapping[str, Mapping[str, str]]) -> tuple[str, str] | None:
    """(kind, reason) of an id that is expected not to pass."""
    for kind, patterns in reasons.items():
        for pattern, reason in patterns.items():
            if name == pattern or fnmatch.fnmatchcase(
                name.replace("[", "(").replace("]", ")"), pattern.replace("[", "(").replace("]", ")")
            ):
                return kind, reason
    return None


def page(ids: Sequence[str], found: Results, reasons: Mapping[str, Mapping[str, str]]) -> str:
    """The page: counts by file, then every id that does not pass, with its reason."""

    def ended(name: str) -> str:
        file = name.split("::")[0]
        return found.get(name, found.get(file, ("not run", "")))[0]

    counts = collections.Counter(ended(name) for name in ids)
    files: dict[str, list[str]] = collections.defaultdict(list)
    for name in ids:
        files[name.split("::")[0]].append(name)
    lines = [
        "# Conformance", "", "<!-- Made by `nox -s conformance -- TESTS_DIR` from tests-integration/conformance. -->", "",
        "DeepSpeed's own unit tests that pass with DeepSpeed on a host without accelerators, run against the facade `packages/compat`.",
        f"**{counts['passed']} of {len(ids)} pass.** The others are listed below with the reason.", "", "| file | pass | of |", "|---|---|---|",
        *(f"| `{file}` | {sum(ended(name) == 'passed' for name in names)} | {len(names)} |" for file, names in sorted(files.items())),
        "", "## Not passing", "", "| test | | reason |", "|---|---|---|",
    ]  # fmt: skip
    for name in sorted(set(ids)):
        if ended(name) != "passed":
            kind, reason = why(name, reasons) or (ended(name), "not explained yet")
            lines.append(f"| `{name.replace('|', ' ')}` | {kind.replace('-', ' ')} | {reason} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
