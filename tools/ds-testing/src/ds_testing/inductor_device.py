"""A CUDA device that is not there, for inductor: graphs are compiled for an H100 up to their source, and nothing is loaded.

    missing_for      why this cannot work here, or nothing
    put_in_place     torch for the CPU traces tensors of the device; for the rest of the process
    generated_code   inside, torch sees the device, and inductor's passes and code generation for it run
    moved_to_device  a graph captured on the CPU, with fake tensors of the device

What runs is all that inductor does before a kernel is compiled: the joint, post-grad and layout passes, padding of matrix products, the
choice of attention kernels, fusion, and the Triton source of every kernel. What does not run: Triton, ptxas, and every kernel. Benchmarks
that inductor would make are answered with times that fall, so the variant that is measured last, the padded one, is taken.

Call it in a process that ends afterwards: what `put_in_place` changes stays, and torch caches what it asked a device.
"""

from __future__ import annotations

import ast
import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx

__all__ = [
    "H100",
    "DeviceProperties",
    "NothingLoadedError",
    "generated_code",
    "missing_for",
    "moved_to_device",
    "put_in_place",
]

_SOURCE = Path(__file__).with_suffix(".cpp")


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What torch says of a CUDA device, by torch's names; sizes in bytes."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    L2_cache_size: int
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232448
    shared_memory_per_multiprocessor: int = 233472
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    gcnArchName: str = ""  # noqa: N815  torch asks for it on every device

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability."""
        return self.major, self.minor


H100 = DeviceProperties("NVIDIA H100 80GB HBM3", 9, 0, 132, 85_031_714_816, 52_428_800)


class NothingLoadedError(RuntimeError):
    """Generated code was called."""


def missing_for() -> str:
    """Return what this machine lacks to generate code for the device; "" for nothing."""
    if torch.backends.cuda.is_built():
        return "torch is built for CUDA: its own guards and hooks would be in the way"
    if shutil.which("c++") is None:
        return "no C++ compiler"
    return "" if importlib.util.find_spec("triton") is not None else "no Triton"


def put_in_place(folder: Path) -> None:
    """Let a torch for the CPU trace tensors of a CUDA device, until the process ends.

    Args:
        folder: Where the compiled library is kept; a second call with the same torch finds it there.
    Raises:
        RuntimeError: the library does not compile.
    Cost: 3 s the first time.
    """
    ctypes.CDLL(str(_library(folder))).stand_in()
    # What torch makes on the device outside of fake tensors are the constants that it folds: they are on the CPU.
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "CUDA")
    library.impl("empty_strided", _empty_strided, "CUDA")
    _kept.append(library)


_kept: list[torch.library.Library] = []


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="cpu")


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


def _library(folder: Path) -> Path:
    installed = Path(torch.__file__).parent
    key = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode() + str(installed).encode()).hexdigest()[:16]
    library = folder / f"inductor_device_{key}.so"
    if library.exists():
        return library
    written = library.with_suffix(f".{os.getpid()}")
    command = ["c++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{installed / 'include'}", str(_SOURCE)]
    command += ["-o", str(written), f"-L{installed / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{installed / 'lib'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{_SOURCE.name} does not compile with torch {torch.__version__}:\n{done.stderr[-4000:]}")
    written.replace(library)
    return library


@contextmanager
def generated_code(properties: DeviceProperties = H100) -> Iterator[list[str]]:
    """Let torch see one device with `properties`, while inside.

    Yields:
        The source of each module that inductor generates, in order; each one parses.
    """
    # torch's compiler takes seconds to import, and reads the device of the process when it does.
    from torch._dynamo import device_interface
    from torch._inductor import config
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.benchmarking import benchmarker
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    sources: list[str] = []
    ticks = count()

    def keep(source: str) -> None:
        ast.parse(source)
        sources.append(source)

    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any, *, create: bool = False) -> None:
            stack.enter_context(mock.patch.object(owner, name, value, create=create))

        device_interface.get_interface_for_device("cpu")  # torch's own are registered on the first question
        interfaces = mock.patch.dict(device_interface.device_interfaces)
        stack.enter_context(interfaces)
        for name in ("cuda", "cuda:0"):
            device_interface.register_interface_for_device(name, _interface(device_interface.CudaInterface, properties))
        for name, value in _answers(properties).items():
            replace(torch.cuda, name, value)
        replace(torch.cuda, "default_generators", (_Generator(),))
        replace(torch._C, "_cuda_cudaCachingAllocator_is_enabled", lambda: True, create=True)
        replace(FakeTensorMode, "avoid_device_init", True)
        target = GPUTarget("cuda", properties.major * 10 + properties.minor, properties.warp_size)
        replace(driver, "_active", SimpleNamespace(get_current_target=lambda: target))
        replace(benchmarker, "benchmark_gpu", lambda *_, **__: 2.0 ** -next(ticks))
        replace(GraphLowering, "save_output_code", staticmethod(keep))
        replace(PyCodeCache, "load_by_key_path", _not_loaded)
        for function in (_triton.has_triton, _triton.has_triton_package):
            function.cache_clear()
            stack.callback(function.cache_clear)
        stack.enter_context(config.patch(fx_graph_cache=False, compile_threads=1))
        yield sources


def _interface(base: Any, properties: DeviceProperties) -> Any:
    """Create a `DeviceInterface` that answers for the device."""
    worker = SimpleNamespace(
        set_device=lambda device: None,
        current_device=lambda: 0,
        get_device_properties=lambda device=None: properties,
    )
    answers: dict[str, Callable[..., Any]] = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_compute_capability": lambda device=None: properties.major * 10 + properties.minor,
        "get_device_properties": lambda device=None: properties,
        "get_raw_stream": lambda index: 0,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=False: True,
        "is_triton_capable": lambda device=None: True,
        "memory_allocated": lambda device=None: 0,
        "raise_if_triton_unavailable": lambda device=None: None,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
    }
    return type("AbsentDevice", (base,), {"Worker": worker, **{name: staticmethod(f) for name, f in answers.items()}})


def _answers(properties: DeviceProperties) -> dict[str, Callable[..., Any]]:
    """Return what stands for functions of `torch.cuda`."""

    def device(index: Any) -> AbstractContextManager[None]:
        del index
        return nullcontext()

    return {
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "device": device,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: properties.capability,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_initialized": lambda: True,
        "is_tf32_supported": lambda: True,
        "mem_get_info": lambda device=None: (properties.total_memory, properties.total_memory),
        "set_rng_state": lambda state, device="cuda": None,
        "synchronize": lambda device=None: None,
    }


class _Generator(torch.Generator):
    """A generator of random numbers of the device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    def clone_state(self) -> torch.Generator:
        return _Generator()


