"""Which implementation of an op runs: chosen once per op, device type and dtype, from data that can be printed.

An *op* is a name with *backends* in order of preference; the last one is the reference in plain torch, which runs
everywhere. A backend says, for a device type and a dtype, why it cannot run, or nothing. `DS_OPS=reference` (or another
backend's name) in the environment makes that backend the only choice wherever an op has it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import ds_ops._native as _native
import ds_ops.cuda_launch as cuda_launch
from ds_config.errors import KernelError, UnsupportedError
from ds_ops._call import DTYPES

__all__ = [
    "Backend",
    "Choice",
    "Op",
    "Unavailable",
    "absent_backend",
    "choose",
    "cpu_backend",
    "cuda_backend",
    "ops",
    "reference_backend",
    "register",
    "torch_backend",
]

Reason = Callable[[str, torch.dtype], str]


class Unavailable(str):
    """Why a backend cannot run, as text, and what a user can do about it.

    Attributes:
        fix: The command or the sentence that changes it; empty if nothing does.
        elsewhere: The backend is for another kind of device, so it is not reported.
    """

    __slots__ = ("elsewhere", "fix")

    fix: str
    elsewhere: bool

    def __new__(cls, reason: str, *, fix: str = "", elsewhere: bool = False) -> Unavailable:
        obstacle = super().__new__(cls, reason)
        obstacle.fix, obstacle.elsewhere = fix, elsewhere
        return obstacle


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation. `obstacle(device_type, dtype)` is why it cannot run there (an `Unavailable`), empty if it can."""

    name: str
    run: Callable[..., Any]
    obstacle: Reason


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """A named operation and its backends, best first. Compared by identity: it is looked up at every call."""

    name: str
    summary: str
    backends: tuple[Backend, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that runs, and why each better one does not."""

    backend: Backend
    rejected: tuple[tuple[str, str], ...]


_ops: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Add an op at import of the module that defines it. Names are unique."""
    if op.name in _ops:
        raise KernelError(f"op {op.name!r} is registered twice.", code="op-duplicate", fix="Give it another name.")
    _ops[op.name] = op
    for backend in op.backends:
        if isinstance(backend.run, _CompiledLate):
            backend.run.op = op
    return op


def ops() -> tuple[Op, ...]:
    """Return every registered op, sorted by name."""
    return tuple(_ops[name] for name in sorted(_ops))


def choose(op: Op, device_type: str, dtype: torch.dtype) -> Choice:
    """Choose the backend of `op` for tensors of this kind. Cached; about a microsecond.

    Under torch.compile: plain torch, which the compiler fuses with neighbouring operations; a kernel is opaque to the
    compiler.
    """
    if torch.compiler.is_compiling():
        return _traced(op)
    return _choose(op, device_type, dtype, os.environ.get("DS_OPS", ""))


def _traced(op: Op) -> Choice:
    for backend in op.backends:
        if backend.name in ("torch", "reference"):
            return Choice(backend, ())
    raise KernelError(
        f"op {op.name} has no reference.", code="kernel-missing", fix="Register one, as its last backend."
    )


@functools.lru_cache(maxsize=1024)
def _choose(op: Op, device_type: str, dtype: torch.dtype, forced: str) -> Choice:
    rejected: list[tuple[str, str]] = []
    has_forced = any(b.name == forced for b in op.backends)
    for backend in op.backends:
        reason = backend.obstacle(device_type, dtype)
        if not reason and has_forced and backend.name != forced:
            reason = Unavailable(f"DS_OPS={forced} forces another backend", fix="unset DS_OPS")
        if not reason:
            return Choice(backend, tuple(rejected))
        rejected.append((backend.name, reason))
    lines = "; ".join(f"{name}: {reason}" for name, reason in rejected)
    raise UnsupportedError(
        f"op {op.name} has no backend for {dtype} on {device_type}: {lines}.",
        code="op-no-backend",
        fix="Convert the tensors, or unset DS_OPS.",
    )


def cpu_backend(run: Callable[..., Any], dtypes: tuple[torch.dtype, ...] = tuple(DTYPES)) -> Backend:
    """Build a backend of the native CPU module."""
    return Backend("cpu", run, functools.partial(_native_obstacle, "_cpu", "cpu", dtypes))


def cuda_backend(run: Callable[..., Any], dtypes: tuple[torch.dtype, ...] = tuple(DTYPES)) -> Backend:
    """Build a backend of CUDA kernels, which are compiled when they are first used.

    A call whose kernel cannot be compiled runs by the op's torch backend, and so do all calls of that op from then on;
    `choose` and `ds doctor` say why.
    """
    guard = _CompiledLate(run)
    return Backend("cuda", guard, functools.partial(_cuda_obstacle, guard, dtypes))


class _CompiledLate:
    """Runs a CUDA kernel, or torch once it turned out that it cannot be compiled. op: set when the op is registered."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self.op: Op | None = None
        self.failure = ""

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self.run(*arguments)
        except KernelError as error:
            if error.code != "kernel-compile" or self.op is None:
                raise
            self.failure = error.message
            _choose.cache_clear()
            return _traced(self.op).backend.run(*arguments)


def reference_backend(run: Callable[..., Any], *, moves: bool = False) -> Backend:
    """Build the reference backend in plain torch, which runs on every device.

    moves: the op computes nothing, so that any dtype will do.
    """
    return Backend("reference", run, _anything if moves else _floats)


def torch_backend(run: Callable[..., Any]) -> Backend:
    """Build a backend of torch's own fused kernel, for ops where a native kernel would be no faster."""
    return Backend("torch", run, _floats)


def absent_backend(name: str, why: str) -> Backend:
    """Build the entry of a backend that was not written; `why` says what the reference costs instead."""
    return Backend(name, _absent, lambda _device, _dtype: Unavailable(why))


def _anything(_device: str, _dtype: torch.dtype) -> str:
    return ""


def _floats(_device: str, dtype: torch.dtype) -> str:
    # Floats of one byte or less are for storage: torch itself computes nothing with them.
    takes = dtype.is_floating_point and dtype.itemsize > 1
    return "" if takes else Unavailable(f"does not take {dtype}", fix="convert to torch.float32")


def _absent(*_arguments: object) -> None:
    raise KernelError("a backend that does not exist was run.", code="kernel-missing", fix="Go through choose().")


def _native_obstacle(
    module: str, kind: str, dtypes: tuple[torch.dtype, ...], device_type: str, dtype: torch.dtype
) -> str:
    if device_type != kind:
        return Unavailable(f"runs on {kind} tensors only", elsewhere=True)
    if dtype not in dtypes:
        return Unavailable(f"does not take {dtype}", fix=f"convert to {dtypes[0]}")
    loaded = _native.load(module)
    return Unavailable(loaded.reason, fix=f"ds ops build {kind}") if loaded.reason else ""


def _cuda_obstacle(guard: _CompiledLate, dtypes: tuple[torch.dtype, ...], device_type: str, dtype: torch.dtype) -> str:
    if reason := _native_obstacle("_cuda", "cuda", dtypes, device_type, dtype):
        return reason
    reason = cuda_launch.obstacle() or guard.failure
    return Unavailable(reason, fix="ds report   (names the driver and the compiler)") if reason else ""
