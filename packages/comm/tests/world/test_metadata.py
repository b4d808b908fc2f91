"""What ranks tell each other beside tensors: as it was given, and never a pickle."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist

import ds_comm
from ds_config.errors import CommError
from ds_testing import world


def check_counts() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    table = torch.arange(size * size * 3).view(size, size, 3)  # row a, column b: what a tells b
    assert torch.equal(ds_comm.all_to_all_counts(table[rank]), table[:, rank])
    flat = table[..., 0]
    assert torch.equal(ds_comm.all_to_all_counts(flat[rank].clone()), flat[:, rank])


@world(3)
def test_counts_on_gloo() -> None:
    check_counts()


@world(3, backend="shm")
def test_counts_on_shm() -> None:
    check_counts()


@world(3)
def test_json_of_any_length_reaches_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle, "dumps", None)
    monkeypatch.setattr(pickle, "loads", None)
    rank = dist.get_rank()
    values = [None, {"names": ["läyer", 1.5, True], "deep": [[rank] for rank in range(500)]}, ""]
    assert ds_comm.all_gather_json(values[rank]) == values
    assert ds_comm.broadcast_json(values[rank], group_src=1) == values[1]


def test_alone_it_is_what_the_others_would_see() -> None:
    assert ds_comm.all_gather_json({1: (2, 3)}) == [{"1": [2, 3]}]
    assert ds_comm.broadcast_json((1, None)) == [1, None]
    assert ds_comm.all_to_all_counts(torch.tensor([5])).tolist() == [5]


def test_what_is_cut_short_is_refused() -> None:
    from ds_comm import metadata

    packed = metadata._pack(list(range(100)))
    with pytest.raises(CommError, match="cut short"):
        metadata._unpack(packed[:-5])


@pytest.mark.parametrize("counts", [torch.zeros(1), torch.zeros(2, dtype=torch.int64), torch.tensor(1)])
def test_counts_that_are_none_are_refused(counts: torch.Tensor) -> None:
    with pytest.raises(CommError, match="all_to_all_counts"):
        ds_comm.all_to_all_counts(counts)


@world(3)
def test_differences_name_every_rank_s_value():
    rank = dist.get_rank()
    values = {"same": "1", "other": str(rank // 2), **({"lone": "x"} if rank == 1 else {})}
    assert ds_comm.find_differences(values) == {"other": ["0", "0", "1"], "lone": [None, "x", None]}
    assert ds_comm.find_differences({"b": "2", "a": "1"} if rank else {"a": "1", "b": "2"}) == {}
