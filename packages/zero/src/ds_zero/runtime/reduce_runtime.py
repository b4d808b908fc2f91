"""When units reduce: hooks on parameters, driven by autograd. Knows no module.

A unit is reduced when the last of its parameters' gradients has arrived. The end of the outermost backward closes whatever is
open, so unused, reused, tied and checkpointed modules need no case of their own.

Note "handed over". A compiled graph gives gradients away where they are made, and returns none of them; autograd calls the hooks of those
parameters all the same. Such a call must not count as a second gradient: the unit would be summed twice, and late from then on.

Note "leftovers". How often a rank needs a unit in one backward (a block that is checkpointed by nested backwards), and which gradients wait
for the step, may be a matter of its data. So what comes after a unit was sent is not sent when it comes, because nobody else may be there: the
rank keeps it until the next backward sends the unit, or until the message in which ranks measure gradients or agree on a step says that some
rank holds something. Then all of them reduce once more.

Note "waiting on a device". Where ranks take other paths, one may wait for a sum that another sends only after a gather which the first has yet
to start. So a backward that gathers waits for sums on the host, on devices, too: a stream that waits holds back all gathers behind it. The
helper starts them meanwhile.

Note "a backward that raised". The ranks may have raised in different places, or only one of them did, and the others wait for its sums. So it
is finished by what comes next on its rank: what has no gradient is sent as zeros. A rank that did not raise is told where gradients are
measured (its own backward raises then, too), or else in the step.

Note "sums of several models". One backward may go through several models (a loss of two engines). Each sends its units in its own order, but which
model comes next is a matter of the ranks' paths, and units of one size would be summed with those of another model without a word. So the place of
each sum among all over the same ranks is part of a digest, `sent`, which the ranks compare in a step.

Note "hooks of users" (`register_post_accumulate_grad_hook`). autograd would call them with this rank's gradient, or with None where that was
taken into a buffer already. So they are looked for when a backward begins, replaced by nothing while it runs, and called when it is over and
`param.grad` is the averaged gradient. Where gradients are not shown (the engine from stage 1 on) they are called with this rank's own gradient
before that is taken into a buffer, whenever they were registered; what they write to it is summed.
"""

from __future__ import annotations

import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from logging import getLogger
from typing import Any

import torch
from torch import Tensor

from ds_accel import streams
from ds_config.errors import TrainingError
from ds_zero._torch import graph_task_id, without_torch_function
from ds_zero.layout.units import DENSE
from ds_zero.planning.unit_plan import ReduceStrategy
from ds_zero.runtime.attributes import GradAttributes
from ds_zero.runtime.forward_backward import Backward
from ds_zero.runtime.gather_order import ReduceOrder
from ds_zero.runtime.gathering import Gathering
from ds_zero.runtime.gradients import Gradients
from ds_zero.runtime.unit import Unit

__all__ = ["AccumulatedHooks", "GradientReductions", "Helper"]

_PATIENCE_S = 0.02
_log = getLogger(__name__)


class Helper:
    """Calls `help` while a `waiting` block lasts.

    Args:
        help_once: A bound method; only a weak reference to its object is kept. Runs on another thread, never at the same
            time as code outside `waiting`.
    """

    def __init__(self, help_once: Callable[[], None]) -> None:
        self._help = weakref.WeakMethod(help_once)
        self._lock = threading.Lock()
        self._since: float | None = None
        self._place: tuple[Any, torch.device] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def waiting(self, device: torch.device) -> Iterator[None]:
        """Mark the block as possibly waiting for other ranks, so that the helper thread may help, on this thread's stream of `device`."""
        if self._thread is None:
            args = (weakref.ref(self), self._stop, streams.current_device())
            self._thread = threading.Thread(target=_watch, args=args, name="ds-zero-helper", daemon=True)
            self._thread.start()
        with self._lock:
            self._since, self._place = time.monotonic(), (streams.current_stream(device), device)
        try:
            yield
        finally:
            with self._lock:
                self._since = None

    def poll(self) -> None:
        """Run the help function if a wait has lasted long."""
        with self._lock:
            if self._since is not None and time.monotonic() - self._since > _PATIENCE_S:
                help_once = self._help()
                if help_once is not None and self._place is not None:
                    with streams.on_stream(*self._place):
                        help_once()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _watch(owner: weakref.ref[Helper], stop: threading.Event, device: torch.device) -> None:
    with streams.on_device(device):  # gathers that it starts are work of the rank's device
        while not stop.wait(_PATIENCE_S):
            helper = owner()
            if helper is None:
                return
            helper.poll()
            del helper


