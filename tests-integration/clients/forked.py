"""One rank of a client environment, run by its interpreter: imports what every script imports, then forks for each script.

Starting a script costs what it imports itself, not ten seconds of torch and Transformers. Tasks come as JSON lines on stdin;
answers go to stdout: the process that was forked, then how it ended.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback

import torch  # noqa: F401
from accelerate import Accelerator  # noqa: F401
from transformers import LlamaForCausalLM, Trainer  # noqa: F401


def run(task: dict) -> None:
    """The script as `python SCRIPT ARGUMENTS` would run it; never returns."""
    code = 1
    try:
        log = os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.environ.update(task["environ"])
        sys.argv = [task["script"], *task["arguments"]]
        sys.path[0] = os.path.dirname(task["script"])
        runpy.run_path(task["script"], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(json.loads(line))
    print(json.dumps({"pid": child}), flush=True)
    print(json.dumps({"code": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}), flush=True)
