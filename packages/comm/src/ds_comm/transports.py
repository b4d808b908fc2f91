"""How one collective reaches the other ranks: torch's own way, or better where a backend leaves something to gain.

A `Transport` starts an operation and returns what to wait for. It sees ranks within the group, checked arguments and
groups of at least two ranks; sizes, stamps and spans are the business of `collectives`.

gloo. Its ring algorithms move every byte through extra copies; each rank sending its parts straight to their owners
needs none. 2 ranks, 64 MiB, 2-core machine, torch 2.13, medians of 9 alternating rounds in ms:

                    torch   direct
    all_gather       64.0     19.3
    reduce_scatter   85.3     20.2

Sums are made in rank order, in fp32 for fp16 and bf16, so they are the same bits in every run and on every chunking; for
two ranks they are the bits of torch's all_reduce, which DDP uses. A direct message carries what it is (operation,
sequence number, unit, dtype, size) in its tag: ranks that disagree never match, so they wait and the recorder tells why, where
gloo would fill a buffer in part, or abort the process.

gloo's threads, one a group, poll a connection for as long as the rank's own thread holds its lock. Where ranks have no idle cores
beside them, the thread that is woken by a message takes the core from the rank that holds the lock, and polls until the
scheduler gives it back, some 3 ms later. Scheduled as batch work they do not interrupt a thread that runs; where there are cores for all
they stay as they are, for they are to interrupt other programs.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_comm._torch import ALL_GATHER_SINGLE, REDUCE_SCATTER_SINGLE, backend_names

__all__ = ["TRANSPORTS", "GlooTransport", "ShmTransport", "Started", "Transport", "transports"]

_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
_NARROW = (torch.float16, torch.bfloat16)
_FAN_OUT = 8  # up to this many ranks, one sends to all of them itself
_SMALL_BYTES = 64 << 10  # up to this size a sum on every rank from everything is faster than two phases


@dataclass(frozen=True, slots=True)
class Started:
    """An operation on its way.

    Attributes:
        works: torch handles; the operation is complete when all are.
        finish: What remains to do on this rank after that (a local sum, a copy back).
    """

    works: Sequence[Any]
    finish: Callable[[], None] | None = None


class Transport:
    """torch.distributed as it is. An object is made per operation.

    Attributes:
        mark: Number of the operation in its group's order.
        unit: What is communicated.
        asynchronous: Whether the caller goes on before the end. Where it does not, some backends (shm) work in the
            caller's own thread, which is faster than handing over to another.
    """

    views = False  # whether `all_to_all` moves views as they lie
    __slots__ = ("asynchronous", "mark", "pg", "rank", "size", "unit")

    def __init__(self, pg: dist.ProcessGroup, mark: int, unit: str, asynchronous: bool) -> None:
        self.pg, self.mark, self.unit, self.asynchronous = pg, mark, unit, asynchronous
        self.rank, self.size = pg.rank(), pg.size()

    def all_reduce(self, tensor: Tensor, op: Any) -> Started:
        return _started(dist.all_reduce(tensor, op, group=self.pg, async_op=self.asynchronous))

    def reduce(self, tensor: Tensor, dst: int, op: Any) -> Started:
        return _started(dist.reduce(tensor, group_dst=dst, op=op, group=self.pg, async_op=self.asynchronous))

    def reduce_scatter(self, out: Tensor, inp: Tensor, op: Any) -> Started:
        flat = out.view(-1), inp.view(-1)  # gloo compares shapes
        return _started(REDUCE_SCATTER_SINGLE(*flat, op=op, group=self.pg, async_op=self.asynchronous))

    def all_gather(self, out: Tensor, inp: Tensor) -> Started:
        flat = out.view(-1), inp.view(-1)  # gloo compares shapes, of tensors of a device
        return _started(ALL_GATHER_SINGLE(*flat, group=self.pg, async_op=self.asynchronous))

    def all_gather_parts(self, parts: Sequence[Tensor], inp: Tensor) -> Started:
        return _started(dist.all_gather(list(parts), inp, group=self.pg, async_op=self.asynchronous))

    def broadcast(self, tensor: Tensor, src: int) -> Started:
        return _started(dist.broadcast(tensor, group_src=src, group=self.pg, async_op=self.asynchronous))

    def all_to_all(self, outs: Sequence[Tensor], inps: Sequence[Tensor]) -> Started:
        return _started(dist.all_to_all(list(outs), list(inps), group=self.pg, async_op=self.asynchronous))

    def all_to_all_rows(self, out: Tensor, inp: Tensor, receive: Sequence[int], send: Sequence[int]) -> Started:
        """Exchange rows with all ranks: `receive[r]` rows come from rank r and `send[r]` rows go to rank r.

        Input and output are one tensor each.
        """
        sizes = list(receive), list(send)
        return _started(dist.all_to_all_single(out, inp, *sizes, group=self.pg, async_op=self.asynchronous))

    def all_to_all_pieces(self, outs: Sequence[Sequence[Tensor]], inps: Sequence[Sequence[Tensor]]) -> Started:
        others = [r for r in range(self.size) if r != self.rank]
        ops = [dist.P2POp(dist.irecv, t, group=self.pg, group_peer=r) for r in others for t in outs[r]]
        ops += [dist.P2POp(dist.isend, t, group=self.pg, group_peer=r) for r in others for t in inps[r]]
        return Started(dist.batch_isend_irecv(ops) if ops else ())

    def gather(self, tensor: Tensor, parts: Sequence[Tensor] | None, dst: int) -> Started:
        into = None if parts is None else list(parts)
        return _started(dist.gather(tensor, into, group_dst=dst, group=self.pg, async_op=self.asynchronous))

    def scatter(self, tensor: Tensor, parts: Sequence[Tensor] | None, src: int) -> Started:
        of = None if parts is None else list(parts)
        return _started(dist.scatter(tensor, of, group_src=src, group=self.pg, async_op=self.asynchronous))

    def send(self, tensor: Tensor, dst: int, tag: int) -> Started:
        return Started([self.pg.send([tensor], dst, tag)])

    def recv(self, tensor: Tensor, src: int | None, tag: int) -> Started:
        return Started([self.pg.recv_anysource([tensor], tag) if src is None else self.pg.recv([tensor], src, tag)])

    def barrier(self) -> Started:
        return _started(dist.barrier(self.pg, async_op=self.asynchronous))

    @property
    def waits_by_store(self) -> bool:
        """Whether a barrier with a limit is one over the store: gloo's own leaves all but its first rank waiting."""
        return dist.get_backend(self.pg) == "gloo"

    def monitored_barrier(self, timeout: timedelta) -> Started:
        """Block until all ranks have come, or raise the error of the backend after `timeout`."""
        if (timed_barrier := getattr(self.pg, "rendezvous_within", None)) is not None:
            timed_barrier(timeout)
        else:
            dist.barrier(self.pg, async_op=True).wait(timeout)
        return Started(())

    def batch(self, messages: Sequence[Any]) -> Started:
        """Launch `messages` (torch's P2POp) as one batch of the backend."""
        return Started(dist.batch_isend_irecv(list(messages)))


