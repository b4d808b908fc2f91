"""Processes for tests: started by conftest.py, which tells on standard input what to run.

A line in is a list of processes, each a dict: the words of its command line (a script, or `-m` and a module), what to add
to its environment, the file for its output. For each a child is forked that ends like any Python process does; a line out
is their exit codes and seconds. Forking spares each the import of torch, and leaving after the last exit function the half
second in which the interpreter takes it apart again.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
import time
from typing import Any

import torch  # noqa: F401  (the children import nothing large)

import ds_comm.mesh  # noqa: F401


def serve() -> dict[str, Any] | None:
    """Fork what is asked for. Returns what a child is to do, None at the end of input."""
    for line in sys.stdin:
        began, children = time.monotonic(), []
        for process in json.loads(line):
            child = os.fork()
            if child == 0:
                out = os.open(process["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(out, 1)
                os.dup2(out, 2)
                os.environ.update(process["env"])
                return process  # type: ignore[no-any-return]
            children.append(child)
        ends = {}
        while len(ends) < len(children):
            child, status = os.wait()
            ends[child] = (os.waitstatus_to_exitcode(status), time.monotonic() - began)
        print(json.dumps([ends[child] for child in children]), flush=True)
    return None


def leave() -> None:
    """The last exit function: all others have run, and a traceback is printed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if hasattr(sys, "last_value") else 0)


def run(words: list[str]) -> None:
    sys.argv = words[words[0] == "-m" :]
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


task = serve()
if task is not None:
    atexit.register(leave)
    run(task["words"])
