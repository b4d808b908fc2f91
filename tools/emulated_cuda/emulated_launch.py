"""Run ds-ops' kernels of CUDA C++ by the emulator of its tests, on tensors of emulated cards. Imported by `startup.py` with ds_ops.cuda_launch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import struct
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import emulated_kernels

__all__ = ["install"]

_TESTS = Path(__file__).resolve().parents[2] / "packages" / "ops" / "tests" / "conftest.py"
_SIZES_ONLY = "EMULATED_CUDA_SIZES_ONLY" in os.environ
_MOST_BLOCKS = 256  # larger launches do nothing where only sizes count


class _Launches:
    """The module of the driver, whose launches come after what their stream waits for, and are kept while a graph is captured."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._entries: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def load(self, device: int, image: bytes, entry: str) -> tuple[int, str]:
        handle, why = self._module.load(device, image, entry)
        self._entries[handle] = entry
        return handle, why

    def launch(self, index: int, handle: int, blocks: int, threads: int, call: bytes, stream: int) -> str:
        if emulated_kernels.capturing():
            emulated_kernels.record(lambda: self._module.launch(index, handle, blocks, threads, call, 0))
            return ""
        if _SIZES_ONLY and blocks > _MOST_BLOCKS:
            if "sum_squares" in self._entries[handle]:  # a norm is zero, not what lay there
                ctypes.memset(struct.unpack_from("=Q", call, 8)[0], 0, 8 * blocks)
            return ""
        emulated_kernels.settle()
        return str(self._module.launch(index, handle, blocks, threads, call, 0))


def install(launches: ModuleType) -> None:
    """Put the emulator in the place of the driver, in the module `ds_ops.cuda_launch`; nothing where it cannot be built."""
    spec = importlib.util.spec_from_file_location("emulated_launch_tests", _TESTS)
    assert spec is not None
    assert spec.loader is not None
    tests = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tests

    def opened() -> Any:
        spec.loader.exec_module(tests)
        folder = Path(tempfile.gettempdir()) / f"ds-cuda-emulator-{os.getuid()}"
        native = launches._native.load("_cuda")
        if native.module is None:
            raise launches.KernelError(
                f"CUDA kernels cannot run here: {native.reason}.", code="kernel-missing", fix="Run `ds doctor`."
            )
        module = native.module
        module.open_driver(str(tests.fake_driver(folder)))
        places = tests.kernel_folders()[0].parent / "tests"
        compiler = tests.Emulator("g++", places)
        devices = tuple(launches.Device(n, (a, b), c) for n, a, b, c in module.devices())
        return launches.CudaRuntime(_Launches(module), devices, compiler, tests.KernelImages(folder, compiler.identity))

    launches.open_runtime = opened
