"""Channels: what is sent arrives, in order, whatever its kinds and sizes, and no order of sends and receives blocks."""

from __future__ import annotations

import os
import pickle
import random
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_comm.channels import Channels
from ds_comm.channels.shm_ring import plan_ring
from ds_comm.channels.signature import MessageSignature
from ds_config.errors import CommError
from ds_testing import world

SHARED = pytest.mark.parametrize("shared", [True, False], ids=["memory", "messages"])


def message(salt: int, kind: int) -> tuple[Tensor, ...]:
    """The same on every rank. Kinds: usual, several dtypes and strides, empty tensors, none at all, several cells."""
    rng = torch.Generator().manual_seed(salt)
    usual = torch.randn(64, 33, generator=rng)
    return {
        0: (usual,),
        1: (usual.t(), (usual > 0)[:, ::2], usual.bfloat16(), torch.tensor(salt)),
        2: (torch.empty(0, 3), usual[:5]),
        3: (),
        4: (torch.randn(700, 500, generator=rng), usual.half()),
    }[kind]


def same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    alike = [
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in zip(found, wanted, strict=True)
    ]
    return all(alike) and all(a.is_contiguous() for a in found)


@SHARED
@world(2)
def test_messages_of_all_kinds_arrive_in_order(shared: bool) -> None:
    rank = dist.get_rank()
    kinds = [0, 0, 1, 0, 2, 3, 3, 1, 4, 4, 0, 4, 2, *random.Random(1).choices(range(5), k=40)]
    channels = Channels(None, shared=shared)
    if rank == 0:
        sender = channels.sender(1)
        works = [sender.send(message(number, kind)) for number, kind in enumerate(kinds)]
        for work in works:
            work.wait()
            assert work.is_completed()
    else:
        for number, kind in enumerate(kinds):
            assert same(channels.receiver(0).recv(), message(number, kind)), (number, kind)
    dist.barrier()
    channels.close()


@SHARED
@world(2, timeout=20.0)
def test_what_was_sent_before_the_receiver_came_is_there(shared: bool) -> None:
    """The sender was interrupted or left: after the first cell it had waited for the receiver to open the channel."""
    channels = Channels(None, shared=shared)
    if dist.get_rank() == 0:
        works = [channels.sender(1).send(message(7, kind)) for kind in (0, 1)]
    dist.barrier()
    if dist.get_rank() == 1:
        for kind in (0, 1):
            assert same(channels.receiver(0).recv(), message(7, kind))
    dist.barrier()  # the sender has not waited for its works until here
    if dist.get_rank() == 0:
        for work in works:
            work.wait()
    channels.close()


@SHARED
@world(2)
def test_tensors_of_one_message_are_changed_apart(shared: bool) -> None:
    """They may lie in one buffer: a change of one is none of what autograd saved of the other."""
    channels = Channels(None, shared=shared)
    if dist.get_rank() == 0:
        for _ in range(3):  # the first is not packed
            channels.sender(1).send((torch.ones(3), torch.full((4,), 2.0))).wait()
    else:
        for _ in range(3):
            first, second = channels.receiver(0).recv()
            out = first.requires_grad_().square().sum()
            second.mul_(5)
            out.backward()
            assert torch.equal(first.grad, torch.full((3,), 2.0))
            assert torch.equal(second, torch.full((4,), 10.0))
    dist.barrier()
    channels.close()


@SHARED
@world(2)
def test_what_is_kept_of_a_message_is_not_written_by_later_ones(shared: bool) -> None:
    """Buffers are used again once nobody has a tensor of them, also none that autograd saved."""
    channels, numel = Channels(None, shared=shared), 1000
    if dist.get_rank() == 0:
        sender = channels.sender(1)
        works = [sender.send((torch.full((numel,), float(i)), torch.full((2, 3), i).t())) for i in range(40)]
        for work in works:
            work.wait()
        source = torch.zeros(numel)
        for i in range(40):  # and the sender's own memory is read before `wait` returns, not later
            source.fill_(float(i))
            sender.send((source, torch.full((2, 3), i).t())).wait()
    else:
        receiver, kept, graphs = channels.receiver(0), [], []
        weight = torch.ones(numel, requires_grad=True)
        for i in range(40):
            first, second = receiver.recv()
            if i % 3 == 0:
                kept.append((i, second))
            if i % 4 == 0:
                graphs.append((i, (weight * first).sum()))  # holds `first`
        for i, second in kept:
            assert second.tolist() == [[i, i]] * 3
        for i, loss in graphs:
            (grad,) = torch.autograd.grad(loss, weight)
            assert grad.eq(float(i)).all()
        for i in range(40):
            first, _ = receiver.recv()
            assert first.eq(float(i)).all()
    dist.barrier()
    channels.close()


@world(2)
def test_small_messages_over_gloo_use_their_memory_again() -> None:
    channels, places = Channels(None, shared=False), set()
    for i in range(12):
        if dist.get_rank() == 0:
            channels.sender(1).send((torch.full((100,), float(i)),)).wait()
        else:
            (tensor,) = channels.receiver(0).recv()
            assert tensor.eq(float(i)).all()
            places.add(tensor.data_ptr())
    assert len(places) <= 4
    dist.barrier()
    channels.close()


@world(2, backend="shm")
def test_a_group_on_shm_has_channels_too() -> None:
    channels = Channels()
    if dist.get_rank() == 0:
        channels.sender(1, 3).send(message(1, 1)).wait()
    else:
        assert same(channels.receiver(0, 3).recv(), message(1, 1))
    dist.barrier()


