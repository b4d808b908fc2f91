"""Ranks that are forks of the keeper: what is decided, and that a script cannot tell."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from ds_launcher.forked import forkable, imports_of, shared_env
from ds_launcher.launch_plan import Process

if TYPE_CHECKING:
    from conftest import Sandbox

posix = pytest.mark.skipif(os.name != "posix", reason="`ds run` needs signals and process groups")


def rank(number: int, **env: str) -> Process:
    return Process(f"rank {number}", ("python", "-u", "t.py"), {"RANK": str(number), **env}, fork=True)


def test_only_modules_that_do_nothing_are_imported_early() -> None:
    source = "import os, torch, pandas\nfrom ds_engine.plan import x\nfrom . import y\nimport dsx\nif a:\n    import numpy\nimport numpy\n"
    assert imports_of(source) == ("torch", "ds_engine.plan")
    assert imports_of("print 'two'") == ()
    assert imports_of('"""What it is."""\nimport torch\nos.environ["A"] = "1"\nimport numpy\n') == ("torch",)


def test_what_may_be_forks() -> None:
    two = (rank(0), rank(1))
    assert forkable(two, {})
    assert not forkable(two[:1], {})
    assert not forkable((rank(0), Process("rank 1", ("x",))), {})
    assert not forkable(two, {"OMP_PROC_BIND": "close"})
    assert shared_env((rank(0, OMP_NUM_THREADS="3"), rank(1, OMP_NUM_THREADS="3"))) == {"OMP_NUM_THREADS": "3"}


LOOK = """
    import json, os, random, sys
    import numpy
    class Here: pass
    print(json.dumps({
        "argv": sys.argv, "orig": sys.orig_argv[1:], "file": __file__, "name": __name__, "path": sys.path[0],
        "module": Here.__module__, "main": sys.modules["__main__"].Here is Here, "unbuffered": sys.stdout.write_through,
        "line": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0")[1:], "parent": os.getppid() != 1,
        "session": os.getsid(0) == os.getpid(), "threads": len(os.listdir("/proc/self/task")),
        "sockets": sum("socket" in os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
                       if os.path.lexists(f"/proc/self/fd/{n}")),
        "handlers": [str(__import__("signal").getsignal(n)) for n in (2, 15, 17)], "rank": os.environ["RANK"],
        "omp": os.environ["OMP_NUM_THREADS"],
    }), file=open("seen" + os.environ["RANK"], "w"))
    open("drawn" + os.environ["RANK"], "w").write(f"{numpy.random.rand()} {random.random()}")
"""


@posix
def test_a_script_cannot_tell(box: Sandbox) -> None:
    script = box.script(LOOK)
    seen = {}
    for start in ("fork", "spawn"):
        done = box.ds("run", "--nproc", "2", "--start", start, script, "a b", "--x")
        assert (done.returncode, done.stderr) == (0, "")
        seen[start] = [box.file(f"seen{r}").read_text() for r in range(2)]
        assert box.file("drawn0").read_text().split()[0] != box.file("drawn1").read_text().split()[0]
        assert box.file("drawn0").read_text().split()[1] != box.file("drawn1").read_text().split()[1]
    assert seen["fork"] == seen["spawn"]


@posix
def test_the_ranks_are_forks(box: Sandbox) -> None:
    script = box.script("""
        import os, sys
        import numpy
        print("ds_launcher.forked" in sys.modules)
    """)
    assert "True" in box.ds("run", "--nproc", "2", script).stdout
    assert "True" not in box.ds("run", "--nproc", "2", "--start", "spawn", script).stdout


@posix
def test_annotations_are_what_the_script_says(box: Sandbox) -> None:
    script = box.script("""
        import dataclasses
        import numpy
        @dataclasses.dataclass
        class Arguments:
            rate: float = 0.1
        print(dataclasses.fields(Arguments)[0].type is float)
    """)
    assert box.ds("run", "--nproc", "2", script).stdout.count("True") == 2


@posix
def test_how_it_ends_is_the_same(box: Sandbox) -> None:
    script = box.script("""
        import atexit, os, sys
        import numpy
        atexit.register(lambda: open("atexit" + os.environ["RANK"], "w").close())
        def inner():
            if os.environ["RANK"] == "1":
                raise ValueError("broke")
        inner()
        sys.exit(0)
    """)
    done = box.ds("run", "--nproc", "2", script)
    assert done.returncode == 1
    assert "rank 1 failed first (exit code 1)" in done.stderr
    assert done.stderr.splitlines()[-1] == "ValueError: broke"
    assert "forked.py" not in done.stderr
    assert "keeper" not in done.stderr
    assert box.file("atexit0").exists()
    assert box.file("atexit1").exists()
    coded = box.script("import numpy, sys\nsys.exit(7)\n", "coded.py")
    assert box.ds("run", "--nproc", "2", coded).returncode == 7


@posix
def test_a_signal_during_the_imports_ends_it(box: Sandbox) -> None:
    box.script("import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(60)\n", "ds_slow_to_import.py")
    script = box.script("import ds_slow_to_import\n")
    job = box.start("run", "--nproc", "2", script, env={"PYTHONPATH": str(box.folder)})
    box.wait(lambda: box.file("importing").exists())
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=10) == 128 + signal.SIGTERM
    job.communicate()
