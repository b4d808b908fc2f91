"""A thread that works beside another one uses fewer threads, and only that thread."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch

from ds_ops import _call
from ds_ops.stream import copy_ranges
from ds_ops.threads import at_most, kernel_threads


@pytest.fixture(autouse=True)
def eight_threads():
    with mock.patch.object(torch, "get_num_threads", return_value=8):
        yield


def test_the_smallest_of_nested_limits_counts_and_ends_with_its_block() -> None:
    found = [kernel_threads()]
    with at_most(4):
        found.append(kernel_threads())
        with at_most(6):
            found.append(kernel_threads())
        with at_most(2):
            found.append(kernel_threads())
        found.append(kernel_threads())
    assert [*found, kernel_threads()] == [8, 4, 4, 2, 4, 8]


def test_there_is_always_one_and_never_more_than_torch_has() -> None:
    with at_most(0):
        assert kernel_threads() == 1
    with at_most(99):
        assert kernel_threads() == 8


def test_other_threads_are_not_concerned() -> None:
    found: list[int] = []
    with at_most(1):
        other = threading.Thread(target=lambda: found.append(kernel_threads()))
        other.start()
        other.join()
    assert found == [8]


def test_a_limit_ends_when_its_block_raises() -> None:
    with pytest.raises(ValueError, match="x"), at_most(3):
        raise ValueError("x")
    assert kernel_threads() == 8


def test_a_kernel_is_told_the_limit() -> None:
    module = mock.Mock(copy_ranges=mock.Mock(return_value=0))
    with mock.patch.object(_call, "native", return_value=module), at_most(3):
        copy_ranges(torch.empty(4), [(torch.ones(4), [(0, 0, 4)])])
    *_, threads = module.copy_ranges.call_args.args
    assert threads == 3
