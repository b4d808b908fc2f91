"""A device on the CPU whose work comes late: the second implementation of `ds_accel.streams`.

Inside `late_device(seed)` all tensors are memory of the device, except what `ds_accel.streams` calls the host's (page-locked memory, the
slots of offloaded state) and what is computed from that alone. Kernels and copies are queued on streams and run later, in an order that is
drawn by the seed: any that the order within streams, events and waits of the host allow. The host waits where it would on a device: for
numbers that it reads, for copies that are not queued, for events.

Poison (0xFF: NaN in every floating format) is what a result holds before its kernel ran, what memory of the host holds while a copy to it
is under way, and what freed memory holds: at once after the work that was queued on the stream on which it was made, and on streams it was
recorded for. So code that lacks an event, or drops memory that another stream uses, computes NaN or other numbers than without a device.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ds_accel import TABLE, Accelerator, get_accelerator, set_accelerator
from ds_accel.streams import StreamsBackend, use_backend

__all__ = ["LateDevice", "LateEvent", "LateStream", "drawn_orders", "late_device"]

drawn_orders = pytest.mark.parametrize(
    "order", [*range(5), *(pytest.param(order, marks=pytest.mark.slow) for order in range(5, 200))]
)
"""Five orders of the device's work by default, two hundred in the nightly run."""

_MOST_QUEUED = 60
_ALIASES = {"_unsafe_view", "_reshape_alias", "lift_fresh", "detach", "set_", "resize_", "alias"}
_RANDOM = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.nondeterministic_seeded}
_POISON = 0xFF


class _Task:
    """Work at its place in a stream.

    Attributes:
        run: The work; None for the mark of an event.
        tensors: Aliases of what it reads and writes, with memory that stays until it ran.
        ready: Whether the stream may pass this place.
    """

    __slots__ = ("numbers", "ready", "run", "tensors")

    def __init__(self, run: Callable[[], None] | None, tensors: Sequence[Tensor], ready: Callable[[], bool]) -> None:
        self.run, self.tensors, self.ready = run, tensors, ready
        self.numbers = [_number(tensor) for tensor in tensors]


class LateEvent:
    """A place in a stream of the late device."""

    def __init__(self, device: LateDevice) -> None:
        self.device, self.pending = device, 0

    def record(self, stream: LateStream | None = None) -> None:
        self.pending += 1
        (stream or self.device.current).add(self._happen)

    def _happen(self) -> None:
        self.pending -= 1

    def wait(self, stream: LateStream | None = None) -> None:
        (stream or self.device.current).add(None, ready=lambda: not self.pending)

    def query(self) -> bool:
        self.device.drift()
        return not self.pending

    def synchronize(self) -> None:
        self.device.run_until(lambda: not self.pending)


