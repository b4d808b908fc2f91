"""Do the tests see a fault? Drawn changes of pure modules (operators of cosmic-ray), each met by the module's own tests.

    python tools/mutants.py [MODULE ...] [--count 40] [--seed 0] [--json FILE]

Words: a *place* is a piece of a module that some operator can change; a *mutant* is the module with one place changed; it is *killed*
when a test fails, and *survives* when all pass. A place is drawn once, then one of the operators for it. Mutants that change
nothing but annotations, docstrings or promises of records (frozen, slots) are left out.

Nothing is written: a mutant is loaded by an importer of a forked process, which has imported third parties already and none of ours. So
a mutant costs its tests and no more.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).resolve().parents[1]
FIRST = ("torch", "pytest", "hypothesis", "pydantic", "numpy")  # imported once, before the forks
LIMIT_S = 120
MODULES: Mapping[str, str] = {
    "ds_config.did_you_mean": "config/tests/test_names.py",
    "ds_config.parse": "config/tests/test_parse.py",
    "ds_config.sizes": "config/tests/test_sizes.py",
    "ds_zero.layout.elements": "zero/tests/test_layout.py zero/tests/test_exchange.py zero/tests/test_posting.py",
    "ds_zero.runtime.gather_order": "zero/tests/test_order.py",
    "ds_zero.planning.unit_plan": "zero/tests/test_plan.py",
    "ds_zero.layout.dtypes_plan": "zero/tests/test_precision.py",
    "ds_zero.layout.units": "zero/tests/test_units.py",
    "ds_comm.grid": "comm/tests/test_grid.py",
    "ds_comm.launch": "comm/tests/test_launch.py",
    "ds_comm.placement": "comm/tests/test_placement.py",
    "ds_comm.watch.verdict": "comm/tests/test_verdict.py",
    "ds_ckpt.crc": "ckpt/tests/test_crc.py",
    "ds_ckpt.jsontext": "ckpt/tests/test_hostile.py ckpt/tests/test_roundtrip.py",
    "ds_ckpt.save_plan": "ckpt/tests/test_plan.py",
}
"""Pure modules, and the tests that are to see their faults, below packages/."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed module.

    Attributes:
        line: Where.
        operator: cosmic-ray's name of the change.
        diff: The lines before and after.
        source: The module's text with the change.
    """

    module: str
    line: int
    operator: str
    diff: str
    source: str


def path_of(module: str) -> Path:
    """The file of one of our modules."""
    package, *rest = module.split(".")
    return ROOT / "packages" / package.removeprefix("ds_") / "src" / package / Path(*rest).with_suffix(".py")


def drawn(module: str, count: int, seed: int) -> list[Mutant]:
    """At most `count` mutants of a module, the same for the same text and seed."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    text = path_of(module).read_text(encoding="utf-8")
    places: dict[tuple[tuple[int, int], tuple[int, int]], list[tuple[str, int]]] = {}
    nodes = list(ast_nodes(get_ast(text)))
    for name in sorted(n for n in operator_names() if not n.startswith("core/Variable")):  # which need to be told names
        operator, number = get_operator(name)(), 0
        for node in nodes:
            for place in operator.mutation_positions(node):
                places.setdefault(place, []).append((name, number))
                number += 1
    rng, found = random.Random(f"{seed} {module}"), []
    order = sorted(places)
    rng.shuffle(order)
    meant = _meaning(text)
    for place in order:
        name, number = rng.choice(places[place])
        source = mutate_code(text, get_operator(name)(), number)
        if source is None or _meaning(source) == meant:
            continue
        diff = list(difflib.unified_diff(text.splitlines(), source.splitlines(), n=0, lineterm=""))[3:]
        found.append(Mutant(module, place[0][0], name, "\n".join(diff), source))
        if len(found) == count:
            break
    return sorted(found, key=lambda mutant: mutant.line)


def _meaning(source: str) -> str:
    """What a module does: its tree without annotations, docstrings and promises of records (frozen, slots). A text that is none means itself."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.ClassDef):
            for decorator in (d for d in node.decorator_list if isinstance(d, ast.Call)):
                decorator.keywords = [k for k in decorator.keywords if k.arg not in ("frozen", "slots")]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
    return ast.dump(tree)


class _Importer(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports one module from a text."""

    def __init__(self, module: str, source: str) -> None:
        self.module, self.source = module, source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=str(path_of(fullname)))

    def get_source(self, fullname: str) -> str:
        return self.source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, str(path_of(fullname)), "exec", dont_inherit=True)


def tested(module: str, source: str) -> int:
    """Run a module's tests with this text of it, in a process of their own. Returns pytest's exit status, or a signal, negative."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            signal.alarm(LIMIT_S)  # a mutant may loop for ever
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            for name in [n for n in sys.modules if n.startswith("ds_")]:
                del sys.modules[name]
            sys.meta_path.insert(0, _Importer(module, source))
            import pytest

            tests = [str(ROOT / "packages" / name) for name in MODULES[module].split()]
            status = int(pytest.main(["-x", "-q", "--no-header", f"--rootdir={ROOT}", *tests]))
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(argv: Sequence[str]) -> int:
    """Print the table; 1 if the tests of a module fail without a mutant."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="; ".join(MODULES))
    parser.add_argument("--count", type=int, default=40, help="mutants a module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write survivors")
    args = parser.parse_args(argv)
    for name in FIRST:
        importlib.import_module(name)
    killed = total = 0
    survivors: list[dict[str, object]] = []
    for module in args.modules or MODULES:
        began = time.monotonic()
        if status := tested(module, path_of(module).read_text(encoding="utf-8")):
            print(f"{module}: its tests fail as it is (status {status})")
            return 1
        mutants = drawn(module, args.count, args.seed)
        alive = [mutant for mutant in mutants if tested(mutant.module, mutant.source) == 0]
        killed, total = killed + len(mutants) - len(alive), total + len(mutants)
        print(
            f"{module}: {len(mutants) - len(alive)} of {len(mutants)} killed, {time.monotonic() - began:.0f} s",
            flush=True,
        )
        for mutant in alive:
            survivors.append({key: value for key, value in asdict(mutant).items() if key != "source"})
            print(f"  line {mutant.line}, {mutant.operator}\n    " + mutant.diff.replace("\n", "\n    "), flush=True)
    print(f"{killed} of {total} killed: {100 * killed / max(total, 1):.1f} %")
    if args.json is not None:
        args.json.write_text(json.dumps({"killed": killed, "total": total, "survivors": survivors}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
