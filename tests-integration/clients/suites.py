"""What other projects test of their DeepSpeed integration, with DeepSpeed itself first and then with the facade.

    python suites.py NAME=CHECKOUT ... [--results FILE] [--page] [--who theirs|ours]

NAME is one of `SUITES`, CHECKOUT a folder of that project's repository, of which `tests` is copied to a scratch folder and nothing
is kept. PYTHONPATH may name a folder with other versions of libraries, where a suite needs them. DS_PEER_PYTHON and DS_CLIENTS_PYTHON
are the two environments. What passes with DeepSpeed on this host is the list; results are added to FILE, and a test that is in it is
not run again, so that a run that was ended goes on. Writes docs/reference/suites.md.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "reference" / "suites.md"
PYTHONS = {"theirs": "DS_PEER_PYTHON", "ours": "DS_CLIENTS_PYTHON"}
FILE_S = 900
Found = dict[tuple[str, str], dict[str, tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests of one project.

    Attributes:
        home: Folder of the checkout that pytest runs in, copied with everything below it.
        files: What speaks of DeepSpeed, as globs below `home`.
        select: pytest's `-k`; empty for all.
    """

    home: str
    files: tuple[str, ...]
    select: str = ""


SUITES: Mapping[str, Suite] = {
    "accelerate": Suite("tests", ("deepspeed/test_*.py",)),
    "lightning": Suite(
        "tests", (
            "tests_fabric/strategies/test_deepspeed*.py", "tests_fabric/plugins/precision/test_deepspeed*.py",
            "tests_pytorch/strategies/test_deepspeed.py", "tests_pytorch/plugins/precision/test_deepspeed*.py",
            "tests_pytorch/utilities/test_deepspeed_*.py",
        ),
    ),
    "peft": Suite("tests", ("test_initialization.py",), "Deepspeed"),
    "trl": Suite("tests", ("distributed/test_distributed.py",), "zero"),
    "transformers": Suite(
        ".", ("tests/deepspeed/test_deepspeed.py", "tests/trainer/distributed/test_*_deepspeed.py"),
        "TrainerIntegrationDeepSpeed or CoreIntegration",
    ),
}  # fmt: skip


def main() -> int:
    """Run and write the page; 0 when what passes with DeepSpeed passes with the facade, or has a reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", metavar="NAME=CHECKOUT")
    parser.add_argument("--results", default="suites.jsonl", type=Path)
    parser.add_argument("--who", choices=sorted(PYTHONS), action="append")
    parser.add_argument("--page", action="store_true", help="only write the page from what --results holds")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))
    for told in () if given.page else given.checkouts:
        name, _, folder = told.partition("=")
        if name not in SUITES or not Path(folder).is_dir():
            parser.error(f"{told}: expected NAME=CHECKOUT with NAME one of {', '.join(SUITES)}")
        for who in given.who or PYTHONS:
            run(name, Path(folder), who, given.results)
    found = read(given.results)
    reasons = tomllib.loads((HERE / "suites.toml").read_text())
    PAGE.write_text(page(found, reasons))
    missed = [test for suite in SUITES for test in differing(found, suite) if test not in reasons.get(suite, {})]
    print(f"{len(missed)} tests pass with DeepSpeed and neither pass here nor have a reason", *missed, sep="\n")
    return 1 if missed else 0


def run(name: str, checkout: Path, who: str, results: Path) -> None:
    """Every file of a suite in a process group of its own, with a time limit."""
    suite, python = SUITES[name], Path(os.environ[PYTHONS[who]])
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / "suite"
        shutil.copytree(
            checkout / suite.home, scratch, ignore=shutil.ignore_patterns(".git", "src", "docs", "examples")
        )
        files = sorted({str(path.relative_to(scratch)) for glob in suite.files for path in scratch.glob(glob)})
        for file in files:
            environ = os.environ | {
                "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")]), str(scratch)]),
                "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MAX_JOBS": "1",
                "TORCH_EXTENSIONS_DIR": str(python.parents[1] / "torch_extensions"),
                "SUITES_OUT": str(results.resolve()), "SUITES_ROW": json.dumps({"suite": name, "who": who, "file": file}),
            }  # fmt: skip
            options = ["-q", "-p", "suites_plugin", "-p", "no:cacheprovider", "--timeout=120", "-k", suite.select]
            command = [str(python), "-m", "pytest", *options, file]
            process = subprocess.Popen(command, cwd=scratch, env=environ, start_new_session=True)
            try:
                process.wait(FILE_S)
            except subprocess.TimeoutExpired:
                print(f"{file}: took longer than {FILE_S} s")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def read(results: Path) -> Found:
    """(suite, who) -> test -> (how it ended, why)."""
    found: Found = collections.defaultdict(dict)
    for line in results.read_text().splitlines() if results.is_file() else ():
        row = json.loads(line)
        found[row["suite"], row["who"]][row["test"]] = (row["outcome"], row["why"])
    return found


def differing(found: Found, suite: str) -> Sequence[str]:
    """Tests that pass with DeepSpeed and not here."""
    theirs, ours = found.get((suite, "theirs"), {}), found.get((suite, "ours"), {})
    passing = [test for test, (outcome, _) in theirs.items() if outcome == "passed"]
    return sorted(test for test in passing if ours.get(test, ("not run", ""))[0] != "passed")


def page(found: Found, reasons: Mapping[str, Mapping[str, str]]) -> str:
    """The page: counts by file, then what differs with its reason."""
    lines = [
        "# Suites of other projects", "",
        "<!-- Made by `nox -s clients -- suites NAME=CHECKOUT ...` from tests-integration/clients/suites.py. -->", "",
        "What projects around DeepSpeed test of their integration with it, on a host without accelerators: with DeepSpeed 0.19.8, then",
        "with the facade `packages/compat`. What passes with DeepSpeed is the list. Marks that ask for an accelerator are lifted where",
        "the test runs without one; a test that needs a model of the hub, or a GPU, passes with neither.", "",
        "| suite | file | pass with DeepSpeed | of these here | fail or are skipped with DeepSpeed |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for suite in SUITES:
        theirs, ours = found.get((suite, "theirs"), {}), found.get((suite, "ours"), {})
        files = collections.defaultdict(list)
        for test in theirs:
            files[test.split("::")[0]].append(test)
        for file, tests in sorted(files.items()):
            passing = [test for test in tests if theirs[test][0] == "passed"]
            here = sum(ours.get(test, ("", ""))[0] == "passed" for test in passing)
            lines.append(f"| {suite} | `{file}` | {len(passing)} | {here} | {len(tests) - len(passing)} |")
        if not theirs:
            lines.append(f"| {suite} | {reasons.get(suite, {}).get('not run', 'not run')} | | | |")
    rows = [(suite, test) for suite in SUITES for test in differing(found, suite)]
    lines += ["", "## Not passing", "", "| test | reason |", "|---|---|"] if rows else []
    lines += [f"| `{test}` | {reasons.get(suite, {}).get(test, 'not explained yet')} |" for suite, test in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
