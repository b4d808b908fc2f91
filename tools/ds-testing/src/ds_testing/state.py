"""The state of a process that a test may leave changed, and what changed between two looks at it.

A leak fails the test that made it: otherwise the next test on the same worker would fail, or pass, because of it.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["ProcessState", "leaks", "restore", "seed"]

GLOO_THREAD = "pt_gloo_runloop"  # each living gloo group owns some threads of this name
_SETTLE_S = 2.0  # threads that were told to end get this long to do so, on a crowded machine too


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One look at the process.

    Attributes:
        threads: Names of the Python threads, by identity.
        group_threads: Number of native threads that belong to process groups.
        children: Process ids of living children.
    """

    environment: Mapping[str, str]
    directory: str
    dtype: torch.dtype
    device: str
    grad_enabled: bool
    deterministic: bool
    num_threads: int
    threads: Mapping[int, str]
    group_threads: int
    children: frozenset[int]

    @classmethod
    def now(cls) -> ProcessState:
        return cls(
            environment=dict(os.environ),
            directory=os.getcwd(),
            dtype=torch.get_default_dtype(),
            device=str(torch.get_default_device()),
            grad_enabled=torch.is_grad_enabled(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            num_threads=torch.get_num_threads(),
            threads={id(thread): thread.name for thread in threading.enumerate() if not _is_foreign(thread)},
            group_threads=_native_threads()[GLOO_THREAD],
            children=_children(),
        )


def _is_foreign(thread: threading.Thread) -> bool:
    """Whether Python did not start the thread: autograd's threads of a device call hooks, and stay as long as the process."""
    return type(thread).__name__ == "_DummyThread"


def leaks(before: ProcessState) -> tuple[str, ...]:
    """What is different now, one sentence each; waits a moment for threads and children that are about to end."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        after = ProcessState.now()
        found = _settings_changed(before, after) + _still_alive(before, after)
        if not _still_alive(before, after) or time.monotonic() > deadline:
            return tuple(found)
        time.sleep(0.01)


_SET_BY_LIBRARIES = {"TORCHINDUCTOR_CACHE_DIR"}  # by torch, when it first compiles


def _settings_changed(before: ProcessState, after: ProcessState) -> list[str]:
    found = []
    for name in sorted({*before.environment, *after.environment} - _SET_BY_LIBRARIES):
        old, new = before.environment.get(name), after.environment.get(name)
        if old != new:
            found.append(f"environment variable {name} was {old!r}, is {new!r}")
    for name in _SETTERS:
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            found.append(f"{name.replace('_', ' ')} was {old}, is {new}")
    return found


_OF_LIBRARIES = {"tqdm_monitor"}  # one a process, from the first progress bar on


def _still_alive(before: ProcessState, after: ProcessState) -> list[str]:
    found = []
    threads = [name for key, name in after.threads.items() if key not in before.threads and name not in _OF_LIBRARIES]
    if threads:
        found.append(f"threads still run: {', '.join(sorted(threads))}")
    if after.group_threads > before.group_threads:
        found.append("a process group outlives destroy_process_group(): something global still holds it")
    children = after.children - before.children
    if children:
        found.append(f"child processes still run: {', '.join(map(str, sorted(children)))}")
    return found


def restore(before: ProcessState) -> None:
    """Put the settings back; threads, groups and children cannot be.

    Only what changed is set: `use_deterministic_algorithms` alone imports a compiler.
    """
    after = ProcessState.now()
    for name in after.environment.keys() - before.environment.keys():
        del os.environ[name]
    os.environ.update(before.environment)
    for name, put in _SETTERS.items():
        if getattr(before, name) != getattr(after, name):
            put(getattr(before, name))


def _set_device(name: str) -> None:
    torch.set_default_device(None if name == "cpu" else name)


_SETTERS: dict[str, Callable[[Any], object]] = {
    "directory": os.chdir,
    "dtype": torch.set_default_dtype,
    "device": _set_device,
    "grad_enabled": torch.set_grad_enabled,
    "deterministic": torch.use_deterministic_algorithms,
    "num_threads": torch.set_num_threads,
}


def seed(value: int) -> None:
    """The same start for every generator of this process that a test may draw from without naming it."""
    random.seed(value)
    torch.default_generator.manual_seed(value)
    if torch.accelerator.is_available():  # not torch.manual_seed: without a device it queues a call, each time
        torch.manual_seed(value)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(value)


def _native_threads() -> Counter[str]:
    names: Counter[str] = Counter()
    for task in _tasks():
        try:
            names[(task / "comm").read_text().strip()] += 1
        except OSError:  # the thread ended while we looked
            continue
    return names


def _children() -> frozenset[int]:
    found: set[int] = set()
    for task in _tasks():
        try:
            found.update(map(int, (task / "children").read_text().split()))
        except OSError:
            continue
    return frozenset(found)


def _tasks() -> list[Path]:
    try:
        return list(Path("/proc/self/task").iterdir())
    except FileNotFoundError:  # not Linux: groups and children are not counted there
        return []
