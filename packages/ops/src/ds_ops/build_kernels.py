"""Makes images of CUDA kernels ahead of time, and says which are there: what `ds ops build cuda` and `ds ops kernels` do.

Nothing needs it: a kernel is compiled when it is first used. It is for images made before a job starts, and for machines without a
device. `compile_ahead` does it beside the start of a training, so that the first step does not wait for each kernel in turn.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import ds_ops.cuda_launch as cuda_launch
import ds_ops.cuda_norms as cuda_norms
import ds_ops.cuda_quant as cuda_quant
import ds_ops.cuda_stream as cuda_stream
import ds_ops.cuda_update as cuda_update
from ds_config.errors import KernelError
from ds_ops._call import native
from ds_ops.kernel_compilers import KernelCompiler, find_nvcc, open_compiler
from ds_ops.kernel_images import KernelImages
from ds_ops.kernel_source import CudaKernel

__all__ = [
    "KernelRow",
    "any_compiler",
    "build_kernels",
    "compile_ahead",
    "kernel_rows",
    "kernel_table",
    "present_capabilities",
]

_LIBRARY = "libcuda.so.1"
Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A kernel for an architecture. path: its image; empty if it is not compiled yet. seconds: it took now; 0 if it was there."""

    kernel: CudaKernel
    architecture: str
    path: str
    seconds: float = 0.0


def kernel_table() -> tuple[CudaKernel, ...]:
    """List every kernel that is worth making ahead of time. Others are made when a shape or a format asks for them."""
    return cuda_stream.KERNELS + cuda_update.KERNELS + cuda_norms.KERNELS + cuda_quant.KERNELS


def compile_ahead(device: int, *, first: int = 0) -> threading.Thread | None:
    """Compile in the background what every training on CUDA device `device` runs: sums of squares, conversions, optimizers' updates.

    The first call in a process waits for one small kernel, which shows that kernels can be made and loaded at all.

    Args:
        first: Which kernel to begin at: the local rank, so that the ranks of a machine share the work.
    Returns:
        The thread that compiles; None where no CUDA kernel can run.
    """
    if cuda_launch.obstacle():
        return None
    return cuda_launch.runtime().compile_ahead(cuda_stream.KERNELS + cuda_update.KERNELS, device, first=first)


def any_compiler() -> KernelCompiler:
    """Open NVRTC, or nvcc where there is none.

    Raises:
        KernelError: "kernel-compile" if there is neither; "kernel-missing" without the module.
    """
    module = native("_cuda")
    try:
        return open_compiler(module, _driver_version(module))
    except KernelError:
        if (nvcc := find_nvcc(os.environ)) is None:
            raise
        return nvcc


def _driver_version(module: ModuleType) -> int:
    return 0 if module.open_driver(_LIBRARY) else int(module.driver_version())


def present_capabilities() -> tuple[Capability, ...]:
    """List the compute capabilities of this machine's devices, each once; empty where the driver finds none."""
    module = native("_cuda")
    if module.open_driver(_LIBRARY):
        return ()
    return tuple(dict.fromkeys((major, minor) for _name, major, minor, _count in module.devices()))


def kernel_rows(
    compiler: KernelCompiler, capabilities: Sequence[Capability], kernels: Sequence[CudaKernel]
) -> list[KernelRow]:
    """Report of every kernel and capability whether its image is in the user's cache."""
    images = KernelImages.of(compiler.identity)
    rows = []
    for capability in capabilities:
        architecture = compiler.target(capability)
        for kernel in kernels:
            there = images.read(kernel, architecture) is not None
            rows.append(KernelRow(kernel, architecture, str(images.path(kernel, architecture)) if there else ""))
    return rows


def build_kernels(
    compiler: KernelCompiler,
    rows: Sequence[KernelRow],
    *,
    force: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> list[KernelRow]:
    """Compile the rows that have no image, and return them all as they are now.

    Args:
        force: Compile every row.
        say: Called with one line about each kernel.
    Raises:
        KernelError: "kernel-compile"; "ops-build-cache" if an image cannot be kept.
    """
    images = KernelImages.of(compiler.identity)
    done = []
    for row in rows:
        if row.path and not force:
            done.append(row)
            continue
        say(f"{row.architecture} {row.kernel.instance}")
        start = time.monotonic()
        image = compiler.compile(row.kernel, row.architecture)
        seconds = time.monotonic() - start
        if why := images.write(row.kernel, row.architecture, image):
            raise KernelError(
                f"the image of {row.kernel.instance} cannot be kept: {why}.",
                code="ops-build-cache",
                fix="Set DS_OPS_CACHE to a folder of yours on a local disk.",
            )
        done.append(KernelRow(row.kernel, row.architecture, str(images.path(row.kernel, row.architecture)), seconds))
    return done
