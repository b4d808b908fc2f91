"""The page of loops around an optimizer: made of `packages/zero/tests/world/loops.py`, which the tests run at every stage."""

from __future__ import annotations

import importlib.util
import sys

from repo import ROOT

__all__ = ["page"]

SOURCE = ROOT / "packages" / "zero" / "tests" / "world" / "loops.py"


def page() -> str:
    """Write one row a loop: what it ends in at each stage, on one rank and on two."""
    spec = importlib.util.spec_from_file_location("repo_loops", SOURCE)
    if spec is None or spec.loader is None:
        raise ImportError(f"{SOURCE} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    lines = [
        "# Loops",
        "",
        "<!-- Made by `python tools/pages.py loops` from packages/zero/tests/world/loops.py and loops_of_users.py. -->",
        "",
        "What users write around an optimizer, and what it comes to after `ds_zero.shard(model, optimizer, stage=...)`. `nox -s grid` runs each",
        "loop at every stage on one rank and on two. *equal*: weights and logged numbers are those of one process. Else the code of the error",
        "that ends the loop, and says what to write instead ([errors](errors.md)); codes of two ranks only are marked so.",
        "",
        "| loop | stage 0 | stage 1 | stage 2 | stage 3 |",
        "|---|---|---|---|---|",
    ]
    for loop in module.LOOPS.values():
        lines.append(f"| {loop.title} | {' | '.join(_cell(loop, stage) for stage in range(4))} |")
    return "\n".join(lines) + "\n"


def _cell(loop: object, stage: int) -> str:
    expected = loop.expected  # type: ignore[attr-defined]
    alone, two = expected(stage, 1), expected(stage, 2)
    text = " or ".join(code if code == "equal" else f"`{code}`" for code in two.split(" or "))
    return text if alone == two else f"{text} (2 ranks)"
