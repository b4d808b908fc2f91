"""A store of one process that stands for those of all ranks: nobody else writes, so nobody waits."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ds_config.errors import CommError

__all__ = ["LoneStore"]


class LoneStore(dist.Store):
    """Keys of this rank. A key that only another rank could have written is an error at once, not at the end of a timeout."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def clone(self) -> LoneStore:
        """Return the same store: one process has one."""
        return self

    def set(self, key: str, value: bytes | str) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        before = self._values.get(key, b"")
        if before in (b"", expected.encode() if isinstance(expected, str) else bytes(expected)):
            self.set(key, desired)
        return self._values.get(key, b"")

    def get(self, key: str) -> bytes:
        if key not in self._values:
            raise CommError(
                f"key {key!r} of the store, which another rank would have written",
                code="rehearsal-foreign",
                fix="A rehearsal has one rank: leave this exchange out where ds_comm.rehearsal.is_rehearsal(), or exchange tensors.",
            )
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return at once: what others would have written is never there, and nothing here needs it."""

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing is waited for."""
