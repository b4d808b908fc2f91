"""Ranks and hosts of an elastic job are killed at random; at the end every sample was counted once and the loss is that of a quiet run.

usage: python tests-integration/clusters/chaos.py [--minutes 10] [--hosts 3] [--seed 0]

A *host* is a `ds run` of its own on this machine, with its agent and one rank, all in sessions of their own; they meet at a `ds rendezvous`.
What is done to one of them, and what then has to happen by itself:

    rank      kill -9 of the rank             all ranks start again
    agent     kill -9 of torch's agent        the others go on; the host comes back
    host      kill -9 of all its processes    the same
    silent    SIGSTOP of all its processes    the same, after --host-timeout: nothing tells the others but silence

Recovery is the time from that to the end of the first step of ranks that were started after it. Prints one table; exit status 1 when
a sample was counted twice or never, the loss differs, or the job did not come to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DS = (sys.executable, "-P", "-m", "ds_launcher")
SAMPLES, BATCH, SAVE_EVERY = 600, 12, 10  # BATCH is shared by 1, 2, 3 and 4 ranks
HOST_TIMEOUT_S = 5.0
PAUSE_S = 0.1
KINDS = ("rank", "agent", "host", "silent")
LOSS_TOLERANCE = 1e-5  # sums of another number of ranks are rounded elsewhere
WAIT_S = 120.0


@dataclass
class Job:
    """The hosts, and what their ranks wrote."""

    folder: Path
    count: int = 1
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    endpoint: str = ""
    hosts: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    others: list[subprocess.Popen[str]] = field(default_factory=list)

    def begin(self) -> None:
        """Start the rendezvous and all hosts."""
        keeper = subprocess.Popen(
            [*DS, "rendezvous", "--port", "0", "--json"], env=self._env("rendezvous"), stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.others.append(keeper)
        assert keeper.stdout is not None
        self.endpoint = f"127.0.0.1:{json.loads(keeper.stdout.readline())['port']}"
        for number in range(self.count):
            self.start(f"host{number}")

    def start(self, name: str) -> None:
        """Start one host; its log is continued."""
        where = ["--nnodes", f"1:{self.count}", "--rdzv-endpoint", self.endpoint, "--run-id", self.mark]
        ends = ["--max-restarts", "1000", "--host-timeout", f"{HOST_TIMEOUT_S:g}", "--grace", "2"]
        script = [str(HERE / "chaos_train.py"), str(self.folder), str(PAUSE_S)]
        with open(self.folder / f"{name}.log", "ab") as log:
            self.hosts[name] = subprocess.Popen(
                [*DS, "run", "--nproc", "1", *where, *ends, *script], env=self._env(name), stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _env(self, name: str) -> dict[str, str]:
        return {**os.environ, "CHAOS_MARK": self.mark, "CHAOS_HOST": name, "OMP_NUM_THREADS": "1"}

    def processes(self, name: str = "", has: str = "", lacks: str = "\n") -> list[int]:
        """Living ones of a host, or of all, whose command lines have the one text and not the other."""
        wanted = {f"CHAOS_MARK={self.mark}".encode(), *([f"CHAOS_HOST={name}".encode()] if name else [])}
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                variables = set((folder / "environ").read_bytes().split(b"\0"))
                if line and wanted <= variables and has in line and lacks not in line:
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def lines(self) -> list[dict[str, Any]]:
        """All finished steps, of all attempts and ranks."""
        found = []
        for file in self.folder.glob("steps-*.jsonl"):
            for line in file.read_text().splitlines():
                try:
                    found.append(json.loads(line))
                except ValueError:  # killed while it wrote
                    continue
        return found

    def since(self, moment: float, world: int = 0) -> float | None:
        """When the first step of ranks that were started after `moment` had ended; with `world` only of so many ranks."""
        times = [
            x["time"] for x in self.lines() if x["attempt"] > moment and x["time"] > moment and world in (0, x["world"])
        ]
        return min(times, default=None)

    def end(self) -> None:
        for pid in self.processes():
            kill(pid, signal.SIGKILL)
        for process in (*self.hosts.values(), *self.others):
            process.wait()


def kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def until(condition: Callable[[], Any], what: str, seconds: float = WAIT_S) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.1)
    return found


def hurt(job: Job, kind: str, name: str) -> float:
    """Do it; seconds until the job runs again. A host that was lost has come back then, too."""
    moment = time.time()
    if kind == "rank":
        for pid in job.processes(name, "chaos_train.py", "ds_launcher"):
            kill(pid, signal.SIGKILL)
    elif kind == "agent":
        for pid in job.processes(name, "-m ds_launcher.elastic_launch"):
            kill(pid, signal.SIGKILL)
    else:
        for pid in job.processes(name):
            kill(pid, signal.SIGSTOP if kind == "silent" else signal.SIGKILL)
    took = until(lambda: job.since(moment), f"the job runs after {kind} of {name}") - moment
    if kind != "rank":
        for pid in job.processes(name):
            kill(pid, signal.SIGKILL)
        job.hosts[name].wait()
        moment = time.time()
        job.start(name)
        until(lambda: job.since(moment, len(job.hosts)), f"{name} is back")
    return float(took)


def disturbed(job: Job, minutes: float, seed: int) -> list[tuple[str, float]]:
    """Run the job and hurt it; what was done, and what each recovery took."""
    choose = random.Random(seed)
    events: list[tuple[str, float]] = []
    until(lambda: job.since(0, len(job.hosts)), "all hosts run")
    end = time.monotonic() + 60 * minutes
    deck: list[str] = []
    while time.monotonic() < end:
        time.sleep(choose.uniform(1, 6))
        deck = deck or choose.sample(KINDS, len(KINDS))  # each kind comes, also in a short run
        kind, name = deck.pop(), choose.choice(sorted(job.hosts))
        events.append((kind, hurt(job, kind, name)))
        print(f"{kind:<8} {name}  {events[-1][1]:5.1f} s", file=sys.stderr, flush=True)
    last = max(line["step"] for line in job.lines()) + 10
    (job.folder / "last").write_text(str(last))
    for name, process in job.hosts.items():
        until(lambda process=process: process.poll() is not None, f"{name} has ended")
    return events


def quiet(folder: Path, last: int) -> Job:
    """The same training on one rank, with nobody to disturb it."""
    (folder / "last").write_text(str(last))
    job = Job(folder)
    words = [*DS, "run", "--nproc", "1", str(HERE / "chaos_train.py"), str(folder)]
    subprocess.run(words, env=job._env("quiet"), stdout=subprocess.DEVNULL, check=True, timeout=600)
    return job


def trained(job: Job) -> dict[int, tuple[list[int], float]]:
    """Of each step the samples and the loss of the attempt that did it last: earlier ones were lost with their ranks."""
    by_step: dict[int, dict[float, list[dict[str, Any]]]] = {}
    for line in job.lines():
        by_step.setdefault(line["step"], {}).setdefault(line["attempt"], []).append(line)
    found = {}
    for step, attempts in sorted(by_step.items()):
        lines = attempts[max(attempts)]
        found[step] = (sorted(i for line in lines for i in line["ids"]), lines[0]["loss"])
    return found


def judge(
    done: dict[int, tuple[list[int], float]], expected: dict[int, tuple[list[int], float]]
) -> tuple[list[str], float]:
    """What is wrong with the samples, and the largest relative difference of a loss."""
    problems = []
    if list(done) != list(range(1, len(expected) + 1)):
        problems.append(f"steps {sorted(set(expected) - set(done))} are missing")
    for step in sorted(set(done) & set(expected)):
        if done[step][0] != expected[step][0]:
            problems.append(f"step {step} trained on {done[step][0]}, not on {expected[step][0]}")
    per_epoch = SAMPLES // BATCH
    for first in range(1, len(done) + 1, per_epoch):
        counts = Counter(i for step in range(first, first + per_epoch) if step in done for i in done[step][0])
        if twice := sorted(i for i, n in counts.items() if n > 1):
            problems.append(f"the epoch of step {first} has samples {twice} twice")
    losses = [abs(done[s][1] - expected[s][1]) / abs(expected[s][1]) for s in set(done) & set(expected)]
    return problems, max(losses, default=float("inf"))


def table(events: list[tuple[str, float]], steps: int, worst: float, problems: list[str]) -> str:
    rows = [("what", "times", "median s", "longest s")]
    for kind in (*KINDS, "all"):
        took = [seconds for name, seconds in events if kind in (name, "all")]
        if took:
            rows.append((kind, str(len(took)), f"{statistics.median(took):.1f}", f"{max(took):.1f}"))
    text = "\n".join(f"{a:<10}{b:>6}{c:>10}{d:>11}" for a, b, c, d in rows)
    counted = "; ".join(problems[:3]) if problems else f"{steps * BATCH} samples of {steps} steps counted once each"
    return f"{text}\n{counted}\nlargest difference of a loss from the quiet run: {worst:.1e} of it"


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill ranks and hosts of an elastic job at random.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--hosts", type=int, default=3, choices=(2, 3, 4))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="leave logs and checkpoints")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ds-chaos-"))
    (folder / "quiet").mkdir()
    job = Job(folder, args.hosts)
    try:
        job.begin()
        events = disturbed(job, args.minutes, args.seed)
        done = trained(job)
        expected = trained(quiet(folder / "quiet", max(done)))
        problems, worst = judge(done, expected)
        codes = {name: process.returncode for name, process in job.hosts.items() if process.returncode}
        problems += [f"{name} ended with {code}" for name, code in codes.items()]
        print(table(events, len(done), worst, problems))
        return int(bool(problems) or worst > LOSS_TOLERANCE)
    except TimeoutError as error:
        for log in sorted(folder.glob("host*.log")):
            print(f"--- {log.name}\n{log.read_text()[-2000:]}", file=sys.stderr)
        print(error, file=sys.stderr)
        return 1
    finally:
        job.end()
        if args.keep:
            print(f"kept: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
