"""Messages from one rank to another. Signatures are torch.distributed's; `unit=` and `Group` as in `collectives`.

A message goes to the receive with the same tag on the same pair of ranks, in the order of posting. Sizes and dtypes must
agree; no one else watches these, so prefer collectives where they fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ds_comm.call import CollectiveCall
from ds_comm.groups import GroupLike, as_group
from ds_comm.work import Work
from ds_config.errors import CommError

__all__ = ["P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send"]


def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    unit: str = "",
) -> Work:
    """Start sending `tensor` to rank `dst`. It must not change before `wait()` returns."""
    call = CollectiveCall("send", as_group(group), unit)
    peer = call.peer(dst, group_dst)
    call.check(tensor)
    return call.start(tensor, True, lambda to: to.send(tensor, peer, tag), peer=peer)


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    unit: str = "",
) -> Work:
    """Start receiving into `tensor` from rank `src`, or from any rank when none is given and the backend can (gloo)."""
    call = CollectiveCall("recv", as_group(group), unit)
    peer = None if src is None and group_src is None else call.peer(src, group_src)
    call.check(tensor)
    return call.start(tensor, True, lambda to: to.recv(tensor, peer, tag), peer=-1 if peer is None else peer)


def send(
    tensor: Tensor,
    dst: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    unit: str = "",
) -> None:
    """Send `tensor` with `isend` and wait for completion."""
    isend(tensor, dst, group, tag, group_dst, unit=unit).wait()


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    unit: str = "",
) -> None:
    """Receive `tensor` with `irecv` and wait for completion."""
    irecv(tensor, src, group, tag, group_src, unit=unit).wait()


@dataclass(frozen=True, slots=True, eq=False)
class P2POp:
    """One message of a batch.

    Attributes:
        op: `isend` or `irecv`.
        peer: The other rank, of the world; or `group_peer`, within the group.
    """

    op: Callable[..., Work]
    tensor: Tensor
    peer: int | None = None
    group: GroupLike = None
    tag: int = 0
    group_peer: int | None = None
    unit: str = ""


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Start all messages at once, so that no order of sends and receives can block. Wait for every returned Work.

    On backends that fuse a batch into one launch (NCCL) this is torch's function; elsewhere messages are independent.
    """
    for p2p in p2p_op_list:
        if p2p.op not in (isend, irecv):
            raise CommError(
                f"a batch has isend and irecv of ds_comm, got {p2p.op!r}",
                code="comm-rank",
                fix="Pass ds_comm.isend or ds_comm.irecv as op.",
            )
    if any(p2p.tensor.device.type != "cpu" for p2p in p2p_op_list):
        return _fused(p2p_op_list)
    return [p2p.op(p2p.tensor, p2p.peer, p2p.group, p2p.tag, p2p.group_peer, unit=p2p.unit) for p2p in p2p_op_list]


def _fused(messages: Sequence[P2POp]) -> list[Work]:
    """Launch the messages of each process group as one batch."""
    groups: dict[Any, list[P2POp]] = {}
    for message in messages:
        groups.setdefault(as_group(message.group).link, []).append(message)
    works = []
    for batch in groups.values():
        call = CollectiveCall("batch_isend_irecv", as_group(batch[0].group), batch[0].unit)
        ops = [_as_torch(message) for message in batch]
        largest = max((message.tensor for message in batch), key=Tensor.numel)
        nbytes = sum(message.tensor.nbytes for message in batch)
        works.append(call.start(largest, True, lambda to, ops=ops: to.batch(ops), nbytes=nbytes))  # type: ignore[misc]
    return works


def _as_torch(p2p: P2POp) -> Any:
    group = as_group(p2p.group)
    call = CollectiveCall("batch_isend_irecv", group, p2p.unit)
    call.check(p2p.tensor)
    op = dist.isend if p2p.op is isend else dist.irecv
    return dist.P2POp(op, p2p.tensor, group.ranks[call.peer(p2p.peer, p2p.group_peer)], group.link, p2p.tag)
