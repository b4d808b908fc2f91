"""Which calls of modules and which backward of a model run now: what hooks cannot say, but frames of Python and autograd can.

autograd numbers its backwards. One that runs inside another (a checkpointed segment) has its own number and belongs to the
outermost one. A backward that raised has no end; the next event notices, and ends it: others may have raised elsewhere in it, or not at
all, and wait for what this rank has not sent. The first event may be one of an inner backward (what is before
the segment and after it is shared, or not the model's). Then the outermost is known from what it computes next: the inputs of the node
that runs the inner one.

A graph may outlive its model (a loss that is kept, a layer that keeps its last balancing loss), and Python's collector does not look into
graphs. So what they hold of a model, they hold weakly.

The backward of a module's call (`ForwardCall`) ends when it has computed the gradients of all inputs of the call. Its tensors are found in
tuples, lists, mappings and records; a module that hides its results anywhere else is noticed by having none.

The forward of a call (`OpenCall`) ends with the module's forward hook. torch runs that after an exception, but not after what is no
`Exception`: Ctrl-C, SystemExit, a cancelled task. Such a call is known by its Python frame: the frame is on the stack of a thread exactly as
long as the call runs.
"""

from __future__ import annotations

import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from ds_config.errors import ShardedAccessError
from ds_zero._torch import (
    can_watch_saved,
    graph_task_id,
    node_around,
    queue_callback,
    skip_frame,
    unpack_hook,
    without_torch_function,
)

__all__ = ["Backward", "ForwardCall", "OpenCall", "OpenCalls", "Watcher", "alias_saved", "has_memory", "tensors_in"]

_CALLER = torch_module.__file__


class Watcher(Protocol):
    """Who is told of calls."""

    def entered(
        self, call: ForwardCall
    ) -> None: ...  # the gradient of an output has arrived: the backward of the call begins
    def left(self, call: ForwardCall) -> None: ...  # the gradients of all inputs have arrived
    def unpacked(self, numbers: tuple[int, ...], saved: Tensor) -> None: ...  # autograd needs what the call saved
    def unseen(
        self, numbers: tuple[int, ...], output: Any
    ) -> None: ...  # the call returned no tensor that can be found


class ForwardCall:
    """One call in forward: which units it used, and how many of its inputs still await a gradient."""

    __slots__ = ("__weakref__", "_watch", "_watcher", "inputs", "numbers", "pending")

    def __init__(self, watcher: Watcher, numbers: tuple[int, ...]) -> None:
        self._watcher, self.numbers, self.inputs, self.pending = weakref.ref(watcher), numbers, 0, 0
        self._watch: saved_tensors_hooks | None = None

    def begin(self, inputs: Any) -> ForwardCall:
        """Register hooks on `inputs`, whose gradients mark the end of the call's backward.

        What autograd saves is watched until `guard`, unless other saved-tensor hooks are active; inside another watched
        call, for both.
        """
        for tensor in tensors_in(inputs):
            if tensor.requires_grad:
                self.inputs += 1
                if tensor.is_leaf:  # outlives the graph, which alone keeps this call
                    handle = tensor.register_hook(_weakly(weakref.WeakMethod(self.left)))
                    weakref.finalize(self, handle.remove).atexit = False
                else:
                    tensor.register_hook(self.left)
        around = unpack_hook() if can_watch_saved() else None
        if not can_watch_saved() or not (around is None or isinstance(around, _Unpack)):
            return self
        numbers = self.numbers if around is None else tuple(dict.fromkeys(around.numbers + self.numbers))
        pack = _pack if around is None else around.pack
        self._watch = saved_tensors_hooks(pack, _Unpack(self._watcher, numbers, pack))
        self._watch.__enter__()
        return self

    def guard(self, output: Any) -> None:
        """Register hooks on `output`, whose gradient marks the begin of the module's backward."""
        self.unwatch()
        has_tensors = False
        for tensor in tensors_in(output):
            has_tensors = True
            if tensor.grad_fn is not None:
                tensor.register_hook(self.entered)
        watcher = self._watcher()
        if not has_tensors and watcher is not None:
            watcher.unseen(self.numbers, output)

    def unwatch(self) -> None:
        """End the watch of what autograd saves, also where the call raised and has no output."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        if unpack_hook() is watch.unpack_hook:
            watch.__exit__()
        elif isinstance(
            watch.unpack_hook, _Unpack
        ):  # an interrupted call, and other hooks since: what it saved is nobody's
            watch.unpack_hook.numbers = ()

    def entered(self, grad: Tensor) -> None:
        """Hook of every output."""
        del grad
        watcher = self._watcher()
        if watcher is not None:
            watcher.entered(self)

    def left(self, grad: Tensor) -> None:
        """Hook of every input."""
        del grad
        self.pending -= 1
        watcher = self._watcher()
        if self.pending <= 0 and watcher is not None:
            watcher.left(self)


def _weakly(method: weakref.WeakMethod[Callable[[Tensor], None]]) -> Callable[[Tensor], None]:
    def call(grad: Tensor) -> None:
        if (alive := method()) is not None:
            alive(grad)

    return call


class _Unpack:
    """Tells the watcher of calls of modules that own units `numbers` that something saved in them is needed."""

    __slots__ = ("_watcher", "numbers", "pack")

    def __init__(
        self,
        watcher: weakref.ref[Watcher],
        numbers: tuple[int, ...],
        pack: Callable[[Tensor], tuple[Tensor, int]],
    ) -> None:
        self._watcher, self.numbers, self.pack = watcher, numbers, pack

    def __call__(self, packed: tuple[Tensor, int]) -> Tensor:
        watcher = self._watcher()
        if watcher is not None:
            watcher.unpacked(self.numbers, packed[0])
        elif not has_memory(packed[0]):
            raise ShardedAccessError(
                f"a backward needs {tuple(packed[0].shape)} of a sharded model that is gone, whose weights nobody can gather any more",
                code="sharded-access",
                fix="Keep the model, or what shard returned, as long as graphs are made of it.",
            )
        tensor, version = packed
        if tensor._version != version:  # autograd looks at versions only where nobody looks at what it saves
            raise RuntimeError(
                f"a tensor that backward needs, {tuple(tensor.shape)}, was modified by an inplace operation since forward (version "
                f"{tensor._version}, saved at {version}): a step of the optimizer, or an edit, between forward and backward"
            )
        return tensor


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor's elements are there; those of a released unit's parameters, and of their views, are not."""
    try:
        with without_torch_function():
            return not tensor.numel() or tensor.untyped_storage().nbytes() > 0
    except (RuntimeError, NotImplementedError):  # a subclass without a storage of its own
        return False


