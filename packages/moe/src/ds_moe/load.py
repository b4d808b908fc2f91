"""How evenly experts are loaded: counted on the device in every forward, read by the host when someone asks, all layers at once."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

import ds_monitor
from ds_accel import streams
from ds_accel.streams import DeviceEvent
from ds_moe._torch import in_backward
from ds_moe.balancing_losses import entropy
from ds_moe.router_output import RouterOutput

__all__ = ["ExpertLoad", "LayerLoad", "expert_load", "loads", "report_load"]


class ExpertLoad:
    """What the forwards of one layer added up to, on this rank. Tensors on the layer's device, which nothing here reads.

    Attributes:
        counts: int64 [E]: choices of each expert; None before the first forward.
        dropped: int64 scalar: choices that were dropped.
    """

    def __init__(self) -> None:
        self.counts: Tensor | None = None
        self.dropped: Tensor | None = None

    def add(self, counts: Tensor, dropped: Tensor | None = None) -> None:
        """Count a forward; one that backward computes again was counted before."""
        if in_backward():
            return
        counts = counts.detach()
        gone = counts.new_zeros(()) if dropped is None else dropped.detach()
        if self.counts is None or self.dropped is None or self.counts.device != counts.device:
            self.counts, self.dropped = counts.clone(), gone.clone()
        else:
            self.counts += counts
            self.dropped += gone

    def note(self, routed: RouterOutput) -> None:
        """Count what a router said."""
        self.add(routed.counts, None if routed.kept_mask is None else routed.dropped)

    def clear(self) -> None:
        """Begin anew."""
        self.counts = self.dropped = None


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """The load of one layer since it was last cleared, on this rank.

    Attributes:
        counts: Choices of each expert.
        dropped: Choices that were dropped.
        entropy: 1 when all experts are loaded alike, 0 when one takes all.
        largest: The most loaded expert's choices over the mean.
    """

    counts: tuple[int, ...]
    dropped: int
    entropy: float
    largest: float


def loads(model: nn.Module) -> dict[str, ExpertLoad]:
    """Return the `ExpertLoad` of every layer that has a load, by the layer's name."""
    candidates = ((name, getattr(module, "load", None)) for name, module in model.named_modules())
    return {name: load for name, load in candidates if isinstance(load, ExpertLoad)}


def expert_load(model: nn.Module, *, clear: bool = True) -> dict[str, LayerLoad]:
    """Read the load of all layers. Cost: one read of the device."""
    reading = _Reading.begin(model, clear=clear)
    return {} if reading is None else reading.read()


def report_load(model: nn.Module) -> None:
    """Report gauges `moe/<layer>/{dropped,entropy,largest}` of all layers if a sink is attached.

    The gauges cover the time since the last report. Call this once a step: nothing waits for a device. Numbers on a GPU
    are copied behind the step and reported by a later call.
    """
    if not ds_monitor.active():
        return
    waiting = _waiting.setdefault(model, [])
    begun = _Reading.begin(model, clear=True)
    if begun is not None:
        waiting.append(begun)
    while waiting and waiting[0].ready():
        for name, load in waiting.pop(0).read().items():
            for what in ("dropped", "entropy", "largest"):
                ds_monitor.gauge(f"moe/{name}/{what}", getattr(load, what))


_waiting: WeakKeyDictionary[nn.Module, list[_Reading]] = WeakKeyDictionary()


def _to_host(numbers: Tensor) -> tuple[Tensor, DeviceEvent]:
    """Queue a copy to the host; return the copy, which is readable once the event has happened."""
    host = streams.copy_to(numbers, torch.device("cpu"), fresh=True)
    return host, streams.record_event(numbers.device)


@dataclass(slots=True, eq=False)
class _Reading:
    """Numbers of all layers on their way to the host: for each its counts and drops, one after the other."""

    layers: tuple[tuple[str, int], ...]
    numbers: Tensor
    arrived: DeviceEvent | None

    @classmethod
    def begin(cls, model: nn.Module, *, clear: bool) -> _Reading | None:
        """Start; None if nothing was counted."""
        counted = [
            (name, c, d)
            for name, at in loads(model).items()
            if (c := at.counts) is not None and (d := at.dropped) is not None
        ]
        if not counted:
            return None
        packed = torch.cat(
            [torch.cat((c.double(), d.double()[None], entropy(c).double()[None])) for _, c, d in counted]
        )
        arrived: DeviceEvent | None = None
        if streams.is_device_memory(packed):
            packed, arrived = _to_host(packed)
        if clear:
            for load in loads(model).values():
                load.clear()
        return cls(tuple((name, c.numel()) for name, c, _ in counted), packed, arrived)

    def ready(self) -> bool:
        """Whether `read` would not wait."""
        return self.arrived is None or bool(self.arrived.query())

    def read(self) -> dict[str, LayerLoad]:
        """Wait for the numbers and return the load of each layer."""
        if self.arrived is not None:
            self.arrived.synchronize()
        values, out = self.numbers.tolist(), {}
        for name, size in self.layers:
            numbers, dropped, values = tuple(values[:size]), values[size], values[size + 1 :]
            mean, even = sum(numbers) / size, float(entropy(torch.tensor(numbers, device="cpu")))
            out[name] = LayerLoad(numbers, dropped, even, max(numbers) / mean if mean else 0.0)
        return out
