"""Ranks that do something together or not at all: JSON is exchanged, never pickles, and an error of one is an error of all.

Each step of a save or load is `ranks.agree(action)`: every rank runs its action, tells the others the result or the
error, and either all return all results or all raise. So a full disk on rank 3 is a CheckpointError on every rank that
says so, not seven ranks in a collective that rank 3 never reaches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

from ds_ckpt.jsontext import Json
from ds_comm import Group, GroupLike, all_gather_json, as_group, drop_group, patience, single_group, twin_group
from ds_config.errors import CheckpointError, DsError

__all__ = ["TRANSFER_S", "Ranks", "as_checkpoint_error"]

TRANSFER_S: Final = 3600.0  # patience for reading or writing a whole checkpoint


class Ranks:
    """The ranks that take part. `group`: a ds_comm Group, a torch ProcessGroup, or None (all ranks, or a world of one)."""

    def __init__(self, group: GroupLike = None) -> None:
        self._group = as_group(group)
        self.rank, self.size = self._group.rank, self._group.size

    @property
    def group(self) -> Group:
        """What tensors travel over."""
        return self._group

    @staticmethod
    def alone() -> Ranks:
        """A world of one, whatever process groups there are."""
        return Ranks(single_group("ckpt"))

    @staticmethod
    def of(group: Any) -> Ranks:
        """`group` itself when it is one (a caller that keeps it, or a test that replaces `exchange`), else a new one."""
        return group if isinstance(group, Ranks) else Ranks(group)

    def twin(self) -> Ranks:
        """The same ranks over a CPU group of their own, for another thread. Collective; `close` it."""
        return Ranks(twin_group(self._group, "ckpt"))

    def close(self) -> None:
        """Destroy the group of a `twin`."""
        drop_group(self._group)

    def agree(self, action: Callable[[], Json], *, patience_s: float = 0.0) -> list[Json]:
        """Run `action` on every rank and return all results, by rank.

        Args:
            patience_s: How long the others wait for this rank's action before that is reported as a hang.

        Raises:
            CheckpointError: this rank's error, or where it had none, the first other rank's with that rank's number.
        """
        mine: Exception | None = None
        try:
            with patience(patience_s) if patience_s and self.size > 1 else nullcontext():
                message: dict[str, Json] = {"ok": action()}
        except Exception as error:
            mine = as_checkpoint_error(error)
            message = {"message": mine.message, "code": mine.code, "fix": mine.fix}
        if self.size == 1:
            if mine is not None:
                raise mine
            return [message["ok"]]
        answers = self.exchange(message)
        if mine is not None:
            raise mine
        for rank, answer in enumerate(answers):
            if "ok" not in answer:
                raise CheckpointError(f"rank {rank}: {answer['message']}", code=answer["code"], fix=answer["fix"])
        return [answer["ok"] for answer in answers]

    def exchange(self, value: Json) -> list[Any]:
        """Everyone's `value`, by rank. Cost: two all-gathers; the second pads to the longest value."""
        return all_gather_json(value, self._group, unit="ckpt")


def as_checkpoint_error(error: Exception) -> CheckpointError:
    """`error` itself, or a CheckpointError that says what it was, with the original as its cause."""
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, OSError):
        code, fix = "ckpt-io", "Free space or repair the storage; earlier checkpoints are untouched."
    elif isinstance(error, DsError):
        code, fix = error.code, error.fix
    else:
        code, fix = "ckpt-failed", "See the traceback of the rank that failed."
    out = CheckpointError(f"{type(error).__name__}: {getattr(error, 'message', error)}", code=code, fix=fix)
    out.__cause__ = error
    return out