def _nothing(param: Tensor) -> None:
    """Do nothing: the hook in whose place this is runs at the end of the backward."""


class AccumulatedHooks:
    """The users' hooks on accumulated gradients of one model; see the note "hooks of users".

    Args:
        params: Those that are trained, by unit and member.
    Attributes:
        library: Numbers of the hooks that are ds-zero's.
    """

    def __init__(self, params: dict[tuple[int, int], Tensor]) -> None:
        self._params = params
        self._hooks: list[dict[int, Any]] | None = None  # of each parameter, ours among them
        self.library: set[tuple[tuple[int, int], int]] = set()
        self._silent: list[tuple[tuple[int, int], dict[int, Any], int, Callable[[Tensor], Any]]] = []

    def silence(self) -> None:
        """Take the place of all hooks until `restore`. Their handles stay good."""
        self.restore()
        if self._hooks is None:
            with without_torch_function():
                hooks_of = [getattr(param, "_post_accumulate_grad_hooks", None) for param in self._params.values()]
            self._hooks = [{} if hooks is None else hooks for hooks in hooks_of]
        for place, hooks in zip(self._params, self._hooks, strict=True):
            for key in list(hooks) if len(hooks) > 1 else ():
                if (place, key) in self.library:
                    continue
                # Values may be replaced while autograd goes through the hooks, keys may not.
                self._silent.append((place, hooks, key, hooks[key]))
                hooks[key] = _nothing

    def call_of(self, place: tuple[int, int]) -> None:
        """Call the hooks of one parameter, whose gradient was accumulated and will be taken; they keep silent until `restore`."""
        for other, hooks, key, hook in list(self._silent):
            if other == place and hooks.get(key) is _nothing:
                hook(self._params[place])

    def restore(self) -> None:
        """Give hooks their places back; those that were removed meanwhile stay away."""
        for _, hooks, key, hook in self._silent:
            if hooks.get(key) is _nothing:
                hooks[key] = hook
        self._silent.clear()

    def call(self, missing: Sequence[Collection[int]]) -> None:
        """Call the hooks, and give them their places back.

        Args:
            missing: Of each unit the members that got no gradient in this backward.
        """
        silent = [(place, hook) for place, hooks, key, hook in self._silent if hooks.get(key) is _nothing]
        self.restore()
        for (number, member), hook in silent:
            if member not in missing[number]:
                hook(self._params[number, member])


def _one_by_one(several: Sequence[Gradients]) -> None:
    for gradients in several:
        gradients.reduce()


