"""Runs a rank's program on its stages: one handler an action, values and gradients in small tables. It branches little: what happens
when is in the program."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

import ds_comm
import ds_monitor
from ds_comm.channels import Channels
from ds_comm.metadata import metadata_device
from ds_config.errors import CommError, PlanError
from ds_pipe._torch import tree_leaves
from ds_pipe.actions import Action, ActionKind
from ds_pipe.schedule_timing import Span
from ds_pipe.stage import PipelineStage
from ds_pipe.stage_link import StageLink, ValueStructure
from ds_pipe.staged import StagedModel

__all__ = ["Criterion", "GradientReduction", "MicrobatchSource", "PipelineExecutor"]


class GradientReduction(Protocol):
    """How gradients of weights become one over the ranks that hold them: the extension point of data parallelism and ZeRO."""

    def around(self, action: Action) -> AbstractContextManager[None]:
        """Return a context to enter around an action that adds to weight gradients.

        `action.reduce` says whether the gradients are reduced when the action ends.
        """

    def reduce(self, stage: int) -> None:
        """Reduce the gradients of a stage now. Collective over the ranks that hold it."""

    def gather(self, stage: int) -> None:
        """Bring the stage's parameters together."""

    def release(self, stage: int) -> None:
        """Give them back."""

    def finish(self) -> None:
        """Finish the reduction after all actions of a step."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate (loss scaling). Called by criteria."""


Criterion = Callable[[int, Any, Any], Tensor]
"""Of a microbatch's number, the last stage's output and the labels: the scalar that backward starts from."""


@dataclass(slots=True)
class MicrobatchSource:
    """Microbatches of one step, drawn when first needed and dropped when last.

    Attributes:
        source: Yields microbatches.
        split: A microbatch's inputs and labels.
        users: How many stages of this rank need each: the first for inputs, the last for labels.
    """

    source: Iterator[Any]
    split: Callable[[Any], tuple[Any, Any]]
    users: int
    _next: int = 0
    _inputs: dict[int, list[Any]] = field(default_factory=dict)

    def begin(self) -> None:
        """Draw the first microbatch where it is used. Data that end between two steps so end them on the first and the last stage alike."""
        if self.users:
            self._draw(0)

    def take(self, microbatch: int, what: int) -> Any:
        """Return the inputs (`what` 0) or labels (1) of a microbatch, and free them after their last use."""
        self._draw(microbatch)
        entry = self._inputs[microbatch]
        entry[2] -= 1
        if entry[2] <= 0:
            del self._inputs[microbatch]
        return entry[what]

    def _draw(self, microbatch: int) -> None:
        while self._next <= microbatch:
            try:
                drawn = next(self.source)
            except StopIteration:
                raise PlanError(
                    f"the data ended before microbatch {microbatch} of the step",
                    code="pipe-data",
                    fix="Give an iterator of at least as many microbatches as a step has, on the first and the last stage.",
                ) from None
            self._inputs[self._next] = [*self.split(drawn), self.users]
            self._next += 1