class GlooTransport(Transport):
    """Straight to the owner, with a tag that only the same operation has."""

    __slots__ = ()

    def all_reduce(self, tensor: Tensor, op: Any) -> Started:
        size = self.size
        if op not in _SUMS or (size > 2 and (size > _FAN_OUT or tensor.nbytes > _SMALL_BYTES)):
            return super().all_reduce(tensor, op)
        flat = tensor.view(-1)
        terms = _rows(flat, size)
        works = self._exchange(self._tag(1), terms, [flat] * size)
        terms[self.rank] = flat
        return Started(works, lambda: _sum_in_rank_order(flat, terms, op))

    def reduce(self, tensor: Tensor, dst: int, op: Any) -> Started:
        size, rank = self.size, self.rank
        if op not in _SUMS or size > _FAN_OUT:
            return super().reduce(tensor, dst, op)
        flat = tensor.view(-1)
        if rank != dst:
            return Started(self._fan_out(self._tag(2), [dst], [flat] * size))
        terms = _rows(flat, size)
        works = self._fan_in(self._tag(2), [r for r in range(size) if r != rank], terms)
        terms[rank] = flat
        return Started(works, lambda: _sum_in_rank_order(flat, terms, op))

    def reduce_scatter(self, out: Tensor, inp: Tensor, op: Any) -> Started:
        if op not in _SUMS:
            return super().reduce_scatter(out, inp, op)
        size, rank, flat = self.size, self.rank, out.view(-1)
        sent = list(inp.view(size, flat.numel()).unbind())
        # With two ranks the one term that comes can arrive where the sum will be, unless a term is there already.
        terms = [flat] * size if size == 2 and not _overlap(flat, inp) else _rows(flat, size)
        works = self._exchange(self._tag(3), terms, sent)
        terms[rank] = sent[rank]
        return Started(works, lambda: _sum_in_rank_order(flat, terms, op))

    def all_gather(self, out: Tensor, inp: Tensor) -> Started:
        return self.all_gather_parts(out.view(self.size, inp.numel()).unbind(), inp.view(-1))

    def all_gather_parts(self, parts: Sequence[Tensor], inp: Tensor) -> Started:
        works = self._exchange(self._tag(4), parts, [inp] * self.size)
        part = parts[self.rank]
        if part.data_ptr() != inp.data_ptr():
            part.copy_(inp)
        return Started(works)

    def broadcast(self, tensor: Tensor, src: int) -> Started:
        size, rank = self.size, self.rank
        if size > _FAN_OUT:
            return super().broadcast(tensor, src)
        if rank != src:
            return Started(self._fan_in(self._tag(5), [src], [tensor] * size))
        return Started(self._fan_out(self._tag(5), [r for r in range(size) if r != rank], [tensor] * size))

    def all_to_all(self, outs: Sequence[Tensor], inps: Sequence[Tensor]) -> Started:
        works = self._exchange(self._tag(6), outs, inps)
        outs[self.rank].copy_(inps[self.rank])
        return Started(works)

    def all_to_all_rows(self, out: Tensor, inp: Tensor, receive: Sequence[int], send: Sequence[int]) -> Started:
        return self.all_to_all(out.split(list(receive)), inp.split(list(send)))

    def all_to_all_pieces(self, outs: Sequence[Sequence[Tensor]], inps: Sequence[Sequence[Tensor]]) -> Started:
        # Tensors of one size to one rank are told apart by their number.
        works: list[Any] = []
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        for number in range(max(map(len, (*outs, *inps)))):
            tag = _Tag(self.mark * 16 + 10, zlib.crc32(f"{self.unit}/{number}".encode()))
            for r in others:
                if number < len(outs[r]):
                    works.append(self.pg.recv([_carrier(outs[r][number])], r, tag.of(outs[r][number])))
            for r in others:
                if number < len(inps[r]):
                    works.append(self.pg.send([_carrier(inps[r][number])], r, tag.of(inps[r][number])))
        return Started(works)

    def gather(self, tensor: Tensor, parts: Sequence[Tensor] | None, dst: int) -> Started:
        if parts is None:
            return Started(self._fan_out(self._tag(7), [dst], [tensor] * self.size))
        works = self._fan_in(self._tag(7), [r for r in range(self.size) if r != dst], parts)
        parts[dst].copy_(tensor)
        return Started(works)

    def scatter(self, tensor: Tensor, parts: Sequence[Tensor] | None, src: int) -> Started:
        if parts is None:
            return Started(self._fan_in(self._tag(8), [src], [tensor] * self.size))
        works = self._fan_out(self._tag(8), [r for r in range(self.size) if r != src], parts)
        tensor.copy_(parts[src])
        return Started(works)

    def barrier(self) -> Started:
        size = self.size
        if size > _FAN_OUT:
            return super().barrier()
        # One empty message to and from each rank.
        tokens = torch.zeros(size + 1, dtype=torch.uint8, device="cpu").split(1)
        return Started(self._exchange(self._tag(9), tokens[:size], tokens[size:] * size))

    def _tag(self, kind: int) -> _Tag:
        return _Tag(self.mark * 16 + kind, zlib.crc32(self.unit.encode()))

    def _exchange(self, tag: _Tag, received: Sequence[Tensor], sent: Sequence[Tensor]) -> list[Any]:
        """Send `sent[r]` to and receive `received[r]` from every other rank r, without copying on this side."""
        others = [(self.rank + step) % self.size for step in range(1, self.size)]  # not all to the same one first
        return self._fan_in(tag, others, received) + self._fan_out(tag, others, sent)

    def _fan_in(self, tag: _Tag, ranks: Sequence[int], received: Sequence[Tensor]) -> list[Any]:
        return [self.pg.recv([_carrier(received[r])], r, tag.of(received[r])) for r in ranks]

    def _fan_out(self, tag: _Tag, ranks: Sequence[int], sent: Sequence[Tensor]) -> list[Any]:
        return [self.pg.send([_carrier(sent[r])], r, tag.of(sent[r])) for r in ranks]