@SHARED
@world(3)
def test_no_order_of_sends_and_receives_blocks(shared: bool) -> None:
    """Everyone sends to everyone before anyone receives, more than there is room for; then receives in another order."""
    rank, size, count = dist.get_rank(), dist.get_world_size(), 7
    channels = Channels(None, shared=shared, depth=1)
    others = [r for r in range(size) if r != rank]
    works = [
        channels.sender(to, tag).send(message(100 * rank + 10 * tag + n, 4))
        for n in range(count)
        for tag in (0, 1)
        for to in others
    ]
    for tag in (1, 0):
        for source in reversed(others):
            for n in range(count):
                assert same(channels.receiver(source, tag).recv(), message(100 * source + 10 * tag + n, 4))
    for work in works:
        work.wait()
    dist.barrier()


@SHARED
@world(2)
def test_a_receive_is_posted_ahead_and_waited_for_in_any_order(shared: bool) -> None:
    channels = Channels(None, shared=shared)
    if dist.get_rank() == 0:
        for n in range(6):
            channels.sender(1).send(message(n, n % 2)).wait()
    else:
        coming = [channels.receiver(0).post() for _ in range(6)]
        for n in (3, 0, 5, 1, 2, 4):
            assert same(coming[n].wait(), message(n, n % 2))
            assert coming[n].is_completed()
    dist.barrier()


@world(2)
def test_one_who_only_looks_is_told() -> None:
    channels = Channels()
    if dist.get_rank() == 0:
        dist.barrier()
        channels.sender(1).send(message(1, 4)).wait()
    else:
        coming = channels.receiver(0).post()
        assert not coming.is_completed()
        dist.barrier()
        while not coming.is_completed():
            pass
        assert same(coming.wait(), message(1, 4))
    dist.barrier()


@world(2)
def test_what_requires_a_gradient_is_sent_without_its_graph() -> None:
    for shared in (True, False):
        channels = Channels(None, shared=shared)
        if dist.get_rank() == 0:
            x = torch.ones(3, requires_grad=True)
            channels.sender(1).send((x, x * 2)).wait()
        else:
            found = channels.receiver(0).recv()
            assert [t.tolist() for t in found] == [[1] * 3, [2] * 3]
            assert not any(t.requires_grad for t in found)
        dist.barrier()


@SHARED
@world(2)
def test_a_steady_stream_pickles_nothing_and_leaves_nothing_open(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle, "dumps", None)
    monkeypatch.setattr(pickle, "loads", None)
    for _ in range(2):
        before = len(os.listdir("/proc/self/fd"))
        channels = Channels(None, shared=shared)
        for n in range(20):
            if dist.get_rank() == 0:
                channels.sender(1).send(message(n, 0)).wait()
            else:
                assert same(channels.receiver(0).recv(), message(n, 0))
        dist.barrier()
        channels.close()
        del channels
    dist.barrier()
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the connection to the store is closed when it is collected


@world(2)
def test_no_rank_connects_to_a_store_that_may_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first message of a pipeline may be waited for after the rank that serves the store was killed."""
    channels = Channels(None)
    monkeypatch.delattr("ds_comm.channels.rings.second_connection")
    if dist.get_rank() == 0:
        channels.sender(1).send(message(0, 0)).wait()
        channels._rings._store = Mock(set=Mock(side_effect=dist.DistNetworkError("Broken pipe")))
        with pytest.raises(CommError, match=r"send.* failed: Broken pipe"):
            channels.sender(1, tag=1).send(message(0, 0))
    else:
        assert same(channels.receiver(0).recv(), message(0, 0))
    dist.barrier()


@world(2)
def test_a_rank_that_does_not_come_is_named() -> None:
    channels = Channels(None, timeout_s=0.2)
    if dist.get_rank() == 1:
        with pytest.raises(CommError, match=r"recv\[hidden\] of group 'world': rank 0 did not come within 0 s"):
            channels.receiver(0, unit="hidden").recv()
    dist.barrier()
    with pytest.raises(CommError, match="a channel with rank 2 of group 'world' of 2"):
        channels.sender(2)


def test_cells_hold_every_byte_once() -> None:
    signature = MessageSignature(
        (
            (torch.float32, torch.Size((7, 9)), False),
            (torch.int8, torch.Size((130,)), True),
            (torch.half, torch.Size(()), False),
        )
    )
    for cell_bytes in (64, 100, 4096):
        seen = [bytearray(size) for size in signature.sizes]
        for pieces in signature.cells(cell_bytes):
            for piece in pieces:
                assert piece.place + piece.stop - piece.start <= cell_bytes
                for at in range(piece.start, piece.stop):
                    seen[piece.leaf][at] += 1
        assert all(set(one) == {1} for one in seen)
    assert MessageSignature.parse(signature.text()) == signature


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[[1]]", b'[["float32",[1]]]', b'[["system",[1],0]]', b'[["float32",[-1],0]]', b'[["float32","x",0]]'],
)
def test_a_signature_that_is_none_is_refused(text: bytes) -> None:
    with pytest.raises(CommError, match="signature that is none"):
        MessageSignature.parse(text)


@pytest.mark.parametrize(("nbytes", "depth"), [(0, 1), (1, 1), (65536, 2), (256 << 10, 4), ((256 << 10) + 1, 2)])
def test_a_ring_has_room_for_what_it_is_planned_for(nbytes: int, depth: int) -> None:
    plan = plan_ring(nbytes, depth)
    assert plan.cells >= 8
    assert plan.cell_bytes == 256 << 10, "also after a small first message: larger ones follow"
    assert plan.cells * plan.cell_bytes >= nbytes * depth
    assert plan.cell_bytes % 4096 == plan.cells_at % 4096 == 0
