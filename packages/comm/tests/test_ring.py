"""Stamps: what is written is read, by this process and by another one, also when it is dead."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_comm.watch.peer_rings import open_peer
from ds_comm.watch.stamp_ring import OPS, RingReader, StampRing


@pytest.fixture
def ring() -> StampRing:
    return StampRing()


@given(
    st.integers(0, 1 << 40),
    st.sampled_from(OPS),
    st.text(max_size=60),
    st.integers(-1, 1000),
    st.lists(st.integers(0, 5), max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn]),
)
def test_a_stamp_is_what_was_stamped(
    mark: int, op: str, unit: str, peer: int, shape: list[int], dtype: torch.dtype
) -> None:
    ring = StampRing()
    slot = ring.begin("3", "data", mark, (op, unit, peer), torch.empty(shape, dtype=dtype))
    (stamp,) = ring.stamps()
    assert (stamp.key, stamp.group, stamp.mark, stamp.op, stamp.peer) == ("3", "data", mark, op, peer)
    assert stamp.shape == tuple(shape)
    assert stamp.numel == torch.Size(shape).numel()
    assert f"torch.{stamp.dtype}" == str(dtype)
    tail = unit.encode()[-40:].rstrip(b"\0")
    assert stamp.unit.encode(errors="ignore")[-4:] == tail.decode(errors="replace").encode(errors="ignore")[-4:]
    assert ring.stamp(slot) == stamp
    ring.close()


def test_the_end_of_a_long_unit_is_kept(ring: StampRing) -> None:
    ring.begin("0", "world", 1, ("barrier", "model." * 20 + "layers.31.mlp.down_proj", -1), None)
    assert ring.stamps()[0].unit.endswith("layers.31.mlp.down_proj")


def test_states(ring: StampRing) -> None:
    slot = ring.begin("0", "world", 1, ("all_reduce", "", -1), torch.ones(2))
    assert not ring.stamps()[0].waits
    assert ring.blocked_since() == 0
    before = time.monotonic()
    ring.waiting(slot)
    assert ring.stamps()[0].waits
    assert before <= ring.blocked_since() <= time.monotonic()
    other = ring.begin("0", "world", 2, ("all_reduce", "", -1), torch.ones(2))
    ring.waiting(other)
    assert ring.blocked_since() == ring.stamps()[0].waited_s
    ring.ended(slot)
    assert ring.blocked_since() == ring.stamps()[1].waited_s
    ring.ended(other)
    assert ring.blocked_since() == 0


def test_the_ring_keeps_the_last_4096_in_half_a_megabyte(ring: StampRing) -> None:
    x = torch.ones(1)
    for mark in range(1, 5001):
        ring.begin("0", "world", mark, ("all_reduce", f"unit {mark}", -1), x)
    stamps = ring.stamps()
    assert [stamp.mark for stamp in stamps] == list(range(905, 5001))
    assert os.fstat(ring.fd).st_size < 1 << 20


def test_digests_are_equal_exactly_for_equal_operations() -> None:
    x = torch.ones(4)

    def digests(odd: tuple[int, tuple[str, str, int], torch.Tensor] | None = None) -> dict[str, dict[int, int]]:
        ring = StampRing()
        for mark in range(1, 200):
            what, tensor = ("all_reduce", f"layers.{mark % 7}", -1), x
            if odd is not None and mark == odd[0]:
                _, what, tensor = odd
            ring.begin("0", "world", mark, what, tensor)
            ring.begin("0", "world", 0, ("send", "", 1), x)  # messages have no place in the order
        found = ring.digests({})
        ring.close()
        return found

    same = digests()
    assert list(same["0"]) == [0, 1, 2]
    assert digests() == same
    for what, tensor in [
        (("all_reduce", "layers.0", -1), x),
        (("broadcast", "layers.2", 0), x),
        (("all_reduce", "layers.2", -1), torch.ones(5)),
        (("all_reduce", "layers.2", -1), x.double()),
    ]:
        other = digests((100, what, tensor))
        assert [block for block in other["0"] if other["0"][block] != same["0"][block]] == [1], what
    assert digests((100, ("all_reduce", "layers.2", -1), x)) == same
    assert StampRing.block_marks(1) == (65, 128)


def test_known_blocks_are_not_digested_again(ring: StampRing) -> None:
    for mark in range(1, 130):
        ring.begin("0", "world", mark, ("barrier", "", -1), None)
    assert list(ring.digests({"0": [0]})["0"]) == [1]


def test_uneven_operations_may_have_other_sizes_on_other_ranks() -> None:
    found = []
    for n in (1, 2):
        ring = StampRing()
        for mark in range(1, 65):
            ring.begin("0", "world", mark, ("all_to_all", "", -1), torch.ones(n))
        found.append(ring.digests({}))
        ring.close()
    assert found[0] == found[1]


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="rings of other processes are read through Linux' memfd")
@pytest.mark.parametrize("word", ["ValueError: boom", ""])
def test_the_ring_of_a_dead_process_is_read(word: str) -> None:
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        ring = StampRing()
        ring.begin("0", "world", 7, ("all_reduce", "layers.1", -1), torch.ones(3))
        if word:
            ring.goodbye(word)
        os.write(tell, str(ring.fd).encode())
        signal.pause()
    peer = open_peer(child, int(os.read(told, 16)))
    assert peer is not None
    assert peer.alive()
    os.kill(child, signal.SIGKILL)
    while peer.alive():  # it is a zombie soon: nobody has waited for it
        time.sleep(0.01)
    (stamp,) = peer.stamps()
    assert str(stamp) == "all_reduce[layers.1] #7 float32[3] of group 'world'"
    assert peer.end() == (word or f"its process {child} died without a word")
    os.waitpid(child, 0)
    assert not peer.alive()
    peer.close()
    assert open_peer(child, 3) is None


def test_readers_see_what_the_writer_adds_later(ring: StampRing) -> None:
    reader = RingReader(os.getpid(), ring.fd)
    assert reader.stamps() == []
    ring.begin("5", "tensor", 1, ("barrier", "x", -1), None)
    assert [stamp.group for stamp in reader.stamps()] == ["tensor"]
    reader.close()