class GradientReductions:
    """The reductions of one model.

    Args:
        units: In canonical order, the same on every rank.
        backward: Where the model's backward is.
        gathering: Told of units whose gradients have all arrived; gathers go on while a reduction is waited for.
        inflight_bytes: Gradient bytes that may be in unfinished reductions.
    Attributes:
        trained: Numbers of the units with gradients.
        now: Whether a backward reduces its gradients.
        unused: Of each unit the parameters that no backward of this step has given a gradient.
        attributes: What `param.grad` is between backwards.
        leftovers: Units of which this rank holds gradients that no backward sends, see the note "leftovers".
        adds: Whether the backward that runs gives gradients to parameters.
        raised: How many backwards that send gradients an error has ended on this rank since the ranks last compared that.
        sent: Digest of the sums since the last step, see the note "sums of several models".
    """

    def __init__(self, units: Sequence[Unit], backward: Backward, gathering: Gathering, inflight_bytes: int) -> None:
        self.units, self.inflight_bytes = list(units), inflight_bytes
        self.trained = [i for i, u in enumerate(units) if u.spec.trained]
        self.now, self._sends, self._deferred, self.adds = True, True, False, False
        self.raised = 0
        self._unwarned = [True]  # on the first rank only
        self.unused: list[set[int]] = [set(range(len(u.params))) for u in units]
        self.attributes = GradAttributes(units, self.unused, backward, self.forget)
        self.hooks = AccumulatedHooks({(n, i): p for n in self.trained for i, p in enumerate(units[n].params)})
        self.attributes.before = weakref.WeakMethod(self.look_for_hooks)
        self._looked = -1
        self._backward, self._gathering, self._arrivals = backward, gathering, gathering.arrivals
        self._hosts = list(dict.fromkeys(u.groups.host for u in units if u.groups.host is not None))
        # Gradients that are summed with ranks outside this backward wait for the step.
        self._apart = [n for n in self.trained if self.units[n].groups.external]
        self._order = ReduceOrder([n for n in reversed(self.trained) if n not in self._apart])
        self._inflight: deque[int] = deque()
        self.leftovers: set[int] = set()
        dense = [n for n, unit in enumerate(units) if unit.spec.family == DENSE]
        groups = units[dense[0]].groups if dense else None
        self._sequence = None if groups is None else groups.shard_group.order or groups.replicate_group.order
        # Places are alike on ranks that have parameters of other families; sums in shared memory are in places of their own.
        self._in_messages = {
            n: place
            for place, n in enumerate(dense)
            if units[n].groups.size > 1 and units[n].plan.reduction is not ReduceStrategy.POSTING
        }
        self.sent = 0
        self.forget_sent()
        self._bucket_of: dict[int, tuple[int, ...]] = {}
        self._reduce_several: Callable[[Sequence[Gradients]], None] = _one_by_one
        self._waiting: dict[tuple[int, ...], list[int]] = {}  # collected, and waiting for the rest of their bucket
        self._handed: dict[
            tuple[int, int], tuple[weakref.ref[Tensor], int]
        ] = {}  # by unit and member: gradient, version
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._helper = Helper(gathering.run_ahead)

    def attach(self) -> None:
        """Put a hook on every trained parameter."""
        for number in self.trained:
            for member, param in enumerate(self.units[number].params):
                handle = param.register_post_accumulate_grad_hook(self._fired_hook(number, member))
                self.hooks.library.add(((number, member), handle.id))
                self._handles.append(handle)
        for unit in self.units if self.trained else ():
            for member in range(len(unit.params)):
                self.leave_out(unit, member)

    def leave_out(self, unit: Unit, member: int) -> None:
        """Drop the gradients of a parameter that the optimizer does not train, where each of several ranks has its own."""
        param, groups = unit.params[member], unit.groups
        if unit.spec.trained or groups.size == 1 or not param.requires_grad:
            return
        if groups.shard_group.rank + groups.replicate_group.rank > 0:
            self._unwarned.clear()
        hook = partial(_drop, unit.spec.params[member].name, self._unwarned)
        self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def detach(self) -> None:
        """Take the hooks back."""
        self.attributes.detach()
        self.hooks.restore()
        self._helper.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ---- backward

    def _fired_hook(self, number: int, member: int) -> Callable[[Tensor], None]:
        # Weak: autograd keeps this function where the garbage collector does not look, so a strong one would never die.
        owner = weakref.ref(self)

        def fired(param: Tensor) -> None:
            reducing = owner()
            if reducing is None:
                return
            attributes = reducing.attributes
            if attributes.added is not None:
                attributes.land(param)
            if not attributes.shows:
                reducing.hooks.call_of((number, member))
            if not reducing._handed or not reducing._is_empty(number, member, param):
                reducing.arrived(number, member)

        return fired

    def hand_over(self, number: int, member: int, grad: Tensor) -> None:
        """Accept a parameter's gradient from a graph: as `arrived`, and see the note "handed over"."""
        self.attributes.begin()
        param = self.units[number].params[member]
        with without_torch_function():
            stored = param.grad = grad if param.grad is None else param.grad + grad
        self._handed[number, member] = weakref.ref(stored), stored._version
        del stored
        self.arrived(number, member)

    def _is_empty(self, number: int, member: int, param: Tensor) -> bool:
        """Whether autograd calls the hook of a parameter whose gradient a graph has handed over, and adds nothing to it."""
        record = self._handed.pop((number, member), None)
        if record is None:
            return False
        with without_torch_function():
            now = param.grad
        return now is None or (now is record[0]() and now._version == record[1])

    def arrived(self, number: int, member: int) -> None:
        """Record that a parameter's gradient was accumulated; reduce the unit when complete."""
        if graph_task_id() != self._backward.task:
            self._backward.enter()
        for host in self._hosts:
            if host.pending is not None:
                host.finish_ready()
        if self._arrivals.add(number, member):
            self._complete(number)

    def begin_backward(self) -> None:
        """Reset arrivals, open buckets and the reduction order for the outermost backward."""
        self.look_for_hooks()
        self.attributes.take()
        self._arrivals.any, self._sends = False, self.now
        self._waiting.clear()
        self._order.begin()

    def look_for_hooks(self) -> None:
        """Take the place of users' hooks on accumulated gradients, once a backward."""
        task = graph_task_id()
        if self.attributes.attached and task != self._looked:
            self._looked = task
            self.hooks.silence()

    def finish_backward(self, *, raised: bool = False) -> None:
        """Reduce every trained unit not reduced yet, unless no parameter took part (torch.autograd.grad)."""
        self._handed.clear()
        arrivals = self._arrivals
        if raised and self._sends and (self.adds or arrivals.any):
            self.raised += 1
            arrivals.any = True  # on other ranks, if not here
        for number in self.trained:
            self.unused[number] &= arrivals.missing[number]
        if arrivals.any and self._sends:
            missed = [n for n in arrivals.again if self._order.was_issued(n)]
            for number in self._order.finish():
                self._reduce(number)
            for number in missed:
                self._hold(number)
            arrivals.late.update(missed)
            self._deferred = False
            for number in self._apart:
                self._gather_leftovers(number)
        elif arrivals.any:
            for number in self.trained:
                if arrivals.late or arrivals.again or arrivals.missing[number]:
                    self._gather_leftovers(number)
        if not arrivals.known:
            arrivals.late &= arrivals.again
            arrivals.known = True
        if arrivals.any and self._sends and self.attributes.shows:
            self.drain()
            self.measure_after_backward()
        self.attributes.put()
        if not self.attributes.shows:
            self.hooks.restore()
        elif arrivals.any:
            self.hooks.call(arrivals.missing)

    def _complete(self, number: int) -> None:
        """Reduce or collect a unit whose gradients have all arrived, as far as this graph goes."""
        arrivals = self._arrivals
        if self._backward.inside and not arrivals.known:
            arrivals.late.add(number)  # a checkpointed segment; another one may use the same parameters
        if number not in arrivals.late and number not in self._apart:
            for other in self._order.ready(number) if self.now else ():
                self._reduce(other)
            if not self.now:
                self.units[number].gradients.collect(now=False)
        self._gathering.completed(number)

    def _reduce(self, number: int, *, alone: bool = False) -> None:
        gradients = self.units[number].gradients
        # What waited is wide on the ranks that had any, and all send the same format.
        gradients.collect(now=not (self._deferred or number in self._apart))
        self.leftovers.discard(number)
        if self._sequence is not None and number in self._in_messages:
            self._sequence.sums += 1
            self.sent = zlib.crc32(b"%d %d" % (self._sequence.sums, self._in_messages[number]), self.sent)
        bucket = None if alone else self._bucket_of.get(number)
        if bucket is None:
            gradients.reduce()
            if gradients.host is not None and gradients.groups.size == 1:
                gradients.finish()  # nothing travels between ranks: its copy to the host begins at once
            else:
                self._inflight.append(number)
        else:
            waiting = self._waiting.setdefault(bucket, [])
            waiting.append(number)
            if len(waiting) == len(bucket):
                self._reduce_bucket(bucket)
        self._limit_inflight()

    def _reduce_bucket(self, bucket: tuple[int, ...]) -> None:
        """Reduce the units collected so far in a bucket, in a joint message."""
        numbers = self._waiting.pop(bucket)
        self._reduce_several([self.units[number].gradients for number in numbers])
        self._inflight.extend(numbers)

    def _limit_inflight(self) -> None:
        nbytes = sum(self.units[n].gradients.full_bytes for n in self._inflight)
        helps = self._gathering.released and self._backward.task is not None
        while self._inflight and nbytes > self.inflight_bytes:
            unit = self.units[self._inflight.popleft()]
            oldest = unit.gradients
            nbytes -= oldest.full_bytes
            with self._helper.waiting(unit.device) if helps else nullcontext():
                if helps:  # a gather that is queued after a stream's wait for this sum would wait, too, and ranks on other paths for it
                    oldest.wait_on_host()
                oldest.finish()

    def _gather_leftovers(self, number: int) -> None:
        unit = self.units[number]
        if any(p.grad is not None for p in unit.params):
            unit.gradients.collect(now=False)

    def _hold(self, number: int) -> None:
        """Keep gradients until the ranks agree to sum what some of them hold."""
        self.units[number].gradients.collect(waits=True)
        self.leftovers.add(number)

    # ---- between backwards

    def forget_sent(self) -> None:
        """Begin `sent` anew, on all ranks at once."""
        self.sent = 0
        if self._sequence is not None:
            self._sequence.sums = 0

    @contextmanager
    def reduction(self, now: bool) -> Iterator[None]:
        """Whether a backward inside reduces its gradients. Nested contexts combine with *and*."""
        before, self.now = self.now, self.now and now
        if not self.now:
            self._deferred = True
        try:
            yield
        finally:
            self.now = before

    def close(self, *, apart: bool = True, rests: bool = False) -> None:
        """Reduce what backwards without reduction left, and wait for every reduction. Collective if they were any.

        Gradients that this rank alone may have (an error in backward was caught, somebody set `param.grad`) become `leftovers`.

        Args:
            apart: False: units that are summed over ranks outside this backward (tied over stages) are left for the next call. Those ranks
                may need what this one has not sent yet.
            rests: Whether `param.grad` may stay: nothing but a step follows.
        """
        self._backward.end_raised()
        if rests and not (self._deferred or self._apart) and self.attributes.rest():
            self.drain()
            return
        self.attributes.take()
        with without_torch_function():
            for number in self.trained:
                present = {i for i, p in enumerate(self.units[number].params) if p.grad is not None}
                self.unused[number] -= present
                if present and number not in self._apart and not self._deferred:
                    self._hold(number)
        due = self.trained if self._deferred else self._apart
        for number in reversed([n for n in due if apart or n not in self._apart]):
            self._gather_leftovers(number)
            self._reduce(number)
        self._deferred = False
        self.drain()

    def reduce_leftovers(self) -> None:
        """Sum what some rank holds. Collective; every rank takes part with all of its units."""
        self.attributes.take()
        for number in reversed(self.trained):
            if number not in self._apart:
                self._reduce(number, alone=True)
        self.drain()

    def measure(self) -> None:
        """Measure all gradients, after what some rank holds was summed. Collective over the ranks of the agreement.

        Raises:
            TrainingError: an error has ended this backward on another rank, and not on this one ("zero-backward-raised").
        """
        own = self.raised
        some_hold, raised = self.attributes.measure(len(self.leftovers), own)
        if self.attributes.measured is not None:
            self.raised = 0
        if raised and not own:
            raise TrainingError(
                "an error has ended this backward on another rank: the sums have only a part of that rank's gradients",
                code="zero-backward-raised",
                fix="Read the other ranks' output. A loop that catches errors of a backward goes on if it does that on every rank: "
                "zero_grad(), then the next batch.",
            )
        if some_hold:
            self.reduce_leftovers()
            self.attributes.measure()

    def measure_after_backward(self) -> None:
        """Measure all gradients if the ranks of the agreement end their backwards together."""
        if self.attributes.together:
            self.measure()
        else:
            self.attributes.present.clear()

    def sum_together(self, buckets: Sequence[tuple[int, ...]], reduce: Callable[[Sequence[Gradients]], None]) -> None:
        """Reduce the units of each bucket by one call of `reduce` from now on. Between steps, the same on every rank.

        Args:
            reduce: As `Gradients.reduce` of each; they were collected.
        """
        self._bucket_of = {number: bucket for bucket in buckets for number in bucket}
        self._reduce_several = reduce

    def drain(self) -> None:
        """Wait for every reduction that was started."""
        self._backward.end_raised()
        while self._inflight:
            self.units[self._inflight.popleft()].gradients.finish()

    def forget(self) -> None:
        """Drop every gradient of this step."""
        self._backward.end_raised()
        self.attributes.remove()
        self.drain()
        self._deferred = False
        self.leftovers.clear()
        for number in self.trained:
            self.units[number].gradients.clear()
        self.stepped()
        self.attributes.dropped()

    def zero(self) -> None:
        """Set every gradient to zero, and keep it: a parameter that has one is stepped with zeros."""
        self.close()
        for number in self.trained:
            gradients = self.units[number].gradients
            gradients.change()
            for total in (*(gradients.sums or ()), *([gradients.arena] if number in self.leftovers else ())):
                total.zero_()
        if self.attributes.measured is not None:
            self.attributes.measured.zero()
        self.attributes.put()

    def stepped(self) -> None:
        """Mark every parameter as unused at the beginning of a step."""
        for number in self.trained:
            self.unused[number].update(range(len(self.units[number].params)))

    def waits(self, number: int) -> bool:
        """Whether no gradient of a unit was summed in this step, and those that ranks may have wait for a later reduction. The same on every rank."""
        return (self._deferred or number in self._apart) and not self.units[number].gradients.has_sums

    def absent(self, number: int) -> set[int]:
        """Return the parameters of a unit that have no gradient from this rank's backwards in this step so far."""
        return self.unused[number] & self._arrivals.missing[number]

    @property
    def observed_order(self) -> list[int]:
        """The order in which units were ready in the last backward."""
        return self._order.recorded

    def adopt(self, sequence: Sequence[int]) -> None:
        """Follow `sequence` from now on. The same on every rank."""
        self._order.adopt(sequence)


def _drop(name: str, unwarned: list[bool], param: Tensor) -> None:
    """Drop the gradient of a parameter in no group of the optimizer: it is this rank's own, and a norm with it would differ between ranks."""
    param.grad = None
    if unwarned:
        unwarned.clear()
        _log.warning(
            "%s requires a gradient and is in no group of the optimizer: its gradient is neither summed over the ranks nor kept "
            "(param.grad is None), and norms leave it out. requires_grad_(False) saves its memory and time.",
            name,
        )
