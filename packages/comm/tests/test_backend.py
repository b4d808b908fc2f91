"""Which backend: the caller, the environment, the device, the places of the ranks, in this order."""

from __future__ import annotations

import pytest

from ds_comm.backend import BackendChoice, choose_backend, settle
from ds_comm.launch import LaunchedProcess

CPU, CUDA = ("cpu", "gloo"), ("cuda", "nccl")


def launch(world: int, local: int) -> LaunchedProcess:
    return LaunchedProcess("torchrun", 0, world, 0, local, "host", 1234, "job")


@pytest.mark.parametrize(
    ("asked", "env", "ranks", "device", "name", "otherwise"),
    [
        (None, {}, (2, 2), CPU, "shm", "gloo"),
        (None, {}, (8, 4), CPU, "gloo", ""),
        (None, {}, (8, 0), CPU, "gloo", ""),
        (None, {}, (1, 1), CPU, "gloo", ""),
        (None, {}, (2, 2), CUDA, "cpu:gloo,cuda:nccl", ""),
        (None, {"DS_COMM_BACKEND": "gloo"}, (2, 2), CPU, "gloo", ""),
        (None, {"DS_COMM_BACKEND": ""}, (2, 2), CPU, "shm", "gloo"),
        (None, {"DS_COMM_BACKEND": "mpi"}, (2, 2), CUDA, "mpi", ""),
        ("shm", {"DS_COMM_BACKEND": "gloo"}, (8, 4), CPU, "shm", ""),
    ],
)
def test_who_decides(
    asked: str | None, env: dict[str, str], ranks: tuple[int, int], device: tuple[str, str], name: str, otherwise: str
) -> None:
    choice = choose_backend(asked, env, launch(*ranks), device)
    assert (choice.name, choice.otherwise) == (name, otherwise)
    assert choice.why


def test_one_refusal_is_enough_and_is_told() -> None:
    choice = BackendChoice("shm", "all 3 ranks are on this host", otherwise="gloo")
    assert settle(choice, ["", "", ""]) is choice
    assert settle(choice, ["", "no memfd", ""]) == BackendChoice("gloo", "shm cannot be used, rank 1: no memfd")
    assert settle(choice, ["a", "b", "c"]).why.endswith("rank 0: a (and 2 more)")
