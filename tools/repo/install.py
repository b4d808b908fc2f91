"""The development environment: made once, checked quickly, the same for `tools/bootstrap.py` and for nox.

Two steps, and both are skipped when a stamp in the environment says that nothing changed:
third-party packages from the index under constraints.txt, then ours, editable and with `--no-deps`, so that no index is
ever asked for a package of our name.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from repo import ROOT
from repo.index import parse_pip_config, uv_environment
from repo.projects import closure, dev_requirements, load

__all__ = [
    "InstallError",
    "Installer",
    "dev_install",
    "ensure_environment",
    "hand_over",
    "install_packages",
    "installer",
]

ENVIRONMENT = ROOT / ".venv"
CONSTRAINTS = ROOT / "constraints.txt"
TESTING = ROOT / "tools" / "ds-testing"
_STAMP = "ds-dev-install.json"
_RUNNER = ("pip", "nox>=2024.10.9", "uv>=0.5")


class InstallError(Exception):
    """Something the person at the keyboard can change.

    Args:
        message: What was tried, what happened.
        fix: What to do.
    """

    def __init__(self, message: str, fix: str) -> None:
        self.message, self.fix = message, fix
        super().__init__(f"{message}\n  {fix}")


@dataclass(frozen=True, slots=True)
class Installer:
    """How to install into one interpreter: the command up to `install`, and the variables it needs."""

    command: tuple[str, ...]
    environ: Mapping[str, str]

    def run(self, *arguments: str) -> bool:
        """Install; False when that failed. The output goes to the terminal."""
        environ = {**os.environ, **self.environ}
        return (
            subprocess.run([*self.command, "install", *arguments], cwd=ROOT, env=environ, check=False).returncode == 0
        )


# ---- the environment itself ------------------------------------------------------------------------------------------


def ensure_environment() -> str:
    """`.venv` with nox in it; the path of its interpreter. Quick when it is there already.

    Raises:
        InstallError: it cannot be made, is broken, or has an old Python.
    """
    python = _interpreter(ENVIRONMENT)
    if not python.exists():
        _make_environment(ENVIRONMENT)
    _check_version(python)
    if not _has_runner(python):
        _say("installing nox and uv into .venv")
        # uv makes the rest quicker, but nothing needs it: where there is no build of it, pip does the work.
        if not (_pip_install(python, *_RUNNER) or _pip_install(python, *_RUNNER[:2])):
            raise InstallError("nox could not be installed into .venv; pip's output is above.", _NETWORK)
    return str(python)


def hand_over(python: str, session: str, arguments: Sequence[str]) -> int:
    """Run one nox session with the environment's own nox; its exit status."""
    command = [python, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py"), "-s", session, *arguments]
    try:
        return subprocess.run(command, cwd=ROOT, check=False).returncode
    except KeyboardInterrupt:
        return 130


_NETWORK = (
    "Usual reasons: no network, or an index or proxy that pip must be told about "
    "(PIP_INDEX_URL, PIP_FIND_LINKS, HTTPS_PROXY, or pip.conf; uv is given the same settings). Then run it again."
)


def _interpreter(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _make_environment(environment: Path) -> None:
    _say(f"making {environment.name} with Python {sys.version.split()[0]}")
    if _quiet(sys.executable, "-m", "venv", str(environment)):
        return
    # Debian ships venv without ensurepip. The host's pip can still fill the environment from outside.
    if not _quiet(sys.executable, "-m", "venv", "--without-pip", "--clear", str(environment)):
        raise InstallError(
            f"a virtual environment cannot be made at {environment}.",
            "Install Python's venv module (Debian: apt-get install python3-venv), and check that the folder is writable.",
        )


def _check_version(python: Path) -> None:
    asked = subprocess.run(
        [str(python), "-c", "import sys; print(sys.version_info >= (3, 11), sys.version.split()[0])"],
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode != 0:
        raise InstallError(f"the environment {ENVIRONMENT} does not work.", "Remove that folder and run this again.")
    new_enough, version = asked.stdout.split()
    if new_enough != "True":
        raise InstallError(
            f"the environment {ENVIRONMENT} has Python {version}.", "Remove that folder, then run again."
        )


def _has_runner(python: Path) -> bool:
    return _quiet(str(python), "-c", "import nox")


def _pip_install(python: Path, *requirements: str) -> bool:
    """pip of the environment, or the host's pip working on it from outside. Never on the host's own packages."""
    if _quiet(str(python), "-m", "pip", "--version"):
        pip = [str(python), "-m", "pip"]
    elif _quiet(sys.executable, "-m", "pip", "--version"):
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
    else:
        raise InstallError(
            "this Python has no pip, neither for new environments nor for itself.",
            "Install one of them (Debian: apt-get install python3-venv), then run this again.",
        )
    return subprocess.run([*pip, "install", "-q", *_PIP_FLAGS, *requirements], check=False).returncode == 0


# ---- what is in it ---------------------------------------------------------------------------------------------------

_PIP_FLAGS = ("--disable-pip-version-check",)


def dev_install(python: str, groups: Iterable[str] = ("tests",)) -> None:
    """Bring the environment of `python` to the state of the checkout: all packages editable, with what they need.

    Args:
        groups: Dependency groups of the root pyproject.toml to add.
    Cost: about 0.2 s when nothing changed since the last call.
    Raises:
        InstallError: neither uv nor pip could install.
    """
    groups = sorted({"tests", *groups})
    requirements = dev_requirements(groups)
    wanted = _fingerprint(requirements)
    if _up_to_date(python, wanted, requirements):
        return
    tool = installer(python)
    _step("third-party packages", tool, python, "-c", str(CONSTRAINTS), *requirements)
    projects = {name: project for name, project in load().items() if not project.opt_in}
    editable = [str(projects[name].folder) for name in closure(projects, projects)] + [str(TESTING)]
    flags = [flag for folder in editable for flag in ("-e", folder)]
    _say("the next step compiles the C++ kernels of ds-ops: 1 to 3 minutes on two cores")
    _step("our packages", tool, python, "--no-deps", "--no-build-isolation", *flags)
    _write_stamp(python, wanted, groups)


def installer(python: str) -> Installer:
    """uv where the environment of `python` has it, told what pip knows; else pip."""
    uv = Path(python).with_name("uv")
    if not uv.exists():
        return _pip(python)
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    settings = uv_environment(parse_pip_config(listed), os.environ)
    return Installer((str(uv), "pip"), {"VIRTUAL_ENV": str(Path(python).parent.parent), **settings})


def _pip(python: str) -> Installer:
    return Installer((python, "-m", "pip", *_PIP_FLAGS), {})


def _step(label: str, tool: Installer, python: str, *arguments: str) -> None:
    start = time.perf_counter()
    _say(f"installing {label}")
    environ = {**tool.environ, "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    with _signs_of_life(label):
        done = Installer(tool.command, environ).run("-q", *arguments)
        if not done and tool.command[-1] == "pip" and tool.command[0].endswith("uv"):
            _say("uv could not do it; trying pip")
            fallback = _pip(python)
            done = Installer(fallback.command, {"PATH": environ["PATH"]}).run("-q", *arguments)
    if not done:
        raise InstallError(f"{label} could not be installed; the installer's output is above.", _NETWORK)
    _say(f"installed {label} in {time.perf_counter() - start:.0f} s")


@contextmanager
def _signs_of_life(label: str) -> Iterator[None]:
    """Say every 15 seconds how long it has taken so far: an installer is silent while it downloads and compiles."""
    ended, start = threading.Event(), time.perf_counter()

    def report() -> None:
        while not ended.wait(_SIGN_EVERY_S):
            _say(f"  still installing {label}, {time.perf_counter() - start:.0f} s")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


_SIGN_EVERY_S = 15.0

# ---- single packages -------------------------------------------------------------------------------------------------


def install_packages(names: Sequence[str], python: str) -> None:
    """Install packages of this checkout, with those that they need, into the environment of `python`.

    Args:
        names: As folders (`zero`) or distributions (`ds-zero`) are called.
        python: Interpreter of the environment that gets them.
    Raises:
        InstallError: there is no such package, or pip could not install.
    """
    projects = load()
    by_folder = {project.folder.name: name for name, project in projects.items()}
    chosen = [by_folder.get(name, name) for name in names]
    if unknown := [name for name in chosen if name not in projects]:
        raise InstallError(f"there is no package {', '.join(unknown)} here.", f"Choose from {', '.join(by_folder)}.")
    needed = closure(chosen, projects)
    _say(f"{', '.join(chosen)}: with what they need, {len(needed)} packages: {', '.join(needed)}")
    if compiled := [name for name in needed if projects[name].native]:
        _say(
            f"{', '.join(compiled)} compiles C++, 1 to 3 minutes on two cores; without a compiler torch does that work"
        )
    _step(", ".join(chosen), _pip(python), python, *(str(projects[name].folder) for name in needed))


# ---- the stamp -------------------------------------------------------------------------------------------------------


def _fingerprint(requirements: Sequence[str]) -> str:
    """Changes when anything does that an installed environment depends on. Python sources do not count: editable."""
    digest = hashlib.sha256("\n".join(requirements).encode())
    files = [CONSTRAINTS, TESTING / "pyproject.toml", *(p.folder / "pyproject.toml" for p in load().values())]
    for file in [*files, *_native_sources()]:
        digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _native_sources() -> list[Path]:
    suffixes = {".c", ".h", ".cpp", ".cu", ".cuh", ".in", ".cmake", ".txt"}
    files = (ROOT / "native").rglob("*")
    return sorted(f for f in files if f.suffix in suffixes and "build" not in f.relative_to(ROOT / "native").parts)


def _up_to_date(python: str, wanted: str, requirements: Sequence[str]) -> bool:
    """Whether the stamp matches and everything it lists is still there, in the version it had."""
    try:
        stamp = json.loads(_stamp(python).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    if wanted not in stamp["fingerprints"]:
        return False
    return set(stamp["installed"]) <= set(_installed(python))


def _write_stamp(python: str, wanted: str, groups: Sequence[str]) -> None:
    """One file for all group sets: installing `docs` does not undo `tests`."""
    try:
        old = json.loads(_stamp(python).read_text())["fingerprints"]
    except (FileNotFoundError, json.JSONDecodeError):
        old = {}
    kept = {mark: names for mark, names in old.items() if names != list(groups)}
    content = {"fingerprints": {**kept, wanted: list(groups)}, "installed": _installed(python)}
    _stamp(python).write_text(json.dumps(content, indent=1))


def _stamp(python: str) -> Path:
    return Path(python).parent.parent / _STAMP


_LIST = (
    "import importlib.metadata as m; print(*sorted({f'{d.name}=={d.version}' for d in m.distributions()}), sep='\\n')"
)


def _installed(python: str) -> list[str]:
    return subprocess.run([python, "-c", _LIST], capture_output=True, text=True, check=True).stdout.split()


def _quiet(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _say(text: str) -> None:
    sys.stderr.write(f"bootstrap: {text}\n")
    sys.stderr.flush()
