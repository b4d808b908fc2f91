"""Rows that ranks of one host take out of each other's memory: an exchange in which nobody packs, sends or receives.

    window = Window(group, rows=4096, width=1024, dtype=torch.bfloat16)
    window.mine[: len(tokens)].copy_(tokens)             # or computed there
    window.publish()                                     # everyone's rows are there
    for source, index in enumerate(wanted):              # which rows of each rank this one needs, in what order
        window.pull(source, index, out=parts[source])
    mixed = window.everyone[sources * window.rows + index]   # or of all ranks at once

Each row is written once by who makes it and read once by who needs it; `all_to_all_rows` sorts, copies in, copies out and sorts
again. Two buffers are used alternately, so what was published may be pulled until this rank publishes again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_comm.groups import GroupLike, as_group
from ds_comm.shm.symmetric_arena import Arena, TensorRequest
from ds_config.errors import CommError

__all__ = ["ShmWindow"]


class ShmWindow:
    """A buffer of rows for each rank of a group on one host. Construction, `publish` and `grow` are collective.

    Attributes:
        rows: Capacity of each rank.
        width: Elements of a row.
        local: [rows, width], where this rank writes what it publishes next; another buffer after `publish` and `grow`. Zeros at first.
        everyone: [size * rows, width]: what all ranks published last, one rank after the other, in their own memory: to be read, not kept.

    Raises:
        CommError: the ranks cannot share memory ("comm-arena"); ask `ds_comm.shm.symmetric_arena.arena_refusal` first.
    """

    def __init__(self, group: GroupLike, rows: int, width: int, dtype: torch.dtype) -> None:
        self.group = as_group(group)
        self.width, self.dtype = width, dtype
        self._arena = Arena(self.group)
        self.grow(rows)

    @property
    def local(self) -> Tensor:
        return self._part(self._buffers[self._turn], self.group.rank)

    def grow(self, rows: int) -> None:
        """Allocate at least `rows` rows a rank; what was published can be pulled no more. The same on every rank."""
        self.rows, self._turn = rows, 0
        every = (self.group.size * rows, self.width)
        wish = TensorRequest(every[0] * every[1], self.dtype, shared=True)
        self._buffers = [shared.view(every) for (shared,) in self._arena.allocate([wish, wish])]
        if not self._buffers:
            self._buffers = [torch.empty(every, dtype=self.dtype, device="cpu")] * 2
        self.everyone = self._buffers[1]

    def publish(self, unit: str = "") -> None:
        """Return when every rank has written its rows, and let them be pulled. About 3 us when all are ready."""
        self._arena.barrier(unit)
        self.show()

    def show(self) -> None:
        """Publish as `publish` does, but without a barrier of this window.

        The same ranks have passed a barrier of another window since all of them wrote.
        """
        self.everyone = self._buffers[self._turn]
        self._turn ^= 1

    def pull(self, source: int, index: Tensor, out: Tensor | None = None) -> Tensor:
        """Read rows `index` of the rows that rank `source` of the group published last, in that order.

        Args:
            index: [n], int64 or int32, on the CPU; rows may repeat.
            out: [n, width] to write into; new when None.
        Raises:
            CommError: there is no such rank, or a row is beyond the window ("comm-size").
        Cost: one read and one write of the rows.
        """
        if not 0 <= source < self.group.size:
            raise self._beyond(f"rank {source} of {self.group.size}")
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < self.rows:
            raise self._beyond(f"rows {int(index.min())} to {int(index.max())} of {self.rows}")
        published = self._part(self.everyone, source)
        if out is None:
            return published.index_select(0, index)
        torch.index_select(published, 0, index, out=out)
        return out

    def close(self) -> None:
        """End it. Tensors stay valid as long as they are referenced."""
        self._arena.close()

    def _part(self, buffer: Tensor, rank: int) -> Tensor:
        return buffer[rank * self.rows : (rank + 1) * self.rows]

    def _beyond(self, what: str) -> CommError:
        return CommError(
            f"a window of group {self.group.name!r} has not {what}",
            code="comm-size",
            fix="Pull from ranks within the group rows that they have room for; grow() makes more.",
        )
