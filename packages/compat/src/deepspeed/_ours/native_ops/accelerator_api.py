"""`deepspeed.accelerator`: upstream's interface over ds-accel's one accelerator."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import ds_accel
from deepspeed._ours.base._torch import compilers
from deepspeed._ours.base.forwarding import answers, calls, method, tells
from deepspeed._ours.native_ops.builders import BUILDERS
from deepspeed._ours.native_ops.pinned_memory import get_active_native_pinned_memory as native_pins
from deepspeed._ours.native_ops.pinned_memory import track_pinned_memory
from ds_accel import Accelerator
from ds_accel.detection import facts_of


def _bytes(name: str, meaning: str) -> Callable[..., int]:
    def ask(self: FacadeAccelerator, device_index: int | None = None) -> int:
        return int(getattr(self.ours.memory(device_index), name))

    ask.__doc__ = meaning
    return ask


class FacadeAccelerator:
    """The device of this process under upstream's names. `ours` is the ds-accel object that answers."""

    def __init__(self, ours: Accelerator) -> None:
        self.ours = ours
        self._name = ours.name
        self._compile_backend = ours.compile_backend

    def __getattr__(self, name: str) -> Any:
        # What torch's device module has under the same name (Stream, Event, current_stream, ...) is upstream's, too.
        if name.startswith("__") or name == "ours":
            raise AttributeError(name)
        attribute = getattr(self.ours.module, name, None)
        if attribute is None:
            raise AttributeError(f"the accelerator {self._name} has no {name}")
        return attribute

    # ---- which device

    def device_name(self, device_index: int | str | None = None) -> str:
        """Return the device's name, `"cuda"` or `"cuda:1"`; the CPU is `"cpu"` whatever the index."""
        return str(self.ours.device(None if device_index is None else int(device_index)))

    device = calls("ours.device", "Return the device as a torch.device.", "device_index")
    set_device = calls("ours.set_device", "Make the device of this index the default for new tensors.", "device_index")

    def current_device(self) -> int | str:
        """Return the index of the current device; its name on the CPU."""
        return "cpu" if self._name == "cpu" else self.ours.current_index()

    current_device_name = method(
        lambda self: self.device_name(self.ours.current_index()),
        "Return the current device's name, a string for `.to()`.",
    )

    def device_count(self) -> int:
        """Return the number of devices that this process sees.

        On the CPU that is the number of ranks that a launcher started on this host (LOCAL_SIZE).
        """
        local_size = int(os.environ.get("LOCAL_SIZE", "0")) if self._name == "cpu" else 0
        return max(local_size, 0) or self.ours.device_count()

    is_available = method(lambda self: self.ours.device_count() > 0, "Whether there is one.")
    is_synchronized_device = tells("ours.facts.synchronous", "Whether operations are done when they return.")
    use_host_timers = method(
        lambda self: self.ours.facts.host_timers or self.ours.facts.synchronous, "Whether time is read on the host."
    )
    resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    synchronize = calls("ours.synchronize", "Wait for everything.", "device_index")
    communication_backend_name = tells(
        "ours.comm_backend", "Return the name of torch.distributed's backend for this device."
    )
    get_compile_backend = tells("_compile_backend", "Return the name of torch.compile's backend.")
    is_triton_supported = method(lambda self: bool(self.ours.triton()), "Whether Triton kernels run.")
    on_accelerator = calls("ours.holds", "Whether a tensor is on this kind of device.", "tensor")
    # ---- formats

    is_bf16_supported = method(lambda self: bool(self.ours.supports(torch.bfloat16)), "Whether bf16 computes here.")

    is_fp64_supported = method(lambda self: bool(self.ours.supports(torch.float64)), "Whether fp64 computes here.")
    is_fp16_supported = method(lambda self: bool(self.ours.supports(torch.float16)), "Whether fp16 computes here.")

    def supported_dtypes(self) -> list[torch.dtype]:
        """Formats to train in."""
        return [dtype for dtype in (torch.float, torch.half, torch.bfloat16) if self.ours.supports(dtype)]

    # ---- random numbers

    random, initial_seed = staticmethod(lambda: torch.random), staticmethod(torch.initial_seed)

    manual_seed = calls("ours.manual_seed", "Seed host and device.", "seed")
    manual_seed_all = manual_seed

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Return the random state of the device, or of the host for the CPU."""
        if self._name == "cpu":
            return torch.get_rng_state()
        state: torch.Tensor = self.ours.module.get_rng_state(self.ours.device(device_index))
        return state

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set it."""
        if self._name == "cpu":
            torch.set_rng_state(new_state)
        else:
            self.ours.module.set_rng_state(new_state, self.ours.device(device_index))

    # ---- memory

    memory_allocated = _bytes("allocated", "Bytes of tensors; of the process on the CPU.")
    max_memory_allocated = _bytes("peak", "The most so far.")
    memory_reserved = memory_cached = _bytes("reserved", "Bytes the allocator holds.")
    max_memory_reserved = max_memory_cached = _bytes("peak_reserved", "The most so far.")
    total_memory = _bytes("total", "Bytes there are.")
    available_memory = _bytes("free", "Bytes that are free.")

    reset_peak_memory_stats = calls("ours.reset_peak_memory", "Start the peaks anew.", "device_index")
    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    empty_cache = calls("ours.empty_cache", "Give unused memory back.")

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True, align_bytes: int = 1
    ) -> torch.Tensor:
        """Return a pinned copy of `tensor`; `tensor` itself where the device needs no pinned memory.

        Args:
            make_copy: False gives memory of that size with undefined contents.
            match_shape: False gives a flat tensor.
            align_bytes: Ignored: every allocation is aligned to a page.
        """
        del align_bytes
        if self.ours.facts.pinned or native_pins():
            track_pinned_memory(tensor.nbytes)
        if pins := native_pins():
            return pins.pin(tensor, make_copy, match_shape)
        pinned = tensor.contiguous().pin_memory() if self.ours.facts.pinned else tensor
        if not make_copy and pinned is tensor:
            pinned = torch.empty_like(tensor)
        return pinned if match_shape else pinned.reshape(-1)

    def pin_empty(self, *size: Any, dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
        """Return pinned memory of this shape (numbers, or one tuple) with undefined contents.

        Raises:
            ValueError: `device` is not the host.
        """
        if torch.device(device).type != "cpu":
            raise ValueError(f"pin_empty gives memory of the host, not of {device}: leave out device=")
        pins = native_pins()
        empty = torch.empty(*size, dtype=dtype, pin_memory=self.ours.facts.pinned and not pins, device="cpu")
        if self.ours.facts.pinned or pins:
            track_pinned_memory(empty.nbytes)
        return pins.pin_empty(empty, empty.shape) if pins else empty

    def pin_empty_like(
        self, tensor: torch.Tensor, device: Any = "cpu", dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return pinned memory of the shape of `tensor`, and of its format unless `dtype` is given."""
        return self.pin_empty(tensor.shape, dtype=dtype or tensor.dtype, device=device)

    def unpin_memory(self, tensor: torch.Tensor) -> bool | None:
        """Unlock memory of `DS_PIN_MEMORY_BACKEND=native`; nothing otherwise: it is freed with its last tensor."""
        pins = native_pins()
        return pins.unpin(tensor) if pins else None

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it is."""
        pins = native_pins()
        return bool((pins and pins.is_pinned(tensor)) or (self.ours.facts.pinned and tensor.is_pinned()))

    # ---- profiling, building

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """Begin a named stretch for the vendor's profiler, where there is one."""
        if self.ours.facts.ranges:
            getattr(self.ours.module, self.ours.facts.ranges).range_push(msg)

    def range_pop(self, domain: Any = None) -> None:
        """End it."""
        if self.ours.facts.ranges:
            getattr(self.ours.module, self.ours.facts.ranges).range_pop()

    stream = calls("ours.on_stream", "Send work to a stream inside; None does nothing.", "stream")

    def default_stream(self, device_index: int | None = None) -> Any:
        """Return the device's default stream; None where it has none."""
        ask = getattr(self.ours.module, "default_stream", None)
        return None if ask is None else ask(device_index)

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call `callback` once the device is initialized: at once on the CPU."""
        return getattr(self.ours.module, "_lazy_call", lambda do: do())(callback)

    # ---- graphs of work

    def is_current_stream_capturing(self) -> bool:
        """Whether a graph records what is launched now."""
        return bool(getattr(self.ours.module, "is_current_stream_capturing", bool)())

    def create_graph(self) -> Any:
        """Create an empty graph; None where the device has no graphs."""
        graph_class = getattr(self.ours.module, "CUDAGraph", None)
        return None if graph_class is None else graph_class()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        """Record what is launched inside; nothing is recorded where the device has no graphs."""
        if graph is None:
            return nullcontext()
        capture: AbstractContextManager[Any] = self.ours.module.graph(graph, pool, stream)
        return capture

    def replay_graph(self, graph: Any) -> None:
        """Launch what was recorded."""
        if graph is not None:
            graph.replay()

    # ---- what else upstream's interface names

    def default_generator(self, device_index: int | None = None) -> torch.Generator:
        """Return the generator that random operations of a device use."""
        if self._name == "cpu":
            return torch.default_generator
        generator: torch.Generator = self.ours.module.default_generators[device_index or 0]
        return generator

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Return the statistics of the device's allocator; for the host, the bytes in use."""
        stats = getattr(self.ours.module, "memory_stats", None)
        return {"allocated_bytes.all.current": self.memory_allocated()} if stats is None else dict(stats(device_index))

    op_builder_dir = answers("deepspeed.ops.op_builder", "Return the name of the module with the op builders.")
    get_op_builder = staticmethod(
        method(
            lambda class_name: BUILDERS.get(class_name),
            "Return a builder's class by its name; None for an unknown name.",
        )
    )

    def create_op_builder(self, class_name: str) -> Any:
        """Create a builder by its class's name; None for an unknown name."""
        builder_class = BUILDERS.get(class_name)
        return None if builder_class is None else builder_class()

    def build_extension(self) -> Any:
        """Return torch's command class that compiles extensions; unused here."""
        from torch.utils.cpp_extension import BuildExtension  # imports a compiler's tools

        return BuildExtension

    def export_envs(self) -> list[str]:
        """Return the prefixes of environment variables that a launcher exports to other hosts."""
        return ["NCCL"] if self._name == "cuda" else []

    visible_devices_envs = method(
        lambda self: ["CUDA_VISIBLE_DEVICES"],
        "Return the environment variables that select the devices a process sees.",
    )

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Iterable[int]
    ) -> None:
        """Write them."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def set_compile_backend(self, backend: str) -> None:
        """Choose torch.compile's backend.

        Raises:
            ValueError: torch knows none of this name.
        """
        if backend not in compilers():
            raise ValueError(f"{backend!r} is no backend of torch.compile: {compilers()}")
        self._compile_backend = backend


def _constructor(dtype: torch.dtype) -> property:
    # What `torch.FloatTensor(...)` was for; of this accelerator's device.
    return property(lambda self: functools.partial(torch.tensor, dtype=dtype, device=self.device()))


for _name, _dtype in {
    "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8, "DoubleTensor": torch.double, "FloatTensor": torch.float,
    "HalfTensor": torch.half, "IntTensor": torch.int, "LongTensor": torch.long,
}.items():  # fmt: skip
    setattr(FacadeAccelerator, _name, _constructor(_dtype))


def _class_of(name: str) -> type[FacadeAccelerator]:
    # Another device than the process's own has its facts, and torch's module, which may find none.
    def start(self: FacadeAccelerator) -> None:
        FacadeAccelerator.__init__(self, Accelerator(facts_of(name), getattr(torch, name, torch.cpu)))

    return type(f"{name.upper()}_Accelerator", (FacadeAccelerator,), {"__init__": start, "__module__": __name__})


for _name in ("cpu", "cuda", "hpu", "mlu", "mps", "npu", "sdaa", "supa", "xpu"):
    globals()[f"{_name.upper()}_Accelerator"] = _class_of(_name)


_set: list[Any] = []


def get_accelerator() -> FacadeAccelerator:
    """Return the accelerator that `set_accelerator` set, or else the detected accelerator of this process."""
    return _set[-1] if _set else _found()


@functools.cache
def _found() -> FacadeAccelerator:
    return FacadeAccelerator(ds_accel.get_accelerator())


def set_accelerator(accel_obj: Any) -> None:
    """Let `get_accelerator` give this object, for programs that wrap or replace it; None: the process's own again.

    The engine asks ds-accel, whose device does not change: another one is registered by the entry point `ds_accel.devices`.
    """
    _set[:] = [] if accel_obj is None else [accel_obj]


def is_current_accelerator_supported() -> bool:
    """Whether the device is one that the packages know; they know what torch knows."""
    return True
