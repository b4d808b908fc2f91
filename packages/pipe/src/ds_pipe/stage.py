"""One stage at work: forwards and backwards of several microbatches in flight. Knows no rank, no schedule, no transfer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_comm.part_gradients import refuse_dtensors
from ds_config.errors import PlanError
from ds_pipe._torch import tree_flatten, tree_unflatten
from ds_pipe.recompute import Backwards, Mode
from ds_pipe.splitting import Capture, WeightGradJob, WeightGradRecorder, run_jobs, split_backward

__all__ = ["PipelineStage"]


@dataclass(slots=True)
class _MicrobatchState:
    """A microbatch between its forward and the end of its backward."""

    inputs: list[Tensor]  # leaves of the input that require gradients
    outputs: list[Tensor]  # leaves of the output with a graph
    capture: Capture | None


class PipelineStage:
    """Runs a module on microbatches.

    Args:
        index: Number of the stage.
        module: Takes one value (any pytree) and returns one.
        splits: Whether backwards may come in two.
    Raises:
        PlanError: a parameter is a DTensor ("comm-dtensor").
    """

    def __init__(self, index: int, module: nn.Module, splits: bool) -> None:
        refuse_dtensors(
            module.parameters(),
            "stages sum plain gradients over their replicas",
            "Cut the layers of stages with ds_parallel.tensor.parallelize_model, whose parts are plain tensors.",
        )
        self.index, self.module, self.splits = index, module, splits
        self._recorder = WeightGradRecorder(module)
        self.backwards = Backwards(self._recorder)
        self._flights: dict[int, _MicrobatchState] = {}
        self._jobs: dict[int, list[WeightGradJob]] = {}

    def forward(self, microbatch: int, value: Any, finish: Callable[[Any], Any] | None = None) -> Any:
        """Run the module and keep what the backward needs.

        Args:
            value: Tensors that require gradients are cut from their graph: their gradients are what the backward returns.
            finish: Applied to the output inside the graph (the loss).
        """
        if not torch.is_grad_enabled():
            with self.backwards.forwards():
                out = self.module(value)
                return out if finish is None else finish(out)
        leaves, spec = tree_flatten(value)
        leaves = [_cut(leaf) for leaf in leaves]
        # A leaf of autograd cannot be changed in place, as the first layer of a stage may do with what the layer before it returned.
        entered = [_Entered.apply(t) if isinstance(t, Tensor) and t.requires_grad else t for t in leaves]
        shared, capture = _shared(entered), Capture() if self.splits else None
        with self.backwards.forwards(), self._recorder.into(capture):
            out = self.module(tree_unflatten(entered, spec))
            if finish is not None:
                out = finish(out)
        self._check_in_place(shared)
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        outputs = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
        self._flights[microbatch] = _MicrobatchState(inputs, outputs, capture)
        return out

    def backward(self, microbatch: int, grads: Sequence[Tensor | None] | None) -> list[Tensor | None]:
        """The whole backward: adds the weights' gradients, returns those of the inputs that require them, in order.

        Args:
            grads: Of the outputs that require gradients, in order, None for one that nobody used. None instead of all of them:
                the output is the loss, whose gradient is 1.
        Raises:
            PlanError: the loss is not one number with a graph ("pipe-loss").
        """
        flight = self._flights.pop(microbatch)
        outputs, output_grads = self._matched(flight.outputs, grads)
        if outputs:
            with self.backwards.running(Mode.WHOLE):
                torch.autograd.backward(outputs, output_grads)
        input_grads = [leaf.grad for leaf in flight.inputs]
        for leaf in flight.inputs:
            leaf.grad = None
        return input_grads

    def input_grad(self, microbatch: int, grads: Sequence[Tensor | None] | None) -> list[Tensor | None]:
        """The first half: the gradients of the inputs. `grads` as in `backward`."""
        flight = self._flights.pop(microbatch)
        if flight.capture is None:
            raise RuntimeError("a stage that does not split was asked for an input gradient")
        outputs, output_grads = self._matched(flight.outputs, grads)
        if not outputs:
            self._jobs[microbatch] = []
            return [None] * len(flight.inputs)
        with self.backwards.running(Mode.INPUT) as inner:
            input_grads, jobs = split_backward(outputs, output_grads, flight.inputs, flight.capture)
        self._jobs[microbatch] = [*inner, *jobs]
        return input_grads

    def _matched(
        self, outputs: Sequence[Tensor], grads: Sequence[Tensor | None] | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs that were used, with their gradients."""
        if grads is None:
            if len(outputs) != 1 or outputs[0].numel() != 1:
                what = [f"of shape {list(t.shape)}" for t in outputs]
                raise PlanError(
                    f"stage {self.index} ends in the loss, which is one number with a graph; found {len(outputs)} tensors that require "
                    f"gradients{': ' if what else ''}{', '.join(what)}",
                    code="pipe-loss",
                    fix="Return the mean or the sum of the losses, computed from parameters that require gradients.",
                )
            return [outputs[0]], [torch.ones_like(outputs[0])]
        # Not by the number of elements: an auxiliary loss that the next stage ignores is a scalar without a gradient.
        pairs = [(t, g) for t, g in zip(outputs, grads, strict=True) if g is not None]
        return [t for t, _ in pairs], [g for _, g in pairs]

    def _check_in_place(self, shared: list[tuple[Tensor, int]]) -> None:
        for tensor, version in shared:
            if tensor._version != version:
                raise PlanError(
                    f"stage {self.index} changes its input of shape {list(tensor.shape)} in place, and another part of the input is the same tensor",
                    code="pipe-in-place",
                    fix="Return a copy from the stage before (x.clone()), or let this stage begin without an in-place operation.",
                )

    def weight_grad(self, microbatch: int) -> None:
        """Run the second half of a backward: add the weight gradients, and free the microbatch's memory."""
        with self.backwards.running(Mode.THROUGH):
            run_jobs(self._jobs.pop(microbatch))

    def forget(self) -> None:
        """Drop every microbatch in flight."""
        self._flights.clear()
        self._jobs.clear()

    def close(self) -> None:
        """Take the hooks from the module."""
        self.forget()
        self._recorder.close()


class _Entered(torch.autograd.Function):
    """A leaf as a result: the same memory and version counter, so that autograd still notices changes of what it has saved."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _shared(leaves: Sequence[Any]) -> list[tuple[Tensor, int]]:
    """Return the tensors that have their memory in common with another, with their versions.

    A change of one would change the other's value, but not its gradient.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]
    if len(tensors) < 2:
        return []
    pointers = [t.data_ptr() for t in tensors]
    again = {pointer for pointer in pointers if pointers.count(pointer) > 1}
    return [(t, t._version) for t, pointer in zip(tensors, pointers, strict=True) if pointer in again]


def _cut(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.requires_grad:
        return leaf.detach().requires_grad_(True)
    return leaf
