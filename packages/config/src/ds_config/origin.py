"""Where values come from.

Words: an *origin* says who set one value: a line of a file, a dict, the code that derived it (with the reason), the default.
A *provenance* is a record of origins by path. It is kept beside a frozen model, never inside, and code that derives a value
adds a line to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ds_config.parse import KeyPath

__all__ = ["DEFAULT", "Origin", "Provenance"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Who set a value.

    Attributes:
        source: A file's path, "dict", "base64", "text", "derived" or "default".
        line: Line in the source, from 1; 0 where there are no lines.
        why: For derived values the reason, otherwise what was rewritten on the way ("was `cpu_offload`"); often empty.
    """

    source: str
    line: int = 0
    why: str = ""

    def __str__(self) -> str:
        place = f"{self.source}:{self.line}" if self.line else self.source
        return f"{place}: {self.why}" if self.source == "derived" else f"{place} ({self.why})" if self.why else place


DEFAULT = Origin("default")


class Provenance:
    """Origins by path; what has none of its own has that of the nearest path above it, and at the end the default."""

    def __init__(self, origins: Mapping[KeyPath, Origin] | None = None) -> None:
        self._origins = dict(origins or {})

    def record(self, path: KeyPath, origin: Origin) -> None:
        """Record the origin of the value at `path`; earlier origins of `path` and of paths inside are replaced."""
        for inner in [known for known in self._origins if known[: len(path)] == path]:
            del self._origins[inner]
        self._origins[path] = origin

    def fill(self, origins: Mapping[KeyPath, Origin]) -> None:
        """Record the origins of a whole document at once; those of other paths stay. Cost: linear."""
        self._origins.update(origins)

    def derived(self, path: KeyPath, why: str) -> None:
        """Record that code computed the value at `path`; `why` is a formula or a half sentence."""
        self.record(path, Origin("derived", why=why))

    def move(self, old: KeyPath, new: KeyPath, why: str, *, keep_inner: bool) -> None:
        """Follow a key that was renamed; `keep_inner` when the value inside it is the same, with the same inner paths."""
        place = self.of(old)
        moved = {path: origin for path, origin in self._origins.items() if path[: len(old)] == old}
        for path in moved:
            del self._origins[path]
        if keep_inner:
            self._origins.update({(*new, *path[len(old) :]): origin for path, origin in moved.items()})
        self._origins[new] = Origin(place.source, place.line, why)

    def of(self, path: KeyPath) -> Origin:
        """Return the origin of the value at `path`."""
        for end in range(len(path), -1, -1):
            if path[:end] in self._origins:
                return self._origins[path[:end]]
        return DEFAULT

    def __contains__(self, path: KeyPath) -> bool:
        return path in self._origins

    def __iter__(self) -> Iterator[KeyPath]:
        return iter(self._origins)

    def __len__(self) -> int:
        return len(self._origins)
