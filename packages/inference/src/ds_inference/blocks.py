"""Who holds which block of the key-value cache: integers only.

Words: a *block* is memory for the keys and values of `size` consecutive tokens of one sequence. A block may be held by several
sequences whose tokens are the same up to its end (a shared prompt); each counts as one *hold*. The *print* of a full block
says which tokens are in it and before it, so a new sequence finds blocks that hold its beginning. A block that no sequence holds keeps its print until
it is needed for something else, the longest unused first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from ds_config.errors import PlanError

__all__ = ["BlockPool", "block_hashes"]


def block_hashes(tokens: Sequence[int], size: int, salt: bytes = b"") -> list[bytes]:
    """Hash each full block of `tokens` with its prefix, for prefix caching (128-bit digests).

    Two hashes are equal exactly when all tokens up to the block's end are.

    Args:
        salt: What else the values depend on: an adapter, a version of the weights.
    """
    # A key of the hash has at most 64 bytes: a longer salt counts by its own hash, not by its beginning.
    hashes, before = [], salt if len(salt) <= 64 else hashlib.blake2b(salt, digest_size=64).digest()
    for start in range(0, len(tokens) - size + 1, size):
        before = hashlib.blake2b(
            array("q", tokens[start : start + size]).tobytes(), key=before, digest_size=16
        ).digest()
        hashes.append(before)
    return hashes


class BlockPool:
    """`count` blocks of `size` tokens, numbered from 0. Taking and giving back are O(1) a block."""

    def __init__(self, count: int, size: int) -> None:
        if count < 1 or size < 1:
            raise PlanError(
                f"a cache of {count} blocks of {size} tokens",
                code="inference-cache",
                fix="Give it at least one block of at least one token.",
            )
        self.count, self.size = count, size
        self._holds = [0] * count
        self._print: list[bytes | None] = [None] * count
        self._blank = list(range(count - 1, -1, -1))  # hold nothing; the lowest number is taken first
        self._evictable: OrderedDict[int, None] = (
            OrderedDict()
        )  # no sequence holds them, their content may be wanted again
        self._by_print: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, those that keep a print included."""
        return len(self._blank) + len(self._evictable)

    def ref_count(self, block: int) -> int:
        """Return the reference count of a block."""
        return self._holds[block]

    def num_blocks_for(self, tokens: int) -> int:
        """Blocks for so many tokens."""
        return -(-tokens // self.size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with undefined content, one hold each; None, and nothing is taken, if there are not so many."""
        if count > self.num_free:
            return None
        return [self._allocate() for _ in range(count)]

    def _allocate(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            self._drop_hash(block)
        self._holds[block] = 1
        return block

    def release(self, blocks: Iterable[int]) -> None:
        """End one hold of each block. Those at the end of a sequence first, because its beginning is likelier to be wanted again."""
        for block in blocks:
            if self._holds[block] < 1:
                raise ValueError(f"block {block} is given back and nobody holds it")
            self._holds[block] -= 1
            if self._holds[block] == 0:
                if self._print[block] is None:
                    self._blank.append(block)
                else:
                    self._evictable[block] = None

    def add_refs(self, blocks: Iterable[int]) -> None:
        """Increment the reference count of each block, which must be in use."""
        for block in blocks:
            if self._holds[block] < 1:
                raise ValueError(f"block {block} is shared and nobody holds it")
            self._holds[block] += 1

    def find_cached(self, prints: Sequence[bytes]) -> list[int]:
        """Find the longest run of cached blocks from the first hash on, and increment their reference counts."""
        blocks = []
        for mark in prints:
            block = self._by_print.get(mark)
            if block is None:
                break
            self._holds[block] += 1
            self._evictable.pop(block, None)
            blocks.append(block)
        return blocks

    def register_hash(self, block: int, mark: bytes) -> None:
        """Register a computed block under its hash, unless the hash has a block already."""
        if self._print[block] is None and mark not in self._by_print:
            self._print[block] = mark
            self._by_print[mark] = block

    def clear_hashes(self) -> None:
        """Drop the hashes of all blocks: after a change of weights no block may be reused by its content."""
        for block in range(self.count):
            self._drop_hash(block)
        self._blank.extend(self._evictable)
        self._evictable.clear()

    def _drop_hash(self, block: int) -> None:
        mark, self._print[block] = self._print[block], None
        if mark is not None:
            del self._by_print[mark]
