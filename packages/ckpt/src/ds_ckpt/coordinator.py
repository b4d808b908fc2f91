"""Ranks that do something together or not at all: JSON is exchanged, never pickles, and an error of one is an error of all.

Each step of a save or load is `ranks.settle(action)`: every rank runs its action, and either all return or all raise. So a full
disk on rank 3 is a CheckpointError on every rank that says so, not seven ranks in a collective that rank 3 never reaches.

What a rank sends does not grow with the world, but for a logarithm. Everything is made of `swap`: bytes to one rank, bytes from
another. `spread` merges a value of every rank in ceil(log2 N) swaps (dissemination: Hensgen, Finkel and Manber 1988); the merge
must give the same result when a value comes twice. `route` carries messages to any ranks in as many swaps, each message going the distances
whose bits are set in the way it has to go (Bruck et al. 1997).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Final

import torch

from ds_ckpt.jsontext import Json
from ds_comm import (
    Group,
    GroupLike,
    P2POp,
    all_gather_json,
    as_group,
    batch_isend_irecv,
    destroy_group,
    destroy_when_dropped,
    duplicate_group,
    ensure_world,
    extend_timeout,
    irecv,
    isend,
    self_group,
)
from ds_comm.metadata import metadata_device
from ds_config.errors import CheckpointError, DsError
from ds_config.rehearsing import is_rehearsal

__all__ = ["TRANSFER_S", "Coordinator", "Message", "arrived", "as_checkpoint_error", "hops", "moving", "pack", "unpack"]

TRANSFER_S: Final = 3600.0  # patience for reading or writing a whole checkpoint
_FRAME_BYTES: Final = 1024  # what goes with the length of a message; longer ones take a second
_HEAD: Final = struct.Struct("<IIQ")

Message = tuple[int, int, bytes]  # to which rank, from which, what


class Coordinator:
    """The ranks that take part. `group`: a ds_comm Group, a torch ProcessGroup, or None: all ranks, whose group is made if a launcher
    started several, or a world of one."""

    def __init__(self, group: GroupLike = None) -> None:
        self._group = ensure_world() if group is None else as_group(group)
        self.rank, self.size = self._group.rank, self._group.size
        self._duplicates: list[Group] = []  # what `close` destroys

    @property
    def group(self) -> Group:
        """What tensors travel over."""
        return self._group

    @staticmethod
    def alone() -> Coordinator:
        """Return a coordinator with a world size of 1, whatever process groups there are."""
        return Coordinator(self_group("ckpt"))

    @staticmethod
    def of(group: Any) -> Coordinator:
        """`group` itself when it is one (a caller that keeps it, or a test that replaces `swap`), else a new one."""
        return group if isinstance(group, Coordinator) else Coordinator(group)

    def twin(self) -> Coordinator:
        """Duplicate this coordinator over a new CPU process group of the same ranks, for another thread.

        Collective. Call `close` on the result; one that is dropped destroys its group when it is collected as garbage.
        """
        twin = Coordinator(duplicate_group(self._group, "ckpt"))
        twin._duplicates.append(twin.group)
        destroy_when_dropped(twin, twin._duplicates)
        return twin

    def close(self) -> None:
        """Destroy the group of a `twin`."""
        while self._duplicates:
            destroy_group(self._duplicates.pop())

    def settle(self, action: Callable[[], Json], *, patience_s: float = 0.0) -> Json:
        """Run `action` on every rank and return this rank's result when all went well. Collective.

        Args:
            patience_s: How long the others wait for this rank's action before that is reported as a hang.

        Raises:
            CheckpointError: this rank's error, or where it had none, the first other rank's with that rank's number.
        Cost: ceil(log2 N) small messages.
        """
        result: Json = None
        own_error: CheckpointError | None = None
        try:
            with extend_timeout(patience_s) if patience_s and self.size > 1 else nullcontext():
                result = action()
        except Exception as error:
            own_error = as_checkpoint_error(error)
        report = [self.rank, own_error.message, own_error.code, own_error.fix] if own_error is not None else None
        first = self.spread(report, _lowest)
        if own_error is not None:
            raise own_error
        if first is not None:
            rank, message, code, fix = first
            raise CheckpointError(f"rank {rank}: {message}", code=code, fix=fix)
        return result

    def first(self, action: Callable[[], Json], *, patience_s: float = 0.0) -> Json:
        """Run `action` on rank 0 and return its result, or raise its error, on every rank. Collective.

        Args:
            patience_s: As in `settle`.
        Cost: 2 ceil(log2 N) messages, of the result's size in the second half.
        """
        result = self.settle(lambda: action() if self.rank == 0 else None, patience_s=patience_s)
        return self.spread(result, lambda mine, theirs: theirs if mine is None else mine)

    def spread(self, value: Json, merge: Callable[[Json, Json], Json]) -> Json:
        """Merge the `value` of all ranks and return the merged value on every rank. Collective.

        Args:
            merge: Associative, commutative, and the same when a value is merged in twice: a maximum, a union, the value
            of the
                lowest rank.
        Cost: ceil(log2 N) messages of the merged value.
        """
        step = 1
        while step < self.size:
            data = json.dumps(value, separators=(",", ":")).encode()
            received = self.swap(data, (self.rank + step) % self.size, (self.rank - step) % self.size)
            value = merge(value, json.loads(received))
            step *= 2
        return value

    def route(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Carry a message to each rank that is named, and return what this one received, by sender. Collective.

        Cost: ceil(log2 N) messages; a byte passes through half as many ranks on average.
        """
        pending: list[Message] = [(to, self.rank, data) for to, data in messages.items()]
        for step in hops(self.size):
            going, pending = moving(pending, self.rank, self.size, step)
            came = self.swap(pack(going), (self.rank + step) % self.size, (self.rank - step) % self.size)
            pending += unpack(came)
        return arrived(pending, self.rank)

    def exchange(self, value: Json) -> list[Any]:
        """Gather `value` from every rank and return the values by rank, on every rank. Collective (an all-gather).

        The cost grows with the world size: use this only for messages about a failure.
        """
        return all_gather_json(value, self._group, unit="ckpt")

    def swap(self, data: bytes, to: int, source: int) -> bytes:
        """Send `data` to rank `to`, and return what rank `source` sends. Every rank is one's `to` and one's `source`."""
        if is_rehearsal():  # of ranks that are not there, each says what this one says
            return data
        device = metadata_device(self._group)
        frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8, device="cpu")
        head = len(data).to_bytes(8, "little") + data[: _FRAME_BYTES - 8]
        frame[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        came = torch.empty(_FRAME_BYTES, dtype=torch.uint8, device=device)
        self._pass([(isend, frame.to(device), to), (irecv, came, source)])
        start = came.cpu().numpy().tobytes()
        nbytes = int.from_bytes(start[:8], "little")
        rest: list[tuple[Any, torch.Tensor, int]] = []
        if len(data) > _FRAME_BYTES - 8:
            more = torch.frombuffer(bytearray(data[_FRAME_BYTES - 8 :]), dtype=torch.uint8)
            rest.append((isend, more.to(device), to))
        tail = torch.empty(max(0, nbytes - (_FRAME_BYTES - 8)), dtype=torch.uint8, device=device)
        if tail.numel():
            rest.append((irecv, tail, source))
        if rest:
            self._pass(rest)
        return start[8 : 8 + min(nbytes, _FRAME_BYTES - 8)] + tail.cpu().numpy().tobytes()

    def _pass(self, messages: list[tuple[Any, torch.Tensor, int]]) -> None:
        ops = [P2POp(op, data, group=self._group, group_peer=peer, unit="ckpt") for op, data, peer in messages]
        for work in batch_isend_irecv(ops):
            work.wait()


def hops(size: int) -> list[int]:
    """Return the rank distances of the swaps that `route` makes, the largest first."""
    return [1 << k for k in reversed(range((size - 1).bit_length()))]


def moving(messages: list[Message], rank: int, size: int, step: int) -> tuple[list[Message], list[Message]]:
    """Split messages at `rank` into those to send `step` ranks further now and those that stay."""
    going: list[Message] = []
    staying: list[Message] = []
    for message in messages:
        (going if (message[0] - rank) % size & step else staying).append(message)
    return going, staying


def pack(messages: list[Message]) -> bytes:
    """Pack messages end to end into bytes, each behind a header of target, source and length."""
    return b"".join(part for to, source, data in messages for part in (_HEAD.pack(to, source, len(data)), data))


def unpack(data: bytes) -> list[Message]:
    """Undo `pack`."""
    out, at = [], 0
    while at < len(data):
        to, source, nbytes = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        out.append((to, source, data[at : at + nbytes]))
        at += nbytes
    return out


def arrived(messages: list[Message], rank: int) -> dict[int, bytes]:
    """Return the routed messages that are for `rank`, by sender, the lowest first."""
    return {source: data for to, source, data in sorted(messages, key=lambda m: m[1]) if to == rank}


def _lowest(first: Json, second: Json) -> Json:
    """Return the error of the lowest rank; None where neither rank has an error."""
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


def as_checkpoint_error(error: Exception) -> CheckpointError:
    """Return `error`, wrapped in a CheckpointError with `error` as its cause unless `error` is a CheckpointError."""
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
