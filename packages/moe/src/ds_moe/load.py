"""How evenly experts are loaded: counted on the device in every forward, read by the host when someone asks, all layers at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import ds_monitor
from ds_moe._torch import in_backward
from ds_moe.losses import entropy
from ds_moe.routed import Routed

__all__ = ["LayerLoad", "Load", "expert_load", "loads", "report_load"]


class Load:
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

    def note(self, routed: Routed) -> None:
        """Count what a router said."""
        self.add(routed.counts, None if routed.kept is None else routed.dropped)

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


def loads(model: nn.Module) -> dict[str, Load]:
    """The `Load` of every layer that has one, by the layer's name."""
    found = ((name, getattr(module, "load", None)) for name, module in model.named_modules())
    return {name: load for name, load in found if isinstance(load, Load)}


def expert_load(model: nn.Module, *, clear: bool = True) -> dict[str, LayerLoad]:
    """Read the load of all layers. Cost: one read of the device."""
    counted = [
        (name, c, d)
        for name, at in loads(model).items()
        if (c := at.counts) is not None and (d := at.dropped) is not None
    ]
    if not counted:
        return {}
    shares = torch.stack([entropy(c) for _, c, _ in counted])
    packed = torch.cat([torch.cat((c, d[None])) for _, c, d in counted]).double()
    told = torch.cat((packed, shares.double().to(packed.device))).tolist()
    out, at = {}, 0
    for i, (name, counts, _) in enumerate(counted):
        numbers = tuple(int(n) for n in told[at : at + counts.numel()])
        mean = sum(numbers) / len(numbers)
        out[name] = LayerLoad(
            numbers, int(told[at + len(numbers)]), told[packed.numel() + i], max(numbers) / mean if mean else 0.0
        )
        at += len(numbers) + 1
    if clear:
        for load in loads(model).values():
            load.clear()
    return out


def report_load(model: nn.Module) -> None:
    """Gauges `moe/<layer>/{dropped,entropy,largest}` of all layers, if someone listens; else nothing is read."""
    if not ds_monitor.active():
        return
    for name, load in expert_load(model).items():
        for what in ("dropped", "entropy", "largest"):
            ds_monitor.gauge(f"moe/{name}/{what}", getattr(load, what))
