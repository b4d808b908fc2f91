"""Memory shared by the ranks of one host, and collectives over it: the native half of ds-comm's `shm` backend.

Words: a *segment* is a file without a name, mapped by all ranks; its *token* is a text that lets another process of the same user open
it while the maker lives, and nothing of it has a name in the file system, so nothing is left behind whichever process dies. A
*channel* is one rank's end of a segment made for collectives. An *arena* is a segment in which tensors are allocated.

Results are the same bits on every rank and in every run: sums are made in rank order, half types in fp32. Measured costs
and the comparison with gloo: docs/benchmarks/comm.md. Protocol: native/include/ds/shm.h.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

import ds_ops._call as _call
from ds_config.errors import KernelError
from ds_ops.counters import HostCounters, outcome_error
from ds_ops.segment import SharedSegment, pid_namespace_id

__all__ = [
    "Channel",
    "ChannelSettings",
    "HostCounters",
    "SharedSegment",
    "ShmCollective",
    "ShmReduceOp",
    "ShmTask",
    "combine",
    "pid_namespace_id",
    "rows_of",
]


class ShmCollective(IntEnum):
    """What a collective does; numbers shared with native/include/ds/shm.h."""

    BARRIER = 0
    ALL_REDUCE = 1
    REDUCE = 2
    REDUCE_SCATTER = 3
    ALL_GATHER = 4
    ALL_TO_ALL = 5
    BROADCAST = 6
    GATHER = 7
    SCATTER = 8


class ShmReduceOp(IntEnum):
    """How elements of several ranks become one. The bit operations take integers and booleans only."""

    SUM = 0
    AVERAGE = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7


_ELEMENTS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.int64: 4,
    torch.int32: 5,
    torch.int16: 6,
    torch.int8: 7,
    torch.uint8: 8,
    torch.bool: 9,
}
_CPU = torch.device("cpu")
_BYTES = _ELEMENTS[torch.uint8]
_MOVES = (
    ShmCollective.ALL_GATHER,
    ShmCollective.ALL_TO_ALL,
    ShmCollective.BROADCAST,
    ShmCollective.GATHER,
    ShmCollective.SCATTER,
)


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """Sizes and patience of a channel.

    Attributes:
        slot_bytes: Bytes a rank shows the others at once; two of them per rank. Half a second-level cache is a good size.
        mailbox_bytes: Bytes of one cell of a point-to-point mailbox; two cells per ordered pair of ranks.
        spin_us: How long a waiting call looks before it sleeps. Keep it short where ranks outnumber cores.
        timeout_s: A call that waited this long ends with an error on every rank.
    """

    slot_bytes: int = 512 << 10
    mailbox_bytes: int = 128 << 10
    spin_us: int = 200
    timeout_s: float = 600.0

    def segment_bytes(self, world: int) -> int:
        """Return the size of the segment for `world` ranks; memory is allocated only where touched."""
        return int(_call.native().shm_total_bytes(self.slot_bytes, self.mailbox_bytes, world))


class ShmTask:
    """A call under way; keeps its tensors alive until it ended."""

    __slots__ = ("_channel", "_job", "_keep", "_what")

    def __init__(self, channel: Channel, job: Any, keep: tuple[Tensor, ...], what: str) -> None:
        self._channel, self._job, self._keep, self._what = channel, job, keep, what

    def done(self) -> bool:
        """Whether it ended, well or badly."""
        return bool(self._job.done())

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when it is complete on this rank.

        Raises:
            CommError: as the calls of `Channel` do.
            TimeoutError: not complete within `timeout_s`; it goes on.
        """
        if not self._job.wait(-1 if timeout_s is None else max(int(timeout_s * 1e3), 0)):
            raise TimeoutError(f"{self._what} did not end within {timeout_s} s")
        self._keep = ()
        self._channel.check(self._what, self._job.outcome())


