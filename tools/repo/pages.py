"""The pages of docs/reference that are made from what the tree says, never by hand."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

from repo import ROOT, errors, keys, layers, loops, pictures
from repo.projects import Project, load, requirement_name

__all__ = ["PAGES", "Page", "packages", "support", "support_data", "surface"]

REFERENCE = ROOT / "docs" / "reference"


@dataclass(frozen=True, slots=True)
class Page:
    """A generated file, and what makes its text."""

    file: Path
    text: Callable[[], str]


def packages() -> str:
    """One row a package, lowest layer first."""
    projects = load()
    level = {name: i for i, row in enumerate(layers.read().packages) for name in row}
    lines = [
        "# Packages",
        "",
        "<!-- Made by `python tools/pages.py packages` from the pyproject.toml files. -->",
        "",
        "Each package can be installed alone and has its own version. A package imports only packages that stand above it in",
        "this table; packages of one layer never import each other. What each one offers is in its README.",
        "",
        "| package | import | what it is | needs | extras |",
        "|---|---|---|---|---|",
    ]
    for project in sorted(projects.values(), key=lambda project: (level[project.folder.name], project.name)):
        lines.append(_package_row(project))
    return "\n".join(lines) + "\n"


def _package_row(project: Project) -> str:
    meta = tomllib.loads((project.folder / "pyproject.toml").read_text())["project"]
    needs = ", ".join(sorted(requirement_name(requirement) for requirement in project.dependencies)) or "nothing"
    extras = ", ".join(f"`{extra}`" for extra in project.extras) or "none"
    name = f"`{project.name}` {project.version}"
    return f"| {name} | `{project.module}` | {meta['description']} | {needs} | {extras} |"


def surface() -> str:
    """Every public name of DeepSpeed: what it is in the facade, or why it is not there."""
    with _bare_facade():
        rows, missing = _surface_rows()
        undecided = _undecided_names()
    lines = [
        "# DeepSpeed names",
        "",
        "<!-- Made by `python tools/pages.py surface` from packages/compat/src/deepspeed/_surface/. -->",
        "",
        "What the public names of DeepSpeed 0.19.8 are in the opt-in facade `packages/compat`. A name of the second table raises",
        "`UnsupportedError` with the same words; it is an `AttributeError` or `ImportError` too, so that `hasattr` and guarded",
        "imports answer.",
        "",
        "## Here",
        "",
        "A name with a star is a name of one of the ds packages as it is; the others adapt one. Constants, which name configuration keys and",
        "entries of checkpoint files, are left out here.",
        "",
        "| module | names |",
        "|---|---|",
        *(f"| `{module}` | {_names(names)} |" for module, names in rows.items()),
        "",
        "## Not here",
        "",
        "| name | why | use |",
        "|---|---|---|",
        *(f"| `{name}` | {_cell(why)} | {_cell(instead)} |" for name, why, instead in missing),
        "",
        "## Names without a decision",
        "",
        "What else DeepSpeed 0.19.8 defines, by the part it is in. A module without names is refused whole.",
        "",
        "| why | use | modules, names |",
        "|---|---|---|",
        *(f"| {_cell(why)} | {_cell(instead)} | {names} |" for (why, instead), names in undecided.items()),
    ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


@contextmanager
def _bare_facade() -> Iterator[None]:
    """Inside, `deepspeed` is a package without its `__init__`, which wants the packages installed; afterwards whoever imports it gets it whole."""
    if "deepspeed" in sys.modules:
        yield
        return
    package = ModuleType("deepspeed")
    package.__path__ = [str(load()["deepspeed"].source)]
    sys.modules["deepspeed"] = package
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name == "deepspeed" or name.startswith("deepspeed.")]:
            del sys.modules[name]


def _undecided_names() -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], list[str]] = {}
    rows = importlib.import_module("deepspeed._surface").SURFACE
    upstream = importlib.import_module("deepspeed._surface.upstream_names")
    for module, names in upstream.upstream_modules().items():
        undecided = [
            name for name in names.split() if name not in rows.get(module, {}) and f"{module}.{name}" not in rows
        ]
        for path in [f"{module}.{name}" for name in undecided] if module in rows else [module]:
            reason = upstream.reason_of(path)
            found.setdefault((reason.why, reason.instead), []).append(f"`{path.removeprefix('deepspeed.')}`")
    return {key: ", ".join(names) for key, names in found.items()}


def _surface_rows() -> tuple[dict[str, dict[str, str]], list[tuple[str, str, str]]]:
    module = importlib.import_module("deepspeed._surface")
    here: dict[str, dict[str, str]] = {}
    missing = []
    for home, names in sorted(module.SURFACE.items()):
        for name, row in sorted(names.items()):
            if isinstance(row, module.Missing):
                missing.append((f"{home}.{name}", row.why, row.instead))
            elif not isinstance(row, module.ConstantRow):
                here.setdefault(home, {})[name] = row
    of_engine = [
        (f"DeepSpeedEngine.{name}", row.why, row.instead) for name, row in sorted(module.MISSING_ATTRIBUTES.items())
    ]
    return here, [*missing, *of_engine]


def _names(rows: Mapping[str, str]) -> str:
    # What is ours under upstream's name, and what the facade adapts to it.
    adapted = "deepspeed._ours"
    return ", ".join(f"`{name}`{'' if row.startswith(adapted) else '*'}" for name, row in rows.items())


def support() -> str:
    """Pairs of features, and how many recorded runs with both came to what one process comes to."""
    from ds_engine.support import FEATURES, matrix

    found = matrix()
    lines = [
        "# Support matrix",
        "",
        "<!-- Made by `python tools/pages.py support` from packages/engine/src/ds_engine/support.json. -->",
        "",
        "A hundred drawn combinations of degrees on four ranks were trained beside one process on all the data: losses, norms of gradients and",
        "(in fp32) weights had to be equal. A cell is the number of runs with both features that were equal, `+ n refused` those that the engine refused",
        "before anything ran; a code alone: always refused, by that error; `-`: not drawn, or cannot be together. `data` to `experts` are degrees above 1, `checkpointing` is of",
        "activations. The planner reads the same record: it refuses what was always refused, and `print(plan)` says which pairs of a",
        "plan were never compared. The record is in `support-matrix.json`; `python tools/support.py` makes it anew.",
        "",
        f"| | {' | '.join(FEATURES)} |",
        "|---" * (len(FEATURES) + 1) + "|",
    ]
    for row in FEATURES:
        cells = []
        for column in FEATURES:
            verdict = found.get((row, column)) or found.get((column, row))
            if verdict is None:
                cells.append("-")
            elif verdict.equal:
                cells.append(f"{verdict.equal}" + (f" + {verdict.refused.total()} refused" if verdict.refused else ""))
            else:
                cells.append(", ".join(f"`{code}`" for code in sorted(verdict.refused)))
        lines.append(f"| **{row}** | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def support_data() -> str:
    """The same as JSON: every pair, then every run."""
    from ds_engine.support import matrix

    record = json.loads((ROOT / "packages/engine/src/ds_engine/support.json").read_text())
    pairs = [
        {"pair": list(pair), "equal": verdict.equal, "refused": dict(sorted(verdict.refused.items()))}
        for pair, verdict in sorted(matrix().items())
    ]
    return json.dumps({"pairs": pairs, **record}, indent=1) + "\n"


def _pictures() -> dict[str, Page]:
    return {
        f"picture-{name}": Page(pictures.file_of(name), partial(pictures.text_of, name))
        for name in (*pictures.PICTURES, "packages")
    }


def _explanations() -> dict[str, Page]:
    """Copies of the parts of the errors page that `ds explain` reads: one a package, so that edits of two meet in no file."""
    folder = ROOT / "packages" / "config" / "src" / "ds_config" / "explanations"
    return {f"explain-{part.stem}": Page(folder / part.name, part.read_text) for part in errors.parts()}


PAGES: Mapping[str, Page] = {
    "errors": Page(errors.PAGE, errors.page),
    **_explanations(),
    **_pictures(),
    "packages": Page(REFERENCE / "packages.md", packages),
    "configuration": Page(REFERENCE / "configuration.md", keys.page),
    "surface": Page(REFERENCE / "deepspeed-surface.md", surface),
    "loops": Page(REFERENCE / "loops.md", loops.page),
    "support": Page(REFERENCE / "support-matrix.md", support),
    "support-data": Page(REFERENCE / "support-matrix.json", support_data),
}
