"""One trial: the user's script as a fresh job of `ds run`, with a time limit; what became of it is kept on disk.

    RESULTS/NAME/  order.json  rehearsal.json (with --links)  ds_config.json  exp.json  cmd.txt  stdout.log  stderr.log  measured.json  metrics.json  outcome.json
    EXPS/NAME.json

The names are DeepSpeed's; `order.json`, `measured.json` and `outcome.json` are ours.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ds_config.errors import LaunchError
from ds_config.regular_file import replace_text
from ds_engine.trial_results import read_measured, write_json
from ds_engine.trial_spec import DS_TRIAL, TrialSpec
from ds_tune.rehearsed_trial import RehearsedWorld
from ds_tune.results_writer import tuned
from ds_tune.search import NextTrial, Outcome, Result

__all__ = ["TrialRunner", "command_of", "ended", "results_on_disk", "run_trial", "script_words"]

_MEMORY = (
    "MemoryError",
    "out of memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "bad_alloc",
    "SIGKILL",
    "signal 9",
)
_GRACE_S = 20.0
_ORDER = "rehearsal.json"
_TOLD = 12


@dataclass(frozen=True, slots=True)
class TrialRunner:
    """How trials are started.

    Attributes:
        config: What the user wrote, and the words that name its file on the script's command line.
        launch: Options of `ds run`.
        script, arguments: What every rank runs.
        mappings: Options of the script by key of the configuration that they get the value of.
        warmup: Steps before those that are measured.
        rehearsed: The world that trials are rehearsed in; None: they run on the ranks of `launch`.
    """

    config: Mapping[str, Any]
    config_words: tuple[str, ...]
    launch: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]
    results: Path
    exps: Path
    time_limit_s: float = 600.0
    mappings: Mapping[str, str] = field(default_factory=dict)
    memory_bytes: int = 0
    warmup: int = 2
    rehearsed: RehearsedWorld | None = None

    @property
    def sign(self) -> str:
        """Results of other signs are of another question."""
        inputs = [self.config, self.launch, self.script, self.arguments, self.mappings, self.memory_bytes, self.warmup]
        inputs += [] if self.rehearsed is None else [asdict(self.rehearsed)]
        return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()[:16]


# ---- words. Pure.


def script_words(job: TrialRunner, config_file: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the script's arguments with another configuration file and with mapped configuration values."""
    words = [config_file if word in job.config_words else word for word in job.arguments]
    for key, flag in job.mappings.items():
        if values.get(key) is None:
            continue
        flag, value = flag.strip(), str(values[key])
        if flag in words and words.index(flag) + 1 < len(words):
            words[words.index(flag) + 1] = value
        elif any(word.startswith(f"{flag}=") for word in words):
            words = [f"{flag}={value}" if word.startswith(f"{flag}=") else word for word in words]
        else:
            words += [flag, value]
    return tuple(words)


