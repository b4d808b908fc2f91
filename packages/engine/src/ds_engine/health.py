"""What a run does when its numbers go wrong: a gradient that is not finite, or a loss far away from the losses before it.

The norm of every step's gradient is known before its update, so a NaN on one rank is seen before it reaches a weight. The policy
says what happens then (`Health`); `HealthWatch` does it, and says once what a person needs to find the cause: the step, the ranks
and microbatches whose loss is not finite, their samples, and the first tensor of the model that is not finite.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

import ds_monitor
from ds_accel import preserve_random_streams
from ds_comm import Group, all_gather_json
from ds_config.errors import TrainingError
from ds_engine.result import StepResult
from ds_monitor import metric_names
from ds_zero import NonfiniteDetector

__all__ = ["Health", "HealthWatch", "LossTrend", "Seen", "finding_text", "skips_after"]

_log = logging.getLogger("ds_engine")

LONGEST_RUN = 100
"""Skipped steps in a row after which a run ends. A dynamic loss scale of 2**32 has fallen to 1 after 34."""
_KEPT = 8  # microbatches whose inputs are kept for a search, the newest


@dataclass(frozen=True, slots=True)
class Health:
    """What is done about numbers that go wrong.

    Attributes:
        on_nonfinite: A gradient that is not finite: `warn` updates all the same, `skip` leaves the update out, `stop` ends the run
            with an error before the update.
        loss_spike_threshold: End the run when a loss is so many standard deviations above the running mean; None never does.
    """

    on_nonfinite: Literal["warn", "skip", "stop"] = "skip"
    loss_spike_threshold: float | None = None

    def __str__(self) -> str:
        done = {"warn": "warn", "skip": "skip the update", "stop": "an error before the update"}[self.on_nonfinite]
        jump = (
            ""
            if self.loss_spike_threshold is None
            else f"; a loss {self.loss_spike_threshold:g} deviations up is an error"
        )
        return f"non-finite gradients: {done}{jump}"


@dataclass(frozen=True, slots=True)
class LossTrend:
    """Running mean and variance of a loss, weighted towards the last `window` steps. A value, replaced at every step."""

    mean: float = 0.0
    variance: float = 0.0
    steps: int = 0
    window: int = 100

    def deviations(self, loss: float) -> float:
        """Return how many standard deviations `loss` lies above the mean; 0 before 20 losses, or without variance."""
        if self.steps < 20 or not math.isfinite(loss) or self.variance <= 0.0:
            return 0.0
        return (loss - self.mean) / math.sqrt(self.variance)

    def after(self, loss: float) -> LossTrend:
        """Return the trend with one more loss; unchanged by a non-finite loss."""
        if not math.isfinite(loss):
            return self
        weight = 1.0 / min(self.steps + 1, self.window)
        ahead = loss - self.mean
        mean = self.mean + weight * ahead
        variance = (1.0 - weight) * (self.variance + weight * ahead * ahead)
        return replace(self, mean=mean, variance=variance, steps=self.steps + 1)


def skips_after(skips: int, skipped: bool) -> int:
    """Return the number of skipped steps in a row after one more step.

    Raises:
        TrainingError: they are `LONGEST_RUN` ("training-skips").
    """
    if skipped and skips + 1 >= LONGEST_RUN:
        raise TrainingError(
            f"{skips + 1} steps in a row were skipped, because their gradients were not finite",
            code="training-skips",
            fix="Go back to a checkpoint, with a smaller learning rate, or with bf16 in place of fp16.",
        )
    return skips + 1 if skipped else 0


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank knows of a step whose gradient is not finite.

    Attributes:
        rank: Of the world.
        microbatches: Numbers, within the step, of those whose loss is not finite.
        samples: Indices into the dataset of those microbatches, where the engine's own loader gave them.
        tensor: The first tensor of the model that is not finite; None if all of a forward is.
    """

    rank: int
    microbatches: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()
    tensor: str | None = None


@dataclass(frozen=True, slots=True)
class _Microbatch:
    number: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    samples: Sequence[int]