def _not_loaded(key: str, path: str, linemap: Any = None, attrs: Any = None) -> Any:
    """Return what stands for a generated module."""
    del linemap, attrs

    def call(inputs: list[Any]) -> Any:
        raise NothingLoadedError(f"{path} was called with {len(inputs)} inputs, for a device that is not there")

    runner = SimpleNamespace(recursively_apply_fns=lambda functions: None, partitions=[])
    return SimpleNamespace(call=call, runner=runner, key=key, __file__=path)


def moved_to_device(captured: fx.GraphModule, arguments: Sequence[Any], fake: Any) -> tuple[fx.GraphModule, list[Any]]:
    """Copy a graph that dynamo captured on the CPU, with its constants and the examples of its inputs on the device.

    Args:
        captured: Stays as it was. Graphs inside it, as of checkpointed functions, are copied as well.
        arguments: The inputs that a backend gets with it.
        fake: The mode of the device's fake tensors, that of the tracing context.
    Returns:
        The copy, and its inputs: fake tensors of `cuda:0`, and numbers as they were.
    """
    device = torch.device("cuda", 0)

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device
        if isinstance(value, torch.Tensor):
            with fake:
                tensor = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
            return tensor.requires_grad_(value.requires_grad)
        return "cuda" if value == "cpu" and isinstance(value, str) else value

    graph, table = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(captured.graph, table))
    inputs: list[Any] = []
    for before, after in table.items():
        after.meta, after.name = dict(before.meta), before.name
        after.args = fx.node.map_aggregate(after.args, moved)
        after.kwargs = fx.node.map_aggregate(after.kwargs, moved)
        if after.op == "placeholder":
            # A number of the program that may change is a tensor on the CPU for dynamo, wherever the tensors are.
            number = getattr(before.meta.get("grapharg"), "pass_arg_as_tensor", False)
            if number and arguments:
                inputs.append(arguments[len(inputs)])
                continue
            after.meta["example_value"] = moved(before.meta.get("example_value"))
            inputs.append(after.meta["example_value"])
    module = fx.GraphModule(captured, graph)
    module.meta = dict(captured.meta)
    for name, inner in captured.named_children():
        if isinstance(inner, fx.GraphModule):
            setattr(module, name, moved_to_device(inner, (), fake)[0])
    return module, inputs
