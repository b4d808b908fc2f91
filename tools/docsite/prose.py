"""Prose that people can read: known spellings, no riddling words, sentences that end.

usage: python tools/docsite/prose.py [PAGE.md ...]      (all pages of docs/ and the READMEs without one)
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from repo import ROOT

__all__ = ["MOST_WORDS", "RIDDLES", "main", "pages", "problems", "sentences"]

MOST_WORDS = 45

# Words that this project once used for things that have a name in the field. Each stands with what to write.
RIDDLES = {
    r"\bmeetings? of (the )?(ranks|engines)\b": "rendezvous, run",
    r"\bstrangers?\b": "another process, unknown",
    r"\bthe ride\b": "transfer",
    r"\brides along\b": "is sent with",
    r"\bscratch room\b": "scratch space",
    r"\broom in (files|memory)\b": "space",
    r"\bcomes? home\b": "return",
    r"\bforgetful\b": "say what is lost",
    r"\bwhere (they|ranks) part\b": "where they differ",
    r"\bside door\b": "attribute, global",
}
_CODE = re.compile(r"^ *```.*?^ *```|^    .*?$|<!--.*?-->|^---$.*?^---$", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"^\s*(\||#|!!!|\?\?\?|===|:::)")


def pages() -> list[Path]:
    """What people read: pages that say how things are now. Decisions and notes of measurements may be longer."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "packages").glob("*/README.md"))]
    for folder in ("tutorials", "how-to", "concepts"):
        found += sorted((ROOT / "docs" / folder).glob("*.md"))
    return [*found, ROOT / "docs" / "index.md", ROOT / "docs" / "getting-started.md"]


def sentences(text: str) -> Iterator[str]:
    """Sentences of the running text: no code, tables or headings; items of lists count for themselves."""
    text = _CODE.sub("\n\n", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        if _LINE.match(block) or not block.strip():
            continue
        flat = " ".join(block.split())
        flat = re.sub(r"`[^`]*`", "x", flat)
        flat = re.sub(r"\]\([^)]*\)", "]", flat)
        yield from (part for part in re.split(r"(?<=[.!?:;])[*_]*\s+", flat) if part)


def problems(text: str) -> list[str]:
    """What is wrong with a page."""
    found = [f"{len(s.split())} words: {s[:90]}..." for s in sentences(text) if len(s.split()) > MOST_WORDS]
    plain = _CODE.sub("", text)
    for pattern, better in RIDDLES.items():
        found += [f"{match[0]!r}: write {better}" for match in re.finditer(pattern, plain, re.IGNORECASE)]
    return found


def main(names: list[str]) -> int:
    """Say what is wrong; 1 if anything is."""
    wrong = 0
    chosen = [Path(name).resolve() for name in names] or pages()
    for page in chosen:
        for problem in problems(page.read_text()):
            print(f"{page.relative_to(ROOT)}: {problem}")
            wrong += 1
    command = [sys.executable, "-m", "codespell_lib", "--ignore-words", str(Path(__file__).with_name("words.txt"))]
    spelling = subprocess.run([*command, *map(str, chosen)], capture_output=True, text=True, check=False)
    print(spelling.stdout + spelling.stderr, end="")
    wrong += len(spelling.stdout.splitlines())
    print(f"prose: {wrong} problems in {len(chosen)} pages")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
