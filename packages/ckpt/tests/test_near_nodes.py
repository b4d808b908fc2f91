"""Two nodes, each in a network namespace of its own: one is lost with its disk, and its shards come back from the other."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("near_node.py")


def _run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def nodes():
    """Names of two namespaces that a pair of virtual cables joins: 10.213.77.1 and .2."""
    names = [f"dsckpt{os.getpid()}{i}" for i in range(2)]
    if os.geteuid() or not shutil.which("ip") or _run("ip", "netns", "add", names[0]).returncode:
        pytest.skip("network namespaces need root and iproute2")
    try:
        made = [
            _run("ip", "netns", "add", names[1]),
            _run(
                "ip", "link", "add", "ds0", "netns", names[0], "type", "veth", "peer", "name", "ds0", "netns", names[1]
            ),
        ]
        for i, name in enumerate(names):
            made += [
                _run("ip", "-n", name, "addr", "add", f"10.213.77.{i + 1}/24", "dev", "ds0"),
                _run("ip", "-n", name, "link", "set", "ds0", "up"),
                _run("ip", "-n", name, "link", "set", "lo", "up"),
            ]
        if any(done.returncode for done in made):
            pytest.skip("no virtual cables here: " + " ".join(done.stderr for done in made))
        yield names
    finally:
        for name in names:
            _run("ip", "netns", "del", name)


@contextlib.contextmanager
def _job(nodes, root, steps, port):
    """A rank on each node; their processes."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER", "RANK", "WORLD", "LOCAL"))}
    ranks = []
    for rank, node in enumerate(nodes):
        place = {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.213.77.1",
            "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "ds0", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [
            "ip",
            "netns",
            "exec",
            node,
            sys.executable,
            str(SCRIPT),
            str(root / f"node{rank}"),
            str(root / "far"),
            str(steps),
        ]
        ranks.append(
            subprocess.Popen(
                command,
                env={**environment, **place},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate(timeout=200)


def _said(rank):
    line = rank.stdout.readline()
    assert line, rank.stderr.read()[-3000:]
    return json.loads(line)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_is_restored_from_its_neighbour(nodes, tmp_path, lost):
    with _job(nodes, tmp_path, 6, 29511) as ranks:
        for rank in ranks:
            assert _said(rank) == {"restored": None, "values": [0.0]}
            assert [_said(rank)["offered"] for _ in range(3)] == [2, 4, 6]
        ranks[lost].kill()  # -9, in the middle of the job
    shutil.rmtree(tmp_path / f"node{lost}")
    with _job(nodes, tmp_path, 0, 29512) as ranks:
        told = [_said(rank) for rank in ranks]
    step = told[0]["restored"]
    assert step in (4, 6)  # one interval at most
    assert told == [{"restored": step, "values": [step * 10.0 + rank]} for rank in range(2)]
