"""Compiled kernels on disk, in the user's cache: written once, found by digest, safe against two ranks and a read-only home.

An *image* is what a compiler made of a kernel for one architecture. A file holds the digest of its bytes before them, and comes to its
name by one rename: a torn or damaged file is never loaded, only made again. What has another digest (sources, compiler, options) has
another name, so nothing old is ever found. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ds_ops.kernel_source import CudaKernel, sources_digest
from ds_ops.module_cache import cache_root

__all__ = ["KernelImages"]

_MAGIC = b"ds-image1"


@dataclass(frozen=True, slots=True)
class KernelImages:
    """Images of one compiler in `folder`. `compiler`: what of the compiler decides its output, as text."""

    folder: Path
    compiler: str

    @classmethod
    def of(cls, compiler: str) -> KernelImages:
        """Open the user's cache: `DS_OPS_CACHE`, or the cache folder of the user."""
        return cls(cache_root() / "kernels", compiler)

    def path(self, kernel: CudaKernel, architecture: str) -> Path:
        """Return where the image of `kernel` for `architecture` ("sm_90") lies, or would."""
        words = "\0".join((self.compiler, architecture, sources_digest(), kernel.text))
        return self.folder / f"{kernel.entry[:120]}-{architecture}-{hashlib.sha256(words.encode()).hexdigest()[:24]}"

    def read(self, kernel: CudaKernel, architecture: str) -> bytes | None:
        """Read an image; None if there is none, or one that is damaged."""
        try:
            data = self.path(kernel, architecture).read_bytes()
        except OSError:
            return None
        head = len(_MAGIC) + 32
        whole = data[: len(_MAGIC)] == _MAGIC and hashlib.sha256(data[head:]).digest() == data[len(_MAGIC) : head]
        return data[head:] if whole else None

    def write(self, kernel: CudaKernel, architecture: str, image: bytes) -> str:
        """Keep an image, and return why that failed (a read-only home, a full disk): an empty string where it did not."""
        path = self.path(kernel, architecture)
        temporary = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=".image-", dir=path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(image).digest() + image)
            os.replace(temporary, path)
        except OSError as error:
            if temporary:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            return str(error)
        return ""
