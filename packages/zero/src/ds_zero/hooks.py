"""When units gather and reduce: hooks on modules and parameters, driven by autograd. Knows no stage and no dtype.

Forward: a module that a unit belongs to gathers it before its forward and releases it after. Backward: the gradient of the
module's output gathers it again; the unit is released when every gradient that its graph can produce (its parameters' and
the module's inputs') has arrived. A unit is reduced when the last of its parameters' gradients has arrived. The end of the
outermost backward closes whatever is open, so unused, reused, tied and checkpointed modules need no case of their own.

Order between ranks is that of `order.py`; nothing here depends on which rank is faster or on which path it takes.

Note "two orders". Gathers and reductions travel on channels of their own, each in its own order, because a rank cannot
reduce before it has gathered and computed. Waiting for a reduction inside a backward could therefore wait for a rank that
waits for our next gather. So such a wait helps: while it lasts, gathers whose turn comes next are started. Gathers that no
sequence foresees have a third channel, so that helping cannot come between them.

Note "sticky units". A parameter used outside the forward of the module its unit belongs to (tied weights, a sibling's
weight, a functional head), or a module whose results leave it through a side door (an attribute, an unknown container), is
in a graph that no hook on outputs guards. Such a unit stays gathered until the next optimizer step, which makes older
graphs unusable in any case. The first is seen when the released parameter is touched; the second by looking at what autograd
unpacks in the first backward of every module, the only time this costs anything.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import Parameter

from ds_comm import Group, all_gather_object
from ds_zero._torch import graph_task_id, has_saved_tensor_hooks, queue_callback
from ds_zero.helper import Helper
from ds_zero.order import GatherOrder, ReduceOrder
from ds_zero.released import keep, unkeep
from ds_zero.unit import Full, Unit

__all__ = ["Runtime", "Schedule"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How far communication runs ahead of what needs it.

    Attributes:
        overlap: Start collectives without waiting for them; off, each is finished where it starts.
        ahead_numel: Elements gathered before they are needed.
        inflight_bytes: Gradient bytes that may be in unfinished reductions.
    """

    overlap: bool = True
    ahead_numel: int = 0
    inflight_bytes: int = 0


