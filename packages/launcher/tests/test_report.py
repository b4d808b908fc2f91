"""`ds report`: parts of packages as one report; what fails is told and fails nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

import pytest

from ds_config.report_tables import GROUP, Check, PackageReport, ReportLevel, TextTable
from ds_launcher import launch_report
from ds_launcher.cli import main
from ds_launcher.commands import report as command

if TYPE_CHECKING:
    from conftest import Sandbox

SLOW = Check("files", "io_uring", ReportLevel.SLOWER, "not allowed [here]", "allow it")
FINE = Check("files", "threads", ReportLevel.FINE, "works")
TABLE = TextTable("ops", "who runs them", ("op", "backend"), (("update", "cpu [avx2]"),))


def part(quick: bool) -> PackageReport:
    return PackageReport((FINE,) if quick else (FINE, SLOW), (TABLE,), {"ops": [{"op": "update"}]})


def ill(quick: bool) -> PackageReport:
    raise OSError("libcudart.so.13: cannot open shared object file")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of this file's functions that are registered as parts."""
    names: list[str] = ["part"]
    here = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "parts_of_a_test", here)

    def entry_points(group: str) -> list[EntryPoint]:
        assert group == GROUP
        return [EntryPoint(name, f"parts_of_a_test:{name}", group) for name in names]

    monkeypatch.setattr(launch_report, "entry_points", entry_points)
    return names


def test_the_same_thing_is_told_once_by_the_graver_verdict() -> None:
    one = PackageReport(
        (Check("system", "cores", ReportLevel.INFO, "8"), Check("device", "visible", ReportLevel.INFO, "none"))
    )
    two = PackageReport(
        (Check("system", "cores", ReportLevel.INFO, "9"), Check("device", "visible", ReportLevel.BROKEN, "driver"))
    )
    three = PackageReport((Check("system", "memory", ReportLevel.INFO, "1 GiB"),), data={"x": 1})
    found = launch_report.merged([one, two, three])
    assert [(c.section, c.name, c.result) for c in found.checks] == [
        ("system", "cores", "8"),
        ("system", "memory", "1 GiB"),
        ("device", "visible", "driver"),
    ]
    assert found.data == {"x": 1}


def test_checks_tables_and_a_summary(parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 0
    text = capsys.readouterr().out
    assert "threads" in text
    assert "not allowed [here]" in text
    assert "-> allow it" in text
    assert "ops: who runs them" in text
    assert "cpu [avx2]" in text
    assert text.endswith("nothing is broken; 1 could be better: files io_uring\n")
    assert main(["doctor"]) == 0
    notable = capsys.readouterr().out
    assert "files io_uring" in notable
    assert "threads" not in notable
    assert "cpu [avx2]" not in notable
    assert "`ds report` has all checks, and the tables ops (1 rows)" in notable
    assert main(["env"]) == 0
    assert "io_uring" not in capsys.readouterr().out


def test_the_doctor_begins_with_what_can_be_acted_on(capsys: pytest.CaptureFixture[str]) -> None:
    hopeless = Check("memory", "huge pages", ReportLevel.SLOWER, "not of this kernel")
    broken = Check("native", "library", ReportLevel.BROKEN, "missing", "ds ops build")
    command.show(PackageReport((FINE, hopeless, SLOW, broken)), notable=True)
    lines = capsys.readouterr().out.splitlines()
    places = [next(i for i, line in enumerate(lines) if name in line) for name in ("library", "io_uring", "huge pages")]
    assert places == sorted(places)
    assert lines[0] == "broken"


def test_a_part_that_fails_is_a_line_and_an_exit_status(parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parts.append("ill")
    assert main(["report", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert told["ops"] == [{"op": "update"}]
    (broken,) = [check for check in told["checks"] if check["verdict"] == "broken"]
    assert "OSError: libcudart.so.13" in broken["found"]
    assert main(["report"]) == 1
    assert "1 broken: report" in capsys.readouterr().out


def test_a_report_without_anything_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    command.show(PackageReport())
    assert capsys.readouterr().out == "nothing is broken\n"


def test_what_is_visible_here_is_told_without_torch_and_without_secrets(box: Sandbox) -> None:
    code = (
        "import sys\nfrom ds_launcher.cli import main\nmain(['env', '--json'])\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)\n"
    )
    env = {**box.env, "CUDA_VISIBLE_DEVICES": "4,5", "NCCL_DEBUG": "INFO", "WANDB_API_KEY": "secret"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["devices"] == {"kind": "cuda", "visible": "4,5"}
    assert told["packages"]["ds-launcher"] == "0.1.0"
    assert told["variables"]["NCCL_DEBUG"] == "INFO"
    assert "secret" not in done.stdout
    checks = {(check["section"], check["name"]): check["found"] for check in told["checks"]}
    assert checks["device", "visible"] == "cuda: 4,5"
    assert checks["settings", "NCCL_DEBUG"] == "INFO"