def command_of(job: TrialRunner, config_file: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Build the whole command of a run with a configuration: that of a job, or of a rehearsal whose order lies beside the configuration."""
    words = script_words(job, config_file, values)
    if job.rehearsed is not None:
        order = str(Path(config_file).with_name(_ORDER))
        return (sys.executable, "-m", "ds_tune.rehearsed_trial", order, job.script, *words)
    return (
        sys.executable,
        "-m",
        "ds_launcher",
        "run",
        *job.launch,
        job.script,
        *words,
    )


def ended(status: int | None, output: str) -> tuple[Outcome, str]:
    """Classify why a job without numbers ended, from its exit status (None: timeout) and its last output."""
    last = "\n".join(output.strip().splitlines()[-_TOLD:])
    if status is None:
        return "time limit", last
    if status in (-9, 137) or any(word in output for word in _MEMORY):
        return "memory", last
    if status == 0:
        return "no steps", last
    return "failed", last or f"exit status {status}, and not a word"


# ---- doing


def folder_of(job: TrialRunner, name: str, rung: int) -> Path:
    """Return the folder of a trial's files."""
    return job.results / (f"{name}_r{rung}" if rung else name)


def run_trial(job: TrialRunner, step: NextTrial, index: int) -> Result:
    """Run one trial to its end, whatever that is.

    Raises:
        LaunchError: results cannot be written ("tune-results").
    """
    folder = folder_of(job, step.candidate.name, step.rung)
    with _writing(job.results):
        command, environ = _prepare(job, step, folder)
        with (folder / "stdout.log").open("w") as out, (folder / "stderr.log").open("w") as err:
            began = time.monotonic()
            status = _wait(command, environ, (out, err), job.time_limit_s)
            seconds = time.monotonic() - began
        result = _result(step, folder, status, seconds)
        record = {"sign": job.sign, "index": index, "name": result.name, "rung": result.rung, "outcome": result.outcome,
                "message": result.message, "seconds": seconds, "detail": step.detail, "why": step.why}  # fmt: skip
        write_json(folder / "outcome.json", record)
    return result


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = "there is no space left" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
        raise LaunchError(
            f"results of trials cannot be written to {folder}: {why}",
            code="tune-results",
            fix="Make space there, or give another folder with --results; trials that ended are kept.",
        ) from error


def _prepare(job: TrialRunner, step: NextTrial, folder: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("measured.json", "metrics.json", "outcome.json"):
        (folder / name).unlink(missing_ok=True)
    candidate = step.candidate
    config = tuned(job.config, candidate)
    write_json(folder / "ds_config.json", config)
    first = job.warmup + 1
    order = TrialSpec(
        changes=candidate.changes, start_step=first, end_step=first + step.steps - 1, out=str((folder / "measured.json").resolve()),
        metric_path=str((folder / "metrics.json").resolve()), detail=step.detail, memory_bytes=job.memory_bytes,
    )  # fmt: skip
    write_json(folder / "order.json", order)
    if job.rehearsed is not None:
        write_json(folder / _ORDER, job.rehearsed.order())
    command = command_of(job, str((folder / "ds_config.json").resolve()), candidate.settings)
    replace_text(folder / "cmd.txt", shlex.join(command) + "\n")
    experiment = {"name": candidate.name, "ds_config": config, "why": step.why, "rung": step.rung}
    write_json(folder / "exp.json", experiment)
    if not step.rung:
        write_json(job.exps / f"{candidate.name}.json", experiment)
    return command, {**os.environ, **candidate.environ, DS_TRIAL: str((folder / "order.json").resolve())}


def _wait(command: Sequence[str], environ: Mapping[str, str], streams: tuple[Any, Any], limit_s: float) -> int | None:
    """Run the command and return its exit status; None on timeout.

    `ds run` leaves no process behind, also when it is asked to end.
    """
    with subprocess.Popen(
        command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=streams[0], stderr=streams[1]
    ) as job:
        try:
            return job.wait(timeout=limit_s)
        except BaseException as error:
            job.terminate()
            try:
                job.wait(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                job.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise


def _result(step: NextTrial, folder: Path, status: int | None, seconds: float) -> Result:
    try:
        measured = read_measured(folder / "measured.json")
    except (OSError, ValueError):
        output = (folder / "stderr.log").read_text(errors="replace") or (folder / "stdout.log").read_text(
            errors="replace"
        )
        outcome, message = ended(status, output)
        return Result(step.candidate.name, step.rung, outcome, None, message, seconds)
    return Result(step.candidate.name, step.rung, "measured", measured, "", seconds)


def results_on_disk(job: TrialRunner) -> list[Result]:
    """Load the results of an earlier tuning with the same signature, in the order of their trials."""
    indexed = []
    for path in job.results.glob("*/outcome.json"):
        try:
            record = json.loads(path.read_text())
            measured = read_measured(path.with_name("measured.json")) if record["outcome"] == "measured" else None
            if record["sign"] == job.sign:
                result = Result(
                    record["name"], record["rung"], record["outcome"], measured, record["message"], record["seconds"]
                )
                indexed.append((record["index"], result))
        except (OSError, ValueError, KeyError):
            continue  # written by half, or by another program: it is tried again
    return [result for _, result in sorted(indexed, key=lambda pair: pair[0])]
