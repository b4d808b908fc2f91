"""Every link and anchor of the built site leads somewhere, and nothing is asked of another host."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["Page", "broken", "foreign", "main", "read"]


@dataclass(slots=True)
class Page:
    """What a page refers to.

    Attributes:
        links: Targets of `a`, with the text between.
        loads: What the browser fetches by itself: scripts, styles, pictures.
        ids: Anchors.
        headings: Levels of headings in order.
    """

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    headings: list[int] = field(default_factory=list)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        for name in ("id", "name"):
            if given.get(name):
                self.page.ids.add(given[name])
        if tag == "a" and given.get("href"):
            self.page.links.append(given["href"])
        elif tag in ("script", "img", "source", "iframe") and given.get("src"):
            self.page.loads.append(given["src"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.page.loads.append(given.get("href", ""))
        elif len(tag) == 2 and tag[0] == "h" and tag[1].isdigit():
            self.page.headings.append(int(tag[1]))


def read(text: str) -> Page:
    """Read one page."""
    reader = _Reader()
    reader.feed(text)
    return reader.page


def broken(site: Path) -> list[str]:
    """`page: link` of every link inside the site that leads nowhere, and of every picture, script or style that is not there."""
    pages = {file: read(file.read_text()) for file in sorted(site.rglob("*.html"))}
    found = []
    for file, page in pages.items():
        for target in [*page.links, *page.loads]:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            path = unquote(parts.path)
            if path.startswith("/"):
                # The page 404.html is shown at any depth, so its links begin at the root.
                there = site / path.lstrip("/")
            else:
                there = (file.parent / path).resolve() if path else file
            if there.is_dir():
                there = there / "index.html"
            anchor = unquote(parts.fragment)
            if not there.is_file():
                found.append(f"{file.relative_to(site)}: {target}")
            elif anchor and there in pages and anchor not in pages[there].ids and not anchor.startswith("__"):
                found.append(f"{file.relative_to(site)}: {target} (no such anchor)")
    return found


def foreign(site: Path) -> list[str]:
    """What a page or a style of the site would fetch from another host by itself."""
    found = []
    for file in sorted(site.rglob("*.html")):
        found += [
            f"{file.relative_to(site)}: {target}" for target in read(file.read_text()).loads if urlsplit(target).netloc
        ]
    for file in sorted(site.rglob("*.css")):
        text = file.read_text()
        if "url(http" in text or "url(//" in text or "@import url(" in text:
            found.append(str(file.relative_to(site)))
    return found


def main(site: Path) -> int:
    """Say what is wrong; 1 if anything is."""
    wrong = [*broken(site), *(f"from another host: {line}" for line in foreign(site))]
    for line in wrong:
        print(line)
    print(f"links: {len(wrong)} wrong on {len(list(site.rglob('*.html')))} pages")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
