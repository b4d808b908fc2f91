"""Where a unit's master shard, and what the optimizer keeps of it, are between updates: the seat of everything that keeps them elsewhere.

Words: a *tier* is such a place. An update of a unit is four steps, which `ShardedOptimizer` makes for every unit in canonical order:

    fetch    the shard and the optimizer's state of it are where the optimizer reads and writes them
    update   the optimizer steps the unit's parts with its summed gradients
    publish  the shard's new values go where gathers send them from, in the format forward uses (`Unit.mark_updated`)
    store    the shard and the state go back to their tier

Units of the tier `device` are updated together, by one call of the optimizer: for them fetch and store are nothing. A unit of a tier
that is *alone* is updated by a call for it, with the next one's `begin_fetch` under way, so that one unit's state at a time is on the
device. Forward and backward never need a tier: what they use is kept in the format and the place that gathers send from.

A new tier is a subclass and a row of `TIERS`; `ShardOptions.tier` says which units are in it. What may come with it: gradients of a unit
are final when its reduction is (`Gradients.finish`), long before the step, so a tier may take them as they come; a norm that clips
is known after the last, so a tier that updates before has to keep what it overwrites until `ShardedOptimizer.step` has agreed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from ds_config.errors import PlanError
from ds_zero.layout.elements import UnitLayout
from ds_zero.layout.precision import Dtypes
from ds_zero.layout.residency import UnitBytes
from ds_zero.layout.units import UnitSpec
from ds_zero.offload.part import Part
from ds_zero.offload.placement import Placement

__all__ = ["TIERS", "Sums", "Tier", "Tiered", "kind_of", "tier_of"]

States = Callable[[Part], dict[str, Any]]


class Sums(Protocol):
    """Of a unit's gradients what a tier may use: `Gradients`."""

    sums: list[Tensor] | None
    ranges: tuple[tuple[int, int], ...]

    def finish(self) -> None: ...

    def view(self, start: int, stop: int) -> Tensor | None: ...


class Tiered(Protocol):
    """Of a unit what a tier may use: `Unit`. The one thing that it may set is `shard`.

    Attributes:
        number: In its model.
        parts: What the optimizer sees of the shard; empty while the tier is made.
    """

    number: int
    spec: UnitSpec
    layout: UnitLayout
    dtypes: Dtypes
    rank: int
    params: list[Parameter]
    shard: Tensor
    parts: list[Part]

    @property
    def device(self) -> torch.device: ...

    @property
    def gradients(self) -> Sums: ...

    def publish(self) -> None: ...


class Tier:
    """The tier `device`: state is kept where the model is. Made once for each unit, on all ranks alike.

    Attributes:
        resident: The shard is always readable, and may be a range of the buffer that forward uses.
        alone: A unit is updated by itself.
        apart: The shard's memory is not the device's.
        unit: Whose state this is.
        states: The optimizer's state of a part of the unit; empty before its first step, and where there is no optimizer.
    """

    resident = True
    alone = False
    apart = False

    def __init__(self, unit: Tiered) -> None:
        self.unit = unit
        self.states: States = lambda part: {}

    @staticmethod
    def planned(found: UnitBytes) -> UnitBytes:
        """What of a unit's bytes is kept on the device, given what the tier `device` keeps. Pure."""
        return found

    def begin_fetch(self) -> None:
        """Start what `fetch` ends. Called while another unit is updated."""

    def fetch(self) -> None:
        """Return when `unit.shard` and its state may be read and written. Nothing if they may be already."""

    def store(self) -> None:
        """They were written, or only read: put them away."""

    def drop(self) -> None:
        """They were only read since the last `store`: put them away."""

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[numel], of any content: where `unit.shard` is while it is made."""
        return torch.empty(numel, dtype=dtype, device=device)

    def gradient(self, summed: Tensor, part: Tensor) -> Tensor:
        """What the optimizer is given: a sum in the format, shape and place of the part."""
        if summed.dtype != part.dtype or summed.device != part.device:
            summed = summed.to(part.device, part.dtype)
        return summed if summed.shape == part.shape else summed.view(part.shape)


TIERS: dict[str, type[Tier]] = {"device": Tier}
"""By name, as `ShardOptions.tier` says it."""


def kind_of(tier: str | Placement) -> type[Tier] | Placement:
    """What planning asks a tier: `resident`, `alone`, `planned`."""
    return tier_of(tier) if isinstance(tier, str) else tier


def tier_of(name: str) -> type[Tier]:
    """The tier of a name.

    Raises:
        PlanError: there is none ("zero-tier").
    """
    found = TIERS.get(name)
    if found is None:
        raise PlanError(
            f"there is no tier {name!r} to keep state in",
            code="zero-tier",
            fix=f"Choose from {', '.join(sorted(TIERS))}, or add a row to ds_zero.offload.tier.TIERS.",
        )
    return found
