"""`ds ops build`: one builder at a time, no lock that outlives its holder, the first error of the compiler."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ds_config.errors import KernelError
from ds_ops import cli_ops, module_cache
from ds_ops.build_native import BuildPlan, build, first_error, missing_tools, plan
from ds_ops.toolchain import Tool, find_tools

_CMAKE = """
cmake_minimum_required(VERSION 3.22)
project(small LANGUAGES CXX)
file(APPEND "{log}" "configured\\n")
add_library(one SHARED one.cpp)
install(PROGRAMS $<TARGET_FILE:one> DESTINATION "${{DS_INSTALL_DIR}}" RENAME "{name}")
"""


@pytest.fixture
def tools() -> dict[str, Tool]:
    found = find_tools(os.environ)
    if missing := missing_tools(found):
        pytest.skip("; ".join(missing))
    return found


@pytest.fixture
def small(tmp_path: Path, tools: dict[str, Tool], monkeypatch: pytest.MonkeyPatch) -> BuildPlan:
    """A plan for a project of one function, in place of native/."""
    monkeypatch.setenv("DS_OPS_CACHE", str(tmp_path / "cache"))
    sources = tmp_path / "sources"
    sources.mkdir()
    name = module_cache.module_file("_cpu")
    (sources / "CMakeLists.txt").write_text(_CMAKE.format(log=tmp_path / "log", name=name))
    (sources / "one.cpp").write_text("int one() { return 1; }\n")
    monkeypatch.setattr(module_cache, "source_dir", lambda: sources)
    return plan("cpu", sources, tools)


def test_a_build_is_made_once_and_found_again(small: BuildPlan, tmp_path: Path) -> None:
    said: list[str] = []
    first = build(small, say=said.append)
    assert first.fresh
    assert said == ["configuring", "compiling", "installing"]
    assert module_cache.built_modules("_cpu") == [first.module]
    assert not build(small).fresh
    assert build(small, force=True).fresh
    assert (tmp_path / "log").read_text() == "configured\n" * 2
    assert not list(small.folder.glob("work-*"))


def test_a_build_of_other_sources_is_never_loaded(
    small: BuildPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build(small).module
    assert module_cache.built_modules("_cpu") == [made]
    (tmp_path / "sources" / "one.cpp").write_text("int one() { return 2; }\n")
    assert module_cache.built_modules("_cpu") == []
    monkeypatch.setattr(module_cache, "source_dir", lambda: None)  # nothing says what it should be of
    assert module_cache.built_modules("_cpu") == [made]


def test_the_key_follows_sources_and_compiler(small: BuildPlan, tmp_path: Path, tools: dict[str, Tool]) -> None:
    sources = tmp_path / "sources"
    assert plan("cpu", sources, tools).key == small.key
    other = {**tools, "c++ compiler": Tool("/usr/bin/other", "9")}
    assert plan("cpu", sources, other).key != small.key
    (sources / "one.cpp").write_text("int one() { return 2; }\n")
    assert plan("cpu", sources, tools).key != small.key


def test_the_first_error_is_shown_and_nothing_stays_half_built(small: BuildPlan, tmp_path: Path) -> None:
    (tmp_path / "sources" / "one.cpp").write_text("int one() { return two; }\nint three() { return four; }\n")
    with pytest.raises(KernelError, match=r"one\.cpp:1:20: error: .two. was not declared") as caught:
        build(small)
    assert caught.value.code == "ops-build-failed"
    assert "four" not in str(caught.value)
    assert "four" in (small.folder / "build.log").read_text()
    assert not small.module.exists()
    assert not list(small.folder.glob("work-*"))


def test_a_compiler_that_does_not_work_is_named(small: BuildPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(KernelError, match=r"/bin/false") as caught:
        build(small)
    assert "configuring the native module failed" in str(caught.value)


_HOLDER = """
import sys, time
from pathlib import Path
from ds_ops.build_native import locked
with locked(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_killed_builder_leaves_nothing_that_blocks(small: BuildPlan) -> None:
    small.folder.mkdir(parents=True)
    (small.folder / "work-left-behind").mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(small.folder / "lock")], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    waiting: list[str] = []

    def on_wait(line: str) -> None:
        waiting.append(line)
        if line.startswith("waiting"):
            holder.send_signal(signal.SIGKILL)

    assert build(small, say=on_wait).fresh
    assert f"by process {holder.pid} on" in waiting[0]
    assert not list(small.folder.glob("work-*"))
    holder.wait()
    holder.stdout.close()


_BUILDER = """
import os, sys
from pathlib import Path
from ds_ops.build_native import build, plan
from ds_ops.toolchain import find_tools
print(build(plan("cpu", Path(sys.argv[1]), find_tools(os.environ))).fresh)
"""


def test_of_many_builders_one_builds(small: BuildPlan, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _BUILDER, str(tmp_path / "sources")]
    jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert sorted(job.communicate(timeout=200)[0].strip() for job in jobs) == ["False", "False", "True"]
    assert (tmp_path / "log").read_text() == "configured\n"


def test_sources_without_the_module_and_a_folder_that_cannot_be_written(
    small: BuildPlan, tmp_path: Path, tools: dict[str, Tool], monkeypatch: pytest.MonkeyPatch
) -> None:
    cmake = tmp_path / "sources" / "CMakeLists.txt"
    cmake.write_text(cmake.read_text().replace("_cpu", "_another"))
    with pytest.raises(KernelError, match="define no module _cpu"):
        build(plan("cpu", tmp_path / "sources", tools))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DS_OPS_CACHE", str(tmp_path / "file"))
    with pytest.raises(KernelError, match="DS_OPS_CACHE"):
        build(plan("cpu", tmp_path / "sources", tools))


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("a\nx.cpp:3:1: error: first\n  3 | x\ny.cpp:4: error: second", "  x.cpp:3:1: error: first\n    3 | x"),
        (
            "CMake Error at CMakeLists.txt:5 (message):\n  no nvcc\n",
            "  CMake Error at CMakeLists.txt:5 (message):\n    no nvcc",
        ),
        ("ld: undefined reference to `f'", "  ld: undefined reference to `f'"),
        (
            "gcc: fatal error: Killed signal\ncompilation terminated.",
            "  gcc: fatal error: Killed signal\n  compilation terminated.",
        ),
        ("warnings only\nstopped", "  warnings only\n  stopped"),
    ],
)
def test_first_error(output: str, expected: str) -> None:
    assert first_error(output) == expected


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli_ops.register(parser)
    return cli_ops.main(parser.parse_args(words))


def test_missing_tools_are_listed_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "/bin/false")
    monkeypatch.delenv("CXX", raising=False)
    assert run("build") == 1
    said = capsys.readouterr().err
    if "native sources" in said:
        pytest.skip("this installation has no sources")
    assert all(
        line in said
        for line in ("c compiler: /bin/false cannot compile", "c++ compiler: not found", "cmake: not found")
    )


def test_the_command_builds_and_says_where(
    small: BuildPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_ops, "source_dir", lambda: tmp_path / "sources")
    assert run("build", "--jobs", "1") == 0
    assert capsys.readouterr().out.startswith(f"built: {small.module}")
    assert run("build") == 0
    assert capsys.readouterr().out.startswith("already built")
    assert run("build", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["module"], told["fresh"]) == (str(small.module), False)
    monkeypatch.setattr(cli_ops, "source_dir", lambda: None)
    assert run("build") == 1
    assert "not installed" in capsys.readouterr().err
