"""Runs client scripts with our facade and with DeepSpeed, each in an environment of its own (`nox -s clients`).

The sample that needs neither (test_sample.py) imports the facade from the checkout.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
PYTHONS = {"ours": "DS_CLIENTS_PYTHON", "upstream": "DS_PEER_PYTHON"}
TABLE = "DS_CLIENTS_TABLE"
"""Names a file that collects, test by test, how far losses are apart, step times and peak memory of both."""
ROUNDS = "DS_CLIENTS_ROUNDS"
"""How often each side runs for a row of the table, by turns."""
LIMIT_S = 400  # DeepSpeed compiles its operations when it first uses them

if importlib.util.find_spec("deepspeed") is None:
    sys.path.insert(0, str(ROOT / "packages" / "compat" / "src"))


class Rank:
    """A process of forked.py."""

    def __init__(self, python: Path, number: int) -> None:
        self._number = number
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("forked.py"))],
            env=environment(python),
            cwd=SCRIPTS,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def start(self, script: Path, arguments: list[str], environ: dict[str, str], log: Path) -> None:
        """Fork and run; `wait` afterwards."""
        mine = environ | {"RANK": str(self._number), "LOCAL_RANK": str(self._number)}
        task = {"script": str(script), "arguments": arguments, "environ": mine, "log": str(log)}
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        self.pid = json.loads(self._process.stdout.readline())["pid"]

    def wait(self) -> int:
        """Its exit code."""
        return int(json.loads(self._process.stdout.readline())["code"])

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait(20)


class Ranks:
    """Two ranks of one environment."""

    def __init__(self, python: Path) -> None:
        self._ranks = [Rank(python, number) for number in range(2)]

    def run(self, script: Path, arguments: list[str], ranks: int, log: Path) -> tuple[int, str]:
        """The script on so many ranks: the worst exit code and what they printed. When one fails, the others are ended."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "clients"}
        used, codes = self._ranks[:ranks], [0] * ranks
        logs = [log.with_suffix(f".{number}.log") for number in range(ranks)]
        for rank, file in zip(used, logs, strict=True):
            rank.start(script, arguments, shared, file)

        def end(others: list[Rank]) -> None:
            for rank in others:
                with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile
                    os.kill(rank.pid, signal.SIGKILL)

        def watch(number: int) -> None:
            codes[number] = used[number].wait()
            if codes[number]:
                end(
                    [
                        rank
                        for rank, thread in zip(used, threads, strict=True)
                        if thread.is_alive() and rank is not used[number]
                    ]
                )

        threads = [threading.Thread(target=watch, args=(number,)) for number in range(ranks)]
        for thread in threads:
            thread.start()
        clock = threading.Timer(LIMIT_S, end, [used])
        clock.start()
        for thread in threads:
            thread.join()
        clock.cancel()
        return max(codes, key=abs), "\n".join(file.read_text()[-4000:] for file in logs)

    def close(self) -> None:
        """End both."""
        for rank in self._ranks:
            rank.close()


class Client:
    """Starts scripts; results are the JSON that rank 0 wrote.

    Args:
        folder: Where results, models and checkpoints go.
        case: The name under which `both` records what it saw.
        ranks: The environments' ranks.
    """

    def __init__(self, folder: Path, case: str, ranks: dict[str, Ranks]) -> None:
        self.folder, self._case, self._ranks = folder, case, ranks

    def run(
        self, who: str, script: str, *, launcher: tuple[str, ...] | None = None, ranks: int = 2, **options: Any
    ) -> dict[str, Any]:
        """One script in the environment of `who`.

        Args:
            launcher: The command that starts ranks, its program from that environment; None: forked from one that waits.
        Raises:
            AssertionError: it failed; with the end of what it printed.
        """
        out = self.folder / f"{script}-{who}.json"
        out.unlink(missing_ok=True)
        file = SCRIPTS / f"{script}.py"
        words = ["--out", str(out), *(text for name, value in options.items() for text in (f"--{name}", str(value)))]
        if launcher is None:
            code, said = self._ranks[who].run(file, words, ranks, out)
        else:
            python = Path(os.environ[PYTHONS[who]])
            command = [str(python.parent / launcher[0]), *launcher[1:], str(file), *words]
            code, said = launched(command, environment(python))
        assert code == 0, said[-8000:]
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    def both(self, script: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The same script with ours, then with upstream's. For the table as often as asked for, by turns; the first results."""
        found: dict[str, list[dict[str, Any]]] = {"ours": [], "upstream": []}
        for _ in range(int(os.environ.get(ROUNDS, "1")) if TABLE in os.environ else 1):
            for who, runs in found.items():
                runs.append(self.run(who, script, **options))
        if TABLE in os.environ:
            record(Path(os.environ[TABLE]), self._case, found)
        return found["ours"][0], found["upstream"][0]


def environment(python: Path) -> dict[str, str]:
    """Of processes in the environment of `python`."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    environ["PATH"] = f"{python.parent}{os.pathsep}{environ.get('PATH', '')}"
    # What DeepSpeed compiles is kept with its environment: another one's flags would have it compile again for every run,
    # and a lock that a killed compilation left would have every later run wait for ever.
    environ.setdefault("TORCH_EXTENSIONS_DIR", str(python.parents[1] / "torch_extensions"))
    environ.pop("PYTHONPATH", None)
    return environ


def launched(command: list[str], environ: dict[str, str]) -> tuple[int, str]:
    """Exit code and stderr of a launcher, which does not outlive its time."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environ, cwd=SCRIPTS, start_new_session=True, **quiet) as process:
        try:
            _, said = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, said


def record(file: Path, case: str, found: dict[str, list[dict[str, Any]]]) -> None:
    """One row of the table: medians over the steps of all rounds, without the first two of each."""
    table = json.loads(file.read_text()) if file.exists() else {}
    ours, upstream = (runs[0]["losses"] for runs in found.values())
    row: dict[str, Any] = {"steps": len(ours), "rounds": len(found["ours"])}
    for who, runs in found.items():
        # The first steps also compile, allocate and open connections.
        row[who] = {
            "last_loss": round(runs[0]["losses"][-1], 7),
            "step_ms": _median_ms([run["seconds"][2:] for run in runs]),
            "busy_ms": _median_ms([run["busy"][2:] for run in runs]),
            "peak_mib": round(max(run["peak_bytes"] for run in runs) / 2**20),
        }
    row["largest_difference"] = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, upstream, strict=True))
    here = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "machine": platform.machine()}
    file.write_text(json.dumps({"rows": table.get("rows", {}) | {case: row}, **here}, indent=1) + "\n")


def _median_ms(rounds: list[list[float]]) -> float:
    return round(1e3 * statistics.median(value for values in rounds for value in values), 2)


@pytest.fixture(scope="session")
def environments():
    missing = [name for name in PYTHONS.values() if name not in os.environ]
    if missing:
        pytest.skip(f"needs the environments of `nox -s clients` ({', '.join(missing)} not set)")
    ranks = {who: Ranks(Path(os.environ[name])) for who, name in PYTHONS.items()}
    yield ranks
    for both in ranks.values():
        both.close()


@pytest.fixture
def client(tmp_path, request, environments):
    return Client(tmp_path, request.node.name.removeprefix("test_"), environments)
