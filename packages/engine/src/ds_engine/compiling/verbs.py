"""The verbs of one model for graphs of a compiler: what hooks do in eager execution, as calls that a graph can make.

A graph that needs a unit's parameters calls `need` before their first use and `spare` after the last one; one that makes
gradients gives them to `arrived`. Orders, accumulation, tiers and codes are those of ds-zero: nothing is decided here, and
modules that run outside of any graph keep their hooks.

Where a graph is being made, its parameters must look like parameters. `Graphs.tracing` gives released ones their own class back,
without memory; inside, nothing may read them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn

from ds_engine.compiling.joint import buckets_of, reduce_together
from ds_engine.compiling.parking import Parking
from ds_zero.runtime.sharded_model import ShardedModel
from ds_zero.runtime.sharded_parameter import ShardedParameter, release, restore
from ds_zero.runtime.unit import Full, Unit

__all__ = ["Graphs"]


class Graphs:
    """See the module's docstring.

    Args:
        sharding: Of the model whose graphs are compiled.
    Attributes:
        units: In the order of their numbers.
        loads: How often a graph had what a gather sends on the device before the gather began.
    """

    def __init__(self, sharding: ShardedModel) -> None:
        self.sharding = sharding
        self.units: list[Unit] = sharding.units
        self._gathering, self._reducing = sharding.runtime.gathering, sharding.runtime.reducing
        self._parking: Parking | None = None
        self.loads = 0

    def released(self, number: int) -> bool:
        """Whether a unit's parameters have no memory between uses."""
        return self.units[number].releases

    def forward(self) -> AbstractContextManager[None]:
        """Mark the forward of the whole model as a phase of all-gathers."""
        return self._gathering.forward()

    def hook_with(self, model: nn.Module, hooked: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        """Put the hooks of `model` on again, each as `hooked` makes it."""
        gathering = self._gathering
        gathering.remove_hooks()
        gathering.hooked = hooked
        gathering.attach(model)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Restore the original class of released parameters, while inside."""
        # Those of a gather that is under way, too: they have their class back when somebody waits for it.
        released = [(unit, p) for unit in self.units for p in unit.params if type(p) is ShardedParameter]
        for _, param in released:
            restore(param)
        try:
            yield
        finally:
            for unit, param in released:
                if unit.state in (Full.RELEASED, Full.GATHERING):
                    release(param)

    # ---- what graphs call

    def expect(self, number: int) -> None:
        """Prefetch a unit: start its all-gather, after those before it in the order. Collective over its ranks.

        So are all methods of this class that begin all-gathers or reductions.
        """
        order = self._gathering.phase()
        for other in () if order is None else order.expect(number):
            self.units[other].start_unshard(again=True)

    def need(self, number: int) -> None:
        """Gather a unit; return when its parameters are usable."""
        self._gathering.gather(number, self._gathering.phase())

    def spare(self, number: int) -> None:
        """Release a unit that this graph needs no more, unless a call outside of the graph uses the unit."""
        gathering = self._gathering
        if self.units[number].releases and not gathering.calls[number] and not gathering.running[number]:
            gathering.put_back(number)

    def load(self, number: int) -> None:
        """Copy this rank's shard of an offloaded unit to the device, before its all-gather."""
        self.loads += self.units[number].storage.load()

    def put_state(self, number: int) -> None:
        """Offload the optimizer state of a unit to the host while this graph runs."""
        if self._parking is not None:
            self._parking.put(number)

    def get_state(self, number: int) -> None:
        """Start to copy a unit's optimizer state back to the device, if this backward ends with reductions."""
        if self._parking is not None and self._reducing.now:
            self._parking.begin(number)

    def arrived(self, number: int, members: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Take over gradients of a unit's parameters; the last gradient of the unit begins its reduction."""
        for member, grad in zip(members, grads, strict=True):
            self._reducing.hand_over(number, member, grad)

    # ---- between steps

    def hide_gradients(self) -> None:
        """Leave `param.grad` alone from now on: hooks on parameters would keep their gradients out of captured backward graphs."""
        self._reducing.attributes.detach()

    def keep(self, numbers: Collection[int]) -> None:
        """Keep units gathered from their first use in a step until the update. The same on every rank."""
        self._gathering.keep([n for n in numbers if self.units[n].releases])

    def park(self, *, pin: bool) -> Parking:
        """Allow graphs to offload the optimizer state, until `stay`. Between steps."""
        if self._parking is None:
            self._parking = Parking(self.units, pin=pin)
        return self._parking

    def stay(self) -> None:
        """Move the optimizer state back to the device and end its offloading."""
        parking, self._parking = self._parking, None
        if parking is not None:
            parking.close()

    def buckets(self, limit: int) -> tuple[tuple[int, ...], ...]:
        """Group units into gradient buckets of at most `limit` elements, in reduction order. The same on every rank."""
        sequence = [number for number in reversed(self._reducing.trained) if not self.units[number].groups.external]
        numels = [unit.layout.numel for unit in self.units]
        return tuple(buckets_of(sequence, [unit.gradients for unit in self.units], numels, limit))

    def sum_together(self, buckets: Sequence[tuple[int, ...]]) -> None:
        """Reduce the gradients of each bucket's units in one message. Between steps, the same on every rank."""
        self._reducing.sum_together(buckets, reduce_together)

    def run_ahead(self, numel: int) -> None:
        """Set how many elements are prefetched before a graph needs them."""
        self._gathering.orders.ahead = numel

    @property
    def ahead_numel(self) -> int:
        """Elements gathered before they are asked for."""
        return self._gathering.orders.ahead

    def in_flight(self, nbytes: int) -> int:
        """Set how many bytes of gradients may be in unfinished reductions; returns how many it were."""
        before, self._reducing.inflight_bytes = self._reducing.inflight_bytes, nbytes
        return before

    def drain(self) -> None:
        """Wait for every reduction that was started."""
        self._reducing.drain()
