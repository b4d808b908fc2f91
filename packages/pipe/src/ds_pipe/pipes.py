"""Bytes from rank to rank, by `ds_comm.p2p`: what a link stands on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

import ds_comm
from ds_comm import Group
from ds_pipe.wire import Message

__all__ = ["PeerPipe"]


@dataclass(frozen=True, slots=True)
class PeerPipe:
    """One direction between this rank and a peer.

    Attributes:
        group: With both ranks in it.
        peer: Index of the other in `group`.
        tag: The same on both sides, another for every direction and stage.
    """

    group: Group
    peer: int
    tag: int

    def send(self, data: Tensor) -> Message:
        """Start sending."""
        return ds_comm.isend(data, group=self.group, group_dst=self.peer, tag=self.tag, unit="pipe")

    def recv(self, data: Tensor) -> Message:
        """Start receiving."""
        return ds_comm.irecv(data, group=self.group, group_src=self.peer, tag=self.tag, unit="pipe")
