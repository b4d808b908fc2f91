"""Every collective in a world of one: the same code, no process group, nothing sent."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist

import ds_comm
from ds_config.errors import CommError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]


def values(n: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(n) % 2 + 1).to(dtype)


def test_the_world_is_one_group_without_a_process_group() -> None:
    assert ds_comm.init_distributed().size == 1
    assert not dist.is_initialized()
    group = ds_comm.world_group()
    assert (group.ranks, group.rank, group.global_rank, group.pg) == ((0,), 0, 0, None)
    assert ds_comm.as_group(group) is group
    assert ds_comm.as_group(None).size == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 7])
def test_results_are_the_arguments(n: int, dtype: torch.dtype) -> None:
    x = values(n, dtype)

    def out() -> torch.Tensor:
        return torch.zeros(n, dtype=dtype)

    y = x.clone()
    for work in (
        ds_comm.all_reduce(y),
        ds_comm.reduce(y, 0),
        ds_comm.broadcast(y, group_src=0, async_op=True),
        ds_comm.all_reduce_coalesced([y]),
        ds_comm.barrier(),
    ):
        assert work.is_completed()
        assert work.wait()
    assert torch.equal(y, x)

    results = [out() for _ in range(9)]
    ds_comm.all_gather_single(results[0], x)
    ds_comm.all_gather([results[1]], x)
    ds_comm.reduce_scatter_single(results[2], x)
    ds_comm.reduce_scatter(results[3], [x])
    ds_comm.all_to_all_single(results[4], x)
    ds_comm.all_to_all([results[5]], [x])
    ds_comm.gather(x, [results[6]])
    ds_comm.scatter(results[7], [x])
    ds_comm.all_gather_coalesced([results[8]], [x])
    for result in results:
        assert torch.equal(result, x)
    last = out()
    ds_comm.reduce_scatter_coalesced([last], [x])
    assert torch.equal(last, x)
    ds_comm.monitored_barrier()


def test_objects() -> None:
    gathered, received, one = [None], ["a", {"b": 1}], [None]
    ds_comm.all_gather_object(gathered, {"x": 1})
    assert gathered == [{"x": 1}]
    ds_comm.broadcast_object_list(received)
    assert received == ["a", {"b": 1}]
    ds_comm.gather_object("y", gathered)
    assert gathered == ["y"]
    ds_comm.scatter_object_list(one, ["z"])
    assert one == ["z"]


def test_a_part_may_be_the_whole() -> None:
    x = torch.arange(4.0)
    ds_comm.all_gather_single(x, x)
    ds_comm.reduce_scatter_single(x, x)
    assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ds_comm.all_gather_single(torch.zeros(3), torch.zeros(2)), "output_tensor has 3 elements"),
        (lambda: ds_comm.reduce_scatter_single(torch.zeros(2), torch.zeros(3)), "input has 3 elements, output 2"),
        (lambda: ds_comm.all_gather([torch.zeros(1)] * 2, torch.zeros(1)), "tensor_list has 2 places, 1 are needed"),
        (
            lambda: ds_comm.all_to_all_single(torch.zeros(2), torch.zeros(2), [1], [2]),
            "output has 2 places, its sizes are",
        ),
        (lambda: ds_comm.all_to_all_single(torch.zeros(2), torch.zeros(3)), "input part for itself 3"),
        (lambda: ds_comm.reduce_scatter(torch.zeros(2), [torch.zeros(1)]), "1 elements, 2 are needed"),
        (lambda: ds_comm.gather(torch.zeros(2)), "gather_list is given on rank 0"),
        (lambda: ds_comm.scatter(torch.zeros(2), []), "scatter_list is given on rank 0"),
        (lambda: ds_comm.all_gather_coalesced([torch.zeros(1)], []), "0 input_tensors for 1 output_tensors"),
        (lambda: ds_comm.all_gather_object([], 1), "object_list has 0 places"),
    ],
)
def test_sizes_are_checked(call: object, message: str) -> None:
    with pytest.raises(CommError, match=message) as caught:
        call()  # type: ignore[operator]
    assert caught.value.code == "comm-size"


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: ds_comm.all_reduce(torch.zeros(4, 4).t()), "comm-layout"),
        (lambda: ds_comm.all_gather_single(torch.zeros(2), torch.zeros(2, dtype=torch.int64)), "comm-layout"),
        (lambda: ds_comm.broadcast(torch.zeros(1)), "comm-rank"),
        (lambda: ds_comm.broadcast(torch.zeros(1), 0, group_src=0), "comm-rank"),
        (lambda: ds_comm.broadcast(torch.zeros(1), 1), "comm-rank"),
        (lambda: ds_comm.broadcast(torch.zeros(1), group_src=1), "comm-rank"),
        (lambda: ds_comm.send(torch.zeros(1), 0), "comm-rank"),
        (lambda: ds_comm.new_group([0, 1], "pair"), "comm-rank"),
        (lambda: ds_comm.as_group(dist.GroupMember.NON_GROUP_MEMBER), "comm-not-member"),
        (lambda: ds_comm.batch_isend_irecv([ds_comm.P2POp(print, torch.zeros(1), 0)]), "comm-rank"),
    ],
)
def test_wrong_arguments_are_told(call: object, code: str) -> None:
    with pytest.raises(CommError) as caught:
        call()  # type: ignore[operator]
    assert caught.value.code == code
    assert caught.value.fix


def test_messages_name_operation_unit_and_group() -> None:
    with pytest.raises(CommError, match=r"all_gather_single\[layers\.7\.mlp\] of group 'world'") as caught:
        ds_comm.all_gather_single(torch.zeros(3), torch.zeros(2), unit="layers.7.mlp")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_groups_of_one() -> None:
    group = ds_comm.new_group([0], "alone")
    assert group is not None
    assert (group.name, group.size, group.index(0)) == ("alone", 1, 0)
    with pytest.raises(ValueError, match="process group is needed"):
        ds_comm.Group("pair", (0, 1), 0)
    assert "0" in repr(group)
