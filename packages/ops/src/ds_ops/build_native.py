"""Builds the native modules on this machine, into the user's cache: what `ds ops build` does. Nothing else ever builds.

Words: a *plan* is everything that decides a build (sources, commands, folder); its *key* is a digest of that, so that another
compiler, Python or version of the sources gets another folder. A folder's `lib` appears by one rename, so what is there is
complete. Builders of one folder exclude each other by an advisory lock that the kernel drops with its holder: there is
nothing to clean up after a builder that was killed, and what it left behind is removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ds_config.errors import KernelError
from ds_ops.module_cache import build_folder, module_file, sources_key
from ds_ops.toolchain import Tool

__all__ = ["BuildPlan", "Built", "Kind", "build", "first_error", "locked", "missing_tools", "plan"]

Kind = Literal["cpu"]
Say = Callable[[str], None]
_ERROR = re.compile(r"(\berror\b ?[:#(A-Z]|^CMake Error|undefined reference|: command not found|No space left)", re.I)
_CONTEXT = 8  # lines of the first error that are shown


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """One build. commands: configure, compile, install, with {work} for the temporary folder."""

    kind: Kind
    key: str
    folder: Path
    commands: tuple[tuple[str, ...], ...]

    @property
    def module(self) -> Path:
        """The file that the build makes."""
        return self.folder / "lib" / module_file(f"_{self.kind}")


@dataclass(frozen=True, slots=True)
class Built:
    """What `build` did. fresh: it compiled, instead of finding the module there. seconds: it took."""

    module: Path
    fresh: bool
    seconds: float


def plan(kind: Kind, sources: Path, tools: Mapping[str, Tool], *, jobs: int = 0) -> BuildPlan:
    """Decide a build. Reads the sources for the key, starts nothing.

    Args:
        tools: What `ds_ops.toolchain.find_tools` found.
        jobs: Compilers at a time; 0: one per core.
    """
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "DS_INSTALL_DIR": "lib",
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": tools["pybind11"].path,
    }
    cmake = tools["cmake"].path
    configure = [cmake, "-S", str(sources), "-B", "{work}/build", "-DCMAKE_INSTALL_PREFIX={work}/install"]
    configure += [f"-D{name}={value}" for name, value in options.items()]
    if tools["ninja"].works:
        configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools['ninja'].path}"]
    count = str(jobs or len(os.sched_getaffinity(0)))
    key = _key(kind, sources, tools)
    return BuildPlan(
        kind,
        key,
        build_folder(kind, key),
        (
            tuple(configure),
            (cmake, "--build", "{work}/build", "-j", count),
            (cmake, "--install", "{work}/build"),
        ),
    )


def _key(kind: Kind, sources: Path, tools: Mapping[str, Tool]) -> str:
    compiler = tools["c++ compiler"]
    about = (kind, sysconfig.get_config_var("EXT_SUFFIX"), compiler.path, compiler.version)
    return f"{sources_key(sources)}-{hashlib.sha256(repr(about).encode()).hexdigest()[:12]}"


def missing_tools(tools: Mapping[str, Tool]) -> tuple[str, ...]:
    """List the tools that must be installed before the module can be built, one line each."""
    needed = ["c compiler", "c++ compiler", "cmake", "pybind11"]
    return tuple(
        f"{name}: {tools[name].path} {tools[name].problem}".strip() if tools[name].path else f"{name}: not found"
        for name in needed
        if not tools[name].works
    )


def build(todo: BuildPlan, *, force: bool = False, say: Say = lambda _line: None) -> Built:
    """Make the module of `todo`, unless it is there. Many processes may call this at once: one builds, the others wait.

    Args:
        force: Build even if it is there.
        say: Called with one line about each step.
    Raises:
        KernelError: "ops-build-failed" with the compiler's first error and the place of the log; "ops-build-missing" if
            the sources define no such module; "ops-build-cache" if the cache folder cannot be written.
    """
    start = time.monotonic()
    try:
        todo.folder.mkdir(parents=True, exist_ok=True)
        with locked(todo.folder / "lock", say):
            fresh = force or not todo.module.is_file()
            if fresh:
                _make(todo, say)
    except OSError as error:
        raise KernelError(
            f"the cache folder {todo.folder} cannot be used: {error}.",
            code="ops-build-cache",
            fix="Set DS_OPS_CACHE to a folder of yours on a local disk.",
        ) from error
    return Built(todo.module, fresh, time.monotonic() - start)


@contextlib.contextmanager
def locked(path: Path, say: Say) -> Iterator[None]:
    """Hold the lock file `path`. It stays behind, with the last holder's name in it; only a living holder locks."""
    with path.open("a+") as file:
        reported = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not reported:
                    file.seek(0)
                    say(f"waiting for another build, by {file.read().strip() or 'an unknown process'}")
                    reported = True
                time.sleep(0.1)
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _make(todo: BuildPlan, say: Say) -> None:
    for left_behind in todo.folder.glob("work-*"):
        shutil.rmtree(left_behind, ignore_errors=True)
    work = tempfile.mkdtemp(prefix="work-", dir=todo.folder)
    log = todo.folder / "build.log"
    log.write_text("")
    try:
        for command, step in zip(todo.commands, ("configuring", "compiling", "installing"), strict=True):
            say(step)
            _run_step([word.replace("{work}", work) for word in command], step, log)
        _publish(Path(work) / "install" / "lib", todo)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _publish(built: Path, todo: BuildPlan) -> None:
    if not (built / todo.module.name).is_file():
        raise KernelError(
            f"the sources define no module _{todo.kind}.",
            code="ops-build-missing",
            fix="Install a version of ds-ops that has it; until then its ops run in plain torch.",
        )
    shutil.rmtree(todo.folder / "lib", ignore_errors=True)
    built.rename(todo.folder / "lib")


def _run_step(command: list[str], step: str, log: Path) -> None:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        status, output = done.returncode, done.stdout
    except OSError as error:
        status, output = 1, f"error: {command[0]}: {error}"
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n{output}\n")
    if status:
        raise KernelError(
            f"{step} the native module failed. The first error:\n{first_error(output)}\nAll output: {log}",
            code="ops-build-failed",
            fix="Correct what the error names (CXX chooses another compiler), then run `ds ops build` again.",
        )


def first_error(output: str) -> str:
    """Return the first line that reports an error, with its explanation; the end of the output without such a line."""
    lines = output.splitlines()
    for i, line in enumerate(lines):
        if _ERROR.search(line):
            shown = lines[i : i + _CONTEXT]
            stop = next((k for k, text in enumerate(shown[1:], 1) if _ERROR.search(text)), len(shown))
            return "\n".join(f"  {text}" for text in shown[:stop]).rstrip()
    return "\n".join(f"  {text}" for text in lines[-_CONTEXT:])
