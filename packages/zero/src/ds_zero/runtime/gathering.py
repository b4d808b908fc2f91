"""When units gather and release: hooks on modules, driven by forward and backward.

Forward: a module that a unit belongs to gathers it before its forward and releases it after. Backward: the gradient of the
module's output gathers it again; the unit is released when every gradient that its graph can produce (its parameters' and
the module's inputs') has arrived.

Note "persistent units". A parameter used outside the forward of the module its unit belongs to (tied weights, a functional head), or a module
whose results leave it by another way than its outputs (an attribute, an unknown container), is in a graph that no hook on outputs
guards. Such a unit stays gathered until the next optimizer step, which makes older graphs unusable in any case. The first is seen when
the released parameter is touched, or a parameter that stays gathered for its module's next call (`Unit.guard`); the second by watching what autograd unpacks, in every backward, since a path may be taken late:
about 1 % of the time of a small transformer layer on a CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from logging import getLogger
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from ds_config.errors import ShardedAccessError
from ds_zero._torch import graph_task_id, keeps_graph, outside_transforms, running_modules, uncaptured
from ds_zero.runtime.forward_backward import Backward, ForwardCall, OpenCall, OpenCalls, has_memory
from ds_zero.runtime.gather_agreement import GatherAgreement
from ds_zero.runtime.gather_order import Arrivals, GatherOrder, GatherOrders, Retention
from ds_zero.runtime.init_shards import Copier
from ds_zero.runtime.sharded_parameter import AccessHandler, keep, placeholder_of, unkeep
from ds_zero.runtime.unit import Full, Unit

__all__ = ["Gathering"]

_log = getLogger(__name__)


class Gathering(AccessHandler):
    """The gathers of one model. Keeper of its released parameters, watcher of its modules' calls.

    Args:
        units: In canonical order, the same on every rank.
        backward: Where the model's backward is.
        ahead_numel: Elements gathered before they are needed.
    Attributes:
        released: Numbers of the units that are released between uses.
        arrivals: Which gradients have arrived in this backward.
        hooked: What becomes of a function before it is put on a module. Set it while there are no hooks.
        calls: Of each unit the calls whose backward is under way.
        idle: Frozen units that no backward needs, as far as is known.
        running: How many calls of modules that own a unit run now; by its number.
        rounds: Whether ranks meet at the end of each forward (`gather_agreement`). The same on every rank.
    """

    def __init__(self, units: Sequence[Unit], backward: Backward, ahead_numel: int) -> None:
        self.units = list(units)
        self.released = [i for i, u in enumerate(units) if u.releases]
        self.arrivals = Arrivals([len(u.params) for u in units])
        self.hooked: Callable[[Callable[..., None]], Callable[..., None]] = lambda hook: hook
        self.running = [0] * len(self.units)
        self._routes = list(dict.fromkeys(u.groups.route for u in units if u.groups.route is not None))
        self._in_backward = backward
        self._where = {id(p): (i, member) for i, u in enumerate(units) for member, p in enumerate(u.params)}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._depth = 0
        self.orders = GatherOrders(self.released[::-1], ahead_numel, [u.layout.numel for u in units])
        self._stays = Retention()
        self._forward: GatherOrder | None = None
        self._interrupted: GatherOrder | None = None  # of a forward that Ctrl-C ended
        self._open = OpenCalls()
        # Gradients flow through a frozen unit only if something before it is trained, or in its module.
        trained = [i for i, u in enumerate(self.units) if u.spec.trained]
        around = {name for i in trained for name in _modules_around(self.units[i].spec.module)}
        before = self.released if not trained else [n for n in self.released if n < trained[0]]
        self.idle = {n for n in before if self.units[n].spec.module not in around}
        self.calls: list[set[ForwardCall]] = [set() for _ in units]
        self._guarded: set[int] = set()  # of those that stay in a forward, between uses
        self.rounds = True
        self._warned = self._awaits_backward = False
        self._records = (
            False  # whether the forward that runs makes a graph, whatever parts of it that are checkpointed do
        )
        self._agreement: GatherAgreement | None = None

    # ---- hooks come and go

    def attach(self, model: nn.Module) -> None:
        """Put hooks on the modules that units belong to; none where nothing is released."""
        if not self.released:
            return
        modules = dict(model.named_modules())
        of_module: dict[str, list[int]] = {"": []}
        for number in self.released:
            of_module.setdefault(self.units[number].spec.module, []).append(number)
            for param in self.units[number].params:
                keep(param, self, weakly=True)
        for name, numbers in of_module.items():
            module = modules[name]
            below = [n for n in self.released if f"{self.units[n].spec.module}.".startswith(name and f"{name}.")]
            self.orders.add(name, below)
            pickled = partial(self._refuse_pickle, name, tuple(numbers))
            hooks = self._forward_hooks(module, name, tuple(numbers))
            pre, post = (self.hooked(uncaptured(hook, pickled)) for hook in hooks)
            self._handles.append(module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(post, always_call=True))
        self._agreement = GatherAgreement(self.units, self.released, list(of_module))

    def remove_hooks(self) -> None:
        """Take the hooks back; parameters stay as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def detach(self) -> None:
        """Take everything back. Units must not be released."""
        self.remove_hooks()
        for number in self.released:
            for param in self.units[number].params:
                unkeep(param)

    # ---- released parameters

    def name_of(self, param: Parameter) -> str:
        number, member = self._where[id(param)]
        return self.units[number].spec.params[member].name

    def on_access(self, param: Parameter, what: str) -> bool:
        """Gather a parameter that is used outside its module, if a forward or backward is running, or a loss is computed between both.

        A module may be called alone whose unit belongs to a module around it, or to one that shares its weight: an encoder's embedding.
        """
        del what
        number, order = self._where[id(param)][0], self.phase()
        if order is None and not (self._awaits_backward and torch.is_grad_enabled()) and not self._is_called(param):
            return False
        self.gather(number, order)
        if torch.is_grad_enabled() or (order is self._forward and self._records):
            self._stays.share(number)
        else:
            self._stays.unclaimed.add(number)
        return True

    def _is_called(self, param: Parameter) -> bool:
        """Whether a module that has `param` itself, not in a module below, runs now."""
        return any(param is own for module in running_modules() for own in module._parameters.values())

    def materialize(self, param: Parameter, what: str) -> Tensor | None:
        """Return a placeholder for a sharded parameter outside of any forward or backward; warn the first time."""
        self._drop_ended()
        if graph_task_id() != -1 or self._forward is not None or self._is_called(param):
            return None
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s was asked of a sharded parameter, %s, which this rank has only a part of: it, and all like it, show an empty tensor. "
                "Whole values: full_state_dict() or save_16bit_model() of the engine, or `with GatheredParameters(params):`",
                what,
                self.name_of(param),
            )
        return placeholder_of(param, self.name_of(param))

    def placeholder_for(self, param: Parameter) -> Parameter:
        """Sends nothing."""
        unit, name = self.units[self._where[id(param)][0]], self.name_of(param)
        unit.state_store.fetch()
        pieces = [piece for piece in unit.owned if piece.name == name]
        parts = [unit.shard[piece.start : piece.stop].to(param.dtype) for piece in pieces]
        chunk = torch.cat(parts) if parts else torch.empty(0, dtype=param.dtype, device=param.device)
        return Copier(unit.groups.shard_group).like(
            param, name, chunk.to(param.device), [piece.interval for piece in pieces]
        )

    def _refuse_pickle(self, name: str, numbers: tuple[int, ...]) -> None:
        """Raise where a module is pickled whose weights are not here: the file would hold empty ones."""
        if any(self.units[number].state is Full.RELEASED for number in numbers):
            raise ShardedAccessError(
                f"module {name or 'of the model'} was pickled while this rank holds only its shards of the parameters",
                code="sharded-access",
                fix="Pickle it inside `with GatheredParameters(model.parameters())`, or save the engine's state: full_state_dict(), save_16bit_model().",
            )

    # ---- forward

    def _forward_hooks(
        self, owner: nn.Module, name: str, numbers: tuple[int, ...]
    ) -> tuple[Callable[..., None], Callable[..., None]]:
        key = object()
        owner_ref = weakref.ref(owner)  # a copy of the module has these hooks, too

        def pre(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module is not owner_ref():
                return
            self._drop_ended()
            call = self._open.begin(key, numbers)
            if graph_task_id() != -1:  # recomputation
                self._in_backward.enter()
                for number in numbers:
                    self.gather(number, self.orders.backward)
            else:
                order = self._enter(name, call)
                for number in numbers:
                    self.gather(number, order)
            if numbers and torch.is_grad_enabled():
                call.watched = ForwardCall(self, numbers).begin((args, kwargs))

        def post(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if module is not owner_ref():
                return
            call, inside = self._open.end(key)
            if call is None:
                return
            self._close_ended(inside)
            try:
                if call.watched is not None and call.raised:
                    call.watched.unwatch()
                elif call.watched is not None:
                    call.watched.guard(output)
                if not call.counted:
                    return
                if self._records and self._stays.shared:
                    self._stays.until_update.update(self._stays.shared.intersection(numbers))
                for number in numbers:
                    self.running[number] -= 1
                    self.put_back(number)
            finally:
                if call.counted:
                    self._leave()

        return pre, post

    def _enter(self, name: str, call: OpenCall | None = None) -> GatherOrder:
        """Enter a module's forward; the outermost forward begins a phase."""
        order, self._depth = self._forward, self._depth + 1
        if call is not None:
            call.counted = True
            for number in call.numbers:
                self.running[number] += 1
        if self._depth == 1 or order is None:
            self._in_backward.end_raised()
            self._finish_interrupted()
            self._records = torch.is_grad_enabled()
            order = self._forward = self._order_for(name)
            order.begin()
        return order

    def _order_for(self, name: str) -> GatherOrder:
        """Return the order of a phase that begins with the forward of module `name`; of those that the ranks call, where they differ."""
        with outside_transforms():
            names = [name] if not name or self._agreement is None else self._agreement.modules_of_phase(name)
        return self.orders.forward(names)

    def _drop_ended(self) -> None:
        """Close the calls that Ctrl-C ended: their forward hooks did not run, and the phase is not over for the other ranks."""
        self._close_ended(self._open.take_ended())

    def _close_ended(self, calls: Sequence[OpenCall]) -> None:
        for call in calls:
            if call.watched is not None:
                call.watched.unwatch()
            if not call.counted:
                continue
            self._depth -= 1
            self._stays.unclaimed.update(call.numbers)
            for number in call.numbers:
                self.running[number] -= 1
        if calls and self._depth == 0 and self._forward is not None:
            self._interrupted, self._forward = self._forward, None

    def _finish_interrupted(self) -> None:
        """Issue the gathers that an interrupted forward left out, for which other ranks may wait. Collective."""
        order, self._interrupted = self._interrupted, None
        if order is not None:
            with outside_transforms():
                self._finish(order, rounds=self._has_rounds)
                self._put_back_unclaimed()

    def _put_back_unclaimed(self) -> None:
        for number in self._stays.unclaimed:
            self.put_back(number)
        self._stays.unclaimed.clear()

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._finish_forward()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Mark the forward of the whole model, for modules without hooks."""
        if not self.released or graph_task_id() != -1:
            yield
            return
        self._enter("")
        try:
            yield
        finally:
            self._leave()

    def phase(self) -> GatherOrder | None:
        """Return the gather order of the phase that runs; None outside of any phase."""
        if graph_task_id() == -1:
            self._drop_ended()
            return self._forward
        self._in_backward.enter()
        return self.orders.backward

    def keep(self, numbers: Collection[int]) -> None:
        """Keep units gathered from their first use in a step until the update. The same on every rank, between steps."""
        self._stays.persistent = frozenset(numbers)
        self.orders.skip(frozenset())

    def gather(self, number: int, order: GatherOrder | None) -> None:
        """Make a unit usable, in the order of a phase where one runs."""
        with outside_transforms():  # buffers are no part of a function that torch.func transforms
            self._gather(number, order)

    def _gather(self, number: int, order: GatherOrder | None) -> None:
        unit = self.units[number]
        if order is not None and order.awaits(number):
            for other in order.need(number):
                self.units[other].start_unshard(again=True)
        elif unit.state in (Full.RELEASED, Full.STALE):
            if order is not None:
                order.recorded.append(number)
                for other in order.rest():
                    self.units[other].start_unshard(again=True)
                self._stays.until_phase_ends.add(number)
            if order is not None and order is self._forward and self._has_rounds:
                self._meet(number)
            else:
                if self._agreement is not None:
                    self._agreement.check_on_the_spot(number)
                unit.start_unshard(channel=unit.groups.gather_group)
        unit.finish_unshard()
        unit.unguard()

    @property
    def _has_rounds(self) -> bool:
        return self.rounds and self._agreement is not None and self._agreement.has_rounds

    def _meet(self, number: int | None, path: Sequence[int] = ()) -> bool:
        """Take part in a round and in the gathers that it brings; return whether the forward of every rank is over."""
        if self._agreement is None:
            return True
        self._push()
        wanted, over, alike = self._agreement.meet(number, path)
        if over and not alike:
            self._stays.paths_differ()
        for other in wanted:
            unit, was_released = self.units[other], self.units[other].state is Full.RELEASED
            unit.finish_unneeded()  # of the order, which its ranks have issued before
            unit.start_unshard(again=True, channel=unit.groups.gather_group)
            unit.finish_unneeded()
            if was_released and other != number:
                unit.reshard()
        return over

    def put_back(self, number: int) -> None:
        """Release a unit that its caller no longer needs.

        The unit stays gathered while another use needs it, or if it was prefetched for a later use. What uses it in between without being
        its module is noticed, as where it was released: a head that is tied to an embedding which is called twice.
        """
        if self.running[number]:
            return
        order = self._forward if graph_task_id() == -1 else self.orders.backward
        if order is None or not order.is_waiting(number):
            self._release(number)
        if order is None or order is not self._forward or self._stays.outlasts_phase(number):
            return
        if self.units[number].guard():
            self._guarded.add(number)

    def _release(self, number: int) -> None:
        if not self._stays.holds(number):
            self.units[number].reshard()

    def _finish_forward(self) -> None:
        with outside_transforms():
            self._close_forward()

    def _close_forward(self) -> None:
        order, self._forward = self._forward, None
        # What records a graph after it is part of the loss: a head used chunk by chunk, a penalty on weights. All ranks compute that.
        self._awaits_backward = self._awaits_backward or torch.is_grad_enabled()
        if order is not None:
            self._finish(order, rounds=self._has_rounds)
            self._stays.forward_ended(order.recorded, has_graph=self._records)
        self._put_back_unclaimed()
        if (
            self._stays.persistent and order is self.orders.forwards[""]
        ):  # every rank has them now, and until the update
            self.orders.skip(self._stays.persistent)

    def _finish(self, order: GatherOrder, *, rounds: bool) -> None:
        waiting = order.waiting
        left = order.finish()
        for number in waiting:
            self._release(number)
        for number in left:
            self.units[number].start_unshard(again=True)
            self.units[number].finish_unshard()
            self._release(number)
        while rounds and not self._meet(None, order.recorded):
            pass
        for number in self._stays.end_phase():
            self._release(number)
        while self._guarded:
            self.units[self._guarded.pop()].unguard()
        self._push()

    def _push(self) -> None:
        """Let gathers go on that others may wait for, see `unit_groups.py`."""
        for route in self._routes:
            route.push()

    # ---- backward

    def begin_backward(self) -> None:
        """Begin the gather order of the outermost backward."""
        self._drop_ended()
        self._finish_interrupted()
        self.orders.backward.begin()
        self._stays.begin_backward(keeps_graph=keeps_graph())

    def finish_backward(self) -> None:
        """Finish the gather order of the backward.

        Ranks that took another path may count on all-gathers that were not needed here.
        """
        if self.released:
            self.idle.difference_update(self.orders.backward.recorded)
            self._finish(self.orders.backward, rounds=False)

    def clear_backward(self) -> None:
        """Forget the calls whose backward was under way, and the gradients that arrived in it."""
        self._awaits_backward = False
        self._stays.end_backward()
        self.arrivals.clear()
        for calls in self.calls:
            calls.clear()

    def release_all(self) -> None:
        """Free all gathered units except those marked persistent."""
        self._stays.end_phase()
        for number in self.released:
            self._release(number)

    def completed(self, number: int) -> None:
        """Release a unit after all its gradients have arrived, unless a call still needs it."""
        if self.units[number].releases and not self.calls[number]:
            self.put_back(number)

    def end_inner(self, numbers: set[int]) -> None:
        """Release the frozen units that a checkpointed segment gathered, after the segment is done."""
        for number in numbers:
            if not self.units[number].spec.trained and not self.calls[number]:
                self.put_back(number)

    def run_ahead(self) -> None:
        """Start the next gather in order, before anyone here needs it; see the note "two orders" in `sharded_model.py`."""
        number = self.orders.backward.run_ahead()
        if number is not None:
            self.units[number].start_unshard(again=True)
        self._push()

    def entered(self, call: ForwardCall) -> None:
        """Gather the units of a call when its backward begins (watcher)."""
        self._in_backward.enter()
        inner = self._in_backward.inner_units
        if torch.is_grad_enabled():  # create_graph: what this backward saves is guarded by nobody
            self._stays.until_update.update(call.numbers)
        for number in call.numbers:
            if call.inputs and call not in self.calls[number]:
                call.pending = call.inputs
                self.calls[number].add(call)
            if inner is not None:
                inner.add(number)
            self.gather(number, self.orders.backward)

    def unpacked(self, numbers: tuple[int, ...], saved: Tensor) -> None:
        """Gather the units whose saved tensors autograd unpacks, if they are not gathered by now (watcher).

        A unit that has had its turn in this backward is gathered once more only for a tensor in its memory: ranks that took another path
        save other activations in a module, and would not come.
        """
        for number in numbers:
            unit = self.units[number]
            if unit.state is not Full.CURRENT and graph_task_id() != -1:
                self._in_backward.enter()
                if unit.state is Full.RELEASED and not self.orders.backward.awaits(number) and has_memory(saved):
                    continue
                self.gather(number, self.orders.backward)
                self._stays.share(number)

    def unseen(self, numbers: tuple[int, ...], output: Any) -> None:
        """Mark units of a module without tensor outputs as persistent: their results leave by another path (watcher)."""
        if graph_task_id() != -1:  # a recomputation that was stopped early
            return
        self._stays.until_update.update(numbers)
        if output is not None:
            self._stays.shared.update(numbers)

    def left(self, call: ForwardCall) -> None:
        """Release the units of a call after the gradients of all its inputs have arrived (watcher)."""
        for number in call.numbers:
            self.calls[number].discard(call)
            if not self.calls[number] and (not self.units[number].spec.trained or self.arrivals.complete(number)):
                self.put_back(number)

    # ---- between steps

    @property
    def shared(self) -> list[int]:
        """Units that were used outside their modules."""
        return sorted(self._stays.shared)

    def adopt(self, orders: Mapping[str, list[int] | None]) -> None:
        """Follow the orders that are there from now on; None: go on as before. The same on every rank.

        On a device ranks meet after a forward only where they took other paths, or use a unit more than once: a round waits for the device.
        """
        once = self.orders.adopt(orders)
        if self._agreement is not None and self._agreement.waits_for_device:
            self.rounds = not once

    def share(self, numbers: set[int], idle: set[int]) -> None:
        """Mark units used outside their modules on some rank, which no backward may expect, nor those that are idle on all of them. The
        same on every rank."""
        self._stays.shared, self.idle = numbers, idle
        self.orders.backward.drop(numbers | idle)

    def stepped(self) -> None:
        """Reshard the units that stayed gathered: after an update no earlier graph is usable."""
        self._drop_ended()
        self._finish_interrupted()
        self._awaits_backward = False
        for number in self._stays.updated():
            self.units[number].reshard()
        self.orders.skip(frozenset())


def _modules_around(name: str) -> set[str]:
    """Return the names of a module and of all modules that it is in."""
    parts = name.split(".")
    return {"", *(".".join(parts[:depth]) for depth in range(1, len(parts) + 1))}
