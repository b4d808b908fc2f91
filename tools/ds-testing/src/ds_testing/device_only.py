"""A world whose groups take tensors of a device alone, on the CPU: what NCCL refuses is refused here.

Inside `device_only()` the device is `DEVICE`. What is made there, moved there, or computed from something there is the device's; what a
program makes without saying where, reads from numpy, or moves to the CPU is the host's. A collective of host tensors raises. Who makes groups
is not checked here.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import ds_comm.groups
from ds_accel.streams import StreamsBackend, use_backend
from ds_comm.call import CollectiveCall
from ds_config.errors import CommError

__all__ = ["DEVICE", "device_only", "host_reads"]

DEVICE = torch.device("cpu", 0)
"""The device; the host is torch.device("cpu"). torch computes on both alike."""

_HOST = torch.device("cpu")
_MAKERS = {
    "tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "randperm", "eye", "linspace",
    "from_numpy", "frombuffer", "empty_strided", "scalar_tensor",
}  # fmt: skip


class _Places(TorchFunctionMode):
    """Knows which tensors are the host's."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self._host: dict[int, Tensor] = {}  # the storages, held so that no number is used again

    def is_host(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage()._cdata in self._host

    def _mark(self, tensor: Tensor, host: bool) -> None:
        with torch._C.DisableTorchFunction():
            number = tensor.untyped_storage()._cdata
            if host:
                self._host[number] = tensor.detach()
            else:
                self._host.pop(number, None)

    def _note_read(self, name: str, args: Any, kwargs: Any) -> None:
        """Note what makes the host wait for the device: numbers that it asks for, and copies that it reads at once."""
        to_host = name == "cpu" or (
            name == "to"
            and any(
                leaf in (_HOST, "cpu")
                for leaf in (*args[1:], *kwargs.values())
                if isinstance(leaf, (str, torch.device))
            )
        )
        if (name in _READS or to_host) and isinstance(args[0], Tensor) and not self.is_host(args[0]):
            self.reads.append(f"{name} {tuple(args[0].shape)} at {_caller()}")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func == Tensor.device.__get__:
            return _HOST if self.is_host(args[0]) else DEVICE
        if name == "_parse_to":
            return func(*args, **kwargs)
        # torch itself is not told: some operators give a CPU with an index to what they return.
        on_cpu = tree_map(
            lambda leaf: _HOST if isinstance(leaf, torch.device) and leaf == DEVICE else leaf, (args, kwargs)
        )
        self._note_read(name, args, kwargs)
        out = func(*on_cpu[0], **on_cpu[1])
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        wanted = kwargs.get("device")
        if name in ("to", "cpu"):
            asked = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, (torch.device, str))]
            wanted = _HOST if name == "cpu" else _device(asked[0]) if asked else None
            if wanted is not None and (wanted.index is None) != self.is_host(read[0]):
                out = out.clone() if not isinstance(out, torch.nn.Parameter) else out
                self._mark(out, wanted.index is None)
                return out
        if wanted is not None and name not in ("to", "cpu"):
            for tensor in made:
                self._mark(tensor, _device(wanted).index is None)
        elif (name in _MAKERS and not read) or (read and all(self.is_host(tensor) for tensor in read)):
            for tensor in made:
                self._mark(tensor, True)
        return out


class _OnlyStreams(StreamsBackend):
    """Says what is memory of the device; copies and kernels are done at once."""

    def is_device_memory(self, tensor: Tensor) -> bool:
        return tensor.device == DEVICE

    def record_use(self, tensor: Tensor, stream: Any) -> None:
        pass

    def page_locked(self, size: Sequence[int], dtype: torch.dtype, zero: bool) -> Tensor:
        return (torch.zeros if zero else torch.empty)(size, dtype=dtype)

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


def _like(tensor: Tensor) -> dict[str, Any]:
    return {"shape": tensor.shape, "dtype": tensor.dtype}


def _device(value: torch.device | str) -> torch.device:
    return value if isinstance(value, torch.device) else torch.device(value)  # a device of a device has no index