class PipelineExecutor:
    """One rank of one pipeline.

    Args:
        model: The stages of this rank.
        splits: Whether programs may split backwards.
        depth: Messages that may be under way on a link. No more than the activations a rank holds ever are.
    """

    def __init__(self, model: StagedModel, splits: bool, depth: int) -> None:
        self.model = model
        self.stages = {s: PipelineStage(s, part, splits) for s, part in model.parts.items()}
        for s, part in model.parts.items():
            if hasattr(part, "backwards"):  # it can compute activations again, and needs to know for what
                setattr(part, "backwards", self.stages[s].backwards)  # noqa: B010
        group = model.places.pipe
        self._channels = Channels(group, depth=depth, device=_device_of(model)) if group.size > 1 else None
        self._links: dict[int, StageLink] = {}
        self.timeline: list[Span] | None = None
        self._interrupted = False
        self._reset()

    def _reset(self) -> None:
        self._values: dict[tuple[int, int], Any] = {}  # (stage, microbatch) -> its input
        self._grads: dict[tuple[int, int], list[Tensor | None]] = {}  # -> gradients of its output
        self._sent: dict[
            tuple[int, int], tuple[Any, ValueStructure | None]
        ] = {}  # -> its output, while it is to be sent
        self._shapes: dict[tuple[int, int], ValueStructure] = {}  # -> of its output (sender) for the gradient to come
        self._received_inputs: dict[
            tuple[int, int], list[Tensor]
        ] = {}  # -> tensors of its input whose gradients are to be sent
        self._back: dict[tuple[int, int], list[Tensor | None]] = {}  # -> gradients of its input, while to be sent

    def link(self, low: int) -> StageLink:
        """Return the link between stage `low` and the next stage, which are on different ranks."""
        if low not in self._links:
            if self._channels is None:
                raise RuntimeError("a link in a pipeline of one rank")
            below = low in self.stages
            peer = self.model.rank_of[low + 1 if below else low]
            self._links[low] = StageLink(self._channels, peer, low, below)
        return self._links[low]

    # ---- a step

    def run(
        self, actions: Sequence[Action], feed: MicrobatchSource, reduction: GradientReduction, criterion: Criterion
    ) -> None:
        """Run this rank's row of a training program.

        Raises:
            CommError: a step or an evaluation before this one ended between its messages ("pipe-interrupted").
        """
        self._check_links()
        self._lend(feed, reduction, criterion)
        handlers = self._handlers()
        timeline = self.timeline
        try:
            feed.begin()
            for action in actions:
                begin = time.perf_counter() if timeline is not None else 0.0
                with ds_monitor.span(f"pipe.{action.op.name.lower()}"):
                    handlers[action.op](action)
                if timeline is not None:
                    timeline.append((begin, time.perf_counter(), action))
            self._flush()
            reduction.finish()
        except BaseException:
            self._abandon()
            raise
        finally:
            self._lend(None, None, None)

    def _abandon(self) -> None:
        """Forget a step that failed. What its links still carry nobody knows, and the next step would take it for its own."""
        for stage in self.stages.values():
            stage.forget()
        self._reset()
        self._interrupted = self._interrupted or any(link.moved for link in self._links.values())

    def _check_links(self) -> None:
        """Let a step begin, unless messages of another one may still come.

        Raises:
            CommError: they may ("pipe-interrupted").
        """
        if self._interrupted:
            raise CommError(
                f"a step of the pipeline over ranks {list(self.model.places.pipe.ranks)} ended by an error or Ctrl-C on this rank while "
                "its stages had messages under way, which would be taken for those of the next step",
                code="pipe-interrupted",
                fix="Start the job again from its last checkpoint.",
            )
        for link in self._links.values():
            link.moved = False

    def _lend(
        self, feed: MicrobatchSource | None, reduction: GradientReduction | None, criterion: Criterion | None
    ) -> None:
        # Typed as what they are in a step; between steps nothing of the caller is kept.
        self._feed: Any = feed
        self._reduction: Any = reduction
        self._criterion: Any = criterion

    def _flush(self) -> None:
        """Flush all links before this rank waits for other ranks.

        Afterwards each sent message has arrived, or waits for its receiver only.
        """
        for link in self._links.values():
            link.flush()

    @contextmanager
    def _differentiating(self, action: Action) -> Iterator[None]:
        if action.reduce:
            self._flush()
        with self._reduction.around(action):
            yield

    def _reduce(self, action: Action) -> None:
        self._flush()
        self._reduction.reduce(action.stage)

    def _handlers(self) -> dict[ActionKind, Callable[[Action], None]]:
        return {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.INPUT_GRAD: self._backward,
            ActionKind.WEIGHT_GRAD: self._weight_grad,
            ActionKind.SEND_F: self._send_forward,
            ActionKind.RECV_F: self._recv_forward,
            ActionKind.SEND_B: self._send_backward,
            ActionKind.RECV_B: self._recv_backward,
            ActionKind.GATHER: lambda action: self._reduction.gather(action.stage),
            ActionKind.RELEASE: lambda action: self._reduction.release(action.stage),
            ActionKind.REDUCE: self._reduce,
        }

    def _forward(self, action: Action) -> None:
        s, m = action.stage, action.microbatch
        value = self._feed.take(m, 0) if s == 0 else self._values.pop((s, m))
        last = s + 1 == len(self.model.rank_of)
        out = self.stages[s].forward(m, value, self._finish(m) if last else None)
        if last:
            return
        if s + 1 in self.stages:
            self._values[s + 1, m] = out
        else:
            self._sent[s, m] = (out, None)

    def _finish(self, microbatch: int) -> Callable[[Any], Any]:
        labels = self._feed.take(microbatch, 1)
        return lambda out: self._criterion(microbatch, out, labels)

    def _send_forward(self, action: Action) -> None:
        s, m = action.stage, action.microbatch
        out, _ = self._sent.pop((s, m))
        signature = self.link(s).send(out)
        if torch.is_grad_enabled():
            self._shapes[s, m] = signature

    def _recv_forward(self, action: Action) -> None:
        s, m = action.stage, action.microbatch
        value, _ = self.link(s - 1).receive()
        self._values[s, m] = value
        if torch.is_grad_enabled():
            self._received_inputs[s, m] = [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.requires_grad]

    def _backward(self, action: Action) -> None:
        s, m = action.stage, action.microbatch
        last = s + 1 == len(self.model.rank_of)
        grads = None if last else self._grads.pop((s, m))
        stage = self.stages[s]
        if action.op is ActionKind.INPUT_GRAD:
            input_grads = stage.input_grad(m, grads)
        else:
            with self._differentiating(action):
                input_grads = stage.backward(m, grads)
        if s == 0:
            return
        if s - 1 in self.stages:
            self._grads[s - 1, m] = input_grads
        else:
            self._back[s, m] = input_grads

    def _weight_grad(self, action: Action) -> None:
        with self._differentiating(action):
            self.stages[action.stage].weight_grad(action.microbatch)

    def _send_backward(self, action: Action) -> None:
        s, m = action.stage, action.microbatch
        self.link(s - 1).send_gradients(self._back.pop((s, m)), self._received_inputs.pop((s, m)))

    def _recv_backward(self, action: Action) -> None:
        s, m = action.stage, action.microbatch
        self._grads[s, m] = self.link(s).receive_gradients(self._shapes.pop((s, m)))

    # ---- evaluation

    @torch.no_grad()
    def evaluate(
        self, actions: Sequence[Action], feed: MicrobatchSource, done: Callable[[int, Any, Any], object]
    ) -> None:
        """Run this rank's row of a program of forwards; `done` gets number, output and labels of every microbatch at the last stage.

        Raises:
            CommError: as `run`.
        """
        self._check_links()
        self._lend(feed, None, None)
        try:
            feed.begin()
            for action in actions:
                self._evaluate(action, feed, done)
            self._flush()
        except BaseException:
            self._abandon()
            raise
        finally:
            self._lend(None, None, None)

    def _evaluate(self, action: Action, feed: MicrobatchSource, done: Callable[[int, Any, Any], object]) -> None:
        s, m = action.stage, action.microbatch
        if action.op is ActionKind.SEND_F:
            self._send_forward(action)
        elif action.op is ActionKind.RECV_F:
            self._recv_forward(action)
        else:
            value = feed.take(m, 0) if s == 0 else self._values.pop((s, m))
            out = self.stages[s].forward(m, value)
            if s + 1 == len(self.model.rank_of):
                done(m, out, feed.take(m, 1))
            elif s + 1 in self.stages:
                self._values[s + 1, m] = out
            else:
                self._sent[s, m] = (out, None)

    # ---- the loss, everywhere

    def share(self, numbers: Tensor) -> Tensor:
        """Broadcast `numbers` from the rank of the last stage to all ranks of the pipeline; return them on the group's device. Collective."""
        group = self.model.places.pipe
        numbers = numbers.to(metadata_device(group)) if numbers.device.type == "cpu" else numbers
        ds_comm.broadcast(numbers, group=group, group_src=self.model.rank_of[-1], unit="pipe.loss")
        return numbers

    def close(self) -> None:
        """Take all hooks from the model, and give up the channels."""
        for stage in self.stages.values():
            stage.close()
        if self._channels is not None:
            self._channels.close()


def _device_of(model: StagedModel) -> torch.device | None:
    """Return where this rank computes: None where its stages have no parameters yet, or none at all."""
    found = next((param.device for param in model.module.parameters()), None)
    return None if found is None or found.type == "meta" else found
