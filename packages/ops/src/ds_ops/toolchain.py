"""The programs that build native modules: where they are, which version, and whether they run."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Tool", "find_nvcc", "find_tools"]

_SECONDS = 20.0
_PROGRAM = "#include <cstdint>\nint main() { return static_cast<int>(std::int64_t{0}); }\n"


@dataclass(frozen=True, slots=True)
class Tool:
    """A program or a package. path: empty if there is none. version: what it says of itself, one line.

    problem: why it is not usable though it is there.
    """

    path: str = ""
    version: str = ""
    problem: str = ""

    @property
    def works(self) -> bool:
        return bool(self.path) and not self.problem


def find_tools(environ: Mapping[str, str]) -> dict[str, Tool]:
    """Find the compilers, CMake, Ninja, pybind11, nvcc and hipcc, as `ds ops build` would in `environ`."""
    path = environ.get("PATH")
    return {
        "c compiler": _compiler(environ.get("CC", ""), ("cc", "gcc", "clang"), "c", path),
        "c++ compiler": _compiler(environ.get("CXX", ""), ("c++", "g++", "clang++"), "c++", path),
        "cmake": _program("cmake", path),
        "ninja": _program("ninja", path),
        "pybind11": _pybind11(),
        "nvcc": _version(find_nvcc(environ)),
        "hipcc": _program("hipcc", path),
    }


def find_nvcc(environ: Mapping[str, str]) -> str:
    """Find nvcc by CUDACXX, PATH, CUDA_HOME, CUDA_PATH, then /usr/local/cuda; empty if there is none.

    What `ds ops build cuda` compiles kernels with where there is no NVRTC.
    """
    if compiler := environ.get("CUDACXX"):
        return shutil.which(compiler, path=environ.get("PATH")) or compiler
    if program := shutil.which("nvcc", path=environ.get("PATH")):
        return program
    homes = (environ.get("CUDA_HOME", ""), environ.get("CUDA_PATH", ""), "/usr/local/cuda")
    places = [Path(home) / "bin" / "nvcc" for home in homes if home]
    return next((str(place) for place in places if place.is_file()), "")


def _pybind11() -> Tool:
    """Find pybind11; the path is the folder with its CMake files."""
    try:
        package = importlib.import_module("pybind11")
    except ImportError:
        return Tool()
    return Tool(str(package.get_cmake_dir()), str(package.__version__))


def _program(name: str, path: str | None) -> Tool:
    return _version(shutil.which(name, path=path) or "")


def _version(program: str) -> Tool:
    if not program:
        return Tool()
    status, text = _run([program, "--version"])
    lines = [line for line in text.splitlines() if any(c.isdigit() for c in line)]
    release = [line for line in lines if "release" in line]  # nvcc opens with its copyright
    return Tool(
        program, (release or lines or [""])[0].strip(), "" if status == 0 else f"`--version` fails: {text[:200]}"
    )


def _compiler(command: str, names: tuple[str, ...], language: str, path: str | None) -> Tool:
    """Find a working compiler: `command` (CC or CXX, maybe with options) or the first of `names`.

    The compiler is tested with an empty program.
    """
    words = command.split()
    candidates = words[:1] or list(names)
    program = next((resolved for name in candidates if (resolved := shutil.which(name, path=path))), "")
    if not program:
        return Tool(command, "", "no such program") if command else Tool()
    text = _PROGRAM if language == "c++" else "int main(void) { return 0; }\n"
    status, output = _run([program, *words[1:], "-x", language, "-fsyntax-only", "-"], text)
    if status:
        return Tool(program, "", f"cannot compile an empty program: {output.strip()[:200] or f'exit status {status}'}")
    return _version(program)


def _run(command: list[str], text: str = "") -> tuple[int, str]:
    try:
        done = subprocess.run(
            command,
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return 1, str(error)
    return done.returncode, done.stdout
