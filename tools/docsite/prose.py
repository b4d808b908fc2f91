"""Prose that people can read: known spellings, no riddling words, sentences that end.

Pages are read whole; of the code docstrings, messages of errors and the help of commands, in which only words count.

usage: python tools/docsite/prose.py [PAGE.md ...]      (all pages of docs/, the READMEs and the code without one)
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from repo import ROOT
from repo.imports import collector_paused, parse, walk

__all__ = [
    "MOST_WORDS",
    "RIDDLES",
    "RIDDLES_OF_PAGES",
    "main",
    "pages",
    "problems",
    "sentences",
    "spoken",
    "words_of_code",
]

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
    r"\btwins?\b": "replica, copy",
    r"\bstrays?\b": "what does not belong there",
    r"\bsticky\b": "persistent",
    r"\bgoes back\b": "return",
    r"\bcomes? together\b": "meet, are combined",
    r"\blen[dt]s?\b": "in use, allocate",
    r"\bseats?\b": "extension point, group set",
    r"\bat home\b": "on its rank, in its place",
}
# The same of pages only: what people search for has the field's name there. Docstrings may use these words in passing.
RIDDLES_OF_PAGES = {
    r"\bthaw(s|ed|ing)?\b": "unfreeze",
    r"\b(go|goes|going|went) on (from|with the|where)\b": "resume, continue",
    r"\brests? (on the host|in host|in memory|on disk|elsewhere)\b": "is offloaded to",
    r"\bcut over (the )?ranks\b": "sharded, partitioned, split over",
    r"\bmany at a time\b": "concurrent",
    r"\bfalls? short\b": "limitations",
    r"\blaboratory\b": "measurements",
    r"\bwhat becomes of\b": "how ... is handled",
    r"\btakes? (the )?weights away\b": "export",
    r"\bshared out\b": "distributed",
    r"\bwears?\b": "uses, has",
    r"\bspeaks? of\b": "applies to, concerns",
}
_ANY_RIDDLE = re.compile("|".join(RIDDLES), re.IGNORECASE)
_CODE = re.compile(r"^ *```.*?^ *```|^    .*?$|<!--.*?-->|^---$.*?^---$", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"^\s*(\||#|!!!|\?\?\?|===|:::)")


def pages() -> list[Path]:
    """What people read: pages that say how things are now. Decisions and notes of measurements may be longer."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "packages").glob("*/README.md"))]
    for folder in ("tutorials", "how-to", "concepts"):
        found += sorted((ROOT / "docs" / folder).glob("*.md"))
    found += sorted((ROOT / "docs" / "benchmarks").glob("*.md"))
    return [*found, *(ROOT / "docs" / name for name in ("index.md", "install.md", "getting-started.md", "faq.md"))]


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
    for pattern, better in {**RIDDLES, **RIDDLES_OF_PAGES}.items():
        found += [f"{match[0]!r}: write {better}" for match in re.finditer(pattern, plain, re.IGNORECASE)]
    return found


def spoken(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of docstrings, of messages and fixes of errors, and of the help of commands."""
    for node in walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield getattr(node, "lineno", 1), text
        elif isinstance(node, ast.Raise) and node.exc is not None:
            yield from ((part.lineno, str(part.value)) for part in _texts(node.exc))
        elif isinstance(node, ast.keyword) and node.arg in ("help", "fix", "description"):
            yield from ((part.lineno, str(part.value)) for part in _texts(node.value))


def _texts(node: ast.AST) -> Iterator[ast.Constant]:
    return (part for part in walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str))


def words_of_code() -> list[str]:
    """Return what is wrong with the words of docstrings, messages and help in packages/*/src, by file and line."""
    wrong = []
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        with collector_paused():
            texts = [(line, re.sub(r"`[^`]*`", "", text)) for line, text in spoken(parse(path))]
        if not _ANY_RIDDLE.search("\n".join(text for _, text in texts)):
            continue
        for line, plain in texts:
            for pattern, better in RIDDLES.items():
                for match in re.finditer(pattern, plain, re.IGNORECASE):
                    wrong.append(f"{path.relative_to(ROOT)}:{line}: {match[0]!r}: write {better}")
    return wrong


def main(names: list[str]) -> int:
    """Print what is wrong; return 1 if anything is."""
    wrong = 0
    for problem in [] if names else words_of_code():
        print(problem)
        wrong += 1
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