class ShmTransport(Transport):
    """torch.distributed on the backend `shm`. Where the caller waits, calls go past torch's wrappers, which take longer than a small message."""

    views = True
    __slots__ = ()

    def all_reduce(self, tensor: Tensor, op: Any) -> Started:
        group: Any = self.pg
        if not self.asynchronous and group.reduces(tensor, op):
            group.all_reduce_now(tensor, op)
            return Started(())
        return Transport.all_reduce(self, tensor, op)

    def all_gather(self, out: Tensor, inp: Tensor) -> Started:
        group: Any = self.pg
        if not self.asynchronous and not inp.is_complex():
            group.all_gather_now(out, inp)
            return Started(())
        return Transport.all_gather(self, out, inp)


def transports(pg: dist.ProcessGroup) -> dict[str, type[Transport]]:
    """Return the transport of each device type that `pg` communicates; gloo's threads may be scheduled as batch work from then on."""
    names = backend_names(pg)
    on_host = os.environ.get("LOCAL_WORLD_SIZE", "")
    if "gloo" in names.values() and _crowded(int(on_host) if on_host.isdigit() else pg.size()):
        _schedule_as_batch("gloo_tcp_loop")
    return {device: TRANSPORTS.get((name, device), Transport) for device, name in names.items()}


def _crowded(ranks: int) -> bool:
    """Whether so many ranks of this host, and a thread of gloo's for each, have fewer cores than they are."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 2 * ranks > cores


def _schedule_as_batch(thread_name: str) -> None:
    """Let this process's threads of a name wait for a running thread instead of interrupting it, on Linux.

    Threads whose scheduling policy someone has chosen keep it.
    """
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread may have ended, and a sandbox may forbid it
            thread = int(task.name)
            if (task / "comm").read_text().strip() == thread_name and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


TRANSPORTS: dict[tuple[str, str], type[Transport]] = {("gloo", "cpu"): GlooTransport, ("shm", "cpu"): ShmTransport}
"""By backend and device type; torch's own way elsewhere. A group takes its transport when it is first used."""
_DTYPE_CODES = {
    dtype: code
    for code, dtype in enumerate(
        (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int8, torch.bool),
        1,
    )
}


