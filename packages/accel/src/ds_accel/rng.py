"""Named random streams: reproducible, independent of each other and of the global generator.

Words: a *stream* is one generator, named and seeded from (seed, name); a *fork* runs code that draws from the global
generator (dropout, `torch.rand`) on a stream instead, and puts the global generator back as it was.
"""

from __future__ import annotations

import base64
import hashlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ds_config.errors import DsError

__all__ = ["RngError", "RngStreams", "derive_seed", "preserve_random_streams"]


class RngError(DsError, ValueError):
    """A random stream was asked for or restored in a way that would repeat or lose numbers."""


def derive_seed(seed: int, *parts: str | int) -> int:
    """Derive a 63-bit seed from a seed and names (SHA-256), the same on every machine.

    Any difference in the arguments gives an unrelated seed.
    """
    text = "\0".join([str(int(seed)), *(f"{type(part).__name__}:{part}" for part in parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


@contextmanager
def preserve_random_streams(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Put the random streams of torch, numpy and Python back afterwards as they were before the block.

    Args:
        devices: Whose generators to preserve besides the host's; all of one kind. One that has not been started is left alone.
    """
    numpy: Any = sys.modules.get("numpy.random")
    drawn, state = random.getstate(), None if numpy is None else numpy.get_state()
    started = list(dict.fromkeys(device for device in devices if _is_started(device)))
    kind = {"device_type": started[0].type} if started else {}
    with torch.random.fork_rng(started, **kind):
        try:
            yield
        finally:
            random.setstate(drawn)
            if numpy is not None:
                numpy.set_state(state)


def _is_started(device: torch.device) -> bool:
    """Whether a device has a generator that is in use. Asking for the state of CUDA's would start CUDA."""
    module = None if device.type in ("cpu", "meta") else getattr(torch, device.type, None)
    return module is not None and bool(getattr(module, "is_initialized", lambda: True)())


class RngStreams:
    """Random streams of one device.

    Args:
        seed: The run's seed. Put a rank into it with `derive_seed(seed, "rank", rank)` where ranks must differ.
        device: Where the numbers are drawn.
        module: The device's module, for the global generator; None for the CPU.
    """

    def __init__(self, seed: int, device: torch.device, module: Any = None) -> None:
        self.seed, self.device = seed, device
        self._module = module if hasattr(module, "get_rng_state") else None
        self._streams: dict[str, torch.Generator] = {}
        self._active: list[str] = []

    def stream(self, name: str) -> torch.Generator:
        """Return the stream `name`, as a generator for `torch.rand(..., generator=...)`; the first call makes it."""
        if name not in self._streams:
            generator = torch.Generator(device=self.device)
            generator.manual_seed(derive_seed(self.seed, name))
            self._streams[name] = generator
        return self._streams[name]

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """Let the global generator of the device draw from stream `name` inside, and be as before outside.

        Forks nest: inside another one the outer stream is put aside, and the same stream goes on where it was. When the
        block ends, also by an exception, the stream has advanced by what was drawn.
        """
        stream = self.stream(name)
        outside = self._global_state()
        if self._active:
            self._streams[self._active[-1]].set_state(outside)
        self._active.append(name)
        self._set_global_state(stream.get_state())
        try:
            yield
        finally:
            stream.set_state(self._global_state())
            self._active.pop()
            self._set_global_state(self._streams[self._active[-1]].get_state() if self._active else outside)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all streams as JSON values, so that a later run continues them.

        About 7 kB a stream on the CPU, 30 bytes on a GPU.

        Raises:
            RngError: inside a fork, where a stream's state is in use ("rng-in-fork").
        """
        self._outside_forks("saved")
        states = {
            name: base64.b64encode(bytes(stream.get_state().tolist())).decode()
            for name, stream in self._streams.items()
        }
        return {"seed": self.seed, "device": self.device.type, "streams": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. Streams that are not in it start anew from its seed.

        Raises:
            RngError: it is of another kind of device, whose generators draw other numbers ("rng-device"); inside a fork
                ("rng-in-fork").
        """
        self._outside_forks("restored")
        if state["device"] != self.device.type:
            raise RngError(
                f"the random state is of device {state['device']!r}, this one is {self.device.type!r}: they draw other numbers.",
                code="rng-device",
                fix="Resume on the same kind of device, or start with a new seed.",
            )
        self.seed = int(state["seed"])
        self._streams.clear()
        for name, encoded in state["streams"].items():
            raw = base64.b64decode(encoded)
            self.stream(name).set_state(torch.frombuffer(bytearray(raw), dtype=torch.uint8))

    def _outside_forks(self, verb: str) -> None:
        if self._active:
            raise RngError(
                f"random streams cannot be {verb} inside fork({self._active[-1]!r}).",
                code="rng-in-fork",
                fix="Do it outside of the with block.",
            )

    def _global_state(self) -> torch.Tensor:
        if self._module is None:
            return torch.get_rng_state()
        state: torch.Tensor = self._module.get_rng_state(*self._where())
        return state

    def _set_global_state(self, state: torch.Tensor) -> None:
        if self._module is None:
            torch.set_rng_state(state)
        else:
            self._module.set_rng_state(state, *self._where())

    def _where(self) -> tuple[int, ...]:
        # A module without current_device (mps) has one device, and functions that take no index.
        if not hasattr(self._module, "current_device"):
            return ()
        return (self.device.index if self.device.index is not None else self._module.current_device(),)
