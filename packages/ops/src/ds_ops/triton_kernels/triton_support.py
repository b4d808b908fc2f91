"""Why Triton kernels cannot run somewhere, and the one place that launches them."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from typing import Any

import torch

from ds_ops.registry import Unavailable

__all__ = ["launch", "multiprocessors", "next_power", "shared_memory", "triton_obstacle"]

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_OLDEST = (8, 0)


def triton_obstacle(device_type: str, dtype: torch.dtype) -> str:
    """Return why Triton kernels cannot run for tensors of this kind, an `Unavailable`; an empty string if they can.

    On the CPU they run in Triton's interpreter, for tests: TRITON_INTERPRET=1 with DS_OPS=triton.
    """
    if dtype not in FLOATS:
        return Unavailable(f"does not take {dtype}", fix="convert to torch.bfloat16")
    if device_type == "cpu":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1" and os.environ.get("DS_OPS") == "triton"
        return _missing() if interpreted else Unavailable("runs on cuda tensors only", elsewhere=True)
    if device_type != "cuda":
        return Unavailable("runs on cuda tensors only", elsewhere=True)
    return _missing() or _no_compiler() or _too_old()


@functools.cache
def _missing() -> str:
    if importlib.util.find_spec("triton") is None:
        return Unavailable(
            "the package triton is not installed", fix="install triton (CUDA builds of torch for Linux require it)"
        )
    return ""


@functools.cache
def _no_compiler() -> str:
    # Triton builds the launcher of a kernel with the system's C compiler, when the kernel first runs.
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    if any(name and shutil.which(name) for name in names):
        return ""
    return Unavailable("there is no C compiler, with which Triton builds launchers", fix="install gcc, or set CC")


@functools.cache
def _too_old() -> str:
    if torch.version.hip is not None:
        return ""
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if found < _OLDEST:
        return Unavailable(f"needs compute capability {_OLDEST[0]}.{_OLDEST[1]}, the device has {found[0]}.{found[1]}")
    return ""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Queue a kernel on the current stream; its results are valid on that stream. Tests count the calls."""
    kernel[grid](*arguments, **constants)


def next_power(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many blocks of threads the device runs side by side; 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a block of threads may have; the interpreter has no limit."""
    if device.type != "cuda":
        return 1 << 30
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 64 << 10))  # ROCm's have no such field
