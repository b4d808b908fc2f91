# The overloads of torch's stub are for callers; a subclass has one signature for all of them.
# mypy: disable-error-code="override,assignment"
"""torch's process group of W ranks of which this process is one and nobody else is there.

A collective leaves what it would leave if all ranks had passed what this one passes: gathers repeat its part, sums multiply it by the
number of ranks, averages, extremes and broadcasts keep it. So counts of experts are balanced, agreements agree, and everything stays
finite. What one other rank alone sends (a message, a part of a scatter) is a small constant.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_comm.python_group import PythonProcessGroup
from ds_comm.rehearsal.fabric import Fabric, Passage
from ds_comm.rehearsal.message_book import MessageBook
from ds_comm.rehearsal.pacing import Pacer, Trip
from ds_config.errors import CommError

__all__ = ["LABEL", "MissingRankError", "RehearsalGroup", "UnitLabel"]

_FILLED = 0.01


class MissingRankError(CommError):
    """What another rank would have sent is not known.

    Attributes:
        rank: That has to be rehearsed before.
    """

    def __init__(self, message: str, *, code: str, fix: str, rank: int) -> None:
        super().__init__(message, code=code, fix=fix)
        self.rank = rank


class UnitLabel(threading.local):
    """What the next operation of this thread communicates, as ds-comm's callers say it, and whether it is ds-comm's."""

    unit = ""
    is_ours = False


LABEL = UnitLabel()


class RehearsalGroup(PythonProcessGroup):
    """One rank of a group.

    Args:
        rank, size: Of the group.
        pacers: Returns who carries tensors of a device type.
        book: What ranks that were rehearsed before sent.
        cpu_backend: Of torch, for which the group stands where tensors are on the CPU.
    """

    backend = "rehearsal"

    def __init__(
        self,
        rank: int,
        size: int,
        fabric: Fabric,
        pacers: Callable[[str], Pacer],
        book: MessageBook,
        cpu_backend: str = "",
    ) -> None:
        super().__init__(rank, size)
        self._copies_to_reduce = cpu_backend == "gloo"  # it has no reduce-scatter: it all-reduces a copy
        self._book = book
        self._fabric, self._pacers = fabric, pacers
        self._members: tuple[int, ...] = ()
        self._pending: list[dist.Work] | None = None

    def shutdown(self) -> None:
        """Nothing is held."""

    def abort(self) -> None:
        """Nobody waits."""

    def _start_coalescing(self, device: torch.device) -> None:
        self._pending = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        pending, self._pending = self._pending or [], None
        return _Together(pending)

    # ---- collectives

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        return self._send_off("all_reduce", _bytes(tensors), lambda: self._sum(tensors, op), tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        return self._send_off("reduce", _bytes(tensors), lambda: self._sum(tensors, op), tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        root = getattr(opts, "rootRank", self._rank)
        channel = f"broadcast {self.members}"

        def move() -> None:
            for tensor in tensors:
                if root == self._rank:
                    self._book.write(channel, tensor)
                elif not self._book.read(self.members[root], channel, tensor) and tensor.is_floating_point():
                    tensor.nan_to_num_(_FILLED)

        return self._send_off("broadcast", _bytes(tensors), move, tensors)

    def _allgather_base(self, output: Tensor, inp: Tensor, opts: Any = None) -> dist.Work:
        return self._send_off("all_gather", output.nbytes, lambda: self._repeat(output, inp), [output])

    all_gather_single = _allgather_base
    allgather_base = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        def move() -> None:
            for out, inp in zip(outputs, inputs, strict=True):
                self._repeat(out, inp)

        return self._send_off("all_gather", _bytes(outputs), move, outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        flat = [part for parts in outputs for part in parts]

        def move() -> None:
            for parts, inp in zip(outputs, inputs, strict=True):
                for part in parts:
                    _resize_copy(part, inp)

        return self._send_off("all_gather", _bytes(flat), move, flat)

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        flat = [part for parts in outputs for part in parts]

        def move() -> None:
            for part in flat:
                _resize_copy(part, inputs[0])

        return self._send_off("gather", _bytes(inputs) * self._size, move, flat or inputs)

    def _reduce_scatter_base(self, output: Tensor, inp: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_tensor_coalesced([output], [inp], opts)

    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_base = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)

        def move() -> None:
            for out, inp in zip(outputs, inputs, strict=True):
                copied = inp.clone() if self._copies_to_reduce and inp.device.type == "cpu" else inp
                self._part(out, copied, op)

        return self._send_off("reduce_scatter", _bytes(inputs), move, outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Any, opts: Any = None) -> dist.Work:
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)

        def move() -> None:
            for out, parts in zip(outputs, inputs, strict=True):
                out.copy_(parts[self._rank])
            self._sum(outputs, op)

        return self._send_off("reduce_scatter", sum(_bytes(parts) for parts in inputs), move, outputs)

    def scatter(self, outputs: Sequence[Tensor], inputs: Any, opts: Any = None) -> dist.Work:
        def move() -> None:
            if inputs:
                outputs[0].copy_(inputs[0][self._rank])
            else:
                _finite(outputs)

        return self._send_off("scatter", _bytes(outputs) * self._size, move, outputs)

    def alltoall_base(
        self, output: Tensor, inp: Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> dist.Work:
        return self._send_off("all_to_all", max(output.nbytes, inp.nbytes), lambda: _tile(output, inp), [output])

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        def move() -> None:
            for out, inp in zip(outputs, inputs, strict=True):
                _tile(out, inp)

        return self._send_off("all_to_all", max(_bytes(outputs), _bytes(inputs)), move, outputs)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._send_off("barrier", 0, lambda: None, ())

    def rendezvous_within(self, timeout: timedelta) -> None:
        """A barrier with a timeout: all have come."""

    # ---- point to point

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> dist.Work:
        def move() -> None:
            for tensor in tensors:
                self._book.write(self._channel(dst, tag), tensor)

        return self._message("send", tensors, dst, move)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> dist.Work:
        channel = self._channel(self._rank, tag)

        def move() -> None:
            for tensor in tensors:
                if not self._book.read(self.members[src], channel, tensor):
                    _finite([tensor])

        whole = any(self._book.keeps(tensor) for tensor in tensors)
        if whole and not self._book.knows(self.members[src]):
            raise MissingRankError(
                f"a message of integers from rank {self.members[src]}, which was not rehearsed",
                code="rehearsal-foreign",
                fix=f"Rehearse rank {self.members[src]} before this one: `ds rehearse` does.",
                rank=self.members[src],
            )
        return self._message("recv", tensors, src, move)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> dist.Work:
        return self.recv(tensors, (self._rank + 1) % self._size, tag)

    # ---- how

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the world that are in this group, in its order."""
        if not self._members:
            self._members = tuple(dist.get_process_group_ranks(self))
        return self._members

    def _channel(self, target: int, tag: int) -> str:
        return f"to {self.members[target]} tag {tag}"

    def _send_off(
        self, op: str, nbytes: int, move: Callable[[], None], tensors: Sequence[Tensor], passage: Passage | None = None
    ) -> dist.Work:
        unit, LABEL.unit = LABEL.unit, ""
        by_torch, LABEL.is_ours = not LABEL.is_ours, False
        if passage is None:
            passage = self._fabric.passage(op, nbytes, self.members, by_torch=by_torch)
        trip = Trip(op, self.group_desc, unit, self._size, nbytes, passage, move, list(tensors))
        work = self._pacers(tensors[0].device.type if tensors else "cpu").start(trip)
        if self._pending is not None:
            self._pending.append(work)
        return work

    def _message(self, op: str, tensors: Sequence[Tensor], peer: int, move: Callable[[], None]) -> dist.Work:
        if not 0 <= peer < self._size:
            raise CommError(f"{op} with rank {peer} of {self._size}", code="comm-rank", fix="Name a rank of the group.")
        seconds = self._fabric.message_seconds(_bytes(tensors), self.members[self._rank], self.members[peer])
        return self._send_off(op, _bytes(tensors), move, tensors, Passage(seconds, seconds, 0.0))

    def _sum(self, tensors: Sequence[Tensor], op: Any) -> None:
        if op == dist.ReduceOp.SUM:
            for tensor in tensors:
                if tensor.dtype is not torch.bool:
                    tensor.mul_(self._size)

    def _repeat(self, out: Tensor, inp: Tensor) -> None:
        rows = inp.reshape(1, -1)
        (out.view(-1) if out.is_contiguous() else out).view(self._size, -1).copy_(rows.expand(self._size, -1))

    def _part(self, out: Tensor, inp: Tensor, op: Any) -> None:
        start = self._rank * out.numel()
        out.view(-1).copy_(inp.reshape(-1)[start : start + out.numel()])
        self._sum([out], op)


class _Together(dist.Work):
    """Several operations that torch coalesced."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _finite(tensors: Sequence[Tensor]) -> None:
    """Replace what another rank would have sent by small constants; integers by 0."""
    for tensor in tensors:
        tensor.fill_(_FILLED if tensor.is_floating_point() else 0)


def _resize_copy(out: Tensor, inp: Tensor) -> None:
    if out.shape == inp.shape:
        out.copy_(inp)
    else:
        _tile(out, inp)


def _tile(out: Tensor, inp: Tensor) -> None:
    """Fill `out` with `inp` from its beginning, again and again."""
    if out.shape == inp.shape:
        out.copy_(inp)
        return
    count, flat = out.numel(), inp.reshape(-1)
    if not count:
        return
    if not flat.numel():
        _finite([out])
        return
    out.copy_(flat.repeat(-(-count // flat.numel()))[:count].view(out.shape))
