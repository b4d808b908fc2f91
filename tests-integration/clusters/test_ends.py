"""Every way to start a job on several hosts, ended in every way: soon nobody is left, and who was to blame is named."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
from jobs import DEADLINE_S, SLEEPER, Site
from ways import WAYS, way

WITHIN_S = 2.0
GRACE_S = 1.0  # --grace: what asks for time gets it
Wait = Callable[[Callable[[], object], float], float]


@pytest.fixture(params=WAYS)
def launcher(request: pytest.FixtureRequest, site: Site) -> str:
    """One of them; its site has what it needs."""
    way(request.param, site, request)
    return str(request.param)


def finish(job: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = job.communicate(timeout=200)
    return job.returncode, out + err


@pytest.fixture
def job(site: Site, launcher: str, soon: Wait) -> subprocess.Popen[str]:
    """Three ranks that wait, one a node."""
    started = site.run(launcher, site.script(SLEEPER))
    soon(lambda: site.ready() or started.poll() is not None, 30)
    if started.poll() is not None:
        pytest.fail("\n".join(map(str, finish(started))))
    time.sleep(0.5)  # the hosts have heard each other
    return started


def rank_on(site: Site, name: str) -> int:
    found = site.on(name, "-u", "train.py")
    ranks = [pid for pid in found if "ds_launcher" not in site.alive()[pid]]
    return max(ranks)


def test_a_rank_is_killed(site: Site, job: subprocess.Popen[str], soon: Wait) -> None:
    os.kill(rank_on(site, "beta"), signal.SIGKILL)
    took = soon(lambda: not site.alive(), WITHIN_S + GRACE_S)
    code, said = finish(job)
    print(f"{took:.2f} s")
    assert code != 0
    assert "rank 1" in said
    assert "SIGKILL" in said
    assert not site.segments()


def test_an_agent_is_killed(site: Site, job: subprocess.Popen[str], soon: Wait) -> None:
    for pid in site.on("beta", "ds_launcher.keeper"):
        os.kill(pid, signal.SIGKILL)
    took = soon(lambda: not site.alive(), WITHIN_S + DEADLINE_S + GRACE_S)
    code, said = finish(job)
    print(f"{took:.2f} s")
    assert code != 0
    assert "beta" in said or "keeper process was ended" in said


def test_the_launcher_is_killed(site: Site, job: subprocess.Popen[str], soon: Wait) -> None:
    for pid in site.on("hub", "ds_launcher"):
        os.kill(pid, signal.SIGKILL)
    took = soon(lambda: not site.alive(), WITHIN_S + DEADLINE_S + GRACE_S)
    print(f"{took:.2f} s")
    finish(job)


def test_a_cable_is_pulled(site: Site, job: subprocess.Popen[str], soon: Wait) -> None:
    site.cluster.cable(site.cluster.nodes[1], plugged=False)
    took = soon(lambda: not site.alive(), WITHIN_S + DEADLINE_S + GRACE_S)
    code, said = finish(job)
    print(f"{took:.2f} s")
    assert code != 0
    assert "beta was lost" in said


def test_it_is_interrupted(site: Site, job: subprocess.Popen[str], soon: Wait) -> None:
    ours: list[Any] = site.on("hub", "-m ds_launcher run")
    os.kill(min(ours), signal.SIGINT)
    soon(lambda: not site.alive(), WITHIN_S + GRACE_S)
    assert finish(job)[0] == 128 + signal.SIGINT
