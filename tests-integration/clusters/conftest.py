"""A cluster for `nox -s clusters`: a hub and three nodes with sshd and Slurm, made on this machine and gone at the end."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import machines
import services
from jobs import Site

# Minutes, and only for root: `nox -s clusters` asks for it.
collect_ignore_glob = [] if os.environ.get("DS_CLUSTERS") else ["test_*.py"]
NAMES = ("alpha", "beta", "gamma")


@pytest.fixture(scope="session")
def hosts() -> Iterator[machines.Cluster]:
    """Hosts that only start what they are told to here."""
    if reason := machines.missing():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix=f"ds-cluster-{uuid.uuid4().hex[:6]}-"))
    folder.chmod(0o755)  # sshd looks at who may write where keys are
    made = machines.make_cluster(folder, NAMES)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster(hosts: machines.Cluster) -> machines.Cluster:
    """The same with OpenSSH's server."""
    if reason := services.absent("sshd", "ssh"):
        pytest.skip(reason)
    services.start_sshd(hosts)
    return hosts


@pytest.fixture(scope="session")
def slurm(cluster: machines.Cluster) -> dict[str, str]:
    """Slurm's variables; skipped where it is not installed."""
    if reason := services.absent("srun", "slurmd", "munged"):
        pytest.skip(reason)
    return services.start_slurm(cluster)


@pytest.fixture
def site(cluster: machines.Cluster, tmp_path: Path) -> Iterator[Site]:
    """Jobs on it; at the end of the test nothing of theirs may be there."""
    yield from _jobs(cluster, tmp_path)


@pytest.fixture
def bare_site(hosts: machines.Cluster, tmp_path: Path) -> Iterator[Site]:
    """The same on hosts without ssh."""
    yield from _jobs(hosts, tmp_path)


def _jobs(on: machines.Cluster, folder: Path) -> Iterator[Site]:
    made = Site(on, folder)
    yield made
    for node in on.nodes:
        on.cable(node, plugged=True)
    left = made.alive()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    assert not left


@pytest.fixture
def soon() -> Callable[[Callable[[], object], float], float]:
    """Wait until something holds; seconds it took. Fails the test when it does not in time."""

    def wait(condition: Callable[[], object], seconds: float) -> float:
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > seconds:
                pytest.fail(f"not within {seconds:g} s")
            time.sleep(0.05)
        return time.monotonic() - began

    return wait
