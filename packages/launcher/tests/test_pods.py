"""`ds run` in a pod: what each operator sets, and what the command line says against it."""

from __future__ import annotations

import socket

import pytest

from ds_config.errors import ConfigError, LaunchError
from ds_launcher import pods
from ds_launcher.cli import main
from ds_launcher.launch_options import RunOptions
from ds_launcher.pods import await_name, in_pod, pod_options

OPTIONS = RunOptions("train.py")
SERVICE = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
OLD_PYTORCHJOB = {**SERVICE, "MASTER_ADDR": "gpt-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "4", "RANK": "2"}
# One that says how many ranks a pod has counts them all in WORLD_SIZE; RANK stays the pod's number.
PYTORCHJOB = {**OLD_PYTORCHJOB, "WORLD_SIZE": "32", "PET_NNODES": "4", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "2"}
ELASTIC = {
    **SERVICE, "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "gpt-worker-0:23456", "PET_RDZV_ID": "gpt",
    "PET_NNODES": "2:4", "PET_MAX_RESTARTS": "7", "PET_N_PROC_PER_NODE": "8",
}  # fmt: skip
TRAINJOB = {
    **SERVICE, "PET_NNODES": "4", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "3",
    "PET_MASTER_ADDR": "gpt-node-0-0.gpt", "PET_MASTER_PORT": "29400",
}  # fmt: skip
INDEXED = {**SERVICE, "JOB_COMPLETION_INDEX": "1"}


def place(options: RunOptions) -> tuple[str, int, str, str, int]:
    return options.nnodes, options.nproc, options.node_rank, options.master_addr, options.master_port


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (PYTORCHJOB, ("4", 8, "2", "gpt-master-0", 23456)),
        (OLD_PYTORCHJOB, ("4", -1, "2", "gpt-master-0", 23456)),
        (TRAINJOB, ("4", -1, "3", "gpt-node-0-0.gpt", 29400)),
        ({**OLD_PYTORCHJOB, "WORLD_SIZE": "1", "RANK": "0"}, ("1", -1, "auto", "", 0)),
        (INDEXED, ("", -1, "auto", "", 0)),
        (SERVICE, ("", -1, "auto", "", 0)),
    ],
)
def test_what_is_not_said_is_as_the_pod_has_it(env: dict[str, str], expected: tuple[str, int, str, str, int]) -> None:
    assert in_pod(env)
    assert place(pod_options(OPTIONS, env)) == expected


def test_an_indexed_job_tells_the_number_of_its_pod() -> None:
    asked = RunOptions("train.py", nnodes="4", nproc=8, master_addr="gpt-workers-0-0.gpt", master_port=29500)
    assert place(pod_options(asked, INDEXED)) == ("4", 8, "1", "gpt-workers-0-0.gpt", 29500)


def test_an_elastic_pytorchjob_is_hosts_that_come_and_go() -> None:
    found = pod_options(OPTIONS, ELASTIC)
    assert (found.nnodes, found.rdzv_endpoint, found.run_id) == ("2:4", "gpt-worker-0:23456", "gpt")
    assert (found.max_restarts, found.nproc, found.node_rank) == (7, 8, "auto")


def test_the_command_line_wins() -> None:
    asked = RunOptions("train.py", nnodes="2", nproc=1, node_rank="1", master_addr="here", master_port=5)
    assert pod_options(asked, PYTORCHJOB) == asked


@pytest.mark.parametrize(
    ("options", "env"),
    [
        (OPTIONS, {}),
        (OPTIONS, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}),
        (OPTIONS, {**PYTORCHJOB, "LOCAL_RANK": "0"}),
        (RunOptions("train.py", hostfile="hosts"), PYTORCHJOB),
        (RunOptions("train.py", world_info="x"), PYTORCHJOB),
    ],
)
def test_elsewhere_nothing_is_read(options: RunOptions, env: dict[str, str]) -> None:
    assert pod_options(options, env) == options


def test_a_number_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="PET_NODE_RANK is 'two'") as caught:
        pod_options(OPTIONS, {**PYTORCHJOB, "PET_NODE_RANK": "two"})
    assert caught.value.code == "launch-pod"


def test_ranks_of_a_pod_are_numbered_by_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in {**PYTORCHJOB, "PET_NPROC_PER_NODE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["run", "--dry-run", __file__]) == 0
    told = capsys.readouterr().out
    assert " RANK=4 " in told
    assert " RANK=5 " in told
    assert "MASTER_ADDR=gpt-master-0 MASTER_PORT=23456" in told
    assert "WORLD_SIZE=8" in told


def test_a_name_that_comes_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([socket.gaierror(-2, "unknown"), socket.gaierror(-2, "unknown"), []])

    def getaddrinfo(host: str, port: None) -> object:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(pods.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(pods, "_AGAIN_S", 0.0)
    await_name("gpt-master-0")
    assert next(answers, None) is None


def test_a_name_that_never_comes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(host: str, port: None) -> object:
        raise socket.gaierror(-2, "unknown")

    monkeypatch.setattr(pods.socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(LaunchError, match="gpt-master-0, the pod of rank 0, has no address") as caught:
        await_name("gpt-master-0", seconds=-1.0)
    assert caught.value.code == "launch-pod"
