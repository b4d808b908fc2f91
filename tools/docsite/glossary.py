"""Link the first use of a word with a meaning of its own to the glossary. Pure; done while the site is built."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["link_words", "words_of"]

_ROW = re.compile(r'^\| <span id="([\w-]+)"></span>([\w ]+) \|', re.MULTILINE)
# Words of the glossary that everybody reads rightly, or that also mean something else: a link would only disturb.
_PLAIN = {
    "action",
    "axis",
    "box",
    "code",
    "degree",
    "difficulty",
    "dim",
    "full",
    "gather",
    "group",
    "interval",
    "origin",
}
_PLAIN |= {"plan", "release", "size", "stage", "step", "replica", "sink"}
# What stays as it is: fences, comments, headings, tables, code, links, tags, admonitions, and blocks that are indented.
_KEPT = re.compile(
    r"^ *```.*?^ *```|<!--.*?-->|^---\n.*?^---$|^ *#.*?$|^ *\|.*?$|^ *(?:===|!!!|\?\?\?|:::).*?$|^    .*?$"
    r"|`[^`\n]*`|!?\[[^\]]*\]\([^)]*\)|!?\[[^\]]*\]\[[^\]]*\]|<[^>\n]+>",
    re.MULTILINE | re.DOTALL,
)


def words_of(glossary: str) -> dict[str, str]:
    """Word -> anchor, of the words that are linked."""
    return {word: anchor for anchor, word in _ROW.findall(glossary) if word not in _PLAIN}


def link_words(text: str, words: dict[str, str], target: str) -> str:
    """`text` with the first use of every word (or its plural) as a link to `target#anchor`."""
    for word in sorted(words, key=len, reverse=True):
        if f"({target}#{words[word]})" in text:  # the page's author was there first
            continue
        text = _linked(text, word, f"{target}#{words[word]}")
    return text


def _linked(text: str, word: str, there: str) -> str:
    found = re.compile(rf"(?<![\w-])({re.escape(word)}s?)(?![\w-])", re.IGNORECASE)
    for begin, end in _open(text):
        if match := found.search(text, begin, end):
            return f"{text[: match.start()]}[{match[0]}]({there}){text[match.end() :]}"
    return text


def _open(text: str) -> Iterable[tuple[int, int]]:
    last = 0
    for kept in _KEPT.finditer(text):
        yield last, kept.start()
        last = kept.end()
    yield last, len(text)