@dataclass(frozen=True, slots=True)
class _Tag:
    """What a message is, as the number gloo matches it by. Users' own sends have small tags; these are above 2**30."""

    mark: int
    unit: int

    def of(self, tensor: Tensor) -> int:
        dtype = _DTYPE_CODES.get(tensor.dtype, 0)
        mixed = ((self.mark * 1_000_003 + self.unit) * 1_000_003 + dtype) * 1_000_003 + tensor.numel()
        return 1 << 30 | (mixed ^ mixed >> 30) & (1 << 30) - 1


def _started(work: Any) -> Started:
    return Started(()) if work is None else Started((work,))


def _carrier(tensor: Tensor) -> Tensor:
    # An empty message is sent, too, or ranks that disagree about an empty tensor would pass each other.
    return tensor if tensor.numel() else torch.zeros(1, dtype=torch.uint8, device="cpu")


def _rows(like: Tensor, count: int) -> list[Tensor]:
    return list(torch.empty((count, like.numel()), dtype=like.dtype, device=like.device).unbind())


def _sum_in_rank_order(out: Tensor, terms: Sequence[Tensor], op: Any) -> None:
    """Sum `terms` in order into `out` (divided by their number for AVG); `out` may be one of the terms."""
    if out.dtype == torch.bool:
        torch.any(torch.stack(list(terms)), 0, out=out)  # what a sum of booleans is in torch
        return
    if len(terms) == 2 and op == dist.ReduceOp.SUM:
        torch.add(terms[0], terms[1], out=out)  # one rounding, whatever the dtype
        return
    total = terms[0].float() if out.dtype in _NARROW else terms[0].clone()
    for term in terms[1:]:
        total.add_(term)
    if op == dist.ReduceOp.AVG:
        total.div_(len(terms))
    out.copy_(total)


def _overlap(a: Tensor, b: Tensor) -> bool:
    # Both contiguous. A shared storage is not enough: a shard and its flat buffer may share it and still be apart.
    a_start, b_start = a.data_ptr(), b.data_ptr()
    return a_start < b_start + b.nbytes and b_start < a_start + a.nbytes
