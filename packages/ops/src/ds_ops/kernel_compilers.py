"""What compiles CUDA kernels: NVRTC, which every CUDA build of torch brings, or nvcc. Imports no torch.

Both get the same text and the same options; a kernel includes nothing outside `native/`, so neither needs CUDA's headers.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import ds_ops.toolchain as toolchain
from ds_config.errors import KernelError
from ds_ops.kernel_source import CudaKernel, kernel_folders

__all__ = ["KernelCompiler", "Nvcc", "Nvrtc", "compile_error", "find_nvrtc", "open_compiler"]

_OPTIONS = ("--std=c++17", "--fmad=false")
_SECONDS = 300.0


class KernelCompiler(Protocol):
    """Makes images of kernels. A test's emulator is one, too."""

    @property
    def name(self) -> str:
        """Name, version and place, for messages."""

    @property
    def identity(self) -> str:
        """What of the compiler decides its output: part of an image's digest."""

    def target(self, capability: tuple[int, int]) -> str:
        """Return the architecture to compile for ("sm_90"; "compute_120" for a newer device, whose driver finishes the work).

        Raises:
            KernelError: "kernel-compile" for a device that is older than the compiler knows.
        """

    def compile(self, kernel: CudaKernel, architecture: str) -> bytes:
        """Compile one kernel.

        Raises:
            KernelError: "kernel-compile" with the compiler's first words.
        """


def compile_error(kernel: str, compiler: str, log: str) -> KernelError:
    """Build the error for a kernel that does not compile."""
    return KernelError(
        f"{compiler} cannot compile {kernel}:\n{log.strip()[:2000]}",
        code="kernel-compile",
        fix="Its op runs in plain torch; `ds doctor` shows it. Please report this with the output of `ds report`.",
    )


def _sources() -> tuple[str, ...]:
    if folders := kernel_folders():
        return tuple(f"-I{folder}" for folder in folders)
    raise KernelError(
        "this installation of ds-ops carries no sources of CUDA kernels.",
        code="ops-build-sources",
        fix="Install ds-ops from its wheel or sdist again: `pip install --force-reinstall --no-deps ds-ops`.",
    )


def _target(capability: tuple[int, int], known: Sequence[int], compiler: str) -> str:
    number = capability[0] * 10 + capability[1]
    if number in known:
        return f"sm_{number}"
    if known and number > max(known):
        return f"compute_{max(known)}"
    alike = [one for one in known if one // 10 == capability[0] and one < number]
    if alike:
        return f"sm_{max(alike)}"
    raise KernelError(
        f"{compiler} does not know devices of compute capability {capability[0]}.{capability[1]}: it begins at {min(known, default=0)}.",
        code="kernel-compile",
        fix="Use a torch built for an older CUDA; until then torch's own kernels run.",
    )


@dataclass(frozen=True, slots=True)
class Nvrtc:
    """NVRTC, opened by the module `_cuda`. native: its `Compiler`."""

    native: Any
    path: str

    @property
    def name(self) -> str:
        return f"NVRTC {'.'.join(map(str, self.native.version))} ({self.path})"

    @property
    def identity(self) -> str:
        return f"nvrtc {self.native.version} {' '.join(_OPTIONS)}"

    def target(self, capability: tuple[int, int]) -> str:
        """Return the name of a capability, as `KernelCompiler.target`."""
        return _target(capability, self.native.architectures, self.name)

    def compile(self, kernel: CudaKernel, architecture: str) -> bytes:
        """Return the image of a kernel, as `KernelCompiler.compile`. The interpreter's lock is released."""
        options = [f"--gpu-architecture={architecture}", *_OPTIONS, "-default-device", *_sources()]
        image, log = self.native.compile(kernel.text, f"{kernel.entry}.cu", options, architecture.startswith("compute"))
        if not image:
            raise compile_error(kernel.instance, self.name, log)
        return bytes(image)


@dataclass(frozen=True, slots=True)
class Nvcc:
    """The compiler of a CUDA toolkit, for `ds ops build cuda` where no NVRTC is."""

    path: str
    version: str

    @property
    def name(self) -> str:
        return f"nvcc {self.version} ({self.path})"

    @property
    def identity(self) -> str:
        return f"nvcc {self.version} {' '.join(_OPTIONS)}"

    def target(self, capability: tuple[int, int]) -> str:
        """Return the name of a capability, as `KernelCompiler.target`; nvcc itself says what it does not know."""
        return f"sm_{capability[0]}{capability[1]}"

    def compile(self, kernel: CudaKernel, architecture: str) -> bytes:
        """Return the image of a kernel, as `KernelCompiler.compile`."""
        with tempfile.TemporaryDirectory() as folder:
            source, image = Path(folder) / f"{kernel.entry[:100]}.cu", Path(folder) / "image"
            source.write_text(kernel.text)
            command = [self.path, "-cubin", f"-arch={architecture}", *_OPTIONS, "--expt-relaxed-constexpr", *_sources()]
            done = subprocess.run(
                [*command, "-o", str(image), str(source)], capture_output=True, text=True, timeout=_SECONDS
            )
            if done.returncode:
                raise compile_error(kernel.instance, self.name, done.stderr or done.stdout)
            return image.read_bytes()


def find_nvrtc(environ: Mapping[str, str]) -> list[str]:
    """List where NVRTC may be, best first: `DS_NVRTC`, torch's own packages, a toolkit, the system's library path."""
    if path := environ.get("DS_NVRTC"):
        return [path]
    folders: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folders += [*Path(place).glob("cuda_nvrtc/lib"), *Path(place).glob("cu*/lib")]
    torch = importlib.util.find_spec("torch")
    if torch and torch.origin:
        folders.append(Path(torch.origin).parent / "lib")
    homes = (environ.get("CUDA_HOME", ""), environ.get("CUDA_PATH", ""), "/usr/local/cuda")
    folders += [Path(home) / name for home in homes if home for name in ("lib64", "lib")]
    paths = [p for folder in folders for p in sorted(folder.glob("libnvrtc*.so.*"), reverse=True)]
    real = [str(p) for p in paths if re.fullmatch(r"libnvrtc(-[0-9a-f]+)?\.so\.[\d.]+", p.name)]
    return [*dict.fromkeys(real), "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"]


def open_compiler(module: ModuleType, driver: int, environ: Mapping[str, str] = os.environ) -> Nvrtc:
    """Open NVRTC: the first that the driver (its version: 13000) can load the images of, else the first.

    Raises:
        KernelError: "kernel-compile" if none opens, with the reason of each.
    """
    reasons, others = [], []
    for path in find_nvrtc(environ):
        builtins = sorted(Path(path).parent.glob("libnvrtc-builtins*.so.*")) if os.sep in path else []
        native = module.Compiler(path, next((str(p) for p in builtins if ".alt." not in p.name), ""))
        if native.problem:
            reasons.append(native.problem)
        elif native.version[0] * 1000 > driver > 0:
            others.append(Nvrtc(native, path))
        else:
            return Nvrtc(native, path)
    if others:
        return others[0]
    raise KernelError(
        "NVRTC, CUDA's run-time compiler, was not found: " + "; ".join(dict.fromkeys(reasons[-3:])),
        code="kernel-compile",
        fix="pip install nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12, or set DS_NVRTC to the library.",
    )


def find_nvcc(environ: Mapping[str, str]) -> Nvcc | None:
    """Find an nvcc that works; None if there is none."""
    tool = toolchain.find_tools(environ)["nvcc"]
    return Nvcc(tool.path, tool.version) if tool.works else None
