"""The pages of docs/reference that are made from what the tree says, never by hand."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from repo import ROOT, errors, layers
from repo.projects import Project, load, requirement_name

__all__ = ["PAGES", "Page", "configuration", "packages", "support", "support_data", "surface"]

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


def configuration() -> str:
    """Every configuration key with what it accepts, from the models themselves."""
    from ds_config import keys
    from ds_engine import Config

    lines = [
        "# Configuration keys",
        "",
        "<!-- Made by `python tools/pages.py configuration` from the models. -->",
        "",
        "Every key that a configuration may hold. `*` stands for any name in an object, `0` for any position in a list.",
        "A key that is not here is an error with the nearest known name. What is marked *not built* is an error unless it is",
        "off; what is marked *no effect* is accepted with a line in the log; *deprecated* keys move to their new place.",
        "",
        "| key | accepts | default | meaning |",
        "|---|---|---|---|",
    ]
    unbuilt: set[str] = set()  # sections; what stands in them is not built with them
    for key in keys(Config):
        path = ".".join(map(str, key.path))
        if _is_unbuilt(key.model, key.field):
            unbuilt.add(f"{path}.")
        row = _key_row(path, key.model, key.field, str(key.path[-1]))
        lines.append(
            row.replace("|  |", "| *Not built*, as its section. |") if path.startswith(tuple(unbuilt)) else row
        )
    return "\n".join(lines) + "\n"


def _is_unbuilt(model: type, field_name: str) -> bool:
    from ds_config import shape
    from ds_config.fields import Unbuilt

    return isinstance(shape.retired(model.model_fields[field_name]), Unbuilt)  # type: ignore[attr-defined]


def _key_row(path: str, model: type, field_name: str, spelling: str) -> str:
    from ds_config import shape

    field = model.model_fields[field_name]  # type: ignore[attr-defined]
    meaning = field.description or ""
    if (reason := shape.retired(field)) is not None:
        meaning = _said(reason)
    elif spelling != field_name:
        meaning = f"Another spelling of `{field_name}`."
    default = "required" if field.is_required() else f"`{_default(field)}`"
    return (
        "| "
        + " | ".join(_cell(text) for text in (f"`{path}`", shape.describe(shape.of_field(field)), default, meaning))
        + " |"
    )


def _said(reason: object) -> str:
    from ds_config.fields import Dead, Deprecated, Unbuilt

    if isinstance(reason, Deprecated):
        return f"*Deprecated*: use `{reason.new}`."
    if isinstance(reason, Dead):
        return f"*No effect*: {reason.why}."
    return f"*Not built*: {reason.instead}." if isinstance(reason, Unbuilt) else ""


def _default(field: object) -> str:
    value = field.get_default(call_default_factory=True)  # type: ignore[attr-defined]
    if hasattr(value, "model_dump"):
        return "{...}"
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if _hashable(value) else str(value)


def _hashable(value: object) -> bool:
    return isinstance(value, bool) or value is None


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def surface() -> str:
    """Every public name of DeepSpeed: what it is in the facade, or why it is not there."""
    rows, missing = _surface_rows()
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
        "## Modules of which nothing is here",
        "",
        "| why | use | modules |",
        "|---|---|---|",
        *(f"| {_cell(why)} | {_cell(instead)} | {names} |" for (why, instead), names in _absent_modules().items()),
    ]
    return "\n".join(lines) + "\n"


def _absent_modules() -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], list[str]] = {}
    there = importlib.import_module("deepspeed._surface").SURFACE
    for module, row in importlib.import_module("deepspeed._surface.absent").ABSENT.items():
        if module not in there:
            found.setdefault((row.why, row.instead), []).append(f"`{module.removeprefix('deepspeed.')}`")
    return {key: ", ".join(names) for key, names in found.items()}


def _surface_rows() -> tuple[dict[str, dict[str, str]], list[tuple[str, str, str]]]:
    package = ModuleType("deepspeed")  # its own __init__ wants the packages installed
    package.__path__ = [str(load()["deepspeed"].source)]
    sys.modules.setdefault("deepspeed", package)
    module = importlib.import_module("deepspeed._surface")
    here: dict[str, dict[str, str]] = {}
    missing = []
    for home, names in sorted(module.SURFACE.items()):
        for name, row in sorted(names.items()):
            if isinstance(row, module.Missing):
                missing.append((f"{home}.{name}", row.why, row.instead))
            elif not isinstance(row, module.Constant):
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
        "(in fp32) weights had to be equal. A cell says in how many of them both features were at work; **refused** with a code is what the",
        "engine says before anything runs; `-` was not drawn, or cannot be together. `data` to `experts` are degrees above 1, `checkpointing` is of",
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
                cells.append(
                    f"{verdict.equal} equal" + (f", {verdict.refused.total()} refused" if verdict.refused else "")
                )
            else:
                cells.append(f"**refused**: {', '.join(f'`{code}`' for code in sorted(verdict.refused))}")
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


PAGES: Mapping[str, Page] = {
    "errors": Page(errors.PAGE, errors.page),
    "packages": Page(REFERENCE / "packages.md", packages),
    "configuration": Page(REFERENCE / "configuration.md", configuration),
    "surface": Page(REFERENCE / "deepspeed-surface.md", surface),
    "support": Page(REFERENCE / "support-matrix.md", support),
    "support-data": Page(REFERENCE / "support-matrix.json", support_data),
}