class LateStream:
    """A queue of work."""

    def __init__(self, device: LateDevice) -> None:
        self.device, self.queue = device, deque[_Task]()

    def add(
        self,
        run: Callable[[], None] | None,
        tensors: Sequence[Tensor] = (),
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """Queue work, which runs once `ready` says so and all before it ran."""
        task = _Task(run, tensors, ready)
        self.device.queued_uses.update(task.numbers)
        self.queue.append(task)

    def wait_stream(self, other: LateStream) -> None:
        event = LateEvent(self.device)
        event.record(other)
        event.wait(self)

    def wait_event(self, event: LateEvent) -> None:
        event.wait(self)

    def record_event(self, event: LateEvent | None = None) -> LateEvent:
        event = event or LateEvent(self.device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return not self.queue


class _Block:
    """Memory of the device that somebody has.

    Attributes:
        alias: Holds the storage, so that its number is not used again meanwhile.
        stream: On which it was made; the allocator gives it away in the order of this stream ...
        recorded: ... and of these.
    """

    __slots__ = ("alias", "recorded", "stream")

    def __init__(self, alias: Tensor, stream: LateStream) -> None:
        self.alias, self.stream = alias, stream
        self.recorded: list[LateStream] = []


class LateDevice(StreamsBackend):
    """Streams, their work, and the memory. Made by `late_device`.

    Attributes:
        kernels, copies: How many were queued.
        queued_uses: How often queued work uses a storage, by its number.
        syncs: How often the host waited for a number.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.kernels = self.copies = self.syncs = 0
        self._default = LateStream(self)
        self._streams = [self._default]
        self._favoured = self._default
        self._local = threading.local()
        self._blocks: dict[int, _Block] = {}
        self._host: dict[int, Tensor] = {}
        self.queued_uses: Counter[int] = Counter()

    # ---- order

    @property
    def current(self) -> LateStream:
        """The stream of this thread's work."""
        found: LateStream = getattr(self._local, "stream", self._default)
        return found

    def drift(self) -> None:
        """Let the device come some way: a drawn number of tasks, of drawn streams."""
        with self.lock:
            self._sweep()
            queued = sum(len(stream.queue) for stream in self._streams)
            least = max(0, queued - _MOST_QUEUED)
            for _ in range(max(least, self.random.choice((0, 0, 0, 1, 2, 8)))):
                if not self._step():
                    return

    def run_until(self, done: Callable[[], bool]) -> None:
        """Run work of drawn streams until `done`."""
        with self.lock:
            self.syncs += 1
            while not done():
                if not self._step():
                    raise RuntimeError("the late device waits for an event that nobody has recorded")

    def finish(self) -> None:
        """Run everything."""
        self.run_until(lambda: not any(stream.queue for stream in self._streams))

    def _step(self) -> bool:
        ready = [stream for stream in self._streams if stream.queue and stream.queue[0].ready()]
        if not ready:
            return False
        if (
            self._favoured not in ready or self.random.random() < 0.05
        ):  # long stretches of one stream: the others are far behind
            self._favoured = self.random.choice(ready)
        task = self._favoured.queue.popleft()
        self.queued_uses.subtract(task.numbers)
        if task.run is not None:
            with torch.inference_mode(), _outside():  # whoever queued it may have been in that mode
                task.run()
        return True

    # ---- memory

    def is_host(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory of the host."""
        return _number(tensor) in self._host

    def note_host(self, tensor: Tensor) -> None:
        """Mark the memory of `tensor` as the host's."""
        self._host[_number(tensor)] = _alias(tensor)

    def note(self, tensor: Tensor) -> None:
        """Mark the memory of `tensor` as the device's, made on the current stream, unless it is known."""
        number = _number(tensor)
        if number not in self._host and number not in self._blocks:
            self._blocks[number] = _Block(_bytes(tensor.untyped_storage()), self.current)

    def _sweep(self) -> None:
        """Give away what nobody but queued work has."""
        for number, block in list(self._blocks.items()):
            storage = block.alias.untyped_storage()
            uses = torch._C._storage_Use_Count(storage._cdata) - 1  # without ours of this moment
            if uses > 1 + self.queued_uses[number]:
                continue
            del self._blocks[number]
            self._give_away(block.alias, block)

    def _give_away(self, memory: Tensor, block: _Block) -> None:
        # The allocator may hand it out in the order of its stream, once the streams it was recorded for came here.
        events = [stream.record_event() for stream in block.recorded]
        block.stream.add(
            lambda: _poison(_bytes(memory.untyped_storage())),
            [memory],
            lambda: all(not event.pending for event in events),
        )

    def resize(self, storage: torch.UntypedStorage, plain: Callable[..., Any], nbytes: int) -> Any:
        """Resize a storage: queued work goes on with the memory as it is, others see it freed or not yet written."""
        with self.lock, _outside():
            block, before = self._blocks.get(storage._cdata), storage.nbytes()
            if block is None:
                return plain(storage, nbytes)
            memory = torch.empty(before, dtype=torch.uint8)
            if before:
                memory.copy_(_bytes(storage))
            for task in (task for stream in self._streams for task in stream.queue):
                for place, tensor in enumerate(task.tensors):
                    if task.numbers[place] == storage._cdata:
                        tensor.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
                        task.numbers[place] = _number(tensor)
                        self.queued_uses.subtract([storage._cdata])
                        self.queued_uses.update([task.numbers[place]])
            if before:
                self._give_away(memory, block)
            block.stream, block.recorded = self.current, []
            result = plain(storage, nbytes)
            if nbytes:
                _poison(_bytes(storage))
            return result

    # ---- what ds_accel.streams asks of it

    def is_device_memory(self, tensor: Tensor) -> bool:
        return not self.is_host(tensor)

    def needs_copy(self, source: Tensor, device: torch.device) -> bool:
        return self.is_host(source)

    def new_stream(self, module: Any) -> LateStream:
        self._streams.append(LateStream(self))
        return self._streams[-1]

    def current_stream(self, module: Any, device: torch.device | None = None) -> LateStream:
        return self.current

    def on_stream(self, module: Any, stream: Any) -> AbstractContextManager[Any]:
        return self._on(stream)

    @contextmanager
    def _on(self, stream: LateStream | None) -> Iterator[None]:
        before, self._local.stream = self.current, stream or self.current
        try:
            yield
        finally:
            self._local.stream = before

    def new_event(self, module: Any) -> LateEvent:
        return LateEvent(self)

    def copy_to(self, source: Tensor, device: torch.device, dtype: torch.dtype | None, fresh: bool) -> Tensor:
        with self.lock, _outside():
            out = torch.empty(source.shape, dtype=dtype or source.dtype)
            mark = self.note if self.is_host(source) else self.note_host
            mark(out)
            self.copy_into(out, source)
            return out

    def copy_into(self, out: Tensor, source: Tensor) -> None:
        with self.lock, _outside():
            self.copies += 1
            self.note(out)
            self.note(source)
            there, here = _alias(out), _alias(source)
            if (
                self.is_host(out) and not self.queued_uses[_number(out)]
            ):  # else an earlier copy may still read it, in order
                _poison(there)

            def run() -> None:
                there.copy_(here)

            self.current.add(run, [there, here])
            self.drift()

    def record_use(self, tensor: Tensor, stream: LateStream) -> None:
        block = self._blocks.get(_number(tensor))
        if block is not None and stream is not block.stream:
            block.recorded.append(stream)

    def page_locked(self, size: Sequence[int], dtype: torch.dtype, zero: bool) -> Tensor:
        with _outside():
            return self.host_memory((torch.zeros if zero else torch.empty)(size, dtype=dtype))

    def pin(self, tensor: Tensor) -> Tensor:
        with _outside():
            return self.host_memory(tensor.clone())

    def host_memory(self, memory: Tensor) -> Tensor:
        self.note_host(memory)
        return memory

    # ---- kernels

    def launch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Queue one operator, or run it where the host needs its result."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_host = [tensor for tensor in tensors if self.is_host(tensor)]
        for tensor in tensors:
            self.note(tensor)
        if not tensors or len(on_host) == len(tensors) or _is_view(func):
            out = func(*args, **kwargs)
            mark = self.note_host if tensors and len(on_host) == len(tensors) else self.note
            for leaf in tree_leaves(out):
                mark(leaf) if isinstance(leaf, Tensor) else None
            return out
        outputs = None if on_host else _outputs(func, args, kwargs)
        if outputs is None:
            self.current.synchronize()
            out = func(*args, **kwargs)
            for leaf in tree_leaves(out):
                self.note(leaf) if isinstance(leaf, Tensor) else None
            return out
        self.kernels += 1
        returned, fresh = outputs
        for tensor in fresh:
            self.note(tensor)
        aliases: list[Tensor] = []

        def alias(tensor: Tensor) -> Tensor:
            aliases.append(_alias(tensor))
            return aliases[-1]

        late_args, late_kwargs = tree_map_only(Tensor, alias, (args, kwargs))
        places = [alias(tensor) for tensor in fresh]

        def run() -> None:
            out = func(*late_args, **late_kwargs)
            for place, value in zip(places, tree_leaves(out) if places else (), strict=True):
                place.copy_(value)

        self.current.add(run, aliases)
        self.drift()
        return returned


class _LateAccelerator(Accelerator):
    """The accelerator of a late device, for who asks where tensors are and whether work is queued."""

    def __init__(self, device: LateDevice) -> None:
        facts = replace(TABLE["cpu"], torch_type="late", pinned=True, synchronous=False)
        super().__init__(facts, torch.cpu)
        self._late = device

    def device(self, index: int | None = None) -> torch.device:
        return torch.device("cpu")

    def holds(self, tensor: Tensor) -> bool:
        return self._late.is_device_memory(tensor)

    def synchronize(self, index: int | None = None) -> None:
        self._late.finish()


class _Kernels(TorchDispatchMode):
    """Sends this thread's operators to the device."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            # A subclass says itself what the operator does, and may have no memory to run it on.
            return NotImplemented
        with self.device.lock, _outside():
            return self.device.launch(func, args, kwargs or {})


@contextmanager
def late_device(seed: int) -> Iterator[LateDevice]:
    """Make this process's CPU a late device, while inside; threads that begin inside work on it, too. All work is done at the end."""
    device = LateDevice(seed)
    resize, tolist, numpy = torch.UntypedStorage.resize_, Tensor.tolist, Tensor.numpy
    deepcopy = torch.UntypedStorage.__deepcopy__
    run, before = threading.Thread.run, get_accelerator()

    def synced(plain: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not device.is_host(tensor):
                device.current.synchronize()
            return plain(tensor, *args, **kwargs)

        return read

    def copied(storage: torch.UntypedStorage, memo: Any) -> Any:
        device.current.synchronize()
        return deepcopy(storage, memo)

    def run_late(thread: threading.Thread) -> None:
        with _Kernels(device):
            run(thread)

    with (
        use_backend(device),
        mock.patch.object(
            torch.UntypedStorage, "resize_", lambda storage, nbytes: device.resize(storage, resize, nbytes)
        ),
        mock.patch.object(torch.UntypedStorage, "__deepcopy__", copied),
        mock.patch.object(Tensor, "tolist", synced(tolist)),
        mock.patch.object(Tensor, "numpy", synced(numpy)),
        mock.patch.object(threading.Thread, "run", run_late),
        _Kernels(device),
    ):
        set_accelerator(_LateAccelerator(device))
        try:
            yield device
        finally:
            set_accelerator(before)
            device.finish()


def _outside() -> Any:
    """Run operators of torch at once, while inside."""
    return torch.utils._python_dispatch._disable_current_modes()


def _number(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _alias(tensor: Tensor) -> Tensor:
    """Return a plain tensor over the same memory, with a version of its own."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), _outside():
        return torch.empty(0, dtype=tensor.dtype).set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return all bytes that a storage has now."""
    with torch.no_grad(), _outside():
        return torch.empty(0, dtype=torch.uint8).set_(storage)


def _poison(tensor: Tensor) -> None:
    if tensor.is_contiguous():
        tensor.view(-1).view(torch.uint8).fill_(_POISON) if tensor.numel() else None
    else:
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def _is_view(func: Any) -> bool:
    if func.namespace == "aten" and func._schema.name.partition("::")[2] in _ALIASES:
        return True
    aliased = [result.alias_info for result in func._schema.returns if result.alias_info is not None]
    return bool(aliased) and not any(info.is_write for info in aliased)


def _outputs(func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]] | None:
    """Return what an operator returns before it ran, and which tensors of that are new; None where the host has to wait for it."""
    schema = func._schema
    if func.namespace not in ("aten", "prims") or _RANDOM & set(func.tags):
        return None
    mutates = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    if mutates:
        if any(result.alias_info is None for result in schema.returns):
            return None
        written = []
        for result in schema.returns:
            names = result.alias_info.before_set
            written += [
                args[place] if place < len(args) else kwargs[argument.name]
                for place, argument in enumerate(schema.arguments)
                if argument.alias_info is not None and argument.alias_info.before_set == names
            ]
        return (written[0] if len(written) == 1 else tuple(written) if written else None), []
    try:
        shown = tree_map_only(Tensor, _on_meta, (args, _device_on_meta(kwargs)))
        out = func(*shown[0], **shown[1])
    except Exception:  # no shape without values
        return None
    leaves, tree = tree_flatten(out)
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        return None
    fresh = [torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype) for leaf in leaves]
    for tensor in fresh:
        _poison(tensor)
    return tree_unflatten(fresh, tree), fresh


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _device_on_meta(kwargs: Any) -> Any:
    return {**kwargs, "device": torch.device("meta")} if kwargs.get("device") is not None else kwargs
