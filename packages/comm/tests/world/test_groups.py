"""A twin has the same ranks and carries the traffic of another thread."""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ds_comm
from ds_comm import (
    Mesh,
    MeshSpec,
    all_gather_single,
    all_reduce,
    as_group,
    destroy_group,
    duplicate_group,
    new_group,
    new_local_group,
    self_group,
)
from ds_config.errors import CommError
from ds_testing import world


@world(3)
def test_a_twin_is_made_by_its_members_alone_and_does_not_mix_with_them():
    inner = new_group([0, 2], "inner")
    if inner is not None:
        twin = duplicate_group(inner, "behind")
        assert (twin.ranks, twin.rank, twin.name) == (inner.ranks, inner.rank, "behind")
        assert twin.pg is not inner.pg
        rows = torch.zeros(2, dtype=torch.int64)

        def behind():
            all_gather_single(rows, torch.tensor([dist.get_rank()]), twin)

        # Rank 0 begins with the twin, rank 2 with the group: on one group this would not end.
        thread = threading.Thread(target=behind)
        if inner.rank == 0:
            thread.start()
        total = torch.ones(1)
        all_reduce(total, group=inner)
        if inner.rank == 1:
            thread.start()
        thread.join(30)
        assert (total.item(), rows.tolist()) == (2, [0, 2])
        destroy_group(twin)
    dist.barrier()


@world(4)
def test_members_alone_make_a_group_again_and_again():
    rank = dist.get_rank()
    ranks = ((0, 2), (1, 3))[rank % 2]
    more = new_local_group((0, 1), "more") if rank < 2 else None  # ranks 0 and 2 have unequal numbers of groups now
    for number in range(3):
        group = new_local_group(ranks, "part")
        twin = duplicate_group(group, "twin", None)
        total = torch.tensor([float(number)])
        all_reduce(total, group=twin)
        all_reduce(total, group=group)
        assert (total.item(), group.rank, group.ranks) == (4.0 * number, rank // 2, ranks)
        destroy_group(twin)
        destroy_group(group)
    if more is not None:
        destroy_group(more)
    with pytest.raises(CommError, match="Make it on its members only"):
        new_local_group([other for other in range(4) if other != rank], "others")


def test_a_group_of_one_is_its_own_twin():
    alone = self_group()
    assert duplicate_group(alone, "behind") is alone
    destroy_group(alone)


@world(2)
def test_a_group_of_one_is_one_rank_to_torch():
    """Its `pg` was None, which is the world to torch."""
    rank = dist.get_rank()
    mesh = Mesh.build(MeshSpec(tensor=2))
    for group in (mesh["data"], mesh["pipe"], self_group("own", rank)):
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total, group=group.pg)
        assert (total.item(), dist.get_world_size(group.pg), dist.get_rank(group.pg)) == (rank + 1, 1, 0)
        assert dist.get_process_group_ranks(group.pg) == [rank]
    assert mesh["data"].pg is self_group("other", rank).pg  # one of a process, whatever shares nothing
    again = as_group(mesh["data"].pg)
    assert (again.ranks, again.size, again.pg) == ((rank,), 1, mesh["data"].pg)
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, rank + 1.0)
    wrapped = DistributedDataParallel(model, process_group=mesh["data"].pg)
    wrapped(torch.full((1, 2), 10.0 * (rank + 1))).sum().backward()
    assert model.weight.tolist() == [[rank + 1.0] * 2]
    assert model.weight.grad.tolist() == [[10.0 * (rank + 1)] * 2]


@world(2)
def test_a_group_of_one_needs_no_other_rank():
    if dist.get_rank() == 1:
        group = self_group("own", 1)
        first = group.pg
        dist.destroy_process_group(first)
        assert group.pg is not first  # and is made again where somebody has destroyed it
        dist.barrier(group=group.pg)
    dist.barrier()


@world(2)
def test_a_group_of_one_that_was_given_is_kept():
    given = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    group = as_group(given)
    assert (group.size, group.pg) == (1, given)
    x = torch.ones(1)
    all_reduce(x, group=group)
    assert x.item() == 1


ABSENT = [((1, 3), (3,)), ((1, 3), (1,)), ((0, 1, 2, 3), (2,)), ((1, 2, 3), (1, 2)), ((0, 1, 3), (1, 3))]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@world(4, backend=None)
def test_a_monitored_barrier_names_the_missing_ranks_of_any_group(backend: str) -> None:
    """By their ranks in the world, on every rank that came, also where the first rank of the group is missing."""
    ds_comm.init_distributed(backend)
    try:
        me = dist.get_rank()
        for ranks, absent in ABSENT:
            group = dist.new_group(list(ranks))
            if me in ranks:
                ds_comm.monitored_barrier(group, timedelta(seconds=20))
                ds_comm.barrier(group)
            if me in ranks and me not in absent:
                with pytest.raises(CommError) as caught:
                    ds_comm.monitored_barrier(group, timedelta(seconds=0.5), wait_all_ranks=len(absent) > 1)
                assert caught.value.code == "comm-timeout"
                named = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
                assert f": {named} did not come within 0.5 s" in str(caught.value)
            elif me in ranks:
                time.sleep(1.5)
    finally:
        ds_comm.destroy_process_group()


def _gloo_threads() -> dict[int, int]:
    """Scheduling policies of this process's gloo threads by thread."""
    tasks = [t for t in Path("/proc/self/task").iterdir() if (t / "comm").read_text().strip() == "gloo_tcp_loop"]
    return {int(t.name): os.sched_getscheduler(int(t.name)) for t in tasks}


@pytest.mark.parametrize(("cores", "policy"), [(3, os.SCHED_BATCH), (4, os.SCHED_OTHER)])
@world(2)
def test_gloo_waits_for_a_running_thread_where_there_are_no_cores_for_both(cores, policy):
    before = set(_gloo_threads())
    chosen, plain = (dist.new_group([0, 1]) for _ in range(2))
    first, second = sorted(set(_gloo_threads()) - before)
    os.sched_setscheduler(first, os.SCHED_IDLE, os.sched_param(0))
    with mock.patch("os.sched_getaffinity", return_value=set(range(cores))):
        as_group(chosen), as_group(plain)
    after = _gloo_threads()
    assert (after[first], after[second]) == (os.SCHED_IDLE, policy)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER  # a rank's own thread is as it was
    dist.destroy_process_group(chosen)
    dist.destroy_process_group(plain)
