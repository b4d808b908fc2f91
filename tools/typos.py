"""Typos of the keys of a model, for tests (`from typos import check_typos`): each is refused and explained.

report = check_typos(Config, samples=200)
assert report.rejected == report.total and report.suggested >= 0.9 * report.total
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ds_config.errors import ConfigError
from ds_config.file_check import validate
from ds_config.issues import Issue
from ds_config.parse import KeyPath, dotted
from ds_config.shape import Key, keys, known_names
from ds_config.strict_model import StrictModel

__all__ = ["Typo", "TypoReport", "check_typos", "single_edits", "typos"]

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Typo:
    """One misspelt key.

    Attributes:
        key: The key that was meant.
        wrong: What is written instead of the last part of its path.
        edit: "insert", "delete", "replace", "swap", "underscore" or "case".
    """

    key: Key
    wrong: str
    edit: str

    @property
    def path(self) -> KeyPath:
        """Where the misspelt key stands."""
        return (*self.key.path[:-1], self.wrong)

    def document(self) -> dict[str, Any]:
        """The smallest document that has this typo; its value is null."""
        value: Any = None
        for part in reversed(self.path):
            value = [value] if isinstance(part, int) else {part: value}
        return dict(value)


def single_edits(name: str) -> Iterator[tuple[str, str]]:
    """Every (misspelling, kind of edit) that is one edit away from `name`, each once; about 53 per letter."""
    seen = {name}
    for wrong, edit in _edits(name):
        if wrong and wrong not in seen:
            seen.add(wrong)
            yield wrong, edit


def _edits(name: str) -> Iterator[tuple[str, str]]:
    for i in range(len(name)):
        head, char, tail = name[:i], name[i], name[i + 1 :]
        if char == "_":
            yield head + tail, "underscore"
            yield f"{head}-{tail}", "underscore"
        yield head + tail, "delete"
        if tail:
            yield head + tail[0] + char + tail[1:], "swap"
        if char.swapcase() != char:
            yield head + char.swapcase() + tail, "case"
        if i > 0:
            yield f"{head}_{char}{tail}", "underscore"
        for letter in _LETTERS:
            yield head + letter + tail, "replace"
            yield head + letter + char + tail, "insert"
    for letter in _LETTERS:
        yield name + letter, "insert"


def typos(model: type[StrictModel]) -> Iterator[Typo]:
    """Every single-edit typo of every key of `model` and its sections that is not itself a known key there."""
    for key in keys(model):
        yield from _of_key(key)


def _of_key(key: Key) -> Iterator[Typo]:
    known = known_names(key.model)
    for wrong, edit in single_edits(str(key.path[-1])):
        if wrong not in known:
            yield Typo(key, wrong, edit)


@dataclass(frozen=True, slots=True)
class TypoReport:
    """How a model met its typos.

    Attributes:
        total: How many were tried.
        rejected: How many made `validate` raise with an issue at the misspelt key.
        suggested: How many had the key that was meant as the first suggestion.
        missed: Those that were not suggested, as (document path, key that was meant, what was said).
    """

    total: int
    rejected: int
    suggested: int
    missed: tuple[tuple[str, str, str], ...]


def check_typos(model: type[StrictModel], samples: int = 200, seed: int = 0) -> TypoReport:
    """Try a random sample of the typos of `model`, spread evenly over kinds of edit and over keys.

    Cost: one small validation per sample, about a millisecond each.
    """
    rng, every = random.Random(seed), keys(model)
    chosen: list[Typo] = []
    while len(chosen) < samples:
        by_kind: dict[str, list[Typo]] = {}
        for typo in _of_key(rng.choice(every)):
            by_kind.setdefault(typo.edit, []).append(typo)
        chosen.append(rng.choice(by_kind[rng.choice(sorted(by_kind))]))
    rejected = suggested = 0
    missed = []
    for typo in chosen:
        issue = _issue_of(model, typo)
        rejected += issue is not None
        meant = dotted(typo.key.path)
        if issue is not None and issue.suggestions[:1] == (meant,):
            suggested += 1
        else:
            missed.append((dotted(typo.path), meant, str(issue)))
    return TypoReport(len(chosen), rejected, suggested, tuple(missed))


def _issue_of(model: type[StrictModel], typo: Typo) -> Issue | None:
    try:
        validate(model, typo.document())
    except ConfigError as error:
        issues = [issue for issue in error.issues if isinstance(issue, Issue)]
        return next((issue for issue in issues if issue.path == typo.path), None)
    return None
