"""The verb to start with: `pipeline(model, ...)` gives a function that runs one step's forwards and backwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import ds_comm
from ds_comm.metadata import metadata_device, raise_together
from ds_config.errors import PlanError
from ds_pipe.actions import Action, ActionKind, Program
from ds_pipe.costs import Costs
from ds_pipe.decoder_stages import DecoderStages
from ds_pipe.executor import GradientReduction, MicrobatchSource, PipelineExecutor
from ds_pipe.grad_scaler import StageGradScaler
from ds_pipe.gradient_reduction import OptimizerReduction, PlainReduction, ReducingOptimizer, begin_step
from ds_pipe.loss_weights import LossWeights, check_weights, weighted
from ds_pipe.module import PipelineModule
from ds_pipe.program_passes import add_comms, mark_reduce
from ds_pipe.programs import inference, list_scheduled, make_program
from ds_pipe.staged import StagedModel, evaluating
from ds_pipe.traced_stages import TracedStages
from ds_pipe.verify import verify

__all__ = ["Pipeline", "pipeline", "split_batch"]


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Split a microbatch into inputs and labels: a pair, or a dict with `labels`, which is its inputs.

    Raises:
        PlanError: the microbatch is neither ("pipe-batch").
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping) and "labels" in batch:
        return dict(batch), batch["labels"]
    what = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (tuple, list, dict)) else "")
    raise PlanError(
        f"a microbatch is {what}",
        code="pipe-batch",
        fix="Yield (inputs, labels) or a dict with labels, or pass batch_fn, which makes a pair of what you yield.",
    )


class Pipeline:
    """Steps of a model in stages. Made by `pipeline`.

    Attributes:
        model: The stages of this rank.
        executor: Runs programs; `executor.timeline = []` makes it record when each action ran.
        losses: Of the last step or evaluation by microbatch, this rank's data only; on the last stage's rank.
    """

    def __init__(self, model: StagedModel, make: Callable[[int], Program], microbatches: int) -> None:
        self.model, self.microbatches = model, microbatches
        self._make, self._programs = make, dict[tuple[int, bool], Program]()
        program = make(microbatches)
        splits = any(a.op is ActionKind.INPUT_GRAD for row in program.ranks for a in row)
        self.executor = PipelineExecutor(model, splits, max(verify(add_comms(program)).peak_activations) + 1)
        self.reduction: GradientReduction = PlainReduction(model)
        self.losses = torch.zeros(0, dtype=torch.float64, device="cpu")
        self.reduces_every_backward = False
        self.batch_fn: Callable[[Any], tuple[Any, Any]] = split_batch

    def reduce_with(self, optimizer: ReducingOptimizer, every_backward: bool = False) -> None:
        """Let an optimizer reduce gradients: `ds_zero.shard(model, ..., group=places.data, norm=places.world)`.

        Args:
            every_backward: After every microbatch (ZeRO 2 and 3 keep only their share of gradients), or once a step.
        """
        if isinstance(self.reduction, PlainReduction) and self.reduction.scaler is not None:
            raise PlanError(
                "reduce_with after scale_with: the optimizer scales the loss itself",
                code="pipe-scaler",
                fix="Give ds_zero.shard the loss scale (precision=), and leave scale_with out.",
            )
        self.reduction = OptimizerReduction(self.model, optimizer, every_backward)
        self.reduces_every_backward = every_backward

    def scale_with(self, scaler: StageGradScaler) -> None:
        """Multiply losses by the scale of a GradScaler, which divides gradients by it before the optimizer's step.

        Raises:
            PlanError: an optimizer reduces gradients, and has a loss scale of its own ("pipe-scaler").
        """
        if not isinstance(self.reduction, PlainReduction):
            raise PlanError(
                "scale_with after reduce_with: that optimizer scales the loss itself",
                code="pipe-scaler",
                fix="Give ds_zero.shard the loss scale (precision=), and leave scale_with out.",
            )
        self.reduction.scaler = scaler

    def program(self, microbatches: int | None = None) -> Program:
        """Return the verified program that all ranks run in a step."""
        count, every = microbatches or self.microbatches, self.reduces_every_backward
        if (count, every) not in self._programs:
            program = add_comms(mark_reduce(self._make(count), every))
            verify(program)
            self._programs[count, every] = program
        return self._programs[count, every]

    def __call__(
        self,
        data: Iterable[Any] | Iterator[Any],
        microbatches: int | None = None,
        *,
        weights: LossWeights | None = None,
    ) -> Tensor:
        """Forwards and backwards of one step: afterwards gradients are in `.grad` of the rank's parameters, averaged.

        Args:
            data: Yields microbatches. Drawn from on the ranks of the first stage (inputs) and of the last (labels), which must
                see the same ones; other ranks may pass anything.
            microbatches: How many this step has, the same on all ranks; the number given at the start by default. A list is as
                long as it is.
            weights: Of the microbatches' losses in the mean over microbatches and data: `ds_pipe.count_tokens` makes it a mean over tokens,
                whatever their number in each. Numbers, or a function of labels, for which the ranks of the last stage draw all
                microbatches of the step at its start. None: all count the same.
        Returns:
            Mean loss over microbatches and data, a float64 scalar, the same on all ranks.
        Raises:
            PlanError: the weights do not fit, or all of them are 0 ("pipe-weights").
        Collective over the pipeline and its replicas.
        """
        count = microbatches or (len(data) if isinstance(data, Sequence) else self.microbatches)
        losses: dict[int, Tensor] = {}

        def criterion(microbatch: int, out: Any, labels: Any) -> Tensor:
            loss: Tensor = out if self.model.loss is None else self.model.loss(out, labels)
            losses[microbatch] = loss.detach()
            if shares is not None:
                return self.reduction.scale(weighted(loss, shares[microbatch]))
            return self.reduction.scale(loss / count if count > 1 else loss)

        begin_step(self.model)
        data, shares = self._shares(data, count, weights)
        self.executor.run(self._row(self.program(count)), self._feed(data), self.reduction, criterion)
        return self._shared(losses, count if weights is None else 1, shares)

    def _shares(
        self, data: Iterable[Any], count: int, weights: LossWeights | None
    ) -> tuple[Iterable[Any], list[float] | None]:
        """Return the data, and on the last stage each loss's factor: its weight over the mean of all replicas' sums of weights.

        Raises:
            PlanError: the weights do not fit, on every rank of every replica; other stages would wait for a step that does not come.
        Cost: eight bytes over the replicas of the last stage, and from it to the other stages.
        """
        if weights is None:
            return data, None
        places, error, factors = self.model.places, None, None
        if self.model.last:
            numbers = torch.full((1,), torch.nan, dtype=torch.float64, device="cpu")
            try:
                data, numbers = self._weighed(data, count, weights)
            except Exception as failed:
                error = failed
            total = numbers.sum().reshape(1).to(metadata_device(places.gradient))
            ds_comm.all_reduce(total, group=places.gradient, unit="pipe.weights")
            if error is None and not float(total) > 0:
                none = not float(total)
                error = PlanError(
                    f"all {count} microbatches of all replicas have weight 0"
                    if none
                    else "the weights of a replica do not fit",
                    code="pipe-weights",
                    fix="Leave such a step out; it has no token that counts."
                    if none
                    else "Read the error of that replica's last stage.",
                )
            factors = (numbers * (places.gradient.size / float(total))).tolist() if error is None else None
        if float(self.executor.share(torch.tensor([float(error is not None)], dtype=torch.float64, device="cpu"))):
            raise_together(error, places.pipe, unit="pipe.weights")
        return data, factors

    def _weighed(self, data: Iterable[Any], count: int, weights: LossWeights) -> tuple[Iterable[Any], Tensor]:
        """Return the data, and the weights of this rank's microbatches, float64 [count]."""
        if not callable(weights):
            return data, check_weights(weights, count)
        drawn = list(itertools.islice(data, count))
        return drawn, check_weights([weights(self.batch_fn(microbatch)[1]) for microbatch in drawn], count)

    def evaluate(
        self,
        data: Iterable[Any],
        microbatches: int | None = None,
        with_loss: bool = True,
        *,
        weights: LossWeights | None = None,
    ) -> tuple[dict[int, Any], Tensor | None]:
        """Forwards only, without gradients and in evaluation mode.

        Args:
            weights: As in a step.
        Returns:
            Outputs by microbatch, on the last stage's rank and empty elsewhere; and the mean loss, as a step gives it, or None.
        Collective over the pipeline and its replicas.
        """
        count = microbatches or (len(data) if isinstance(data, Sequence) else self.microbatches)
        outputs: dict[int, Any] = {}
        losses: dict[int, Tensor] = {}

        def done(microbatch: int, out: Any, labels: Any) -> None:
            outputs[microbatch] = out
            if with_loss:
                losses[microbatch] = out if self.model.loss is None else self.model.loss(out, labels)

        data, shares = self._shares(data, count, weights if with_loss else None)
        with evaluating(self.model.module):
            self.executor.evaluate(self.forwards(count), self._feed(data), done)
        divisor = count if weights is None else 1
        return outputs, self._shared(losses, divisor, shares) if with_loss else None

    def forwards(self, count: int) -> tuple[Action, ...]:
        """Return this rank's actions for an evaluation of `count` microbatches."""
        rank_of = self.model.rank_of
        return self._row(add_comms(inference(len(rank_of), count, rank_of)))

    def _row(self, program: Program) -> tuple[Action, ...]:
        return program.ranks[self.model.places.pipe.rank]

    def _feed(self, data: Iterable[Any]) -> MicrobatchSource:
        users = self.model.first + self.model.last
        return MicrobatchSource(iter(data if users else ()), self.batch_fn, users)

    def _shared(self, losses: Mapping[int, Tensor], count: float, shares: list[float] | None = None) -> Tensor:
        """Return the mean loss; `count`: what the sum of this rank's losses times their shares is divided by, on all ranks alike."""
        self.losses = torch.stack(
            [losses[m].double().reshape(()).cpu() for m in sorted(losses)] or [torch.zeros((), device="cpu").double()]
        )
        each = [weighted(self.losses[m], share) for m, share in enumerate(shares or ())]
        total = (torch.stack(each) if each else self.losses).sum().reshape(1)
        total = total.to(metadata_device(self.model.places.gradient))
        if self.model.last:
            ds_comm.all_reduce(total, group=self.model.places.gradient, unit="pipe.loss")
        return self.executor.share(total)[0] / (count * self.model.places.gradient.size)

    def close(self) -> None:
        """Take all hooks from the model."""
        self.executor.close()


