"""Where native modules that were built on this machine lie. Imports no torch: `ds ops build` needs none."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from ds_config.installed import version_of

__all__ = ["build_folder", "built_modules", "cache_root", "module_file", "source_dir", "sources_key"]

_SOURCES = {".txt", ".cmake", ".in", ".h", ".hpp", ".cuh", ".c", ".cpp", ".cu"}


def cache_root() -> Path:
    """Return the folder of modules built by `ds ops build`: `DS_OPS_CACHE`, else the user's cache folder.

    Preferably node-local.
    """
    if folder := os.environ.get("DS_OPS_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "ds_ops"


def build_folder(kind: str, key: str) -> Path:
    """Return the folder of a build: modules of another version of ds-ops are never loaded."""
    return cache_root() / f"{_version()}-{kind}-{key}"


def module_file(name: str) -> str:
    """Return the file name of the module `name` for this Python and processor."""
    return f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"


def built_modules(name: str) -> list[Path]:
    """List the modules `name` built from exactly these sources for this Python, newest first.

    Where no sources are installed, modules built from any sources are listed.
    """
    sources = source_dir()
    key = sources_key(sources) if sources else "*"
    paths = cache_root().glob(f"{_version()}-*-{key}-*/lib/{module_file(name)}")
    return sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)


def sources_key(sources: Path) -> str:
    """Hash the native sources: a module built from other sources is never loaded, whatever its version."""
    digest = hashlib.sha256()
    for path in sorted(sources.rglob("*")):
        relative = path.relative_to(sources)
        if path.is_file() and path.suffix in _SOURCES and relative.parts[0] not in ("build", "tests"):
            digest.update(str(relative).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def source_dir() -> Path | None:
    """Find the CMake project in an installed wheel, or `native/` of a checkout or sdist; None if neither exists."""
    here = Path(__file__).resolve().parent
    places = [here / "_src", *(parent / "native" for parent in list(here.parents)[1:4])]
    return next((p for p in places if (p / "CMakeLists.txt").is_file() and (p / "cpu").is_dir()), None)


def _version() -> str:
    try:
        return version_of("ds_ops")
    except PackageNotFoundError:  # used from a checkout that was not installed
        return "uninstalled"
