"""Facts in, findings out: what is broken, what could be better, and the command that changes it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ds_config.report_tables import PackageReport
from ds_ops import machine, ops_report, toolchain
from ds_ops.doctor import Check, Diagnosis, OpRow, ReportLevel, diagnose
from ds_ops.machine import Machine, ProbeStage, parse_stages, read_machine, run_probe
from ds_ops.ops_report import report, report_of
from ds_ops.toolchain import Tool


def row(dtype: str, backend: str = "cpu", *why: tuple[str, str, str], error: str = "") -> dict[str, object]:
    rejected = [dict(zip(("backend", "reason", "fix"), w, strict=True)) for w in why]
    return {
        "op": "update",
        "summary": "steps",
        "device": "cpu",
        "dtype": dtype,
        "backend": backend,
        "error": error,
        "rejected": rejected,
    }


def stages(**changed: ProbeStage) -> dict[str, ProbeStage]:
    return {
        "torch": ProbeStage({"version": "2.13.0", "cuda": "", "hip": "", "cpu_capability": "AVX2", "threads": 2}),
        "native": ProbeStage(
            {
                "reasons": {"_cpu": "", "_cuda": "module _cuda was not built"},
                "isa": "avx2",
                "isa_supported": "avx2,baseline",
                "build": {},
            }
        ),
        "trial": ProbeStage({"backend": "cpu", "difference": 0.0}),
        "io": ProbeStage({"backends": {"io_uring": "", "libaio": "", "threads": "", "python": ""}}),
        "cuda": ProbeStage({"available": False, "devices": []}),
        "triton": ProbeStage(error="ModuleNotFoundError: no triton"),
        "ops": ProbeStage({"rows": [row("float32"), row("bfloat16")], "broken": [], "backends": ["cpu", "reference"]}),
        **changed,
    }


WORKS = Tool("/usr/bin/x", "1.0")
GOOD = Machine(
    "3.11",
    "Linux",
    2,
    memory_bytes=8 << 30,
    shm_bytes=(4 << 30, 4 << 30),
    huge_pages="madvise",
    tools={"c++ compiler": WORKS},
    stages=stages(),
)


def checks(m: Machine, verdict: ReportLevel) -> dict[str, Check]:
    return {check.name: check for check in diagnose(m).checks if check.verdict is verdict}


def broken_by(**changed: ProbeStage) -> dict[str, Check]:
    return checks(replace(GOOD, stages=stages(**changed)), ReportLevel.BROKEN)


def test_a_good_machine_has_nothing_to_mend() -> None:
    assert checks(GOOD, ReportLevel.BROKEN) == checks(GOOD, ReportLevel.SLOWER) == {}


def test_every_fix_is_about_something_that_is_not_fine() -> None:
    for check in diagnose(GOOD).checks:
        assert not check.fix, check
    for check in diagnose(Machine("3.11", "?", 1)).checks:
        assert check.fix or check.verdict in (ReportLevel.FINE, ReportLevel.INFO), check


def test_dtypes_that_are_treated_alike_share_a_row() -> None:
    why = ("cpu", "does not take torch.float64", "convert")
    rows = [row("float32"), row("bfloat16"), row("float64", "reference", why)]
    found = diagnose(replace(GOOD, stages=stages(ops=ProbeStage({"rows": rows}))))
    assert [(r.dtypes, r.backend, r.why_not) for r in found.ops] == [
        (("float32", "bfloat16"), "cpu", ()),
        (("float64",), "reference", (why,)),
    ]


def test_torch_that_does_not_load_is_one_finding_not_seven() -> None:
    same = ProbeStage(error="OSError: libcublas.so.13: cannot open shared object file")
    found = broken_by(**dict.fromkeys(("torch", "native", "trial", "io", "cuda", "triton", "ops"), same))
    assert list(found) == ["torch"]
    assert "libcublas" in found["torch"].result
    assert "pip install" in found["torch"].fix


@pytest.mark.parametrize(
    ("changed", "name", "fix"),
    [
        ({"native": ProbeStage(error="did not answer within 120 s")}, "_cpu", "ds ops build --force cpu"),
        (
            {
                "native": ProbeStage(
                    {"reasons": {"_cpu": "module _cpu does not load: GLIBC", "_cuda": "module was not built"}}
                )
            },
            "_cpu",
            "ds ops build --force cpu",
        ),
        ({"trial": ProbeStage(error="ended with signal 4")}, "trial step", "DS_OPS=reference"),
        ({"trial": ProbeStage({"backend": "cpu", "difference": 0.5})}, "trial step", "DS_OPS=reference"),
        ({"cuda": ProbeStage(error="did not answer within 120 s")}, "accelerator", "nvidia-smi"),
        (
            {"ops": ProbeStage({"rows": [], "broken": [["ds_ops.norm", "ImportError: x"]]})},
            "ds_ops.norm",
            "pip install",
        ),
        ({"ops": ProbeStage({"rows": [row("float32", "", error="cpu: no")]})}, "update on cpu", "unset DS_OPS"),
    ],
)
def test_what_fails_is_broken_and_has_a_command(changed: dict[str, ProbeStage], name: str, fix: str) -> None:
    found = broken_by(**changed)
    assert list(found) == [name]
    assert fix in found[name].fix


def test_a_module_that_was_not_built_is_slower_not_broken() -> None:
    missing = ProbeStage({"reasons": {"_cpu": "module _cpu was not built", "_cuda": "module _cuda was not built"}})
    m = replace(
        GOOD, stages=stages(native=missing), tools={"cmake": Tool(), "c++ compiler": Tool("/bin/false", "", "no")}
    )
    assert not checks(m, ReportLevel.BROKEN)
    slower = checks(m, ReportLevel.SLOWER)
    assert slower["_cpu"].fix == "ds ops build cpu"
    assert "ds-ops[build]" in slower["cmake"].fix
    assert "CXX" in slower["c++ compiler"].fix


def test_a_device_that_torch_cannot_use_is_broken() -> None:
    m = replace(GOOD, device_files=("nvidia0",))
    assert "CPU only" in checks(m, ReportLevel.BROKEN)["accelerator"].result
    for_cuda = stages(torch=ProbeStage({**stages()["torch"].results, "cuda": "13.0"}))
    assert "driver" in checks(replace(m, stages=for_cuda), ReportLevel.BROKEN)["accelerator"].result
    hidden = replace(m, stages=for_cuda, variables={"CUDA_VISIBLE_DEVICES": ""})
    assert not checks(hidden, ReportLevel.BROKEN)


def test_settings_that_do_nothing_are_broken_and_those_that_slow_down_are_named() -> None:
    m = replace(GOOD, variables={"DS_OPS": "referense", "DS_CPU_ISA": "avx1024"})
    assert set(checks(m, ReportLevel.BROKEN)) == {"DS_OPS", "DS_CPU_ISA"}
    m = replace(GOOD, variables={"DS_OPS": "reference", "DS_CPU_ISA": "avx2", "OMP_NUM_THREADS": "1"})
    assert set(checks(m, ReportLevel.SLOWER)) == {"DS_OPS", "DS_CPU_ISA"}


def test_small_shared_memory_and_blocked_io_say_what_to_do() -> None:
    blocked = ProbeStage({"backends": {"io_uring": "refused", "libaio": "", "threads": "", "python": ""}})
    m = replace(GOOD, shm_bytes=(64 << 20, 64 << 20), huge_pages="never", stages=stages(io=blocked))
    slower = checks(m, ReportLevel.SLOWER)
    assert "--shm-size" in slower["/dev/shm"].fix
    assert "transparent_hugepage" in slower["transparent huge pages"].fix
    info = checks(m, ReportLevel.INFO)
    assert "io_uring_disabled" in info["io_uring transfers"].fix


# ---- the probe and its reader


def test_a_stage_that_kills_the_process_is_told_from_those_before() -> None:
    text = '{"begin": "torch"}\nnoise\n{"stage": "torch", "found": {"version": "2"}}\n[1]\n{"begin": "native"}\n'
    found = parse_stages(text, "ended with signal 4")
    assert found == {"torch": ProbeStage({"version": "2"}), "native": ProbeStage(error="ended with signal 4")}
    assert parse_stages("", "cannot be started") == {"probe": ProbeStage(error="cannot be started")}


_DIES = 'import os, sys; print(\'{"begin": "native"}\', flush=True); os.kill(os.getpid(), 4)'
_HANGS = 'import time; print(\'{"begin": "cuda"}\', flush=True); time.sleep(60)'


def test_death_and_silence_of_the_probe_are_findings() -> None:
    assert run_probe(30, (sys.executable, "-c", _DIES)) == {"native": ProbeStage(error="ended with signal 4")}
    assert run_probe(1.5, (sys.executable, "-c", _HANGS)) == {"cuda": ProbeStage(error="did not answer within 2 s")}
    assert "cannot be started" in run_probe(5, ("/no/such/python",))["probe"].error
    assert set(broken_by(probe=ProbeStage(error="cannot be started"))) == {"probe"}


def test_a_machine_without_proc_sys_dev_and_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "run_probe", lambda: {"probe": ProbeStage(error="nothing works")})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/false -O2")
    m = read_machine(tmp_path)
    assert (m.memory_bytes, m.shm_bytes, m.numa_nodes, m.aio_requests, m.huge_pages) == (None, None, None, None, "")
    assert not m.tools["cmake"].works
    assert "cannot compile" in m.tools["c++ compiler"].problem
    assert diagnose(m).broken


def test_nvcc_is_looked_for_as_the_build_does(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Copyright 2026'; echo 'Cuda compilation tools, release 13.0, V13'\n")
    nvcc.chmod(0o755)
    assert toolchain.find_nvcc({"PATH": "", "CUDA_HOME": str(tmp_path)}) == str(nvcc)
    assert toolchain.find_nvcc({"PATH": "", "CUDACXX": "/x/nvcc"}) == "/x/nvcc"
    assert toolchain.find_tools({"PATH": str(nvcc.parent)})["nvcc"].version.startswith("Cuda compilation tools")


# ---- the part of the report


def test_report_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DS_OPS", "DS_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    found = report()
    assert {"update", "sum_squares"} <= {r["op"] for r in found.data["ops"]}
    assert all(r["backend"] for r in found.data["ops"])
    assert {"system", "torch", "native", "files"} <= {check.section for check in found.checks}
    (table,) = found.tables
    assert all(len(row) == len(table.heads) for row in table.rows)
    json.dumps(found.data)


def test_a_quick_report_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_report, "read_machine", lambda: pytest.fail("looked at the machine"))
    assert report(quick=True) == PackageReport()


def test_ops_that_are_treated_alike_share_a_row() -> None:
    ops = [OpRow(name, "", "cpu", ("torch.float32", "torch.bfloat16"), "cpu", ()) for name in ("update", "fill")]
    lost = OpRow("muon", "", "cpu", ("torch.float32",), "", (("cpu", "no such kernel", "ds ops build"),))
    (table,) = report_of(Diagnosis((), (*ops, lost))).tables
    assert table.rows == (
        ("cpu", "fp32 bf16", "cpu", "", "update, fill"),
        ("cpu", "fp32", "none", "cpu: no such kernel -> ds ops build", "muon"),
    )


def test_what_is_wrong_is_broken_with_its_cure() -> None:
    ill = replace(
        GOOD, stages=stages(native=ProbeStage({"reasons": {"_cpu": "module _cpu does not load: [GLIBC_2.99]"}}))
    )
    (broken,) = [check for check in report_of(diagnose(ill)).checks if check.verdict is ReportLevel.BROKEN]
    assert (broken.section, broken.name, broken.fix) == ("native", "_cpu", "ds ops build --force cpu")
    assert "[GLIBC_2.99]" in broken.result
    assert not [check for check in report_of(diagnose(GOOD)).checks if check.verdict is ReportLevel.BROKEN]


@pytest.mark.parametrize(
    ("stage", "level", "words"),
    [
        (ProbeStage({"compiler": "NVRTC 13.0 (/x)", "folder": "/c", "compiled": 3, "all": 9, "unkept": ""}), ReportLevel.FINE, "3 of 9"),
        (ProbeStage({"compiler": "NVRTC 13.0 (/x)", "folder": "/c", "compiled": 0, "all": 9, "unkept": "read-only"}), ReportLevel.SLOWER, "read-only"),
        (ProbeStage({"obstacle": "NVRTC was not found"}), ReportLevel.SLOWER, "NVRTC was not found; their ops run in plain torch"),
    ],
)  # fmt: skip
def test_where_cuda_kernels_come_from_is_said(stage: ProbeStage, level: ReportLevel, words: str) -> None:
    found = checks(replace(GOOD, stages=stages(kernels=stage)), level)["CUDA kernels"]
    assert words in found.result