class Runtime:
    """The hooks of one model.

    Args:
        model: Its root module.
        units: In canonical order, the same on every rank.
        schedule: How far to run ahead.
        unforeseen: The channel for gathers that no sequence foresees; made when first asked for.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], schedule: Schedule, unforeseen: Callable[[], Group]
    ) -> None:
        self.units, self.schedule, self.unforeseen = list(units), schedule, unforeseen
        self.now = True
        self.deferred = False
        self.trained = [i for i, u in enumerate(units) if u.spec.trained]
        self.released = [i for i, u in enumerate(units) if u.releases]
        self._names = {id(p): info.name for u in units for p, info in zip(u.params, u.spec.params, strict=True)}
        self._number = {id(p): i for i, u in enumerate(units) for p in u.params}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._module_handles: list[torch.utils.hooks.RemovableHandle] = []
        # backward
        self._task: int | None = None
        self._end: Callable[[], weakref.ref[_End] | None] | weakref.ref[_End] = lambda: None
        self._inner: dict[int, set[int]] = {}
        self._missing = [set(range(len(u.params))) for u in units]
        self._again: set[int] = set()
        self._late: set[int] = set()
        self._known = False
        self.unused: list[set[int]] = [set(range(len(u.params))) for u in units]
        self._reduces = ReduceOrder(list(reversed(self.trained)))
        self._inflight: deque[int] = deque()
        # gathers
        self._depth = 0
        numels = [u.layout.numel for u in units]
        self._ahead, self._numels = schedule.ahead_numel if schedule.overlap else 0, numels
        self._forwards: dict[str, GatherOrder] = {}
        self._forward: GatherOrder | None = None
        self._backward = GatherOrder(self._backward_sequence(), self._ahead, numels)
        self._calls: list[set[_Call]] = [set() for _ in units]
        self._sticky: set[int] = set()
        self._shared: set[int] = set()
        self._unproven = set(self.released)
        self._settled = False
        self._any = False
        self.begun: Callable[[], None] = lambda: None
        self._strays: set[int] = set()
        self._helper = Helper(self._run_ahead)
        self._model = model
        self._attach(model)

    # ---- hooks come and go

    def _attach(self, model: nn.Module) -> None:
        for number in self.trained:
            for member, param in enumerate(self.units[number].params):
                self._handles.append(param.register_post_accumulate_grad_hook(self._fired_hook(number, member)))
        if self.released:
            self._attach_modules(model)

    def _attach_modules(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        of_module: dict[str, list[int]] = {"": []}
        for number in self.released:
            of_module.setdefault(self.units[number].spec.module, []).append(number)
            for param in self.units[number].params:
                keep(param, self)
        for name, numbers in of_module.items():
            module = modules[name]
            below = [n for n in self.released if self._is_below(self.units[n].spec.module, name)]
            self._forwards.setdefault(name, GatherOrder(below, self._ahead, self._numels))
            pre, post = self._forward_hooks(name, tuple(numbers))
            self._module_handles.append(module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True))
            self._module_handles.append(module.register_forward_hook(post, always_call=True))

    def detach(self) -> None:
        """Remove every hook. Units must not be released."""
        self._helper.close()
        for handle in self._handles + self._module_handles:
            handle.remove()
        self._handles.clear()
        self._module_handles.clear()
        for number in self.released:
            for param in self.units[number].params:
                unkeep(param)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the model's modules have none of our hooks. Its parameters must stay gathered meanwhile."""
        for handle in self._module_handles:
            handle.remove()
        self._module_handles.clear()
        try:
            yield
        finally:
            if self.released:
                self._attach_modules(self._model)

    @staticmethod
    def _is_below(module: str, root: str) -> bool:
        return not root or module == root or module.startswith(root + ".")

    def _backward_sequence(self) -> list[int]:
        # Gradients flow through a frozen unit only if something before it is trained.
        first = min(self.trained, default=len(self.units))
        return [n for n in reversed(self.released) if n >= first]

    # ---- released parameters

    def name_of(self, param: Parameter) -> str:
        """Keeper: the qualified name of a parameter."""
        return self._names[id(param)]

    def touched(self, param: Parameter, what: str) -> bool:
        """Keeper: gather a parameter that is used outside its module, if a forward or backward is running."""
        del what
        number = self._number[id(param)]
        if graph_task_id() != -1:
            self._in_task()
            self._gather(number, self._backward)
        elif self._forward is not None:
            self._gather(number, self._forward)
        else:
            return False
        if torch.is_grad_enabled():
            self._share(number)
        else:
            self._strays.add(number)
        return True

    def used(self, param: Parameter) -> None:
        """Keeper: what was gathered for a use stays until its module or graph is done with it."""

    def _share(self, number: int) -> None:
        """See the note "sticky units"."""
        self._shared.add(number)
        self._sticky.add(number)

    # ---- forward

    def _forward_hooks(self, name: str, numbers: tuple[int, ...]) -> tuple[Callable[..., None], Callable[..., None]]:
        calls: list[_Call | None] = []

        def pre(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            del module
            if graph_task_id() != -1:  # recomputation
                self._in_task()
                for number in numbers:
                    self._gather(number, self._backward)
            else:
                if self._depth == 0:
                    self._abandon()
                    self._forward = self._forwards[name]
                    self._forward.begin()
                self._depth += 1
                for number in numbers:
                    self._gather(number, self._forward)  # type: ignore[arg-type]
            calls.append(self._call(numbers, (args, kwargs)) if numbers and torch.is_grad_enabled() else None)

        def post(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            del module, args
            call = calls.pop()
            if call is not None:
                call.guard(output)
            if graph_task_id() != -1:
                return
            if call is not None and self._shared:
                self._sticky.update(self._shared.intersection(numbers))
            for number in numbers:
                self._put_back(number)
            self._depth -= 1
            if self._depth == 0:
                self._finish_forward()

        return pre, post

    def _call(self, numbers: tuple[int, ...], inputs: Any) -> _Call:
        call = _Call(self, numbers)
        for tensor in _tensors(inputs):
            if tensor.requires_grad:
                call.inputs += 1
                tensor.register_hook(call.left)
        if not self._unproven.isdisjoint(numbers) and not has_saved_tensor_hooks():
            call.watch()
        return call

    def _gather(self, number: int, order: GatherOrder) -> None:
        unit = self.units[number]
        if order.awaits(number):
            for other in order.need(number):
                self.units[other].start_unshard(again=True)
        elif unit.state in (Full.RELEASED, Full.STALE):
            order.seen.append(number)
            unit.start_unshard(channel=self.unforeseen())
        unit.finish_unshard()

    def _put_back(self, number: int) -> None:
        if number not in self._sticky:
            self.units[number].reshard()

    def _finish_forward(self) -> None:
        order, self._forward = self._forward, None
        if order is not None:
            self._finish_gathers(order)
        for number in self._strays:
            self._put_back(number)
        self._strays.clear()

    def _finish_gathers(self, order: GatherOrder) -> None:
        for number in order.waiting:
            self._put_back(number)
        for number in order.finish():
            self.units[number].start_unshard(again=True)
            self.units[number].finish_unshard()
            self._put_back(number)

    # ---- backward

    def _fired_hook(self, number: int, member: int) -> Callable[[Tensor], None]:
        # Weak: autograd keeps this function where the garbage collector does not look, so a strong one would never die.
        missing, owner = self._missing[number], weakref.ref(self)

        def fired(param: Tensor) -> None:
            del param
            runtime = owner()
            if runtime is None:
                return
            if graph_task_id() != runtime._task:
                runtime._in_task()
            runtime._any = True
            if member in missing:
                missing.discard(member)
                if not missing:
                    runtime._complete(number)
            else:
                runtime._again.add(number)

        return fired

    def _in_task(self) -> None:
        """Called by every event in a backward, so that the outermost one has an end."""
        task = graph_task_id()
        if self._task is not None and self._end() is None:
            self._abandon()
        if self._task is None:
            self.begun()
            self._task = task
            self._any = False
            self._reduces.begin()
            self._backward.begin()
            end = _End(self)
            self._end = weakref.ref(end)
            queue_callback(end)
        elif task != self._task and task not in self._inner:
            self._inner[task] = set()
            queue_callback(lambda: self._end_inner(task))

    def _complete(self, number: int) -> None:
        """All gradients of a unit have arrived, as far as this graph goes."""
        if graph_task_id() != self._task and not self._known:
            self._late.add(number)  # a checkpointed segment; another one may use the same parameters
        if number not in self._late:
            self._close(number)
        if self.units[number].releases and not self._calls[number]:
            self._put_back(number)

    def _close(self, number: int) -> None:
        if not self.now:
            self.units[number].accumulate(now=False)
            return
        for other in self._reduces.ready(number):
            self._reduce(other)

    def _reduce(self, number: int) -> None:
        unit = self.units[number]
        unit.accumulate()
        unit.reduce()
        self._inflight.append(number)
        held = sum(self.units[n].bytes["grad_full"] for n in self._inflight)
        while self._inflight and (not self.schedule.overlap or held > self.schedule.inflight_bytes):
            oldest = self.units[self._inflight.popleft()]
            held -= oldest.bytes["grad_full"]
            if self.released and self._task is not None:
                with self._helper.waiting():
                    oldest.finish_reduce()
            else:
                oldest.finish_reduce()

    def _run_ahead(self) -> None:
        """Called on another thread while this one waits for a reduction; see the note "two orders"."""
        number = self._backward.run_ahead()
        if number is not None:
            self.units[number].start_unshard(again=True)

    def end_backward(self) -> None:
        """The outermost backward is over: every trained unit has its turn, every released unit goes back."""
        self._task = None
        for number in self.trained:
            self.unused[number] &= self._missing[number]
        if self.released:
            self._finish_gathers(self._backward)
        if not self._any:
            pass  # torch.autograd.grad: no parameter took part
        elif self.now:
            missed = sorted((n for n in self._again if self._reduces.had_turn(n)), reverse=True)
            for number in self._reduces.finish() + missed:
                self._reduce(number)
            self._late.update(missed)
            self.deferred = False
        else:
            for number in self.trained:
                if self._late or self._again or self._missing[number]:
                    self._gather_leftovers(number)
        if not self._known:
            self._late &= self._again
            self._known = True
        self._reset_backward()

    def _gather_leftovers(self, number: int) -> None:
        unit = self.units[number]
        if any(p.grad is not None for p in unit.params):
            unit.accumulate(now=False)

    def _reset_backward(self) -> None:
        self._task = None
        for number in self.trained:
            self._missing[number].update(range(len(self.units[number].params)))
        self._again.clear()
        self._inner.clear()
        for calls in self._calls:
            calls.clear()
        for number in self.released:
            self._put_back(number)

    def _end_inner(self, task: int) -> None:
        # A checkpointed segment is done: what it gathered and does not train is not needed for the next one.
        for number in self._inner.pop(task, ()):
            if not self.units[number].spec.trained and not self._calls[number]:
                self._put_back(number)

    def _abandon(self) -> None:
        """A backward that raised has no end: forget its progress. Gradients it left behind stay, as in torch."""
        if self._task is None:
            return
        self._task = None
        for number in self.trained:
            self._missing[number].update(range(len(self.units[number].params)))
        self._again.clear()
        self._inner.clear()
        for calls in self._calls:
            calls.clear()

    def entered(self, call: _Call) -> None:
        """The gradient of a module's output has arrived: its backward begins."""
        if graph_task_id() != self._task:
            self._in_task()
        inner = self._inner.get(graph_task_id())
        if torch.is_grad_enabled():  # create_graph: what this backward saves is guarded by nobody
            self._sticky.update(call.numbers)
        for number in call.numbers:
            if call.inputs and call not in self._calls[number]:
                call.pending = call.inputs
                self._calls[number].add(call)
            if inner is not None:
                inner.add(number)
            self._gather(number, self._backward)

    def unpacked(self, numbers: tuple[int, ...]) -> None:
        """Autograd needs something a module saved, in the first backward after it. Its unit should be here by now."""
        for number in numbers:
            if self.units[number].state is not Full.CURRENT and graph_task_id() != -1:
                self._in_task()
                self._gather(number, self._backward)
                self._share(number)

    def unseen(self, numbers: tuple[int, ...], output: Any) -> None:
        """A module returned no tensor that we can find: its graph leaves through a side door, if at all."""
        if graph_task_id() != -1:  # a recomputation that was stopped early
            return
        self._sticky.update(numbers)
        if output is not None:
            self._shared.update(numbers)

    def left(self, call: _Call) -> None:
        """The gradients of all inputs of a module's call have arrived."""
        for number in call.numbers:
            self._calls[number].discard(call)
            trained = self.units[number].spec.trained
            if not self._calls[number] and (not trained or not self._missing[number]):
                self._put_back(number)

    # ---- between backwards

    @contextmanager
    def reduction(self, now: bool) -> Iterator[None]:
        """Whether a backward inside reduces its gradients. Nested contexts combine with *and*."""
        before, self.now = self.now, self.now and now
        if not self.now:
            self.deferred = True
        try:
            yield
        finally:
            self.now = before

    def close(self) -> None:
        """Reduce what earlier backwards left, and wait for every reduction. Collective if any rank deferred; then all did."""
        if any(p.grad is not None for n in self.trained for p in self.units[n].params):
            self.deferred = True
            for number in self.trained:
                found = {i for i, p in enumerate(self.units[number].params) if p.grad is not None}
                self.unused[number] -= found
        if self.deferred:
            for number in reversed(self.trained):
                self._gather_leftovers(number)
                self._reduce(number)
        self.deferred = False
        self.drain()

    def settle(self, group: Group) -> None:
        """Once, after the first step: follow the order that was seen, if all ranks saw the same. Collective."""
        if self._settled:
            return
        self._settled = True
        seen = {"reduces": self._reduces.seen, "backward": self._backward.seen}
        seen |= {f"forward {name}": order.seen for name, order in self._forwards.items()}
        everyone: list[Any] = [None] * group.size
        all_gather_object(everyone, {"seen": seen, "shared": sorted(self._shared)}, group, unit="settle")
        self._shared = {n for one in everyone for n in one["shared"]}
        if all(one["seen"] == seen for one in everyone):
            self._reduces.adopt(seen["reduces"])
            for name, order in self._forwards.items():
                order.adopt(seen[f"forward {name}"])
            self._backward.adopt(seen["backward"])
        self._backward.drop(self._shared)

    def drain(self) -> None:
        """Wait for every reduction that was started."""
        while self._inflight:
            self.units[self._inflight.popleft()].finish_reduce()

    def stepped(self) -> None:
        """Parameters are new: no graph recorded before is usable, so nothing needs to stay for one."""
        for number in self._sticky:
            self.units[number].reshard()
        self._sticky = set()
        self._unproven.clear()
        for number in self.trained:
            self.unused[number].update(range(len(self.units[number].params)))


class _Call:
    """One call of a module in forward: which units it used, and how many of its inputs still await a gradient."""

    __slots__ = ("__weakref__", "_watch", "inputs", "numbers", "pending", "runtime")

    def __init__(self, runtime: Runtime, numbers: tuple[int, ...]) -> None:
        self.runtime, self.numbers, self.inputs, self.pending = runtime, numbers, 0, 0
        self._watch: saved_tensors_hooks | None = None

    def watch(self) -> None:
        """Look at everything autograd unpacks of this call, until `guard`."""
        runtime, numbers = self.runtime, self.numbers

        def unpack(tensor: Tensor) -> Tensor:
            runtime.unpacked(numbers)
            return tensor

        self._watch = saved_tensors_hooks(lambda tensor: tensor, unpack)
        self._watch.__enter__()

    def guard(self, output: Any) -> None:
        """The call has returned `output`: its gradient is what begins the module's backward."""
        if self._watch is not None:
            self._watch.__exit__()
            self._watch = None
        seen = False
        for tensor in _tensors(output):
            seen = True
            if tensor.grad_fn is not None:
                tensor.register_hook(self.entered)
        if not seen:
            self.runtime.unseen(self.numbers, output)

    def entered(self, grad: Tensor) -> None:
        del grad
        self.runtime.entered(self)

    def left(self, grad: Tensor) -> None:
        del grad
        self.pending -= 1
        if self.pending <= 0:
            self.runtime.left(self)


class _End:
    """The callback of the outermost backward. Only that backward holds it: once it is dead without having run, it raised."""

    __slots__ = ("__weakref__", "runtime")

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def __call__(self) -> None:
        self.runtime.end_backward()


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Tensors in tuples, lists, mappings and the attributes of records (dataclasses, model outputs)."""
    if isinstance(value, Tensor):
        yield value
    elif depth > 6 or value is None or isinstance(value, (str, bytes, int, float, type, nn.Module)):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, depth + 1)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from _tensors(item, depth + 1)
    elif hasattr(value, "__dict__"):
        for item in vars(value).values():
            yield from _tensors(item, depth + 1)
