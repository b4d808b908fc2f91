"""Import modules while Python's audit hook listens, and print what each did, a line of JSON each.

usage: python -B -m ds_testing.import_probe MODULE[,MODULE ...] [BASELINE ...]     (run by ds_testing.effects)

The baseline modules are imported first, once, and are not listened to; each module is imported in a process forked after that.
"""

from __future__ import annotations

import _thread
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["main"]

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FILES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
_PROCESSES = ("subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn")


def main(argv: list[str]) -> int:
    modules, *baseline = argv
    for name in baseline:
        importlib.import_module(name)
    for module in modules.split(","):
        if (child := os.fork()) == 0:
            try:
                _probe(module)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            return 1
    return 0


def _probe(module: str) -> None:
    effects: list[str] = []
    before = _state()
    for owner, name in ((_thread, "start_new_thread"), (threading, "_start_new_thread")):
        # There is no audit event for threads before Python 3.13, and a thread that ended leaves no trace.
        setattr(owner, name, _told(effects, getattr(owner, name)))
    listening = [True]
    sys.addaudithook(lambda event, arguments: _hear(effects, event, arguments) if listening[0] else None)
    importlib.import_module(module)
    listening[0] = False
    after = _state()
    effects += [f"{name}: {before[name]} became {after[name]}" for name in before if before[name] != after[name]]
    print(json.dumps({"effects": effects, "modules": sorted(sys.modules)}), flush=True)


def _told(effects: list[str], start: Callable[..., Any]) -> Callable[..., Any]:
    def start_told(*arguments: Any, **options: Any) -> Any:
        effects.append(f"starts a thread: {arguments[0]!r}")
        return start(*arguments, **options)

    return start_told


def _hear(effects: list[str], event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _writes(arguments[1], arguments[2]):
        effects.append(f"opens {arguments[0]!r} for writing")
    elif event in _FILES or event.startswith(("shutil.", "tempfile.")):
        effects.append(f"changes files: {event}{arguments!r}")
    elif event in _PROCESSES:
        effects.append(f"starts a process: {event}{arguments!r}")
    elif event.startswith("socket."):
        effects.append(f"uses a socket: {event}")
    elif event in ("os.putenv", "os.unsetenv"):
        effects.append(f"sets an environment variable: {arguments[0]!r}")


def _writes(mode: str | None, flags: int) -> bool:
    return bool(set(mode) & set("wax+")) if isinstance(mode, str) else bool(flags & _WRITING)


def _state() -> dict[str, object]:
    tasks = Path("/proc/self/task")
    torch = sys.modules.get("torch")
    return {
        "environment": dict(os.environ),
        "working directory": os.getcwd(),
        "sys.path": list(sys.path),
        "signal handlers": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "number of native threads": len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count(),
        "device initialised": bool(torch and torch.cuda.is_initialized()),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
