"""Docstrings, messages and pages send readers to files, pages and names that are there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`((?:[\w.-]+/)*\w+\.py)`")
PAGES = ("docs/concepts", "docs/developing", "docs/decisions")
UPSTREAMS = {"ds_to_universal.py", "zero_to_fp32.py", "zero_to_torch.py"}  # files of DeepSpeed's
PATTERNS = {"NAME.py"}
LINK = re.compile(r"\]\(([^)\s#:]+)(?:#[^)]*)?\)")
MADE_WITH_THE_SITE = re.compile(r"docs/(changelog\.md|reference/(cli\.md|api/.*))")
OURS = re.compile(
    r"`?(?<!torch\.ops\.)\bds_(?:accel|ckpt|comm|compress|config|data|engine|inference|launcher|moe|monitor|ops|parallel|pipe|tune|zero)(?:\.[A-Za-z_]\w*)+"
)
NO_MODULES = {"ds_accel.devices", "ds_monitor.sinks", "ds_engine.steps"}  # groups of entry points, and a logger
FILES = (".csv", ".html", ".json", ".log", ".md", ".py", ".svg", ".toml")


def _known() -> dict[str, set[str]]:
    """Paths of this repository's Python files by their names."""
    known: dict[str, set[str]] = {}
    for folder in ("packages", "tools", "native", "tests-integration"):
        for path in (ROOT / folder).rglob("*.py"):
            known.setdefault(path.name, set()).add(f"/{path.relative_to(ROOT)}")
    return known | {"noxfile.py": {"/noxfile.py"}}


@pytest.mark.parametrize("folder", [*PAGES, *(f"packages/{p.name}/src" for p in sorted((ROOT / "packages").iterdir()))])
def test_files_that_are_named_exist(folder):
    known, missing = _known(), []
    package = f"/{'/'.join(folder.split('/')[:2])}/"
    for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for named in NAMED.findall(line):
                name = named.rpartition("/")[2]
                places = known.get(name, set())
                if path.suffix == ".py" and named == name:  # without a folder: a file of the same package
                    places = {place for place in places if place.startswith(package)}
                if name not in UPSTREAMS | PATTERNS and not any(place.endswith(f"/{named}") for place in places):
                    missing.append(f"{path.relative_to(ROOT)}:{number}: {named}")
    assert not missing


def test_links_of_pages_lead_to_files():
    """A strict build of the site ends at a link whose file was moved, and nothing else tells."""
    dead = []
    for page in (ROOT / "docs").rglob("*.md"):
        if page.parent.name.endswith(".d"):  # a part of the page beside its folder
            continue
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in LINK.findall(text):
            path = (page.parent / target).resolve()
            if not path.exists() and not MADE_WITH_THE_SITE.fullmatch(str(path.relative_to(ROOT))):
                dead.append(f"{page.relative_to(ROOT)}: {target}")
    assert not dead


def _exists(dotted: str) -> bool:
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for name in parts[count:]:
            if not hasattr(found, name):
                return name in {**getattr(found, "__annotations__", {}), **getattr(found, "model_fields", {})}
            found = getattr(found, name)
        return True
    return False


def test_names_of_our_modules_exist():
    """`ds_comm.start_rehearsal` in a docstring, a message or a page is what a reader types next."""
    known, missing = dict[str, bool](), []
    sources = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("packages/*/README.md"), ROOT / "README.md"]
    pages = [page for page in ROOT.glob("docs/**/*.md") if "decisions" not in page.parts]
    for path in [*sources, *pages]:
        for found in OURS.finditer(path.read_text()):
            name = found[0].strip("`")
            if name.endswith(FILES) or name in NO_MODULES or not (path.suffix == ".md" or found[0].startswith("`")):
                continue
            if not known.setdefault(name, _exists(name)):
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert not missing