class HealthWatch:
    """Watches the steps of one engine.

    Args:
        health: The policy.
        model: Searched for the first tensor that is not finite.
        group: All ranks of the run.
        samples: Dataset indices of the microbatch that was returned last; empty where they are not known.
    Attributes:
        step_number: Of the step that is being made.
    """

    def __init__(
        self, health: Health, model: nn.Module, group: Group, samples: Callable[[], Sequence[int]] = tuple
    ) -> None:
        self.health, self._model, self._group, self._samples = health, model, group, samples
        self._microbatches: deque[_Microbatch] = deque(maxlen=_KEPT)
        self._losses: list[Tensor] = []
        self._trend, self._skips = LossTrend(), 0
        self._forwards, self._moves, self._num_reports = 0, 0, 0
        self._finding: str | None = None
        self.step_number = 0

    # ---- within a step

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the inputs of a training microbatch until the step's end, without a copy, and without the graph that made them."""
        self._microbatches.append(_Microbatch(self._forwards, _detached(args), _detached(kwargs), self._samples()))
        self._forwards += 1

    def loss(self, value: Tensor) -> None:
        """Record the loss of the microbatch whose backward begins."""
        self._losses.append(value.detach())

    def moved(self, backwards: int) -> bool:
        """Whether something happened since the last call: a loss was noted, or one more of the step's `backwards` has begun."""
        before, self._moves = self._moves, backwards + len(self._losses)
        return self._moves > before

    def drop(self) -> None:
        """Forget the microbatches of a step: it is over, or will not be made."""
        self._microbatches.clear()
        self._losses.clear()
        self._forwards = self._moves = 0

    # ---- at its end

    def nonfinite(self, first: str | None) -> bool:
        """Report once that this step's gradient is not finite; return whether to skip the update. Collective.

        Args:
            first: The first parameter, in registration order, whose gradient is not finite.
        Cost: an all-gather of a few bytes, and in the first such step one forward of one microbatch, without gradients.
        """
        policy, step = self.health.on_nonfinite, self.step_number
        if self._num_reports == 0:
            reports = all_gather_json(asdict(self._look()), self._group, unit="nonfinite")
            self._finding = finding_text(step, first, [Seen(**fields) for fields in reports], policy)
        elif policy == "skip":
            self._finding = f"step {step}: skipped, too; first parameter whose gradient is not finite: {first}"
        if self._finding is not None and self._group.rank == 0:
            _log.warning(self._finding)
        self._num_reports += 1
        ds_monitor.counter(metric_names.NONFINITE, 1)
        return policy != "warn"

    def step(self, result: StepResult) -> None:
        """Check a finished step. Reads its loss only where a sink is attached or the policy needs the loss.

        Raises:
            TrainingError: on every rank: the gradient was not finite and the policy is to stop ("training-nonfinite"),
            too many steps
                in a row were skipped ("training-skips"), the loss jumped ("training-loss-jump"). The weights are those
                before the
                step in the first two cases.
        """
        finding, self._finding = self._finding, None
        self.drop()
        if finding is not None and self.health.on_nonfinite == "stop":
            raise TrainingError(
                finding,
                code="training-nonfinite",
                fix="Look at those samples and that tensor. The weights are those before this step; save_checkpoint() keeps them.",
            )
        self._skips, limit = skips_after(self._skips, result.skipped), self.health.loss_spike_threshold
        if result.mean is None or not (limit is not None or ds_monitor.active()):
            return
        loss = result.loss
        deviations, self._trend = self._trend.deviations(loss), self._trend.after(loss)
        ds_monitor.gauge(metric_names.LOSS_JUMP, deviations)
        if limit is not None and deviations > limit:
            raise TrainingError(
                f"the loss {loss:.6g} lies {deviations:.1f} standard deviations above its running mean {self._trend.mean:.6g}; "
                f"loss_spike_threshold is {limit:g}",
                code="training-loss-jump",
                fix="Go back to a checkpoint and look at the samples of this step, or raise loss_spike_threshold.",
            )

    def _look(self) -> Seen:
        """Collect this rank's findings; rerun one of its microbatches, the first whose loss is not finite."""
        bad = [n for n, loss in enumerate(self._losses) if not bool(loss.isfinite().all())]
        microbatches = {m.number: m for m in self._microbatches}
        samples = [s for n in bad if n in microbatches for s in microbatches[n].samples]
        # A forward may be collective: all ranks run one, or none does.
        able = all(all_gather_json(bool(microbatches), self._group, unit="nonfinite"))
        again = next(
            (microbatches[n] for n in bad if n in microbatches), self._microbatches[-1] if microbatches else None
        )
        tensor = self._first(again) if able and again is not None else None
        return Seen(self._group.rank, tuple(bad), tuple(samples), tensor)

    def _first(self, microbatch: _Microbatch) -> str | None:
        with _undisturbed(self._model), NonfiniteDetector(self._model) as search:
            self._model(*microbatch.args, **microbatch.kwargs)
        location = search.first
        return None if location is None else f"{location.name or 'the model'}: {location.what} in {location.phase}"


def _detached(value: Any) -> Any:
    """Detach the tensors of a tuple, a list or a dict: another model's output would keep all its activations."""
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value
    if type(value) in (tuple, list):
        return type(value)(map(_detached, value))
    return {key: _detached(item) for key, item in value.items()} if type(value) is dict else value


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore buffers, random streams and the numbers among the modules' attributes after a forward inside."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    numbers = [
        (vars(module), {key: value for key, value in vars(module).items() if isinstance(value, int | float)})
        for module in model.modules()
    ]
    devices = sorted({p.device for p in model.parameters()}, key=str)
    with preserve_random_streams(device for device in devices if device.type != "cpu"), torch.no_grad():
        try:
            yield
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
            for attributes, before_forward in numbers:
                attributes.update(before_forward)


def finding_text(step: int, first: str | None, reports: Sequence[Seen], policy: str) -> str:
    """Format the ranks' findings about a non-finite gradient in readable lines. Pure."""
    done = {"warn": "it was used all the same", "skip": "the update was left out", "stop": "the run stops"}[policy]
    lines = [f"step {step}: the gradient is not finite; {done} (on_nonfinite: {policy!r})"]
    for rank in (s for s in reports if s.microbatches or s.tensor):
        where = f"rank {rank.rank}"
        if rank.microbatches:
            where += f", microbatch {_listed(rank.microbatches)}: the loss is not finite"
        if rank.samples:
            where += f"; samples {_listed(rank.samples)} of the data"
        if rank.tensor:
            where += f"; first tensor: {rank.tensor}"
        lines.append(f"  {where}")
    if not any(s.microbatches for s in reports):
        lines.append("  every loss is finite: it began in a backward")
    if first is not None:
        lines.append(f"  first parameter whose gradient is not finite: {first}")
    if policy == "warn":
        lines.append('  Later ones are counted and not told. on_nonfinite = "skip" or "stop" keeps the weights finite.')
    return "\n".join(lines)


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:16]))
    return shown + (f" and {len(numbers) - 16} more" if len(numbers) > 16 else "")