def _pack(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, tensor._version


def _pack_alias(tensor: Tensor) -> tuple[Tensor, int]:
    return _pack(tensor.detach() if tensor.is_leaf and tensor.requires_grad else tensor)


for _hook in (_pack, _pack_alias, _Unpack.__call__):
    skip_frame(_hook)


@contextmanager
def alias_saved(watcher: Watcher) -> Iterator[None]:
    """Make autograd save an alias of a parameter's memory instead of the parameter itself, while inside.

    A leaf is saved as itself, so a backward that comes after its unit was released would read memory that is not there. An alias is
    counted as a user of the memory, which is then left to the graph (`ReleasedStorage.release(spare_aliases=True)`). Does nothing where
    somebody decides about saved tensors anyway, or nobody may (inside transforms of functions).
    """
    around = unpack_hook() if can_watch_saved() else None
    if not can_watch_saved() or not (around is None or isinstance(around, _Unpack)):
        yield
        return
    numbers = () if around is None else around.numbers
    with saved_tensors_hooks(_pack_alias, _Unpack(weakref.ref(watcher), numbers, _pack_alias)):
        yield


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors in tuples, lists, mappings and the attributes of records (dataclasses, model outputs)."""
    if isinstance(value, Tensor):
        yield value
    elif depth > 6 or value is None or isinstance(value, (str, bytes, int, float, type, nn.Module)):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from tensors_in(item, depth + 1)
    elif hasattr(value, "__dict__"):
        for item in vars(value).values():
            yield from tensors_in(item, depth + 1)


@dataclass(slots=True, eq=False)
class OpenCall:
    """One call of a module between its two hooks.

    Attributes:
        key: Identifies the pair of hooks.
        numbers: Units of the module.
        frame: Of torch's function that called the first hook; None where there is no such frame, and so no way to see the call's end.
        error: What is handled where the call began; another one at its end means that the call raised.
        counted: The call is part of a forward phase; a recomputation in backward is not.
        watched: What autograd saves in the call; None where nothing is watched.
    """

    key: object
    numbers: tuple[int, ...]
    frame: FrameType | None
    error: BaseException | None
    counted: bool = False
    watched: ForwardCall | None = None

    @property
    def raised(self) -> bool:
        """Whether the call ends with an exception; asked in its forward hook."""
        return sys.exc_info()[1] is not self.error


class OpenCalls:
    """The stacks of one model's open calls, one for each thread: a layer may run its half batches in two."""

    def __init__(self) -> None:
        self._stacks: dict[int, list[OpenCall]] = {}

    def begin(self, key: object, numbers: tuple[int, ...]) -> OpenCall:
        """Open a call, in the forward pre-hook of its module."""
        call = OpenCall(key, numbers, _calling_frame(), sys.exc_info()[1])
        self._stacks.setdefault(threading.get_ident(), []).append(call)
        return call

    def end(self, key: object) -> tuple[OpenCall | None, list[OpenCall]]:
        """Close this thread's innermost call with this pair of hooks.

        Returns:
            The call, None where its first hook did not run because a hook before that raised; and the calls inside, innermost first,
            that ended without their second hook.
        """
        calls = self._stacks.get(threading.get_ident(), [])
        place = next((i for i in reversed(range(len(calls))) if calls[i].key is key), None)
        if place is None:
            return None, []
        call, inside = calls[place], calls[place + 1 :]
        del calls[place:]
        return call, inside[::-1]

    def take_ended(self) -> list[OpenCall]:
        """Close the calls that do not run any more, innermost first. Cost: a look at the few frames since the last open call."""
        ended = []
        for thread, calls in list(self._stacks.items()):
            while calls and not _is_running(calls[-1].frame):
                ended.append(calls.pop())
            if not calls:
                del self._stacks[thread]
        return ended


def _calling_frame() -> FrameType | None:
    """Return the frame of torch's function that calls this thread's hook; between them is at most what wraps the hook."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(12):
        if frame is None or frame.f_code.co_filename == _CALLER:
            return frame
        frame = frame.f_back
    return None


def _is_running(frame: FrameType | None) -> bool:
    if frame is None or _is_below(frame, sys._getframe(1)):
        return True
    # A module may be called in one thread inside the forward of another.
    return any(_is_below(frame, other) for other in sys._current_frames().values())


def _is_below(frame: FrameType, top: FrameType | None) -> bool:
    """Whether `frame` is on the stack that ends with `top`."""
    while top is not None and top is not frame:
        top = top.f_back
    return top is frame


class Backward(ABC):
    """Where one model is. `enter` is called by every event in a backward.

    Attributes:
        task: The number of the outermost backward that runs; None between backwards.
    """

    def __init__(self) -> None:
        self.task: int | None = None
        self._inner: dict[int, set[int]] = {}
        self._end: Callable[[], _End | None] = lambda: None

    def enter(self) -> None:
        """Begin the backward if this is its first event; note a nested backward."""
        task = graph_task_id()
        if task == self.task:
            return
        self.end_raised()
        end = self._end()
        if self.task is None or end is None:
            self.begin_backward()
            end = _End(self)
            self._end = weakref.ref(end)
            around = node_around()
            if around is None or not _await(around, end):
                end.queue()
                return
            self.task = _LATER
        elif self.task == _LATER and node_around() is None:
            end.queue()
            return
        if task not in self._inner:
            self._inner[task] = set()
            queue_callback(lambda: self._end_inner(task))

    @property
    def inside(self) -> bool:
        """Whether this thread runs a backward inside the outermost one."""
        return graph_task_id() != self.task

    @property
    def inner_units(self) -> set[int] | None:
        """Units entered in the backward inside the outermost one that this thread runs; None outside of any."""
        return self._inner.get(graph_task_id())

    def end(self, *, raised: bool = False) -> None:
        """Finish the outermost backward after its last event."""
        self.task = None
        self.end_backward(raised=raised)
        self._inner.clear()

    def end_raised(self) -> None:
        """Finish a backward that has no end. What autograd gave before it raised is summed, and stays, as in torch."""
        if self.task is not None and (graph_task_id() == -1 or self._end() is None):
            self.end(raised=True)

    def _end_inner(self, task: int) -> None:
        self.end_inner(self._inner.pop(task, set()))

    @abstractmethod
    def begin_backward(self) -> None:
        """Start the outermost backward. If this raises, the backward counts as never begun."""

    @abstractmethod
    def end_backward(self, *, raised: bool) -> None:
        """Finish the outermost backward: reduce and release what is left. `raised`: it had no end."""

    @abstractmethod
    def end_inner(self, units: set[int]) -> None:
        """Finish a nested backward, in which modules of `units` were entered."""


class _End:
    """The callback of the outermost backward. Only that backward holds it: once it is dead without having run, it raised."""

    __slots__ = ("__weakref__", "backward")

    def __init__(self, backward: Backward) -> None:
        self.backward = backward

    def queue(self) -> None:
        """Run at the end of the backward that this thread is in, which is the outermost."""
        self.backward.task = graph_task_id()
        queue_callback(self)

    def __call__(self) -> None:
        self.backward.end()


_LATER = -2
"""A number of no backward: the outermost has had no event yet, an inner one has."""


def _await(node: Node, end: _End) -> bool:
    """Queue `end` when the outermost backward comes to an input of `node`, which it runs; return whether there is one."""
    handles: list[RemovableHandle] = []

    def comes(grads: Sequence[Tensor | None]) -> None:
        del grads
        for handle in handles:  # an input may be a leaf, whose node outlives the graph
            handle.remove()
        if end.backward.task == _LATER:
            end.queue()

    handles += [following.register_prehook(comes) for following, _ in node.next_functions if following is not None]
    return bool(handles)
