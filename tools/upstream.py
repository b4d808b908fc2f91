"""List the names of a DeepSpeed release, and compare two releases, or a release with what the facade's table was made from.

usage: python tools/upstream.py SDIST            # the archive or the unpacked folder: what differs from the facade's list; 1 if anything does
       python tools/upstream.py SDIST --write    # make the list that the facade reads
       python tools/upstream.py                  # fetch the newest release's sdist with pip, and compare

The list holds names alone: modules, what each defines, and the fields of the classes that read the configuration. Nothing of upstream is
imported or run: its files are parsed.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from repo import ROOT

NAMES = ROOT / "packages/compat/src/deepspeed/_surface/upstream.json"
# Folders of the sdist that an installation has below the package.
_MOUNTED = {"accelerator": "deepspeed.accelerator", "op_builder": "deepspeed.ops.op_builder"}
_SETTINGS = re.compile(r"(ConfigModel|BaseQuantConfig)$")


def list_names(sdist: Path) -> dict[str, object]:
    """Return the version, the names of each module and the fields of each configuration class of an sdist."""
    defined: dict[str, set[str]] = {}
    stars: dict[str, list[str]] = {}
    fields: dict[str, str] = {}
    version = ""
    for path, text in _read_files(sdist):
        if path == PurePosixPath("version.txt"):
            version = text.strip()
        elif (module := _module_of(path)) is not None:
            tree = ast.parse(text)
            defined[module] = _defined(tree, path.name == "__init__.py")
            stars[module] = _stars(tree, module) if path.name == "__init__.py" else []
            fields |= {f"{module}.{name}": " ".join(keys) for name, keys in _settings(tree)}
    modules = {module: " ".join(sorted(_with_stars(module, defined, stars))) for module in sorted(defined)}
    return {"version": version, "modules": modules, "fields": dict(sorted(fields.items()))}


def _read_files(sdist: Path) -> Iterator[tuple[PurePosixPath, str]]:
    """Yield the Python files and version.txt below the sdist's one folder."""
    if sdist.is_dir():
        for file in sorted(sdist.rglob("*")):
            if file.suffix == ".py" or file.name == "version.txt":
                yield PurePosixPath(file.relative_to(sdist).as_posix()), file.read_text(encoding="utf-8")
        return
    with tarfile.open(sdist) as archive:
        for member in archive:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            data = archive.extractfile(member) if path.suffix == ".py" or path.name == "version.txt" else None
            if data is not None:
                yield path, data.read().decode()


def _module_of(path: PurePosixPath) -> str | None:
    """Return the dotted name of a file of the package; None for a file that is not installed with it."""
    head, *rest = path.with_suffix("").parts
    home = _MOUNTED.get(head, head if head == "deepspeed" else None)
    if home is None or path.suffix != ".py" or "tests" in rest or path.stem.startswith("test_"):
        return None
    return ".".join([home, *rest]).removesuffix(".__init__")


def _defined(tree: ast.Module, package: bool) -> set[str]:
    """Return the public names that a module defines, and those that a package takes from its own modules."""
    names: set[str] = set()
    for node in _statements(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif (
            package and isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("deepspeed"))
        ):
            names |= {alias.asname or alias.name for alias in node.names if alias.name != "*"}
    return {name for name in names if not name.startswith("_")}


def _stars(tree: ast.Module, package: str) -> list[str]:
    """Return the modules that a package takes all names of."""
    nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    return [_absolute(node, package) for node in nodes]


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parents = package.split(".")
    return ".".join(filter(None, [*parents[: len(parents) - node.level + 1], node.module]))


def _with_stars(module: str, defined: Mapping[str, set[str]], stars: Mapping[str, list[str]]) -> set[str]:
    return defined.get(module, set()).union(*(_with_stars(other, defined, stars) for other in stars.get(module, ())))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield a module's statements, those below `if` and `try` too."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                yield from _statements(getattr(node, inner, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _settings(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(_SETTINGS.search(ast.unparse(base)) for base in node.bases):
            keys = [
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            ]
            yield node.name, keys


def differences(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return one line for each module, name and field that only one of two lists has."""
    lines = []
    for kind in ("modules", "fields"):
        old, new = _split(before[kind]), _split(after[kind])
        for home in sorted(old.keys() | new.keys()):
            if home not in old or home not in new:
                lines.append(f"{'+' if home in new else '-'} {home}")
            lines += [
                f"{'+' if name in new.get(home, ()) else '-'} {home}.{name}"
                for name in sorted(old.get(home, set()) ^ new.get(home, set()))
            ]
    return lines


def _split(rows: object) -> dict[str, set[str]]:
    return {home: set(names.split()) for home, names in rows.items()}  # type: ignore[attr-defined]


def fetch(folder: Path) -> Path:
    """Download the newest release's sdist, without building it."""
    # pip asks an sdist for its metadata; the release's setup.py answers with what is installed here, torch or not.
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        ":all:",
        "--no-build-isolation",
    ]
    subprocess.run([*command, "--dest", str(folder), "deepspeed"], check=True)
    return next(folder.glob("deepspeed-*.tar.gz"))


def main(arguments: list[str] | None = None) -> int:
    """Compare or write; 1 where the release and the facade's list differ."""
    parser = argparse.ArgumentParser(prog="upstream", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sdist", type=Path, nargs="?")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = list_names(options.sdist or fetch(Path(folder)))
    if options.write:
        NAMES.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
        return 0
    listed = json.loads(NAMES.read_text(encoding="utf-8"))
    lines = differences(listed, found)
    sys.stdout.write("".join(f"{line}\n" for line in [f"{listed['version']} -> {found['version']}", *lines]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