class Channel:
    """One rank's end of a segment. Every rank makes the same calls in the same order.

    Args:
        segment: At least `settings.segment_bytes(len(pids))` bytes, zero before the first rank came.
        rank: This rank's index.
        pids: Process id of every rank: how a rank that died is noticed.

    Raises (every call):
        CommError: a rank died ("shm-peer-died"), came with another call ("shm-mismatch"), did not come in time
            ("shm-timeout"), or another rank had one of these ("shm-aborted"). The channel is unusable afterwards.
    """

    def __init__(
        self, segment: SharedSegment, rank: int, pids: Sequence[int], settings: ChannelSettings | None = None
    ) -> None:
        self.settings = settings or ChannelSettings()
        self.rank, self.world = rank, len(pids)
        self._end = _call.native().ShmEndpoint(
            segment.fd, self.settings.slot_bytes, self.settings.mailbox_bytes, rank, list(pids)
        )
        self._under_way: deque[ShmTask] = deque()

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return when every rank came; by default waits as long as the settings say. About 1 us on two idle cores."""
        limit_ms = self._timeout_ms if timeout_s is None else int(timeout_s * 1e3)
        self.check("barrier", self._end.run(0, _BYTES, 0, 0, 0, 0, 0, (), (), self.settings.spin_us, limit_ms))

    def call(
        self, verb: ShmCollective, inp: Tensor, out: Tensor, *, op: ShmReduceOp = ShmReduceOp.SUM, root: int = 0
    ) -> None:
        """Run one collective and return when it is complete on this rank.

        Shapes, with n the elements of one rank's part: all_reduce, reduce, broadcast [n] -> [n];
        reduce_scatter, scatter [world * n] -> [n]; all_gather, gather [n] -> [world * n]. Where a rank gives or gets
        nothing (not the root), pass an empty tensor. Tensors are contiguous, on the CPU, of one dtype.
        """
        words = self._words(verb, inp, out, op, root)
        outcome = self._end.run(*words, self.settings.spin_us, self._timeout_ms)
        if outcome[0]:
            self.check(verb.name.lower(), outcome)

    def pull(
        self, out: Tensor, sources: Sequence[Tensor], op: ShmReduceOp = ShmReduceOp.SUM, *, first: int = 0
    ) -> None:
        """Wait at a barrier, then `combine` elements [first, first + out.numel()) of all ranks' sources."""
        words = _combined(out, sources, op, first)
        self.check("pull", self._end.pull(*words, self.settings.spin_us, self._timeout_ms))

    def fetch(self, out: Tensor, source: Tensor) -> None:
        """Wait at a barrier, then copy source to out, of any dtype; bypasses the cache from 4 MiB on."""
        if out.numel() != source.numel():
            raise KernelError(
                f"fetch: {source.numel()} elements into {out.numel()}", code="shm-bounds", fix="Give them one size."
            )
        _, width = _moved(source, out)
        words = (_pointer(out), [_pointer(source)], _BYTES, 0, out.numel() * width)
        self.check("fetch", self._end.pull(*words, self.settings.spin_us, self._timeout_ms))

    def sum_hook(self) -> tuple[int, int]:
        """Return the addresses of a native function that sums floats over the ranks, and of its argument.

        For loops that do not return to Python between sums. The addresses are valid while the channel is; `check_sums`
        reports errors.
        """
        addresses: tuple[int, int] = self._end.sum_hook(self.settings.spin_us, self._timeout_ms)
        return addresses

    def check_sums(self) -> None:
        """Raise the error of the last of those sums."""
        self.check("sum", self._end.summed())

    def start(
        self, verb: ShmCollective, inp: Tensor, out: Tensor, *, op: ShmReduceOp = ShmReduceOp.SUM, root: int = 0
    ) -> ShmTask:
        """Start a collective without waiting; the tensors must not change before the task ended.

        Small data is published to the other ranks at once and read from them by `ShmTask.wait`, `ShmTask.done` or the next
        call; the rest
        runs on the channel's own thread.
        """
        job = self._end.start(*self._words(verb, inp, out, op, root), self._timeout_ms, self.settings.spin_us)
        return self._retain(ShmTask(self, job, (inp, out), verb.name.lower()))

    def all_to_all(self, inp: Tensor, out: Tensor, send: Sequence[int], receive: Sequence[int]) -> ShmTask:
        """Give `send[r]` elements of `inp` to rank r, take `receive[r]` of rank r into `out`, in rank order."""
        if len(send) != self.world or sum(send) != inp.numel() or sum(receive) != out.numel():
            raise KernelError(
                f"all_to_all over {self.world} ranks: sizes {list(send)} and {list(receive)} do not fit "
                f"{inp.numel()} and {out.numel()} elements",
                code="shm-bounds",
                fix="Give one size per rank; their sum is the tensor's length.",
            )
        element, width = _moved(inp, out)
        words = (ShmCollective.ALL_TO_ALL, element, 0, 0, 0, _pointer(inp), _pointer(out))
        sizes = [n * width for n in send], [n * width for n in receive]
        return self._retain(ShmTask(self, self._end.start(*words, *sizes, self._timeout_ms), (inp, out), "all_to_all"))

    def all_to_all_parts(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> ShmTask:
        """Give `inputs[r]` to rank r, take `outputs[r]` of rank r. Tensors may be views that lie in rows (`rows_of`): a part of the
        heads of a sequence, say. Other ranks may call `all_to_all`.

        Cost: what is for other ranks is copied to shared memory and out of it, what stays here once.
        """
        if len(inputs) != self.world or len(outputs) != self.world:
            raise KernelError(
                f"all_to_all over {self.world} ranks: {len(inputs)} inputs and {len(outputs)} outputs",
                code="shm-bounds",
                fix="Give one tensor per rank.",
            )
        parts, sizes = [], []
        for tensor in (*inputs, *outputs):
            lies, (element, width) = rows_of(tensor), _moved(inputs[0], tensor)
            if lies is None:
                raise KernelError(
                    f"all_to_all of a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()}, which does not lie in rows",
                    code="kernel-argument",
                    fix="Pass tensor.contiguous().",
                )
            parts.append((tensor.data_ptr(), lies[0] * width, lies[1] * width))
            sizes.append(tensor.numel() * width)
        send, receive = sizes[: self.world], sizes[self.world :]
        job = self._end.start_parts(ShmCollective.ALL_TO_ALL, element, send, receive, parts, self._timeout_ms)
        return self._retain(ShmTask(self, job, (*inputs, *outputs), "all_to_all"))

    def send(self, data: Tensor, to: int, tag: int = 0) -> ShmTask:
        """Send `data` to rank `to`, in order per pair of ranks. Ends when the other rank has received all but 2 cells."""
        nbytes = data.numel() * data.element_size()
        job = self._end.post(True, self._peer(to), tag, _pointer(data), nbytes, self._timeout_ms)
        return self._retain(ShmTask(self, job, (data,), f"send to rank {to}"))

    def receive(self, data: Tensor, source: int, tag: int = 0) -> ShmTask:
        """Fill `data` with the next message of rank `source`; its size and tag must be the same."""
        nbytes = data.numel() * data.element_size()
        job = self._end.post(False, self._peer(source), tag, _pointer(data), nbytes, self._timeout_ms)
        return self._retain(ShmTask(self, job, (data,), f"receive from rank {source}"))

    def _retain(self, task: ShmTask) -> ShmTask:
        """The task, whose tensors are kept until it ended, also when the caller drops them."""
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()
        self._under_way.append(task)
        return task

    def abort(self) -> None:
        """End every rank's present and later calls with an error."""
        self._end.abort()

    def close(self) -> None:
        """End the channel's threads and unmap it. Calls still queued end with an error on every rank."""
        self._end.close()
        self._under_way.clear()

    def check(self, what: str, outcome: tuple[int, int]) -> None:
        """Raise what a native outcome says."""
        code, rank = outcome
        if code:
            raise outcome_error(what, self.rank, code, rank)

    @property
    def _timeout_ms(self) -> int:
        return int(self.settings.timeout_s * 1e3)

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self.world or rank == self.rank:
            raise KernelError(
                f"rank {rank} is not another rank of {self.world}",
                code="shm-bounds",
                fix="Name a rank of the channel other than this one.",
            )
        return rank

    def _words(self, verb: ShmCollective, inp: Tensor, out: Tensor, op: ShmReduceOp, root: int) -> tuple[Any, ...]:
        numel = {
            ShmCollective.REDUCE_SCATTER: out.numel(),
            ShmCollective.SCATTER: out.numel(),
            ShmCollective.BROADCAST: out.numel(),
        }.get(verb, inp.numel())
        self._fits(verb, inp, out, root, numel)
        if verb in _MOVES:
            element, width = _moved(inp, out)
        else:
            element, width = _element(inp, op), 1
        return (verb, element, op, root, numel * width, _pointer(inp), _pointer(out), (), ())

    def _fits(self, verb: ShmCollective, inp: Tensor, out: Tensor, root: int, n: int) -> None:
        whole, at_root = self.world * n, self.rank == root
        wanted = {
            ShmCollective.ALL_REDUCE: (n, n),
            ShmCollective.REDUCE: (n, n if at_root else out.numel()),
            ShmCollective.BROADCAST: (n if at_root else inp.numel(), n),
            ShmCollective.REDUCE_SCATTER: (whole, n),
            ShmCollective.SCATTER: (whole if at_root else inp.numel(), n),
            ShmCollective.ALL_GATHER: (n, whole),
            ShmCollective.GATHER: (n, whole if at_root else out.numel()),
        }[verb]
        if (inp.numel(), out.numel()) != wanted or not 0 <= root < self.world:
            raise KernelError(
                f"{verb.name.lower()} over {self.world} ranks, root {root}: found {inp.numel()} elements in and "
                f"{out.numel()} out, expected {wanted[0]} and {wanted[1]}",
                code="shm-bounds",
                fix="See Channel.call for the shape of each collective.",
            )


def combine(out: Tensor, sources: Sequence[Tensor], op: ShmReduceOp = ShmReduceOp.SUM) -> None:
    """Reduce `sources` into `out` with op, in their order; half types in fp32.

    `out` may be one of the sources. With sources in the arenas of all ranks this is a reduce-scatter that copies
    nothing.
    Cost: (len(sources) + 1) * out.nbytes.
    """
    _call.native().shm_combine(*_combined(out, sources, op))


def _combined(
    out: Tensor, sources: Sequence[Tensor], op: ShmReduceOp, first: int | None = None
) -> tuple[int, list[int], int, int, int]:
    """Check the tensors and return the arguments of the native function.

    The sources are as long as `out`, or long enough from `first` on.
    """
    if not sources:
        raise KernelError("combine needs at least one source", code="shm-bounds", fix="Pass the tensors to reduce.")
    element, n, dtypes = _element(out, op), out.numel(), (out.dtype,)
    into = _call.address(_call.require("out", out, dtypes=dtypes, device=_CPU))
    pointers = []
    for source in sources:
        _call.require("source", source, dtypes=dtypes, numel=n if first is None else None, device=_CPU)
        if first is not None and not 0 <= first <= source.numel() - n:
            raise KernelError(
                f"{n} elements from {first} on of a source of {source.numel()}",
                code="shm-bounds",
                fix="Stay within it.",
            )
        pointers.append(_call.address(source) + (first or 0) * out.element_size())
    return into, pointers, element, int(op), n


def _pointer(tensor: Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    if tensor.device.type != "cpu":
        raise KernelError(
            f"shared-memory collectives take CPU tensors, found {_call.describe(tensor)}",
            code="kernel-argument",
            fix="Use nccl or another device backend for this tensor.",
        )
    return _call.address(_call.require("tensor", tensor, dtypes=(tensor.dtype,)))


def _element(tensor: Tensor, op: ShmReduceOp) -> int:
    element = _ELEMENTS.get(tensor.dtype)
    if op is ShmReduceOp.SUM and element is not None:
        return element
    bits = op in (ShmReduceOp.BAND, ShmReduceOp.BOR, ShmReduceOp.BXOR)
    averaged = op is ShmReduceOp.AVERAGE and not tensor.dtype.is_floating_point
    if element is None or (bits and tensor.dtype.is_floating_point) or averaged:
        raise KernelError(
            f"{op.name.lower()} of {tensor.dtype} is not defined",
            code="kernel-argument",
            fix=f"Use one of {', '.join(str(d) for d in _ELEMENTS)}; bits of integers, averages of floating point.",
        )
    return element


def rows_of(tensor: Tensor) -> tuple[int, int] | None:
    """Return (elements of a row, elements from one row to the next) of a CPU tensor; None for other layouts.

    The rows have no gaps inside, and all lie at one distance.
    """
    dims = [(size, step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    if tensor.device.type != "cpu" or tensor.is_neg() or tensor.is_conj():
        return None
    row = 1
    while dims and dims[-1][1] == row:
        row *= dims.pop()[0]
    if tensor.numel() == 0 or not dims:
        return max(row, 1), max(row, 1)
    for (_, step), (size, inner) in itertools.pairwise(dims):
        if step != size * inner:
            return None
    return (row, dims[-1][1]) if dims[-1][1] >= row else None


def _moved(inp: Tensor, out: Tensor) -> tuple[int, int]:
    """Return the byte element type and the element size of an op that only moves data of any dtype."""
    if inp.dtype is not out.dtype:
        raise KernelError(
            f"input and output differ in dtype: {inp.dtype} and {out.dtype}",
            code="kernel-argument",
            fix="Allocate the output with the input's dtype.",
        )
    return _BYTES, inp.element_size()
