"""How a worker answers: a line of JSON for every line that it is given. Standard library only: workers run under the interpreters of peers, too."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

Answer = Callable[[object], None]


def answering() -> Answer:
    """Return what writes an answer; what libraries print from now on goes to the other stream."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lambda found: print(json.dumps(found), file=out)


def serve(answer: Answer, act: Callable[[str], object]) -> None:
    """Answer every line with what `act` returns, then end at once: some libraries abort when they are torn down."""
    for line in sys.stdin:
        answer(act(line.strip()))
    os._exit(0)
