"""Rank arithmetic and the environment of a rank; ports that stay ours."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_config.errors import ConfigError, LaunchError
from ds_launcher.ports import hold_port
from ds_launcher.rank_env import World, node_rank_from, omp_threads, rank_env


@given(st.lists(st.integers(1, 8), min_size=1, max_size=8))
def test_every_global_rank_exists_once_and_nodes_are_contiguous(sizes: list[int]) -> None:
    envs = [
        rank_env(World(tuple(sizes), node, "h", 1, "id"), local)
        for node, size in enumerate(sizes)
        for local in range(size)
    ]
    assert [int(env["RANK"]) for env in envs] == list(range(sum(sizes)))
    assert {env["WORLD_SIZE"] for env in envs} == {str(sum(sizes))}
    for env in envs:
        node = int(env["GROUP_RANK"])
        assert int(env["LOCAL_RANK"]) == int(env["RANK"]) - sum(sizes[:node])
        assert int(env["LOCAL_SIZE"]) == int(env["LOCAL_WORLD_SIZE"]) == sizes[node]
        assert env["CROSS_RANK"] == env["GROUP_RANK"]
        assert env["CROSS_SIZE"] == env["GROUP_WORLD_SIZE"] == str(len(sizes))


def test_a_rank_gets_what_torchrun_gives() -> None:
    env = rank_env(World((2, 2), 1, "head", 29500, "job"), 1)
    torchrun = (
        "LOCAL_RANK RANK GROUP_RANK ROLE_RANK ROLE_NAME LOCAL_WORLD_SIZE WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE "
        "MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID "
        "TORCHELASTIC_USE_AGENT_STORE TORCH_NCCL_ASYNC_ERROR_HANDLING"
    )
    assert set(torchrun.split()) | {"LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"} == set(env)
    assert (env["RANK"], env["MASTER_ADDR"], env["MASTER_PORT"]) == ("3", "head", "29500")
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"  # torch compares with "True"


@pytest.mark.parametrize(("cores", "size", "threads"), [(8, 2, 4), (2, 4, 1), (7, 2, 3), (4, 0, 4)])
def test_threads_share_the_cores(cores: int, size: int, threads: int) -> None:
    assert omp_threads(cores, size) == threads


@pytest.mark.parametrize(
    ("env", "hostname", "rank"),
    [
        ({"SLURMD_NODENAME": "n2", "SLURM_NODEID": "0"}, "login", 1),  # the name wins: Slurm numbers by its own order
        ({}, "n1.cluster.local", 0),
        ({"SLURM_NODEID": "1"}, "other", 1),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "other", 1),
        ({"PMI_RANK": "0"}, "other", 0),
    ],
)
def test_which_node_this_is(env: dict[str, str], hostname: str, rank: int) -> None:
    assert node_rank_from(env, ("n1", "n2"), hostname) == rank


def test_one_node_needs_no_hint_and_two_do() -> None:
    assert node_rank_from({}, ("localhost",), "anything") == 0
    with pytest.raises(ConfigError, match="nothing says which one 'x' is") as caught:
        node_rank_from({}, ("n1", "n2"), "x")
    assert caught.value.code == "launch-node-rank"


def listen(port: int) -> socket.socket:
    """As a TCP store does: both families, SO_REUSEADDR, then listen."""
    return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_a_held_port_is_for_the_store_and_for_nobody_who_asks_for_a_free_one() -> None:
    with hold_port() as port, hold_port() as other:
        assert port != other
        taken = []
        for _ in range(2000):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                taken.append(probe.getsockname()[1])
        assert port not in taken
        with listen(port), socket.create_connection(("127.0.0.1", port), timeout=5):
            pass


def test_a_port_somebody_listens_on_is_refused_with_its_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} ") as caught, hold_port(port):
            pass
    assert caught.value.code == "launch-port"
    with hold_port(port) as held:
        assert held == port
