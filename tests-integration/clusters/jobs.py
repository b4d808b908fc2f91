"""Jobs on the cluster: their processes carry a mark in their environment, by which all of them are found again."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from machines import Cluster, Host

__all__ = ["DEADLINE_S", "SLEEPER", "Site", "marked"]

DEADLINE_S = 3.0  # --host-timeout of these jobs
DS = (sys.executable, "-P", "-m", "ds_launcher")

# A rank that waits, with a child and a grandchild in sessions of their own.
SLEEPER = """
    import os, pathlib, subprocess, sys, time
    rank = os.environ["RANK"]
    forget = "import subprocess, sys; subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    subprocess.Popen([sys.executable, "-S", "-c", forget], start_new_session=True).wait()
    pathlib.Path(os.environ["MARKS"], rank).write_text(os.uname().nodename)
    time.sleep(1000)
"""


@dataclass
class Site:
    """What starts jobs on a cluster, and looks for what they left.

    Attributes:
        folder: of this test; all hosts see it.
    """

    cluster: Cluster
    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    env: dict[str, str] = field(default_factory=dict)

    def script(self, code: str, name: str = "train.py") -> str:
        path = self.folder / name
        path.write_text(textwrap.dedent(code))
        return str(path)

    def hostfile(self, slots: int = 1, names: tuple[str, ...] = ("alpha", "beta", "gamma")) -> str:
        path = self.folder / "hosts"
        path.write_text("# nodes of the test\n" + "".join(f"{name}   slots={slots}\n" for name in names))
        return str(path)

    def start(
        self, *command: str, env: Mapping[str, str] | None = None, on: Host | None = None
    ) -> subprocess.Popen[str]:
        """Start a command on a host, by default the hub."""
        (self.folder / "marks").mkdir(exist_ok=True)
        variables = {
            "DS_TEST_MARK": self.mark, "DS_MARKS": str(self.folder / "marks"), "MARKS": str(self.folder / "marks"),
            "HOME": f"{self.cluster.folder}/home", "OMP_NUM_THREADS": "1", **self.env, **(env or {}),
        }  # fmt: skip
        return subprocess.Popen(
            (on or self.cluster.hub).words("env", "-C", str(self.folder), *command),
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ds(self, *words: str, env: Mapping[str, str] | None = None, on: Host | None = None) -> subprocess.Popen[str]:
        """Start `ds ...` on a host, by default the hub."""
        return self.start(*DS, *words, env=env, on=on)

    def run(self, launcher: str, script: str, *words: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """Start `ds run` of a script on all nodes."""
        travel = [word for name in ("DS_TEST_MARK", "MARKS") for word in ("-x", name)]
        ends = ("--host-timeout", str(DEADLINE_S), "--grace", "1")
        base = ("run", "--hostfile", self.hostfile(), "--launcher", launcher, *ends, *travel)
        return self.ds(*base, *options, script, *words)

    def ready(self, ranks: int = 3) -> bool:
        """Whether so many ranks have said that they run."""
        return len(list((self.folder / "marks").glob("[0-9]*"))) == ranks

    def alive(self, *words: str) -> dict[int, str]:
        """Living processes of this test's jobs, whose command lines have all of `words`; by their id on this machine."""
        return {pid: line for pid, line in marked(self.mark).items() if all(word in line for word in words)}

    def on(self, name: str, *words: str) -> list[int]:
        """Those of one host."""
        host = next(h for h in (self.cluster.hub, *self.cluster.nodes) if h.name == name)
        space = os.readlink(f"/proc/{host.first}/ns/pid")
        return [pid for pid in self.alive(*words) if _space(pid) == space]

    def segments(self) -> list[str]:
        """Shared memory on any node."""
        return [f"{node.name}:{name}" for node in self.cluster.nodes for name in node.segments()]


def marked(mark: str) -> dict[int, str]:
    """Living processes that have `mark` in their environment: command lines by id on this machine."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ours = f"DS_TEST_MARK={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
            if ours and (line := (folder / "cmdline").read_text().replace("\0", " ").strip()):
                found[int(folder.name)] = line
        except OSError:
            continue
    return found


def _space(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""