def _on_device(group: Any) -> torch.device:
    return DEVICE if group.size > 1 else _HOST


_READS = {
    "item",
    "tolist",
    "numpy",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "nonzero",
    "is_nonzero",
    "allclose",
    "equal",
}
_current: list[_Places] = []


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Note where the host waits for the device inside `device_only()`: one entry a read, with the function and the shape."""
    places = _current[-1]
    before, places.reads = places.reads, []
    try:
        yield places.reads
    finally:
        places.reads = before


def _caller() -> str:
    """Return the file and line of the innermost frame that is neither torch's nor here."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__ or f"{os.sep}torch{os.sep}" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_PATCHED = ("metadata_device", "sends_from_anywhere")


@functools.cache
def _import_users(package: str) -> None:
    """Import the modules of a package that name what is replaced here: one that is imported inside would keep the replacement."""
    where = getattr(sys.modules[package], "__file__", None)
    for file in sorted(Path(where).parent.rglob("*.py")) if where else ():
        if any(name in file.read_text() for name in _PATCHED):
            parts = file.relative_to(Path(str(where)).parent.parent).with_suffix("").parts
            importlib.import_module(".".join(parts).removesuffix(".__init__"))


@contextmanager
def device_only(*, host_too: bool = False) -> Iterator[None]:
    """Let groups take tensors of `DEVICE` alone, while inside; `host_too`: and those of the host, as a world of NCCL beside gloo does."""
    places, start, run_backward = _Places(), CollectiveCall.start, torch.autograd._engine_run_backward
    of_host: list[
        Any
    ] = []  # groups that were asked for with gloo by name, which are the host's on a device's machine, too
    named_group = ds_comm.groups.named_group

    def make_group(ranks: Any, name: str, purpose: str, backend: str | None = None, *args: Any, **options: Any) -> Any:
        made = named_group(ranks, name, purpose, backend, *args, **options)
        if backend == "gloo":
            of_host.append(made)
        return made

    def backward(*args: Any, **kwargs: Any) -> Any:
        with places:  # torch calls a backward without modes, and hooks ask where tensors are
            return run_backward(*args, **kwargs)

    def checked(call: CollectiveCall, tensor: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        link = call.group.link
        if host_too:
            return start(call, tensor, *args, **kwargs)
        if tensor is not None and link is not None and not any(link is pg for pg in of_host) and places.is_host(tensor):
            raise CommError(
                f"{call}: a tensor of the host, {tuple(tensor.shape)}, in a group of devices",
                code="comm-device",
                fix="Make it on metadata_device(group).",
            )
        return start(call, tensor, *args, **kwargs)

    wrapper = Tensor._make_wrapper_subclass

    def make_wrapper(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") == DEVICE:
            kwargs["device"] = _HOST
        return wrapper(*args, **kwargs)

    for package in [
        name for name in sys.modules if name.startswith("ds_") and "." not in name and name != "ds_testing"
    ]:
        _import_users(package)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Tensor, "_make_wrapper_subclass", staticmethod(make_wrapper)))
        stack.enter_context(mock.patch.object(CollectiveCall, "start", checked))
        stack.enter_context(mock.patch.object(ds_comm.groups, "named_group", make_group))
        stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", backward))
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("ds_") and "metadata_device" in vars(module) and not host_too:
                stack.enter_context(mock.patch.object(module, "metadata_device", _on_device))
        for module in list(sys.modules.values()):  # a way of gloo alone: from the host's memory
            if getattr(module, "__name__", "").startswith("ds_zero") and "sends_from_anywhere" in vars(module):
                stack.enter_context(mock.patch.object(module, "sends_from_anywhere", return_value=False))
        # torch compares where tensors are in hooks, in which modes are off
        checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
        stack.enter_context(mock.patch.dict(checks, {torch.utils.checkpoint._DEFAULT_DETERMINISM_MODE: _like}))
        stack.enter_context(use_backend(_OnlyStreams()))
        stack.enter_context(places)
        _current.append(places)
        stack.callback(_current.pop)
        yield
