"""Hosts that come and go, over a network that does: a cable is pulled, the others go on, the host leaves, and comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable

import pytest
from jobs import DEADLINE_S, Site
from machines import Host

Wait = Callable[[Callable[[], object], float], float]
LEAVE_S, MEET_S = 30.0, 90.0  # importing torch on a busy machine takes long

# A rank that marks which world it saw on which host, and waits for the word to end.
WAITER = """
    import os, pathlib, time
    marks = pathlib.Path(os.environ["MARKS"])
    (marks / f"{os.environ['WORLD_SIZE']}-{os.uname().nodename}-{os.getpid()}").touch()
    while not (marks / "end").exists(): time.sleep(0.05)
"""


def member(site: Site, node: Host, endpoint: str) -> subprocess.Popen[str]:
    words = (
        "run",
        "--nnodes",
        "1:3",
        "--nproc",
        "1",
        "--rdzv-endpoint",
        endpoint,
        "--run-id",
        "goes-on",
        "--grace",
        "1",
    )
    return site.ds(*words, "--max-restarts", "9", "--host-timeout", str(DEADLINE_S), site.script(WAITER), on=node)


def worlds(site: Site, size: int) -> set[str]:
    """Names of the hosts whose ranks saw a world of that size."""
    return {path.name.split("-")[1] for path in (site.folder / "marks").glob(f"{size}-*")}


def told(job: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = job.communicate(timeout=200)
    return job.returncode, out + err


@pytest.mark.timeout(400)
def test_a_cable_is_pulled_and_put_back(bare_site: Site, soon: Wait) -> None:
    site = bare_site
    keeper = site.ds("rendezvous", "--port", "29411", "--json")
    assert keeper.stdout is not None
    assert json.loads(keeper.stdout.readline())["endpoint"] == "hub:29411"
    alpha, beta, gamma = site.cluster.nodes
    jobs = {node.name: member(site, node, "hub:29411") for node in (alpha, beta, gamma)}
    soon(lambda: worlds(site, 3) == {"alpha", "beta", "gamma"}, MEET_S)
    for mark in (site.folder / "marks").glob("[23]-*"):
        mark.unlink()

    site.cluster.cable(beta, plugged=False)
    took = soon(lambda: worlds(site, 2) == {"alpha", "gamma"}, MEET_S)
    print(f"the others run again after {took:.1f} s")
    gone = soon(lambda: not site.on("beta"), LEAVE_S)
    print(f"the host that was cut off has nothing running {gone:.1f} s later")
    code, said = told(jobs["beta"])
    assert code != 0
    assert "the rendezvous hub:29411 " in said

    site.cluster.cable(beta, plugged=True)
    jobs["beta"] = member(site, beta, "hub:29411")
    back = soon(lambda: worlds(site, 3) == {"alpha", "beta", "gamma"}, MEET_S)
    print(f"it is back after {back:.1f} s")
    (site.folder / "marks" / "end").touch()
    ends = {name: told(job) for name, job in jobs.items()}
    assert {name: code for name, (code, _) in ends.items()} == {"alpha": 0, "beta": 0, "gamma": 0}
    assert f"host beta was lost: nothing heard from it for {DEADLINE_S:g} s" in ends["alpha"][1]
    for pid in site.on("hub", "ds_launcher rendezvous"):  # not through nsenter, which passes no signal on
        os.kill(pid, signal.SIGTERM)
    assert keeper.wait(timeout=200) == 0
