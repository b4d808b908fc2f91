"""Ranks as forks of the keeper: what they all import is imported once a host, not once a rank.

A rank that imports torch pays a second of processor for it. The keeper therefore imports, before it starts ranks, what the script imports
at its top of torch, numpy and the packages of this project, which do nothing when they are imported; then each rank is a fork that becomes
`python -u SCRIPT`: its own `__main__`, arguments, path, output and random numbers. Only a process without threads can be forked
safely, and one that touched no device: where an import left a thread behind that does not end itself before a fork (a library may,
by pthread_atfork), or failed, ranks are started as new processes, which says everything itself.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.machinery
import io
import os
import runpy
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

from ds_launcher.launch_plan import Process
from ds_launcher.procfs import USER_SIGNALS

__all__ = ["BecomeRank", "Forks", "become", "forkable", "imports_of", "shared_env"]

Streams = tuple[int | None, int | None, int]
Prepare = Callable[[int, tuple[int, ...]], None]
_ROOTS = ("torch", "numpy")
_CUSTOM = {"sitecustomize", "usercustomize"}
_BOUND = (
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
)  # read when OpenMP is loaded, rank by rank


class BecomeRank(BaseException):
    """Raised in a fork, to leave all that belongs to the keeper; caught where the program began."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.name)
        self.process = process


def imports_of(source: str) -> tuple[str, ...]:
    """List the early-importable modules that a script imports before its first other statement. Pure.

    A script may set a variable that an import reads: each rank does the imports after that statement.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    modules: dict[str, None] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            modules |= dict.fromkeys(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules[node.module] = None
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            break
    return tuple(name for name in modules if name.split(".")[0] in _ROOTS or name.startswith("ds_"))


def forkable(processes: Sequence[Process], env: Mapping[str, str]) -> bool:
    """Whether these are ranks of one script, more than one, that may be forks. Pure."""
    if len(processes) < 2 or not all(process.fork for process in processes):
        return False
    return not any(name in env or any(name in process.env for process in processes) for name in _BOUND)


def shared_env(processes: Sequence[Process]) -> dict[str, str]:
    """Return the variables that are the same for all processes: an import may read them (OMP_NUM_THREADS). Pure."""
    first, *others = (process.env for process in processes)
    return {name: value for name, value in first.items() if all(env.get(name) == value for env in others)}


class Forks:
    """This process as the origin of ranks.

    Args:
        processes: of the launch.
        control: the socket to `ds run`; when it speaks or ends during the imports, this process ends: there is nobody else yet.
    """

    def __init__(self, processes: Sequence[Process], control: socket.socket) -> None:
        self.ready = False
        self._kept_pids: set[int] = set()
        # What Python runs at every start, before a script, would run once and without the ranks' variables.
        if not forkable(processes, os.environ) or _CUSTOM & sys.modules.keys():
            return
        with contextlib.suppress(OSError, UnicodeDecodeError):
            modules = imports_of(Path(processes[0].argv[2]).read_text(encoding="utf-8"))
            if modules:
                os.environ.update(shared_env(processes))
                before = _descriptors()
                with _ending_with(control):
                    self.ready = _import(modules) and _alone()
                self._kept_pids = _descriptors() - before
                gc.freeze()  # a collection in a rank would write to every page that is shared

    def fork(self, process: Process, streams: Streams, prepare: Prepare) -> int:
        """Fork a rank and return its process id; in the rank itself, raise BecomeRank.

        Args:
            prepare: Called first in the new process, with the keeper's id and the cores.
            streams: Descriptors for standard input, output and error; None leaves the stream unchanged.
        """
        keeper = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._begin(process, keeper, (streams, prepare))
        return pid

    def _begin(self, process: Process, keeper: int, setup: tuple[Streams, Prepare]) -> NoReturn:
        streams, prepare = setup
        signal.set_wakeup_fd(-1)
        os.setsid()
        prepare(keeper, process.cores)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, stream in enumerate(streams):
            if stream is not None:
                os.dup2(stream, number)
        for descriptor in _descriptors() - self._kept_pids - {0, 1, 2}:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        raise BecomeRank(process)


def become(process: Process) -> NoReturn:
    """Run `python -u SCRIPT ARGUMENTS` in this process, to its end."""
    os.environ.update(process.env)
    script, words = process.argv[2], list(process.argv[2:])
    sys.argv, sys.orig_argv = words, list(process.argv)
    sys.path.insert(0, str(Path(script).resolve().parent))
    _show_as(process.argv)
    sys.stdin = sys.__stdin__ = open(0, encoding=sys.stdin.encoding, closefd=False) if sys.stdin else None  # type: ignore[misc]  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        new = io.TextIOWrapper(io.FileIO(number, "wb", closefd=False), old.encoding, old.errors, write_through=True)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # or all ranks would draw the same numbers
    try:
        _run(os.path.abspath(script))  # as Python's own `__file__` is
    except SystemExit:
        raise
    except KeyboardInterrupt as error:
        sys.excepthook(type(error), error, _below(error))
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        sys.excepthook(type(error), error, _below(error))
        raise SystemExit(1) from None
    raise SystemExit(0)


def _run(script: str) -> None:
    main = ModuleType("__main__")
    main.__file__ = script
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", script)
    vars(main).update(__builtins__=__builtins__, __spec__=None, __cached__=None)
    sys.modules["__main__"] = main
    if Path(script).is_dir() or script.endswith((".zip", ".pyz")):
        runpy.run_path(script, run_name="__main__")
        return
    # Not with this module's own `from __future__ import annotations`: types of dataclasses would become strings.
    exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), vars(main))


def _below(error: BaseException) -> TracebackType | None:
    """Cut the traceback of an error to begin at the script's first frame, and return the traceback."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_globals.get("__name__") == __name__:
        frame = frame.tb_next
    error.__traceback__ = frame or error.__traceback__
    return error.__traceback__


def _import(modules: Sequence[str]) -> bool:
    try:
        for name in modules:
            importlib.import_module(name)
    except Exception:  # the rank's own import says it, with the script's line
        return False
    return "torch" not in sys.modules or not sys.modules["torch"].cuda.is_initialized()


def _alone() -> bool:
    """Whether a fork finds one thread: what starts threads and minds forks ends them before one (OpenBLAS)."""
    if len(os.listdir("/proc/self/task")) > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) == 1


def _descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


@contextlib.contextmanager
def _ending_with(control: socket.socket) -> Iterator[None]:
    """End this process, while inside, when `ds run` is gone or forwards a signal.

    No process was started yet, so nothing is left behind.
    """

    def look(number: int, frame: object) -> None:
        with contextlib.suppress(BlockingIOError):
            data = control.recv(64, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            ends = [each for each in data if each not in USER_SIGNALS]  # the ranks get those when they are there
            if ends or not data:
                os._exit(128 + (ends[0] if ends else signal.SIGTERM))

    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    signal.signal(signal.SIGIO, look)
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC)
    look(0, None)
    try:
        yield
    finally:
        fcntl.fcntl(control, fcntl.F_SETFL, flags)
        signal.signal(signal.SIGIO, _ignore)  # one may be on its way; its default action ends the process


def _ignore(number: int, frame: object) -> None:
    """Do nothing at a signal; a program that is executed has the default action again."""


def _show_as(argv: Sequence[str]) -> None:
    """Let `ps` show this command: write it where the kernel looks, over our own (which `ds run` made long enough)."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: fields 48 and 49 of proc(5)
        text = b"\0".join(os.fsencode(word) for word in argv)[: max(0, end - start - 1)]
        if start:
            ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
