"""A layer's two half batches in turn: one computes while the sums of the other travel. What is decided is in `half_plan.py`.

Each half runs the layer's own code, hooks and checkpointing included, on a *lane*: the first in the caller's thread, the second in one beside it.
One lane runs at a time. It gives the turn away where it has started a sum (`Turns.give`), so whatever uses the sum comes after the wait,
and every rank starts the same collectives in the same order.

    lane 0   A0 sum. . . . A1 sum. . . .          a dot: the other lane has the turn
    lane 1   . . . . B0 sum. . . . B1 sum
"""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ds_accel import streams
from ds_comm.differentiable import InFlight
from ds_config.errors import PlanError, UnsupportedError
from ds_parallel._torch import ThreadState, in_backward, order_of, saved_hooks
from ds_parallel.tensor.half_plan import FIRST_FREE, half_sizes
from ds_parallel.trees import flatten

__all__ = ["HalfBatches", "Lane", "Turns", "run_layers_in_halves"]

_PATIENCE = timedelta(seconds=1)  # for ranks that are a little behind; the watchdog is there for those that do not come
_FAR = 1 << 16  # nodes; a thread makes two in a microsecond
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum, type, ModuleType, nn.Module)


class _Abandoned(BaseException):
    """Ends a lane whose other half has failed; no code of a model catches it."""


class Lane:
    """One half of a layer that runs.

    Attributes:
        half: 0 or 1.
        copies: Inputs of column layers so far.
    """

    __slots__ = ("abandoned", "copies", "error", "finished", "half", "turn")

    def __init__(self, half: int) -> None:
        self.half, self.copies = half, 0
        self.turn = threading.Semaphore(0)
        self.finished = self.abandoned = False
        self.error: BaseException | None = None


class Turns:
    """The two lanes of one model's layers; one layer at a time.

    Attributes:
        lane: The lane that has the turn; None while no layer runs in halves.
        watch: Told of each sum that a lane starts and of each wait for one, with the lane's half. For tests.
    """

    def __init__(self) -> None:
        self.lane: Lane | None = None
        self.watch: Callable[[str, int], None] | None = None
        self._lanes: tuple[Lane, Lane] | None = None
        self._jobs: SimpleQueue[Callable[[], None] | None] | None = None
        self._thread: threading.Thread | None = None
        self._numbers = _Numbers()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copy of a model has a thread of its own

    def give(self, coming: InFlight) -> Tensor:
        """Let the other lane run while `coming` is on its way; return its result, valid on the current stream."""
        lane = self.lane
        if lane is None:
            return coming.wait()
        if self.watch is not None:
            self.watch("sum", lane.half)
        try:
            self._pass_turn(lane)
        except BaseException:
            with suppress(Exception):  # what ended the lane is what the user is to see
                coming.abandon(_PATIENCE)
            raise
        if self.watch is not None:
            self.watch("wait", lane.half)
        return coming.wait()

    def _pass_turn(self, lane: Lane) -> None:
        lanes = self._lanes
        if lanes is None:
            return
        other = lanes[1 - lane.half]
        if not other.finished:
            self.lane = other
            other.turn.release()
            lane.turn.acquire()
            self.lane = lane
        if lane.abandoned:
            raise _Abandoned
        if other.error is not None:
            raise other.error

    def run(self, halves: tuple[Callable[[], Any], Callable[[], Any]], device: torch.device) -> tuple[Any, Any]:
        """Run both functions in turn, and return their results. What one raises ends both."""
        lanes = self._lanes = Lane(0), Lane(1)
        results: list[Any] = [None]
        ended = threading.Event()
        state, context, stream = (
            ThreadState.take(device.type),
            contextvars.copy_context(),
            streams.current_stream(device),
        )

        def second() -> None:
            lanes[1].turn.acquire()
            try:
                if not lanes[1].abandoned:
                    with streams.on_device(device), state.entered(), streams.on_stream(stream, device):
                        first_number = _count_from(FIRST_FREE)
                        results[0] = context.run(halves[1])
                        self._numbers.note(first_number, _count_from(0))
            except _Abandoned:
                pass
            except BaseException as error:  # it is raised in the caller's thread
                lanes[1].error = error
            lanes[1].finished = True
            ended.set()
            lanes[0].turn.release()

        self.lane = lanes[0]
        self._number_first_half()
        self._start(second)
        try:
            first = halves[0]()
            lanes[0].finished = True
            self.lane = lanes[1]
            lanes[1].turn.release()
            ended.wait()
            if lanes[1].error is not None:
                raise lanes[1].error
            return first, results[0]
        except BaseException:
            lanes[0].finished = lanes[1].abandoned = True
            self.lane = lanes[1]
            lanes[1].turn.release()
            ended.wait()
            raise
        finally:
            lanes[1].error = self.lane = self._lanes = None

    def _number_first_half(self) -> None:
        """Give the first half's nodes larger numbers than the second's will have: backward computes a part of the first, then of the second."""
        now = _count_from(0)
        least = self._numbers.least_of_first
        if least - now > _FAR:  # this thread has made few nodes: cheaper to let the other count from 0 again
            self.close()
            self._numbers = _Numbers()
            least = self._numbers.least_of_first
        _count_from(least)

    def _start(self, job: Callable[[], None]) -> None:
        if self._jobs is None:
            self._jobs = SimpleQueue()
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name="ds-parallel-halves", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread of the second half; it starts again when there is work."""
        jobs, thread, self._jobs, self._thread = self._jobs, self._thread, None, None
        if jobs is not None and thread is not None:
            jobs.put(None)
            thread.join()


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds the layer's tensors


def _count_from(least: int) -> int:
    """Let this thread number its next nodes of autograd's graph from `least` on; return the last number. Each thread counts for itself, from 0."""
    if not torch.is_grad_enabled():
        return 0
    leaf = torch.empty(0, device="cpu", requires_grad=True)
    while (number := order_of(leaf.view(0).grad_fn)) < least:
        pass
    return number


