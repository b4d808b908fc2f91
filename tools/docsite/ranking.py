"""What the search of the site finds first: docs/search.toml says it, the build applies it, and this asks the built site.

usage: python tools/docsite/ranking.py SITE

Words: a *term* is what a reader types; a *tag* is a word by which a page is found though its text does not have it. A page that is
*hidden* is in no result. The terms are asked of the site's own search worker in node, so no browser is needed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from repo import ROOT

__all__ = ["SETTINGS", "Ranking", "apply", "main", "problems", "read"]

SETTINGS = ROOT / "docs" / "search.toml"


@dataclass(frozen=True, slots=True)
class Ranking:
    """What docs/search.toml says.

    Attributes:
        hidden: Beginnings of paths of pages that no result shows.
        boost: Beginning of a path -> factor of the score. The longest beginning counts.
        tags: Path of a page -> words that find it.
        terms: What a reader types -> addresses, of which one must be the first result.
    """

    hidden: Sequence[str]
    boost: Mapping[str, float]
    tags: Mapping[str, Sequence[str]]
    terms: Mapping[str, Sequence[str]]


@cache
def read(file: Path = SETTINGS) -> Ranking:
    """Read the settings."""
    data = tomllib.loads(file.read_text())
    terms = {term: [pages] if isinstance(pages, str) else pages for term, pages in data["terms"].items()}
    return Ranking(data["hidden"], data["boost"], data["tags"], terms)


def apply(path: str, meta: dict[str, Any], settings: Ranking | None = None) -> None:
    """Write into a page's metadata how the search treats it: `search.exclude`, `search.boost`, `tags`."""
    settings = settings or read()
    search = dict(meta.get("search") or {})
    if path.startswith(tuple(settings.hidden)):
        search["exclude"] = True
    beginnings = [begin for begin in settings.boost if path.startswith(begin)]
    if beginnings:
        search.setdefault("boost", settings.boost[max(beginnings, key=len)])
    if search:
        meta["search"] = search
    if words := settings.tags.get(path):
        meta["tags"] = [*meta.get("tags", ()), *words]


def problems(found: Mapping[str, Sequence[str]], settings: Ranking) -> list[str]:
    """Return the terms whose first result is another page than it should be, or whose results have a hidden page.

    Args:
        found: Term -> addresses of its results, best first.
    """
    wrong = []
    for term, pages in settings.terms.items():
        first = next(iter(found[term]), "nothing")
        if first not in pages:
            wrong.append(f"search {term!r}: first is {first}, not {' or '.join(pages)}")
        wrong += [f"search {term!r} shows {page}" for page in found[term] if page.startswith(tuple(settings.hidden))]
    return wrong


def main(site: Path) -> int:
    """Ask every term of the built site; 1 if one does not lead where it should."""
    node = shutil.which("node")
    if node is None:
        print("search: node is missing, and the terms cannot be asked (Debian: apt-get install nodejs)")
        return 1
    settings = read()
    done = subprocess.run(
        [node, str(Path(__file__).with_name("search.js")), str(site)],
        input=json.dumps(list(settings.terms)),
        capture_output=True,
        text=True,
        check=True,
    )
    wrong = problems(json.loads(done.stdout), settings)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"search: {len(wrong)} wrong of {len(settings.terms)} terms")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
