"""Run the body of a test on several ranks: `@world(2)`.

Words: a *world test* is a test function that carries a `World`; a *rank* is one worker process of the pool, which lives
for the whole pytest run; a *job* is one world test on one rank.
"""

from __future__ import annotations

from ds_testing.snippets import run_snippets
from ds_testing.spec import MAX_RANKS, World, world

__all__ = ["MAX_RANKS", "World", "run_snippets", "world"]