@dataclass(slots=True)
class _Numbers:
    """Numbers of nodes on the second half's thread: the last one, and how many the longest half made."""

    last: int = FIRST_FREE
    longest: int = 256

    def note(self, first: int, last: int) -> None:
        if last:
            self.last, self.longest = last, max(self.longest, last - first)

    @property
    def least_of_first(self) -> int:
        """The first half's numbers begin here: behind all that the second half will have."""
        return self.last + 2 * self.longest


class HalfBatches:
    """Runs the layers of one model in halves.

    Args:
        turns: Shared with the row layers inside.
        per_head: Names of arguments whose dim 0 is samples times heads.
    """

    def __init__(self, turns: Turns, per_head: tuple[str, ...] = ()) -> None:
        self.turns, self._per_head = turns, per_head

    def __call__(
        self, layer: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return `call(*args, **kwargs)`, the call of `layer`, computed in halves.

        The whole batch is computed at once where it has one sample, where nobody can say which of its arguments are cut (as many samples as
        places, beside an argument of two dims), in a recomputation, and in a layer that another layer in halves contains.

        Raises:
            UnsupportedError: an argument or a result cannot be cut, FSDP holds the layer, or a checkpointed call is around it ("tensor-halves").
        """
        if self.turns.lane is not None or in_backward() or torch.compiler.is_compiling():
            return call(*args, **kwargs)
        name = type(layer).__name__
        tensors, rebuild = flatten((args, dict(kwargs)))
        hidden = next((t for t in tensors if t.dim() >= 2 and t.is_floating_point()), None)
        sizes = None if hidden is None else half_sizes(hidden.shape[0])
        if hidden is None or sizes is None:
            return call(*args, **kwargs)
        if foreign := _foreign_objects((args, dict(kwargs))):
            if not torch.is_grad_enabled():  # a cache of keys and values: generation
                return call(*args, **kwargs)
            raise UnsupportedError(
                f"half_batches: {name} is given a {foreign[0]}, and nobody can say which part of it belongs to half of a batch",
                code="tensor-halves",
                fix="Call the model with use_cache=False (model.config.use_cache = False), or leave half_batches out.",
            )
        _check_surroundings(layer, name)
        cut = self._cut(kwargs, tensors, hidden)
        if cut is None:
            return call(*args, **kwargs)
        parts = [
            t.split([size * (t.shape[0] // hidden.shape[0]) for size in sizes]) if is_cut else (t, t)
            for t, is_cut in zip(tensors, cut, strict=True)
        ]

        def half(number: int) -> Callable[[], Any]:
            its_args, its_kwargs = rebuild([part[number] for part in parts])
            return lambda: call(*its_args, **its_kwargs)

        return _joined(self.turns.run((half(0), half(1)), hidden.device), sizes, name)

    def _cut(self, kwargs: Mapping[str, Any], tensors: list[Tensor], hidden: Tensor) -> list[bool] | None:
        """Return of each tensor whether its dim 0 is samples; None where that cannot be said."""
        batch, places = hidden.shape[0], hidden.shape[1] if hidden.dim() > 2 else 0
        per_head = {id(kwargs[name]) for name in self._per_head if isinstance(kwargs.get(name), Tensor)}
        found = []
        for tensor in tensors:
            fits = tensor.dim() > 0 and tensor.shape[0] == batch
            if fits and tensor.dim() <= 2 and tensor is not hidden and batch == places:
                return None
            is_folded = id(tensor) in per_head and tensor.shape[0] % batch == 0
            found.append(fits or is_folded)
        return found


def run_layers_in_halves(layers: Mapping[str, nn.Module], halves: HalfBatches) -> None:
    """Let each layer run its calls in halves: its class becomes one of ours in front of its own.

    Raises:
        PlanError: a layer normalizes over samples ("tensor-halves").
    """
    for name, layer in layers.items():
        norms = [path for path, module in layer.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        if norms:
            raise PlanError(
                f"half_batches: {name}.{norms[0]} normalizes over all samples of a batch",
                code="tensor-halves",
                fix="Use a norm of each sample (LayerNorm, RMSNorm), or leave half_batches out.",
            )
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    for layer in layers.values():
        plain = type(layer)
        if plain not in kinds:
            space = {"__module__": plain.__module__, "__doc__": plain.__doc__}
            kinds[plain] = type(plain.__name__, (_InHalves, plain), space)
        layer.__dict__["_ds_halves"] = halves
        layer.__class__ = kinds[plain]


class _InHalves:
    """Mixed into a layer's class. Not its forward but its call runs in halves: what is around the forward (checkpointing, hooks) sees each half."""

    _ds_halves: HalfBatches

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ds_halves(self, super().__call__, args, kwargs)  # type: ignore[arg-type, misc]


def _foreign_objects(tree: Any) -> list[str]:
    """Return the types of what is neither a tensor nor plain: it may hold something for each sample."""
    if tree is None or isinstance(tree, (Tensor, *_PLAIN)) or callable(tree):
        return []
    if isinstance(tree, Mapping):
        return [name for value in tree.values() for name in _foreign_objects(value)]
    if isinstance(tree, (list, tuple)):
        return [name for value in tree for name in _foreign_objects(value)]
    return [type(tree).__name__]


def _check_surroundings(layer: nn.Module, name: str) -> None:
    around = saved_hooks()
    if around is not None and getattr(around[0], "__module__", "") == "torch.utils.checkpoint":
        raise UnsupportedError(
            f"half_batches: a checkpointed call is around {name}, and would compute both halves again in another order",
            code="tensor-halves",
            fix="Checkpoint inside of it: activation_checkpointing.modules, or gradient_checkpointing_enable() of a transformers model.",
        )
    if hasattr(layer, "_is_fsdp_managed_module"):
        raise UnsupportedError(
            f"half_batches: FSDP frees the parameters of {name} after the first half",
            code="tensor-halves",
            fix="Shard with ds_zero.shard or the engine's ZeRO stages, which count calls, or leave half_batches out.",
        )


def _joined(results: tuple[Any, Any], sizes: tuple[int, int], name: str) -> Any:
    (firsts, rebuild), (seconds, _) = (flatten(result) for result in results)
    joined = []
    for first, second in zip(firsts, seconds, strict=True):
        if first.dim() == 0 or (first.shape[0], second.shape[0]) != sizes:
            raise UnsupportedError(
                f"half_batches: {name} returns tensors of {tuple(first.shape)} and {tuple(second.shape)} for halves of {sizes[0]} and {sizes[1]}",
                code="tensor-halves",
                fix="Results of a layer must have the samples in dim 0; leave half_batches out for this model.",
            )
        joined.append(torch.cat((first, second)))
    return rebuild(joined)
