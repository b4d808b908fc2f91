"""Activation checkpointing inside a stage: keep the input of a segment, compute it again in the backward.

Like torch's reentrant checkpoint, with one more ability: in a split backward the segment is computed again once, when its input
gradient is asked for; its weight gradients become jobs of the stage (`splitting.py`) and are not computed a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ds_config.errors import PlanError
from ds_pipe._torch import TreeSpec, tree_flatten, tree_unflatten
from ds_pipe.splitting import Capture, WeightGradJob, WeightGradRecorder, split_backward

__all__ = ["Backwards", "Mode", "checkpointed"]


class Mode(Enum):
    """What the backward that runs is for."""

    WHOLE = "inputs and weights"
    INPUT = "inputs; jobs are kept for weights"
    THROUGH = "inputs only: another job has kept those of the weights"


@dataclass(slots=True)
class Backwards:
    """What backward of a stage is under way, and where segments leave their jobs.

    Attributes:
        forwards: Entered around every forward of the stage, also around those that are made again (autocast).
    """

    recorder: WeightGradRecorder
    forwards: Callable[[], AbstractContextManager[None]] = nullcontext
    mode: Mode = Mode.WHOLE
    jobs: list[WeightGradJob] = field(default_factory=list)

    @contextmanager
    def running(self, mode: Mode) -> Iterator[list[WeightGradJob]]:
        """Set the kind of the backwards inside the context, and yield the list that collects their weight-gradient jobs."""
        before = (self.mode, self.jobs)
        self.mode, self.jobs = mode, []
        try:
            yield self.jobs
        finally:
            self.mode, self.jobs = before


@dataclass(frozen=True, slots=True)
class _RandomState:
    """What the next random numbers are, of the host and of `device`; None: the host's alone."""

    host: Tensor
    device: torch.device | None
    state: Tensor | None

    @classmethod
    def now(cls, device: torch.device | None) -> _RandomState:
        """Read the generators."""
        state = None if device is None else torch.get_device_module(device).get_rng_state(device)
        return cls(torch.get_rng_state(), device, state)

    def restore(self) -> None:
        """Set the generators to this state."""
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.get_device_module(self.device).set_rng_state(self.state, self.device)


def _device_of(tensors: Sequence[Tensor]) -> torch.device | None:
    """Return the device that tensors of a segment are on; None where all are on the host."""
    return next((t.device for t in tensors if t.device.type not in ("cpu", "meta")), None)


@dataclass(slots=True)
class _RecomputedSegment:
    run: Callable[[Any], Any]
    backwards: Backwards
    spec: TreeSpec
    leaves: list[Any]  # None where a tensor was: autograd keeps those
    at: list[int]
    random: _RandomState
    outputs: TreeSpec | None = None
    constants: list[Any] = field(default_factory=list)


def checkpointed(run: Callable[[Any], Any], value: Any, backwards: Backwards) -> Any:
    """`run(value)`, keeping only `value`. Random numbers of the host and of the inputs' device are drawn again alike.

    Args:
        run: From any pytree to any pytree, at least one tensor in each.
    """
    leaves, spec = tree_flatten(value)
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    random = _RandomState.now(_device_of([leaves[i] for i in at]))
    segment = _RecomputedSegment(run, backwards, spec, constants, at, random)
    anchor = torch.empty(0, requires_grad=True, device="cpu")  # weights need gradients even where no input does
    backwards.recorder.anchor(anchor)
    versions = [leaves[i]._version for i in at]
    outputs = _Checkpointed.apply(segment, anchor, *(leaves[i] for i in at))
    for i, version in zip(at, versions, strict=True):
        if leaves[i]._version != version:
            raise PlanError(
                f"a checkpointed segment changes its input of shape {list(leaves[i].shape)} in place, which it is computed from again",
                code="pipe-in-place",
                fix="Let the segment's first layer work out of place (inplace=False), or do not checkpoint it.",
            )
    tensors = iter(outputs)
    flat = [next(tensors) if isinstance(leaf, _Slot) else leaf for leaf in segment.constants]
    if segment.outputs is None:
        raise RuntimeError("a checkpointed segment ended without an output")
    return tree_unflatten(flat, segment.outputs)


class _Slot:
    """Stands where an output tensor was."""


class _Checkpointed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, segment: _RecomputedSegment, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.segment = segment
        ctx.save_for_backward(*tensors)
        with segment.backwards.recorder.into(None):
            flat, segment.outputs = tree_flatten(segment.run(_value(segment, tensors)))
        segment.constants = [_Slot() if isinstance(leaf, Tensor) else leaf for leaf in flat]
        outputs = tuple(leaf for leaf in flat if isinstance(leaf, Tensor))
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))
        # One tensor handed through must not be its own input and output.
        input_ids = {id(t) for t in tensors}
        return tuple(t.view_as(t) if id(t) in input_ids else t for t in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        segment: _RecomputedSegment = ctx.segment
        backwards = segment.backwards
        tensors = [_leaf(t, n) for t, n in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)]
        capture = Capture() if backwards.mode is Mode.INPUT else None
        now = _RandomState.now(segment.random.device)
        segment.random.restore()
        try:
            with torch.enable_grad(), backwards.forwards(), backwards.recorder.into(capture):
                flat, _ = tree_flatten(segment.run(_value(segment, tensors)))
        finally:
            now.restore()
        outputs = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        pairs = [(t, g) for t, g in zip(outputs, grads, strict=True) if g is not None and t.requires_grad]
        return (None, None, *_gradients(backwards, pairs, tensors, capture))


def _gradients(
    backwards: Backwards, pairs: Sequence[tuple[Tensor, Tensor]], tensors: Sequence[Tensor], capture: Capture | None
) -> list[Tensor | None]:
    outputs, grads = [t for t, _ in pairs], [g for _, g in pairs]
    wanted = [t for t in tensors if t.requires_grad]
    got: Sequence[Tensor | None] = [None] * len(wanted)
    if outputs and capture is not None:
        got, jobs = split_backward(outputs, grads, wanted, capture)
        backwards.jobs.extend(jobs)
    elif outputs and backwards.mode is Mode.THROUGH and wanted:
        got = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
    elif outputs and backwards.mode is Mode.WHOLE:
        torch.autograd.backward(outputs, grads)
        got = [t.grad for t in wanted]
    answers = iter(got)
    return [next(answers) if t.requires_grad else None for t in tensors]


def _leaf(tensor: Tensor, needs_grad: bool) -> Tensor:
    return tensor.detach().requires_grad_(needs_grad and tensor.is_floating_point())


def _value(segment: _RecomputedSegment, tensors: Sequence[Tensor]) -> Any:
    leaves = list(segment.leaves)
    for i, tensor in zip(segment.at, tensors, strict=True):
        leaves[i] = tensor
    return tree_unflatten(leaves, segment.spec)
