"""Ranks that do something together or not at all: JSON is exchanged, never pickles, and an error of one is an error of all.

Each step of a save or load is `ranks.agree(action)`: every rank runs its action, tells the others the result or the
error, and either all return all results or all raise. So a full disk on rank 3 is a CheckpointError on every rank that
says so, not seven ranks in a collective that rank 3 never reaches.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ds_ckpt.jsontext import Json
from ds_config.errors import CheckpointError, DsError

__all__ = ["Ranks", "as_checkpoint_error"]


class Ranks:
    """The ranks that take part. `group`: a ds_comm Group, a torch ProcessGroup, or None (all ranks, or a world of one)."""

    def __init__(self, group: Any = None) -> None:
        # A Group of one has no process group; everything below then stays in this process.
        alone = hasattr(group, "pg") and group.pg is None
        self._group: dist.ProcessGroup | None = getattr(group, "pg", group)
        live = dist.is_available() and dist.is_initialized() and not alone
        self.rank = dist.get_rank(self._group) if live else 0
        self.size = dist.get_world_size(self._group) if live else 1

    @staticmethod
    def alone() -> Ranks:
        """A world of one, whatever process groups there are."""
        made = Ranks.__new__(Ranks)
        made._group, made.rank, made.size = None, 0, 1
        return made

    @staticmethod
    def of(group: Any) -> Ranks:
        """`group` itself when it is one (a caller that keeps it, or a test that replaces `exchange`), else a new one."""
        return group if isinstance(group, Ranks) else Ranks(group)

    def twin(self) -> Ranks:
        """The same ranks over a CPU group of their own, for another thread. Collective; `close` it."""
        if self.size == 1:
            return Ranks.alone()
        members = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        return Ranks(dist.new_group(members, backend="gloo", use_local_synchronization=True))

    def close(self) -> None:
        """Destroy the group of a `twin`."""
        if self.size > 1:
            dist.destroy_process_group(self._group)

    def agree(self, action: Callable[[], Json]) -> list[Json]:
        """Run `action` on every rank and return all results, by rank.

        Raises:
            CheckpointError: this rank's error, or where it had none, the first other rank's with that rank's number.
        """
        mine: Exception | None = None
        try:
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
        data = zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)
        device = _device(self._group)
        sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64, device=device), group=self._group)
        lengths = [int(n.item()) for n in sizes]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty(max(lengths), dtype=torch.uint8, device=device) for _ in range(self.size)]
        dist.all_gather(parts, padded.to(device), group=self._group)
        texts = [zlib.decompress(p[:n].cpu().numpy().tobytes()) for p, n in zip(parts, lengths, strict=True)]
        return [json.loads(text) for text in texts]


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


def _device(group: dist.ProcessGroup | None) -> torch.device:
    # Backends of devices move device tensors only; a group with a CPU backend is served from there.
    config = dist.get_backend_config(group)
    if "cpu" in str(config) or dist.get_backend(group) in ("gloo", "mpi"):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
