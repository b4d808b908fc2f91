"""One call of a collective: its checks, its mark in the group's order, its span. What all collectives share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

import ds_monitor
from ds_comm.groups import Group, check_fork
from ds_comm.transports import Started, Transport
from ds_comm.watch.recorder import current
from ds_comm.watch.stamp_ring import MESSAGES
from ds_comm.work import DONE, PendingWork, Work, failed
from ds_config.errors import CommError

__all__ = ["CollectiveCall"]


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """What is called: `op` on `group`, for `unit`. Checks raise before anything is sent; `start` sends.

    Attributes:
        op: Name of the collective, as users call it.
        unit: What is communicated; may be empty.
    """

    op: str
    group: Group
    unit: str

    def __str__(self) -> str:
        return f"{self.op}[{self.unit}] of group {self.group.name!r}"

    def takes_views(self, device: torch.device) -> bool:
        """Whether `all_to_all` of this group moves tensors of the device as they lie, with gaps."""
        kinds = {} if self.group.order is None else self.group.order.transports
        return kinds.get(device.type, Transport).views

    def check(self, *tensors: Tensor, views: bool = False) -> None:
        """Check that `tensors` are contiguous (unless `views`) and of one dtype and device."""
        for tensor in tensors:
            if not views and not tensor.is_contiguous():
                raise CommError(
                    f"{self}: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous",
                    code="comm-layout",
                    fix="Pass tensor.contiguous(), and copy the result back if it is an output.",
                )
            if tensor.dtype != tensors[0].dtype or tensor.device != tensors[0].device:
                raise CommError(
                    f"{self}: tensors of {tensors[0].dtype} on {tensors[0].device} and of {tensor.dtype} on {tensor.device}",
                    code="comm-layout",
                    fix="Pass tensors of one dtype on one device.",
                )

    def check_parts(self, part: str, part_numel: int, whole: str, whole_numel: int, count: int | None = None) -> None:
        """Check that the whole has the elements of `count` parts (default: one part per rank)."""
        count = self.group.size if count is None else count
        if count * part_numel != whole_numel:
            raise self.size_error(
                f"{whole} has {whole_numel} elements, {part} {part_numel}; {count} x {part_numel} = {count * part_numel}"
            )

    def check_count(self, name: str, items: Sequence[object], count: int | None = None) -> None:
        """`count` (by default as many as ranks) items in a list."""
        count = self.group.size if count is None else count
        if len(items) != count:
            raise self.size_error(f"{name} has {len(items)} places, {count} are needed")

    def check_list(self, name: str, tensors: Sequence[Tensor], numel: int | None = None) -> None:
        """Check that the list has one tensor per rank, each of `numel` elements unless None."""
        self.check_count(name, tensors)
        for index, tensor in enumerate(tensors):
            if numel is not None and tensor.numel() != numel:
                raise self.size_error(f"{name}[{index}] has {tensor.numel()} elements, {numel} are needed")

    def check_pairs(self, parts: str, part: Sequence[Tensor], wholes: str, whole: Sequence[Tensor]) -> None:
        """Check that there are as many parts as wholes, and that every whole has a part per rank."""
        if len(part) != len(whole):
            raise self.size_error(f"{len(part)} {parts} for {len(whole)} {wholes}")
        for index, (p, w) in enumerate(zip(part, whole, strict=True)):
            self.check_parts(f"{parts}[{index}]", p.numel(), f"{wholes}[{index}]", w.numel())

    def cut(self, name: str, extent: int, sizes: Sequence[int] | None) -> list[int]:
        """Split `extent` into a size per rank: `sizes`, which must sum to `extent`, or equal parts."""
        ranks = self.group.size
        if not sizes:
            if extent % ranks:
                raise self.size_error(f"{name} has {extent} places, which {ranks} ranks do not divide")
            return [extent // ranks] * ranks
        if len(sizes) != ranks or sum(sizes) != extent or min(sizes) < 0:
            raise self.size_error(f"{name} has {extent} places, its sizes are {list(sizes)}")
        return list(sizes)

    def root(self, world_rank: int | None, group_rank: int | None, default: int | None = None) -> int:
        """Return the rank within the group that either argument names."""
        if (world_rank is None) == (group_rank is None) and not (world_rank is None and default is not None):
            raise CommError(
                f"{self}: got src or dst {world_rank} and group_src or group_dst {group_rank}",
                code="comm-rank",
                fix="Pass exactly one: a rank of the world, or a rank within the group.",
            )
        if world_rank is not None:
            return self.group.index(world_rank)
        root = group_rank if group_rank is not None else default
        if root is None or not 0 <= root < self.group.size:
            raise CommError(
                f"{self}: rank {root} within a group of {self.group.size}",
                code="comm-rank",
                fix="Pass a rank below the size of the group.",
            )
        return root

    def peer(self, world_rank: int | None, group_rank: int | None) -> int:
        """Return the peer rank of a point-to-point message, within the group."""
        peer = self.root(world_rank, group_rank)
        if peer == self.group.rank:
            raise CommError(
                f"{self}: rank {self.group.ranks[peer]} is this rank itself",
                code="comm-rank",
                fix="Copy the tensor; a rank sends itself nothing.",
            )
        return peer

    def at_root(self, name: str, tensors: Sequence[Tensor] | None, root: int, numel: int) -> Sequence[Tensor] | None:
        """Check and return the list that only the root passes; return None on other ranks."""
        if (tensors is not None and len(tensors) > 0) != (self.group.rank == root):
            raise self.size_error(
                f"{name} is given on rank {root} of the group and nowhere else; this is rank {self.group.rank} and it has "
                f"{'none' if tensors is None else len(tensors)}"
            )
        if tensors is None or self.group.rank != root:
            return None
        self.check_list(name, tensors, numel)
        return tensors

    def copy_alone(self, out: Tensor, inp: Tensor, back: Callable[[], None] | None = None) -> None:
        """Copy `inp` to `out` and run `back` in a group of one rank; do nothing in larger groups."""
        if self.group.link is not None:
            return
        if out.data_ptr() != inp.data_ptr():
            out.view(-1).copy_(inp.view(-1))
        if back is not None:
            back()

    def start(
        self,
        tensor: Tensor | None,
        async_op: bool,
        launch: Callable[[Transport], Started],
        back: Callable[[], None] | None = None,
        peer: int = -1,
        nbytes: int | None = None,
    ) -> Work:
        """Run `launch` with this group's transport; a group of one has nothing to do.

        Args:
            tensor: What decides the device and is recorded; None for a barrier.
            back: What remains to do on this rank when the operation is complete.
            peer: The root, or the other rank of a message, within the group.
            nbytes: What is passed in, where that is not the tensor alone.
        Raises:
            CommError: the backend gave up; see `PendingWork.wait`. In a child that was forked from a rank ("comm-forked").
        """
        pg, order = self.group.link, self.group.order
        if pg is None or order is None:
            return DONE
        check_fork(self)
        transport = self._transport(order.transports, tensor)
        mark = 0  # messages have no place in the group's order: only two ranks see them
        if self.op not in MESSAGES:
            order.mark = mark = order.mark + 1
        host_waits = tensor is None or tensor.device.type == "cpu"
        recorder = current()
        slot = recorder.begin(order, mark, (self.op, self.unit, peer), tensor)
        if host_waits and not async_op:
            recorder.waiting(slot)  # in `launch` already, where the backend has it so
        span = self._span(tensor, nbytes, (order.key, mark))
        span.__enter__()
        # `differentiable` is what autograd sees; here a tensor with a history is its values. A `with torch.no_grad()` takes 3 us.
        records = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        try:
            started = launch(transport(pg, mark, self.unit, async_op or not host_waits))
        except RuntimeError as error:
            recorder.ended(slot)
            span.__exit__(None, None, None)
            failure = failed(self, recorder.explain(slot), error)
            raise failure from (None if isinstance(error, CommError) else error)
        finally:
            torch.set_grad_enabled(records)
        if host_waits and not async_op and back is None and not started.works and started.finish is None:
            recorder.ended(slot)
            span.__exit__(None, None, None)
            return DONE
        work = PendingWork(
            started if back is None else _then(started, back), self, (recorder, slot, order.key), span, host_waits
        )
        if async_op:
            return work
        work.wait()
        return DONE

    def size_error(self, mismatch: str) -> CommError:
        """Return the error for buffers whose sizes do not match on this rank."""
        return CommError(
            f"{self} ({self.group.size} ranks): {mismatch}.",
            code="comm-size",
            fix="Pass buffers of matching sizes; pad the last part where the ranks do not divide a tensor.",
        )

    def _transport(self, by_device: dict[str, type[Transport]], tensor: Tensor | None) -> type[Transport]:
        if tensor is None:
            return next(iter(by_device.values()))
        transport = by_device.get(tensor.device.type)
        if transport is None:
            raise CommError(
                f"{self}: it communicates tensors on {sorted(by_device)}, got one on {tensor.device}",
                code="comm-device",
                fix="Move the tensor, or initialise with a backend for its device (backend='cpu:gloo,cuda:nccl').",
            )
        return transport

    def _span(self, tensor: Tensor | None, nbytes: int | None, place: tuple[str, int]) -> AbstractContextManager[None]:
        if not ds_monitor.active():
            return _NO_SPAN
        return ds_monitor.span(
            f"comm/{self.op}",
            unit=self.unit,
            group=self.group.name,
            key=place[0],  # with its place in the group's order: which spans of different ranks are one collective
            place=place[1],
            ranks=self.group.size,
            nbytes=nbytes if nbytes is not None else 0 if tensor is None else tensor.nbytes,
            dtype="" if tensor is None else str(tensor.dtype).removeprefix("torch."),
        )


_NO_SPAN: AbstractContextManager[None] = nullcontext()


def _then(started: Started, back: Callable[[], None]) -> Started:
    first = started.finish

    def finish() -> None:
        if first is not None:
            first()
        back()

    return Started(started.works, finish)
