"""Hosts of a cluster on this machine: Linux namespaces, each with a name, a network, processes and shared memory of its own.

A *hub* holds a bridge, and is where jobs are started; the *nodes* hang on it by a cable (a veth pair) each. All share the files of
this machine, as nodes of a cluster share a home. Killing the first process of a host ends everything on it, like power lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Cluster", "Host", "make_cluster", "missing"]

_FIRST = """
import os, signal, sys
os.set_inheritable(1, True)
open(sys.argv[1], "w").close()
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
while True:
    try:
        os.waitpid(-1, 0)  # what is left behind on a host belongs to its first process
    except ChildProcessError:
        signal.sigtimedwait([signal.SIGCHLD], 0.2)
"""
_NETWORK = "10.214.77"


def missing() -> str:
    """Why there can be no cluster here; empty: there can."""
    if os.geteuid() != 0:
        return "hosts are namespaces, which only root makes"
    for tool, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            return f"no `{tool}`: apt-get install {package}"
    tried = subprocess.run(["unshare", "-n", "-m", "-u", "-i", "-p", "--fork", "true"], capture_output=True)
    return "" if tried.returncode == 0 else "this kernel or container allows no namespaces"


@dataclass
class Host:
    """One of them.

    Attributes:
        first: the process id, as this machine sees it, of its first process.
    """

    name: str
    address: str
    first: int

    def words(self, *command: str) -> list[str]:
        """The command line, here, that runs `command` there."""
        return ["nsenter", "-t", str(self.first), "-n", "-m", "-u", "-i", "-p", "--", *command]

    def run(self, *command: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.words(*command), capture_output=True, text=True, check=check, timeout=timeout)

    def network(self, *command: str) -> None:
        """Run `command` with the host's network only: ids of processes are those of this machine."""
        subprocess.run(["nsenter", "-t", str(self.first), "-n", "--", *command], check=True, capture_output=True)

    def segments(self) -> list[str]:
        """The shared memory that somebody left on it."""
        return sorted(os.listdir(f"/proc/{self.first}/root/dev/shm"))


@dataclass
class Cluster:
    """A hub and nodes."""

    folder: Path
    hub: Host
    nodes: tuple[Host, ...]
    _first: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def cable(self, node: Host, *, plugged: bool) -> None:
        """Pull the network cable of a node, or put it back."""
        self.hub.network("ip", "link", "set", f"to-{node.name}", "up" if plugged else "down")

    def close(self) -> None:
        """End every host, and with it all that runs there."""
        for process in self._first:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        for host in (self.hub, *self.nodes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(host.first, signal.SIGKILL)


def make_cluster(folder: Path, names: tuple[str, ...]) -> Cluster:
    """Start the hosts and connect them. Their root user lives in `folder`/home, where ssh looks for its keys."""
    (folder / "home" / ".ssh").mkdir(parents=True, mode=0o700)
    addresses = {name: f"{_NETWORK}.{number}" for number, name in enumerate(("hub", *names), 1)}
    (folder / "hosts").write_text(
        "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses.items())
    )
    root = f"root:x:0:0:root:{folder}/home:/bin/bash"
    users = [root if line.startswith("root:") else line for line in Path("/etc/passwd").read_text().splitlines()]
    (folder / "passwd").write_text("\n".join(users) + "\n")
    started = [_boot(folder, name) for name in addresses]
    hosts = [
        Host(name, address, _inside(process, folder / f"{name}.up"))
        for (name, address), process in zip(addresses.items(), started, strict=True)
    ]
    cluster = Cluster(folder, hosts[0], tuple(hosts[1:]), started)
    try:
        _connect(cluster)
    except BaseException:
        cluster.close()
        raise
    return cluster


def _boot(folder: Path, name: str) -> subprocess.Popen[bytes]:
    first = f'exec {sys.executable} -S -c "$FIRST" {folder}/{name}.up'
    steps = [
        f"hostname {name}",
        f"mount --bind {folder}/hosts /etc/hosts",
        f"mount --bind {folder}/passwd /etc/passwd",
        "mount -t tmpfs tmpfs /dev/shm",
        first,
    ]
    isolated = ["unshare", "-n", "-m", "-u", "-i", "-p", "--fork", "--kill-child", "--mount-proc"]
    return subprocess.Popen(
        [*isolated, "sh", "-ec", "\n".join(steps)],
        env={**os.environ, "FIRST": _FIRST, "HOME": f"{folder}/home"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _inside(process: subprocess.Popen[bytes], up: Path) -> int:
    """The id of the host's first process, once it runs: `unshare` is its parent."""
    deadline = time.monotonic() + 150
    while not up.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the host of {up.name} did not start")
        time.sleep(0.02)
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def _connect(cluster: Cluster) -> None:
    hub = cluster.hub
    for host in (hub, *cluster.nodes):
        host.network("ip", "link", "set", "lo", "up")
    hub.network("ip", "link", "add", "bridge", "type", "bridge")
    hub.network("ip", "addr", "add", f"{hub.address}/24", "dev", "bridge")
    hub.network("ip", "link", "set", "bridge", "up")
    for node in cluster.nodes:
        end = f"to-{node.name}"
        hub.network("ip", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", str(node.first))
        hub.network("ip", "link", "set", end, "master", "bridge", "up")
        node.network("ip", "addr", "add", f"{node.address}/24", "dev", "eth0")
        node.network("ip", "link", "set", "eth0", "up")
