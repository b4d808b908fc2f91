"""A CUDA kernel as text: a template of `native/cuda`, one instance of it, and the argument it takes. Imports no torch.

Words: an *instance* is a template with its parameters, chosen by an op for a format, a dtype and a shape. A *call* is the one structure
that the kernel takes by value; `layout` is its form for Python's `struct`, native alignment.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from ds_ops.module_cache import source_dir

__all__ = ["CudaKernel", "kernel_folders", "sources_digest"]


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """One instance of a kernel.

    Args:
        source: A file of `native/cuda`.
        instance: What is called, with the parameters of its template: `norm<Dtype::bf16, ...>`.
        call: The structure it takes.
        layout: The structure's fields, as `struct.Struct` reads them.
        threads: Of a block.
        resident: Blocks that fit a multiprocessor: a bound on registers.
    """

    source: str
    instance: str
    call: str
    layout: str
    threads: int = 256
    resident: int = 1

    @property
    def entry(self) -> str:
        """The kernel's name, as a profiler shows it."""
        words = re.sub(r"\b(Dtype|Kind)::", "", self.instance).replace("-", "m")
        return "ds_" + re.sub(r"\W+", "_", words).strip("_").lower()

    @property
    def text(self) -> str:
        """The source of the translation unit, for NVRTC, nvcc and the emulator alike."""
        arguments = f"{self.entry}, {self.threads}, {self.resident}, {self.call}, {self.instance}"
        return f'#include "{self.source}"\nDS_ENTRY({arguments})\n'


def kernel_folders() -> tuple[Path, ...]:
    """Return the folders that kernels include files from; empty where this installation carries no sources."""
    native = source_dir()
    return () if native is None else (native / "cuda", native / "include")


@functools.cache
def sources_digest() -> str:
    """Hash what a kernel can include: an image of other sources is never loaded."""
    digest = hashlib.sha256()
    for folder in kernel_folders():
        for path in sorted(p for p in folder.rglob("*") if p.suffix in (".cu", ".h")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
