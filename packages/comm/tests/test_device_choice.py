"""Which device a rank takes, and what a bare backend of a device means. Pure."""

from __future__ import annotations

import pytest

from ds_comm.backend import choose_backend
from ds_comm.launch import read_launch
from ds_comm.process_group import device_index
from ds_config.errors import CommError

LAUNCH = read_launch(
    {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
)


@pytest.mark.parametrize(("local_rank", "count", "index"), [(0, 1, 0), (3, 1, 0), (3, 8, 3), (0, 8, 0), (2, 0, 2)])
def test_a_rank_that_sees_one_device_takes_it(local_rank: int, count: int, index: int) -> None:
    assert device_index(local_rank, count) == index


def test_two_ranks_do_not_share_a_device_unseen() -> None:
    with pytest.raises(CommError, match="local rank 4 of this host sees 2 devices"):
        device_index(4, 2)


@pytest.mark.parametrize("variable", [True, False])
def test_a_bare_backend_of_a_device_has_gloo_beside_it(variable: bool) -> None:
    assert LAUNCH is not None
    env = {"DS_COMM_BACKEND": "nccl"} if variable else {}
    requested = None if variable else "nccl"
    assert choose_backend(requested, env, LAUNCH, ("cuda", "nccl")).name == "cpu:gloo,cuda:nccl"
    assert choose_backend("cpu:gloo,cuda:nccl", {}, LAUNCH, ("cuda", "nccl")).name == "cpu:gloo,cuda:nccl"
    assert choose_backend("gloo", {}, LAUNCH, ("cuda", "nccl")).name == "gloo"
    assert choose_backend("gloo", {}, LAUNCH, ("cpu", "gloo")).name == "gloo"
