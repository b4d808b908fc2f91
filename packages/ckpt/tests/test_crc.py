"""Checksums of parts add up to the checksum of the whole."""

import zlib

from hypothesis import given
from hypothesis import strategies as st

from ds_ckpt.crc import crc32, shifted


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_contributions_of_segments_xor_to_the_whole(segments):
    whole = b"".join(segments)
    total, after = 0, len(whole)
    for segment in segments:
        after -= len(segment)
        total ^= shifted(crc32(segment), after)
    assert total == zlib.crc32(whole)


def test_long_distances_are_cheap_and_right():
    tail = bytes(3_000_001)
    assert shifted(crc32(b"head"), len(tail)) ^ crc32(tail) == zlib.crc32(b"head" + tail)
