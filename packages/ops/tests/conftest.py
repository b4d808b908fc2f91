"""Shared by the tests of ds_ops."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_ops import _native, cuda_launch
from ds_ops.kernel_compilers import compile_error
from ds_ops.kernel_images import KernelImages
from ds_ops.kernel_source import CudaKernel, kernel_folders


def _ulps(a: Tensor, b: Tensor) -> int:
    """The largest distance between two tensors of one dtype, counted in representable values."""
    if a.numel() == 0:
        return 0
    wide, low = {4: (torch.int32, -(2**31)), 2: (torch.int16, -(2**15))}[a.element_size()]
    x, y = (t.detach().contiguous().view(wide).long() for t in (a, b))
    x, y = (torch.where(t < 0, low - t, t) for t in (x, y))
    return int((x - y).abs().max())


@pytest.fixture
def ulps() -> Callable[[Tensor, Tensor], int]:
    return _ulps


@pytest.fixture
def native() -> None:
    """For tests of native kernels; skipped, with the reason, where this installation has none."""
    loaded = _native.load("_cpu")
    if loaded.module is None:
        pytest.skip(loaded.reason)


@pytest.fixture(params=["native", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with native kernels and with the reference."""
    if request.param == "native" and _native.load("_cpu").module is None:
        pytest.skip(_native.load("_cpu").reason)
    monkeypatch.setenv("DS_OPS", "reference" if request.param == "reference" else "")
    return request.param


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


# ---- CUDA kernels without a device: tests/emulated_driver.cpp in the place of libcuda, g++ in the place of NVRTC ---------------

_FLAGS = ("-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")


@dataclass(frozen=True, slots=True)
class Emulator:
    """The compiler of the emulated device. tests: `native/tests`, whose header stands for CUDA."""

    gxx: str
    tests: Path

    name = "g++ for the emulator"

    @property
    def identity(self) -> str:
        return f"{self.gxx} {hashlib.sha256((self.tests / 'emulated.h').read_bytes()).hexdigest()}"

    def target(self, capability: tuple[int, int]) -> str:
        return f"emulated_{capability[0]}{capability[1]}"

    def compile(self, kernel: CudaKernel, architecture: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            image = Path(folder) / "image.so"
            places = [f"-I{place}" for place in (*kernel_folders(), self.tests)]
            command = [self.gxx, "-x", "c++", "-O1", *_FLAGS, "-Wno-unused-function", *places, "-o", str(image), "-"]
            done = subprocess.run(command, input=kernel.text, capture_output=True, text=True)
            if done.returncode:
                raise compile_error(kernel.instance, self.name, done.stderr)
            return image.read_bytes()


@dataclass(frozen=True, slots=True)
class EmulatedRuntime:
    """A `CudaRuntime` whose kernels run on the CPU, on tensors of the CPU. driver: the fake libcuda."""

    here: cuda_launch.CudaRuntime
    driver: ctypes.CDLL

    def launches(self) -> list[tuple[str, int, int]]:
        """Entry, blocks and threads of each launch since the last call."""
        text = self.driver.fake_launches().decode()
        rows = [line.split() for line in text.splitlines()]
        return [(entry, int(blocks), int(threads)) for _device, entry, blocks, threads, _size in rows]


def fake_driver(folder: Path) -> Path:
    """Build the fake libcuda into `folder`, unless it is there."""
    source = kernel_folders()[0].parent / "tests" / "emulated_driver.cpp"
    digest = hashlib.sha256(source.read_bytes() + (source.parent / "emulated.h").read_bytes()).hexdigest()[:16]
    library = folder / f"libcuda-{digest}.so"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            built = Path(work) / "libcuda.so"
            places = [f"-I{place}" for place in (kernel_folders()[1], source.parent)]
            subprocess.run(["g++", "-O1", *_FLAGS[:3], *places, str(source), "-o", str(built), "-ldl"], check=True)
            os.replace(built, library)
    return library


@pytest.fixture(scope="session")
def emulator_folder() -> Path:
    """Where emulated kernels are kept between runs of the tests."""
    return Path(tempfile.gettempdir()) / f"ds-cuda-emulator-{os.getuid()}"


@pytest.fixture(scope="session")
def emulated_libraries(emulator_folder: Path) -> tuple[Path, Emulator]:
    """The fake libcuda and the emulator's compiler; skipped by name where something is missing."""
    gxx = shutil.which("g++")
    if gxx is None or not kernel_folders():
        pytest.skip("no g++" if gxx is None else "this installation carries no sources of kernels")
    if _native.load("_cuda").module is None:
        pytest.skip(_native.load("_cuda").reason)
    tests = kernel_folders()[0].parent / "tests"
    if not (tests / "emulated.h").is_file():
        pytest.skip("this installation carries no emulator")
    return fake_driver(emulator_folder), Emulator(gxx, tests)


class _OnCpu(cuda_launch.CudaRuntime):
    """A runtime for tensors of the CPU: device 0, stream 0."""

    def place(self, device: torch.device) -> tuple[int, int]:
        return device.index or 0, 0


@pytest.fixture
def emulated(emulated_libraries: tuple[Path, Emulator], emulator_folder: Path) -> Iterator[EmulatedRuntime]:
    """CUDA kernels run under the emulator while the test runs: choosers and launches take tensors of the CPU."""
    library, compiler = emulated_libraries
    module = _native.load("_cuda").module
    assert module is not None
    assert module.open_driver(str(library)) == ""
    devices = tuple(cuda_launch.Device(n, (a, b), c) for n, a, b, c in module.devices())
    driver = ctypes.CDLL(str(library))
    driver.fake_launches.restype = ctypes.c_char_p
    driver.fake_seed.argtypes = [ctypes.c_uint64]
    driver.fake_launches()
    images = KernelImages(emulator_folder, compiler.identity)
    with cuda_launch.use_runtime(_OnCpu(module, devices, compiler, images)) as here:
        yield EmulatedRuntime(here, driver)
    driver.fake_seed(0)