def pipeline(
    model: PipelineModule | DecoderStages | TracedStages | StagedModel,
    microbatches: int,
    schedule: str | Callable[[int], Program] | None = None,
    costs: Costs | None = None,
    cap: float = float("inf"),
) -> Pipeline:
    """Build the step function of a model in stages.

    Args:
        model: Split for this rank: a PipelineModule, a DecoderStages, a TracedStages, or a custom StagedModel.
        microbatches: Of a step, where a call does not say.
        schedule: A name of `ds_pipe.SCHEDULES` that fits how the model was split, or a function from the number of
            microbatches to a program; by default the schedule for which the model was split.
        costs: Measured times of all stages: the program is then built from them (`list_scheduled`), whatever `schedule`
            says.
        cap: With `costs`, the activation memory that a rank may use.
    Raises:
        PlanError: the schedule needs another number of stages than the model has ("pipe-schedule").
        ScheduleError: the program cannot run.
    """
    staged = model if isinstance(model, StagedModel) else model.staged
    name = schedule or ("1f1b" if isinstance(model, StagedModel) else model.pipe_staging.schedule)
    ranks = staged.places.pipe.size
    virtual = len(staged.rank_of) // ranks

    def make(count: int) -> Program:
        if costs is not None:
            return list_scheduled(count, costs, staged.rank_of, cap)
        program = name(count) if callable(name) else make_program(name, ranks, count, virtual)
        owners = program.owners()
        if tuple(owners.get(s, -1) for s in range(program.stages)) != staged.rank_of:
            raise PlanError(
                f"schedule {name if isinstance(name, str) else 'given'} has its stages on ranks "
                f"{[owners[s] for s in range(program.stages)]}, the model was cut for {list(staged.rank_of)}",
                code="pipe-schedule",
                fix="Cut the model for it: PipelineModule(..., schedule=NAME).",
            )
        return program

    return Pipeline(staged, make, microbatches)
